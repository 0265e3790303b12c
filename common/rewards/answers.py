r"""Equality of mathematical answers: 0.5 is \frac{1}{2}, 5 cm is 5, \{1, 2\} is 2, 1 and y = 2x is
2x - y = 0.

`is_equal` looks at an answer from the outside in: its typesetting, options, lists, intervals and
matrices, equations, units. What is left are numbers, words, and formulas
(common/rewards/formulas.py). No function raises. Each takes time linear in the answer, but for the
pairs of items of short lists.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from common.rewards import formulas

MAX_CHARACTERS = 512  # of an answer; longer ones are wrong
MAX_UNMATCHED = 8  # items of two lists that are spelled differently; all pairs are compared
MAX_DEPTH = 8  # of lists in lists

# --- typesetting ---

GREEK = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
GREEK_NAMES = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau upsilon
phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
"""
# symbols as typed, each with its command behind it
COMMANDS = r"""
° ^\circ   × \times   · \cdot   ⋅ \cdot   ∙ \cdot   ÷ \div   ± \pm   ∓ \mp   ≈ \approx   → \to
≤ \le   ⩽ \le   ≥ \ge   ⩾ \ge   ≠ \ne   ∪ \cup   ∩ \cap   ∈ \in   ∉ \notin   ⊂ \subset   ⊆ \subseteq
∅ \emptyset   ∞ \infty   ℕ \mathbb{N}   ℤ \mathbb{Z}   ℚ \mathbb{Q}   ℝ \mathbb{R}   ℂ \mathbb{C}
√ \surd   ∛ \surd[3]   ∜ \surd[4]   ∑ \sum   ∏ \prod   ∫ \int   ∠ \angle   △ \triangle   ⊥ \perp
∥ \parallel   ⟨ \langle   ⟩ \rangle   ⌊ \lfloor   ⌋ \rfloor   ⌈ \lceil   ⌉ \rceil   ‖ \|   … \ldots
"""
COMMAND_WORDS = COMMANDS.split()
COMMAND_PAIRS = zip(COMMAND_WORDS[::2], COMMAND_WORDS[1::2])
SYMBOLS = {symbol: f"{command} " for symbol, command in COMMAND_PAIRS}
SYMBOLS |= {letter: f"\\{name} " for letter, name in zip(GREEK, GREEK_NAMES.split())}
SYMBOLS |= {
    "−": "-",
    "–": "-",
    "—": "-",
    "′": "'",
    "’": "'",
    "∣": "|",
    "∶": ":",
    "⁄": "/",
    "%": "\\%",
}
SYMBOLS |= {"、": ", ", "。": ".", "或": " or ", "和": " and "}
SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
TO_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-" * 2)
# full width, and the mathematical alphabets
STYLED_LETTERS = re.compile("[\uff01-\uff5e\U0001d400-\U0001d7ff]")

TEXT_COMMAND = re.compile(r"\\text\{([^{}]*)\}")
BRACED = r"\{([^{}]*)\}"
# text with braces one deep, but without \over and \choose: one side of those commands
NESTED = r"((?:[^{}\\]|\\(?!over|choose)|\{[^{}]*\})*)"
WORD_END = r"(?![a-zA-Z])"
ARTICLE = re.compile(r"^(?:[Aa]n?|[Tt]he)\s+(?=[A-Za-z]{3,}(?:\s+[A-Za-z]{3,})*$)")
TRIGONOMETRIC = re.compile(rf"\\(?:sin|cos|tan|cot|sec|csc){WORD_END}")
FUNCTION = r"sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|lg|exp"
DIGIT_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
BASES = {word: str(base) for base, word in enumerate(DIGIT_WORDS.split())}
BASE_WORD = "|".join(BASES)

# (pattern, replacement), applied in this order; a comment stands above the rules it is for
TYPESETTING: list[tuple[str, str | Callable[[re.Match], str]]] = [
    # thousands: 1{,}000\pi, 11,\! 111, and in ISO's form 12\,345, 12 345
    (r"(?<=[0-9])(?:\{,\}|,\\!)\s*(?=[0-9]{3}(?![0-9]))", ""),
    (
        r"(?<![0-9.,])([0-9]{1,3})((?:(?:\\[,;: ]|~|\s)\s*[0-9]{3})+)(?![0-9]|\s*/)",
        lambda match: re.sub("[^0-9]", "", match[0]),
    ),
    # one command for each thing
    (rf"\\(?:[dtc]|nice|s|x)frac{WORD_END}", r"\\frac"),
    (rf"\\[dt]binom{WORD_END}", r"\\binom"),
    (rf"\\(?:leq|leqslant|leqq){WORD_END}|<=", r"\\le "),
    (rf"\\(?:geq|geqslant|geqq){WORD_END}|>=", r"\\ge "),
    (rf"\\neq{WORD_END}|\\not\s*=", r"\\ne "),
    (rf"\\lt{WORD_END}", "<"),
    (rf"\\gt{WORD_END}", ">"),
    (rf"\\(?:mid|[lr]?vert){WORD_END}", "|"),
    (rf"\\colon{WORD_END}", ":"),
    (rf"\\overrightarrow{WORD_END}", r"\\vec"),
    (rf"\\bar{WORD_END}", r"\\overline"),
    (rf"\\wide(hat|tilde){WORD_END}", r"\\\1"),
    (rf"\\(?:ast|star){WORD_END}", "*"),
    (rf"\\(?:[lc]dots|dots[cbmio]?){WORD_END}|\.\.\.", r"\\ldots "),
    (rf"\\var(epsilon|theta|phi|rho|sigma|pi|kappa){WORD_END}", r"\\\1"),
    (rf"\\degree{WORD_END}|(?<=[0-9])\s*\^\s*(?:o{WORD_END}|\{{\s*o\s*\}})", r"^\\circ "),
    (rf"\\varnothing{WORD_END}|\\emptyset{WORD_END}|\\\{{\s*\\\}}", r"\\emptyset "),
    (rf"\\lbrace{WORD_END}", r"\\{"),
    (rf"\\rbrace{WORD_END}", r"\\}"),
    (r"\^\s*(?:\\prime|\{\s*\\prime\s*\})", "'"),
    (rf"\{{{NESTED}\\over{WORD_END}{NESTED}\}}", r"\\frac{\1}{\2}"),
    (rf"\{{{NESTED}\\choose{WORD_END}{NESTED}\}}", r"\\binom{\1}{\2}"),
    # what only changes the look: sizes, styles, dollars, \( \)
    (rf"\\(?:left|right)\s*\.|\\(?:left|right|middle|[bB]igg?[lrm]?){WORD_END}", ""),
    (rf"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits){WORD_END}|\\!", ""),
    (rf"\\(?:text)?color\s*\{{[a-zA-Z]+\}}|\\(?:tag|label)\s*{BRACED}", ""),
    (r"^ ?\$(?=[0-9.][^$]*$)", r"\\$"),  # $5 is five dollars
    (r"(?<!\\)\$|(?<!\\)\\[()\[\]]", " "),
    (rf",?(?: ?\\q?quad{WORD_END})+ ?", lambda m: ", " if is_between_relations(m) else " "),
    (rf"(?<!\\)\\[,;:> ]|\\(?:thin|en)space{WORD_END}|~", " "),
    # bold and slanted letters are letters: \mathbf{v}, \boldsymbol{5}, \textbf{(C)}; braces keep
    # them from being units
    (r"(?<![_^])\\(?:mathbf|boldsymbol|bm|pmb|textbf)\s*\{([0-9]+)\}", r"\1"),
    (rf"\\(?:mathbf|boldsymbol|bm|pmb|mathit|textbf|textit|emph)\s*{BRACED}", r"{\1}"),
    (r"\\(?:mathbf|boldsymbol|bm|pmb)\s+([a-zA-Z0-9])", r"{\1}"),
    # upright text: words, units such as \mathrm{cm^{2}}, and the i and e of ISO 80000-2
    (r"(\\(?:text|math)(?:rm)?\s*\{[^{}]*)\^\{(-?[0-9])\}", r"\1^\2"),
    (
        rf"\\(?:text(?:rm|normal|sf|up)?|(?:math)?(?:rm|sf)|mathnormal|[mh]box|operatorname\*?)\s*{BRACED}",
        r"\\text{\1}",
    ),
    (r"\\(?:mathrm|textrm|text)\s+([a-zA-Z0-9])", r"\\text{\1}"),
    (r"\{\s*\\rm\s+([^{}]*)\}", r"\\text{\1}"),
    (r"\{\s*\\(?:bf|it)\s+([^{}]*)\}", r"{\1}"),
    (rf"\\text\{{\s*\\text{BRACED}\s*\}}", r"\\text{\1}"),
    (r"\\text\{\s*\{([^{}]*)\}\s*\}", r"{\1}"),
    (rf"\\text\{{\s*({FUNCTION})\s*\}}", r"\\\1 "),
    (r"\\text\{\s*([ied])\s*\}", r"{\1}"),
    # numbers in other bases: (1011)_2, 52_{\text{eight}}
    (r"\((?=[A-F]*[0-9])([0-9A-F]+)\)_", r"\1_"),
    (
        rf"_\s*\{{?\s*(?:\\text\{{\s*([a-z]+)\s*\}}|({BASE_WORD}))\s*\}}?",
        lambda m: subscript(m[1] or m[2]),
    ),
    # 0.1\overline{6}, 0.\dot{3}, 0.\dot{1}4285\dot{7}
    (r"([0-9]*)\.([0-9]*)\\overline\s*\{?\s*([0-9]+)\s*\}?", lambda m: repeating(m[1], m[2], m[3])),
    (
        r"([0-9]*)\.([0-9]*)\\dot\s*\{?\s*([0-9])\s*\}?(?:([0-9]*)\\dot\s*\{?\s*([0-9])\s*\}?)?",
        lambda m: repeating(m[1], m[2], m[3] + (m[4] or "") + (m[5] or "")),
    ),
    # pi, infty and sqrt as typed without LaTeX; a root of all the digits that follow
    (
        rf"(?<![\\a-zA-Z])(pi|infty|infinity){WORD_END}",
        lambda m: "\\pi " if m[1] == "pi" else "\\infty ",
    ),
    (r"(?<![\\a-zA-Z])sqrt(?=\s*[({0-9])", r"\\surd "),
    (r"\\surd(\[[0-9]\])?\s*([0-9]+(?:\.[0-9]+)?|[a-zA-Z])", r"\\sqrt\1{\2}"),
    (r"\\surd", r"\\sqrt"),
    (r"\\sqrt\s*(\[[^\[\]]*\])?\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
    # LaTeX takes one character where braces are missing: \sqrt[3]2, \frac12, \frac1{72}
    (r"\\sqrt\s*(\[[^\[\]]*\])?\s*([0-9a-zA-Z])", r"\\sqrt\1{\2}"),
    (r"\\frac\s*([0-9a-zA-Z])", r"\\frac{\1}"),
    (r"\\frac\s*\{([^{}]*)\}\s*([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
    (r"\\frac\s*\{([^{}]*)\}\s*\{", r"\\frac{\1}{"),
    # 1 1/2 is not 11/2
    (r"(?<=[0-9])\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9]*\s*/)", r"\\frac{\1}{\2}"),
    # x^2_1 is x_1^2
    (r"\^(\{[^{}]*\}|[0-9a-zA-Z])_(\{[^{}]*\}|[0-9a-zA-Z])", r"_\2^\1"),
    # 3\text{rd}, 23^{\text{th}}
    (r"(?<=[0-9])\s*\^?\s*\{?\s*\\text\{\s*(?:st|nd|rd|th)\s*\}\s*\}?", ""),
    # a matrix as an array in brackets, and a system of equations as a list
    (
        r"[(\[]\s*\\begin\{(?:array\}\s*\{[^{}]*|(?:small)?matrix)\}((?:(?!\\begin|\\end).)*)\\end\{[a-z]+\}\s*[)\]]",
        r"\\begin{pmatrix}\1\\end{pmatrix}",
    ),
    (
        r"\\begin\{(?:cases|aligned)\}((?:(?!\\begin|\\end).)*)\\end\{[a-z]+\}",
        lambda m: system(m[1]) or m[0],
    ),
    # k \in Z, and in brackets behind a formula with k
    (rf"\\in\s*\{{?([NZQRC]){WORD_END}\}}?", r"\\in \\mathbb{\1}"),
    (r",?\s*\(\s*([a-z]\s*\\in(?![a-zA-Z])[^()]*)\)$", r", \1"),
    # the product of vectors or sets
    (
        r"(\{[A-Za-z]\}|\\vec\s*\{?[A-Za-z]+\}?|(?<![A-Za-z])[A-Z])\s*\\times(?=\s*(?:\{[A-Za-z]\}|\\vec|[A-Z]))",
        r"\1\\cross ",
    ),
    # degrees inside a formula; at the end of one they are a unit
    (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})", "°"),
    # a list in words; "5 or more" and "5 (or 6)" become no 5
    (r"\\text\{([^{}]*[a-z.])\s+(and|or)\s*\}", r"\\text{\1}\\text{\2}"),
    (
        r",?\s*(?:\\text\{[\s,]*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))\s*",
        lambda m: conjunction(m[0], m.string),
    ),
    # circled numbers need no separators between them
    (r"(?<=[①-⑳])[\s,;]+(?=[①-⑳])", ""),
    # what stands before an answer (=, \therefore), and punctuation behind it
    (rf"^\s*(?:=|\\(?:approx|therefore|implies|Rightarrow){WORD_END})|[\s.,;:\\]+$", ""),
]


def typeset(answer: str) -> str:
    """LaTeX that says the same, with one command for each thing, and without what is only for the
    eye."""
    # a line break separates answers as \quad does, unless it follows \\
    text = re.sub(r"(?<!\\\\)\s*\n\s*", r" \\quad ", answer.strip())
    text = re.sub(r"\s+", " ", text)
    text = SUPERSCRIPTS.sub(lambda match: f"^{{{match[0].translate(TO_DIGITS)}}}", text)
    text = SUBSCRIPTS.sub(lambda match: f"_{{{match[0].translate(TO_DIGITS)}}}", text)
    text = STYLED_LETTERS.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    text = "".join(map(vulgar_fraction, text))
    text = "".join(SYMBOLS.get(char, char) for char in text.replace("\\%", "%"))
    for pattern, replacement in TYPESETTING:
        text = re.sub(pattern, replacement, text)
    text = text.strip()
    whole = TEXT_COMMAND.fullmatch(text)  # \text{(1, 2)}
    if whole:
        text = whole[1].strip()
    start, inner, _ = in_brackets(text)
    if start == "{" and len(inner) > 1:
        text = inner
    return ARTICLE.sub("", text)


def is_between_relations(match: re.Match) -> bool:
    """Whether a match stands between two equations or inequalities, as in x = 1 \\quad y = 2."""
    before = match.string[: match.start()]
    after = match.string[match.end() :]
    return bool(SIGN.search(before) and SIGN.search(after))


def subscript(word: str) -> str:
    return f"_{{{BASES.get(word, word)}}}"


def system(rows: str) -> str:
    r"""The rows x = 1 \\ y = 2 as the list x = 1, y = 2; "" if they are no equations."""
    equations = [
        row.replace("&", "").strip(" ,.;") for row in rows.removesuffix("\\\\").split("\\\\")
    ]
    if "\\text" in rows or not all("=" in equation for equation in equations):
        return ""
    return ", ".join(equations)


def conjunction(word: str, text: str) -> str:
    """What stands for `and` and `or` in a list: a comma, or in a text with inequalities, where the
    two differ, an intersection or a union."""
    if not re.search(r"[<>]|\\(?:le|ge|ne)(?![a-zA-Z])", text):
        return ", "
    return " \\cup " if "or" in word else " \\cap "


def vulgar_fraction(char: str) -> str:
    r"""Write a vulgar fraction as LaTeX: ½ as \frac{1}{2}. Other characters stay."""
    if char.isascii() or not unicodedata.decomposition(char).startswith("<fraction>"):
        return char
    above, _, below = unicodedata.normalize("NFKD", char).partition("⁄")
    return rf"\frac{{{above}}}{{{below}}}"


def repeating(whole: str, digits: str, period: str) -> str:
    """A repeating decimal as a fraction, from its digits before the point, those after it, and its
    period."""
    base = 10 ** len(digits)
    value = Fraction(int(whole or "0") * base + int(digits or "0"), base)
    value += Fraction(int(period), base * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


# --- units ---

# {unit: its spellings}; single letters are units only in upright type, as in 5\,\mathrm{m}
UNITS = {
    "metre": "m meter meters metre metres",
    "millimetre": "mm millimeter millimeters millimetre millimetres",
    "centimetre": "cm centimeter centimeters centimetre centimetres",
    "decimetre": "dm decimeter decimeters decimetre decimetres",
    "kilometre": "km kilometer kilometers kilometre kilometres kms",
    "inch": "in inch inches",
    "foot": "ft foot feet",
    "yard": "yd yds yard yards",
    "mile": "mi mile miles",
    "acre": "acre acres",
    "hectare": "ha hectare hectares",
    "gram": "g gm gram grams",
    "milligram": "mg milligram milligrams",
    "kilogram": "kg kgs kilogram kilograms",
    "pound": "lb lbs pound pounds",
    "ounce": "oz ounce ounces",
    "ton": "t ton tons tonne tonnes",
    "litre": "L l liter liters litre litres",
    "millilitre": "mL ml milliliter milliliters millilitre millilitres",
    "gallon": "gal gallon gallons",
    "quart": "qt quart quarts",
    "pint": "pt pint pints",
    "cup": "cup cups",
    "second": "s sec secs second seconds",
    "minute": "min mins minute minutes",
    "hour": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "yr yrs year years",
    "degree": "° deg degree degrees",
    "celsius": "°C C celsius",
    "fahrenheit": "°F F fahrenheit",
    "kelvin": "K",
    "radian": "rad radian radians",
    "percent": r"\% percent percents percentage pct",
    "dollar": r"\$ dollar dollars usd",
    "euro": "€ euro euros",
    "pound sterling": "£ gbp",
    "rupee": "₹ rs rupee rupees",
    "yuan": "元 yuan rmb",
    "yen": "¥ yen",
    "won": "₩ won",
    "ruble": "₽ ruble rubles rouble roubles",
    "cent": "¢ cent cents",
    "newton": "N newton newtons",
    "joule": "J joule joules",
    "watt": "W watt watts",
    "kilowatt": "kW kilowatt kilowatts",
    "volt": "V volt volts",
    "ampere": "A amp amps ampere amperes",
    "hertz": "Hz hertz",
    "pascal": "Pa pascal pascals",
    "mole": "mol mole moles",
    "metre/second": "mps",
    "kilometre/hour": "kmh kph kmph",
    "mile/hour": "mph",
    "unit": "unit units",
    "point": "point points",
    "person": "person people persons",
    "student": "student students",
    "way": "way ways",
    "integer": "integer integers",
    "digit": "digit digits",
    "page": "page pages",
    "time": "time times",
}
UNIT_OF = {spelling: unit for unit, spellings in UNITS.items() for spelling in spellings.split()}
# words that change the number before them, so that they are no mere unit: 7 million, 5 or more,
# 20 (loss), 3 (mod 5)
TELLING_WORDS = """
or and not no if mod modulo more less fewer than least most about approximately over under
above below increase decrease increases decreases increased decreased rise fall gain gains
loss losses profit profits deficit surplus win debt credit debit am pm bc ad north south
east west before after ago even odd positive negative true false inclusive exclusive minimum
maximum min max base remainder hundred thousand million billion trillion hundreds thousands
millions billions trillions dozen dozens minus plus squared cubed is are always never
sometimes only all none both solutions roots undefined infinite infinity instead too twice
"""
TELLING = set(TELLING_WORDS.split())
# words that do so only as the last ones: 123 (left) is another answer, 123 (third graders) is 123
TELLING_ALONE_WORDS = """
up down left right long short late early faster slower much many double triple wrong correct
incorrect valid invalid impossible extraneous half halves third thirds fourths fifths sixths
sevenths eighths ninths tenths hundredths thousandths tens times
"""
TELLING_ALONE = set(TELLING_ALONE_WORDS.split())
IRREGULAR_PLURALS = {
    "people",
    "children",
    "men",
    "women",
    "sheep",
    "fish",
    "deer",
    "feet",
    "mice",
    "geese",
    "teeth",
}

POWER = r"(?:\s*\^\s*(?:\{\s*-?[0-9]\s*\}|-?[0-9]))?"
PIECE = re.compile(
    rf"(?:\\text\{{[^{{}}]*\}}|(?<![\\A-Za-z])[A-Za-z][A-Za-z'-]+\.?|(?<=/)[A-Za-z]|°|\\%|\\\$|[€£¢₹元¥₩₽]){POWER}"
)
MAX_PIECES = 8  # of a unit
GAP = re.compile(r"\s*(?:/|-|\\cdot)?\s*")  # between them
RATE_TAIL = re.compile(rf"(?<=[0-9}}\s])\s*(?:km|m|cm|mi|ft)\s*/\s*(?:h|s|hr|min|sec){POWER}$")
NOUN_TAIL = re.compile(r"\s*\(\s*((?:[^()0-9\\^_=+*]|\\%)*?)\s*\)[\s.]*$")
CURRENCY = re.compile(r"^([-+]?)\s*(\\\$|[€£¥₹₩₽])\s*(?=[0-9.\\])")
FACTOR = re.compile(r"\s*(\\%|\\\$|°?[A-Za-z]+|[°€£¢₹元¥₩₽])\.?(?:\s*\^\s*\{?\s*(-?[0-9])\s*\}?)?")
PLAIN_NUMBER = re.compile(
    r"[-+]?\s*(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)?\s*(?:\\frac\{[0-9]+\}\{[0-9]+\}|/\s*[0-9]+)?"
)


def split_units(answer: str, truth: str) -> tuple[str, str, str, str]:
    """(answer, its unit, truth, its unit). If only one of the two shows that a noun is a unit, the
    noun counts as one in the other as well."""
    answer_core, unit = split_unit(answer)
    true_core, true_unit = split_unit(truth)
    if unit and not true_unit:
        true_core, true_unit = split_unit(truth, noun=unit)
    elif true_unit and not unit:
        answer_core, unit = split_unit(answer, noun=true_unit)
    return answer_core, unit, true_core, true_unit


def split_unit(text: str, noun: str = "") -> tuple[str, str]:
    r"""Split a number and its unit: 5\text{ cm}^2 gives ("5", "centimetre^2"), 9 (apples) gives
    ("9", "apple"). Without a unit: (text, "").

    noun: what counts as a unit although it is no plural, or one letter.
    """
    rest = text  # without a currency in front
    currency = ""
    match = CURRENCY.match(text)
    if match:
        rest = match[1] + text[match.end() :]
        currency = UNIT_OF.get(match[2], match[2])
    quantity, unit = unit_behind(rest, noun) or unit_in_brackets(rest) or (rest, currency)
    if currency and unit != currency:
        unit = f"{currency} {unit}"
    return quantity, unit


def unit_behind(text: str, noun: str) -> tuple[str, str] | None:
    for start, tail in unit_tails(text):
        before = text[:start].rstrip()
        unit = unit_name(TEXT_COMMAND.sub(r" \1 ", tail))
        if unit and is_quantity(before, tail):
            return before, unit
        counted = noun_name(TEXT_COMMAND.sub(r" \1 ", tail), noun)
        if counted and before and PLAIN_NUMBER.fullmatch(before):
            return before, counted
    match = re.search(r"(?<=[0-9])\s+([A-Za-z])$", text)
    if match and noun and unit_name(match[1]) == noun:  # 7 m is 7 (m)
        return text[: match.start()], noun
    return None


def unit_in_brackets(text: str) -> tuple[str, str] | None:
    """("9", "apple") of 9 (apples)."""
    text = TEXT_COMMAND.sub(r"\1", text)
    match = NOUN_TAIL.search(text)
    if match is None:
        return None
    before = text[: match.start()].rstrip()
    unit = unit_name(match[1]) or noun_name(match[1], noun=None)
    if unit and before and PLAIN_NUMBER.fullmatch(before):
        return before, unit
    return None


def unit_tails(text: str) -> list[tuple[int, str]]:
    """(start, text) of what may be a unit at the end, the longest first."""
    starts = []
    end = len(text)
    for piece in list(PIECE.finditer(text))[: -MAX_PIECES - 1 : -1]:
        if not GAP.fullmatch(text[piece.end() : end]):
            break
        starts.append(piece.start())
        end = piece.start()
    match = RATE_TAIL.search(text)
    if match:
        starts.append(match.start())
    return [(start, text[start:]) for start in sorted(starts)]


def is_quantity(text: str, tail: str) -> bool:
    """Whether a unit may follow a text: a number, a formula with one, or a letter; of one letter
    only the former."""
    if not text or text[-1] in "^_/([{,+-*=<>":
        return False
    if tail.startswith("°") and TRIGONOMETRIC.search(text):  # \sin 30°
        return False
    if re.search("[0-9]", text):
        return True
    letters = re.sub(r"\\cdot|[^A-Za-z°%$]", "", TEXT_COMMAND.sub(r"\1", tail))
    return len(letters) > 1 and bool(re.fullmatch(r".*\\[a-z]+.*|\{?[a-zA-Z]\}?", text))


def unit_name(text: str) -> str:
    """ "metre/second^2" of m/s^2, m s^-2, metres per square second; "" of what is no unit."""
    # N \cdot m, N-m
    text = re.sub(r"\\cdot|(?<=[A-Za-z ])-(?=[A-Za-z ])", " ", text.strip().rstrip("."))
    above, *below = re.split(r"/|(?<![A-Za-z])per(?![A-Za-z])", text)
    factors = unit_factors(above)
    if len(below) > 1 or not factors:
        return ""
    if below:
        factors_below = unit_factors(below[0])
        if not factors_below:
            return ""
        factors += [(name, -power) for name, power in factors_below]
    dividends = []
    divisors = []
    for name, power in sorted(factors):
        size = "" if abs(power) == 1 else f"^{abs(power)}"
        side = dividends if power > 0 else divisors
        side.append(name + size)
    name = " ".join(dividends) or "1"
    return f"{name}/{' '.join(divisors)}" if divisors else name


def unit_factors(text: str) -> list[tuple[str, int]]:
    """[("metre", 1), ("second", -2)] of m s^-2; [] of what is no unit."""
    factors: list[tuple[str, int]] = []
    next_power = 1
    end = 0
    for match in FACTOR.finditer(text):
        if text[end : match.start()].strip():
            return []
        end = match.end()
        word = match[1]
        lower = word.lower()
        if lower in ("square", "sq"):
            next_power = 2
        elif lower in ("cubic", "cu"):
            next_power = 3
        elif lower in ("squared", "cubed") and factors:
            factors[-1] = (factors[-1][0], 2 if lower == "squared" else 3)
        elif lower == "old" and factors == [("year", 1)]:
            continue
        else:
            unit = UNIT_OF.get(word) or (UNIT_OF.get(lower) if len(word) > 1 else None)
            if not unit:
                return []
            if unit in ("celsius", "fahrenheit") and factors == [("degree", 1)]:
                factors = []
            factors.append((unit, int(match[2] or next_power)))
            next_power = 1
    return [] if text[end:].strip() else factors


def noun_name(text: str, noun: str | None) -> str:
    """The things that are counted, as "red apple" of red apples; "" of words that tell more.

    Without brackets around it, it has to be a plural, or `noun`; None takes any.
    """
    words = re.sub(r"[./-]", " ", text.lower()).split()
    if not 1 <= len(words) <= 6:
        return ""
    if not all(re.fullmatch(r"[a-z]['a-z]*", word) for word in words):
        return ""
    if TELLING.intersection(words) or words[-1] in TELLING_ALONE or len("".join(words)) < 2:
        return ""
    if words[-1].endswith("ed") and len(words[-1]) > 4:  # rejected, excluded
        return ""
    head = len(words) - 1
    if "of" in words[1:]:  # pieces of candy
        head = words.index("of") - 1
    head_word = words[head]
    words[head] = singular(head_word)
    name = " ".join(words)
    if is_plural(head_word) or noun is None or name == noun:
        return name
    return ""


def is_plural(word: str) -> bool:
    if word in IRREGULAR_PLURALS:
        return True
    return word.endswith("s") and not word.endswith(("ss", "us", "is"))


def singular(word: str) -> str:
    for ending, replacement in (
        ("ies", "y"),
        ("ches", "ch"),
        ("shes", "sh"),
        ("xes", "x"),
        ("sses", "ss"),
        ("s", ""),
    ):
        if word.endswith(ending) and len(word) > len(ending) + 1:
            return word[: -len(ending)] + replacement
    return word


def units_agree(unit: str, other: str) -> bool:
    """One may be missing. Of two nouns one may tell more: 9 apples are 9 (red apples), 5 pounds 5
    pounds of sand."""
    if not unit or not other or unit == other:
        return True
    words = unit.split()
    other_words = other.split()
    if {*words, *other_words} <= UNITS.keys() or "/" in unit + other:
        return False
    return is_subset(words, other_words)


# --- one spelling ---

DECIMAL = re.compile(r"[-+]?(?:[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)?(?:\.[0-9]*)?")
SCIENTIFIC = re.compile(  # without spaces: 4.5e-3, 4.5\times10^{-3}, 10^{33}
    r"([-+]?[0-9][0-9,]*(?:\.[0-9]*)?)[eE]([-+]?[0-9]{1,2})"
    r"|(?:([-+]?[0-9][0-9,]*(?:\.[0-9]*)?)(?:\\times|\\cdot|\*))?10\^\{?([-+]?[0-9]{1,2})\}?"
)
FRACTION = re.compile(r"(-?)\\frac\{(-?[0-9]+)\}\{([0-9]+)\}")
MIXED = re.compile(r"(-?)([0-9]+)\\frac\{([0-9]+)\}\{([0-9]+)\}")

# of a typeset text without spaces
SHORT_FORMS = [
    (TEXT_COMMAND.pattern, r"\1"),
    (r"([_^])\{([0-9a-zA-Z+*-])\}", r"\1\2"),
    (r"(?<![\\a-zA-Z}\]_^])\{([^{}]*)\}", r"\1"),  # braces that only group
    (r"^([-+]?)([0-9]+)/([0-9]+)$", r"\1\\frac{\2}{\3}"),
    (r"(?<![0-9])\.(?=[0-9])", "0."),
    (r"\\times|\*", r"\\cdot"),
    (r"^\+(?=[0-9.\\])", ""),
]


def short_form(text: str) -> str:
    """A typeset text without spaces, but where two digits would meet, and after the commas of a
    list of numbers."""
    text = re.sub(r"\s+", " ", TEXT_COMMAND.sub(r"\1", text))
    short = re.sub("(?<![0-9]) | (?![0-9])", "", text)
    for pattern, replacement in SHORT_FORMS:
        short = re.sub(pattern, replacement, short)
    is_list = re.search(r"[0-9],\s+[0-9]", text) and DECIMAL.fullmatch(short)
    return short.replace(",", ", ") if is_list else short


def rational(text: str) -> Fraction | None:
    r"""Value of "-1,234.5", "4.5e3", "-\frac{1}{2}" or "1\frac{1}{2}", None of anything else."""
    if DECIMAL.fullmatch(text) and re.search("[0-9]", text):
        return Fraction(text.replace(",", ""))
    match = SCIENTIFIC.fullmatch(text)
    if match:
        digits = match[1] or match[3] or "1"
        exponent = int(match[2] or match[4])
        return Fraction(digits.replace(",", "")) * Fraction(10) ** exponent
    match = FRACTION.fullmatch(text)
    if match:
        numerator, denominator = int(match[2]), int(match[3])
        if denominator:
            value = Fraction(numerator, denominator)
            return -value if match[1] else value
    match = MIXED.fullmatch(text)
    if match:
        whole, numerator, denominator = int(match[2]), int(match[3]), int(match[4])
        if 0 < numerator < denominator:
            value = whole + Fraction(numerator, denominator)
            return -value if match[1] else value
    return None


def normalize(answer: str) -> str:
    r"""The one spelling of an answer: without spaces, units and `x =`; "0.5" and "2/4" are
    \frac{1}{2}, 4.5e3 is 4500.

    After Hendrycks et al. 2021 (arXiv 2103.03874). "" for more than 512 characters. Equal spellings
    may have different units: `is_equal` compares them, too.
    """
    if len(answer) > MAX_CHARACTERS:
        return ""
    return spelling(plain_value(typeset(answer)))


def spelling(text: str) -> str:
    """Of a typeset text without unit and label."""
    short = short_form(text)
    value = rational(short)
    if value is None:
        return short_form(re.sub("[A-Za-z]+", lower_case, text)) if short.isalpha() else short
    if value.denominator == 1:
        return str(value)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def lower_case(word: re.Match) -> str:
    """A word in lower case; but one or two letters, and three capitals, are symbols: A, Ab, ABC."""
    lower = word[0].lower()
    if lower in ("no", "yes", "odd"):
        return lower
    is_symbol = len(lower) < 3 or (len(lower) == 3 and word[0].isupper())
    return word[0] if is_symbol else lower


def plain_value(text: str) -> str:
    """A typeset answer without the word "option", `x =`, and its unit."""
    letter, content = option(text)
    if letter and not content:
        return letter
    return split_unit(without_label(text))[0]


# --- from the outside in ---


def is_equal(answer: str, truth: str, with_formulas: bool = True) -> bool:
    """Whether two answers are equal, however they are spelled; without formulas by spelling and
    numbers alone."""
    if max(len(answer), len(truth)) > MAX_CHARACTERS:
        return False
    return same(typeset(answer), typeset(truth), MAX_DEPTH if with_formulas else 0)


def same(answer: str, truth: str, depth: int) -> bool:
    """Of two typeset texts. depth: how many collections may still be opened; 0 compares no formulas
    either."""
    if not answer or not truth:
        return False
    if is_option(answer) or is_option(truth):
        return same_option(answer, truth)
    if same_options(answer, truth):
        return True
    if same_leaf(answer, truth):
        return True
    if depth <= 0:
        return False
    answer_relation = relation(answer)
    true_relation = relation(truth)
    if answer_relation and true_relation and PLUS_MINUS.search(answer + truth):
        return same_items(both_signs(answer), both_signs(truth), depth)
    if answer_relation and true_relation:
        return same_relation(answer_relation, true_relation, depth)
    if answer_relation:
        return same_as_relation(answer, truth, depth) or is_result(answer_relation, truth, depth)
    if true_relation:
        return same_as_relation(truth, answer, depth)
    return same_parts(answer, truth, depth)


def same_parts(answer: str, truth: str, depth: int) -> bool:
    """Of two texts that are no relations: part by part if they have parts, else by value."""
    if labels_differ(answer, truth):  # of x = 1, 2 and y = 1, 2
        return False
    kind, items = collection(answer)
    true_kind, true_items = collection(truth)
    if kind in ("list", "set") and len(items) == 1:  # \{5\} is 5
        return same(items[0], truth, depth - 1)
    if true_kind in ("list", "set") and len(true_items) == 1:
        return same(answer, true_items[0], depth - 1)
    if kind or true_kind:
        return same_collection(kind, items, true_kind, true_items, depth)
    return same_formula(answer, truth)


# --- options ---

NAMED_OPTION = re.compile(r"(?:[Oo]ption|[Cc]hoice)\s+\(?([A-Ka-k])\)?")  # Option B, choice (b)
OPTION = re.compile(
    r"\(([A-Ka-k])\)[.:]?|(?:\(([A-K])\)[.:]?|([A-K])(?:\)|[.:](?=\s)))(.+)", re.DOTALL
)
# (C)12, (C) x; but not (C)x, (C)'
OPTION_TEXT = re.compile(r"\s*(?:[0-9$(\[{.\\]|-[0-9.\\])|\s+[A-Za-z|]")
OPERATOR = re.compile(
    r"\s*\\(?:cup|cap|cdot|times|div|le|ge|ne|in|to|approx|subset|subseteq|setminus)(?![a-zA-Z])"
)
OPTION_MARK = re.compile(r"\(([A-K])\)|(?<![A-Za-z])([A-K])[.:)](?=\s)")
SEVERAL = re.compile(r"(?:(?:[A-K]|\([A-K]\))[\s,;.&]*){2,}")  # (A)(C); but not (A, C)
LETTER = re.compile("[A-K]")


def option(text: str) -> tuple[str, str]:
    """("C", "12") of (C) 12 or C. 12, ("C", "") of (C), (c) or Option c; ("", "") of what is no
    option."""
    plain = re.sub(r"[{}]", "", TEXT_COMMAND.sub(r"\1", text)).strip()
    match = NAMED_OPTION.fullmatch(plain)
    if match:
        return match[1].upper(), ""
    match = OPTION.fullmatch(plain)
    if not match:
        return "", ""
    if match[1]:
        return match[1].upper(), ""
    letter = match[2] or match[3]
    content = match[4]
    letters_in_content = [mark[1] or mark[2] for mark in OPTION_MARK.finditer(content)]
    names_later_options = any(other > letter for other in letters_in_content)
    if names_later_options or not OPTION_TEXT.match(content) or OPERATOR.match(content):
        return "", ""
    return letter, content.strip()


def is_option(text: str) -> bool:
    return option(text) != ("", "")


def same_option(answer: str, truth: str) -> bool:
    """By the letter, and by the text behind it if both have one; C alone is the option C."""
    letters = []
    texts = []
    for text in (answer, truth):
        letter, content = option(text)
        if not letter:
            letter = re.sub(r"[{}\s]", "", TEXT_COMMAND.sub(r"\1", text))
        letters.append(letter)
        texts.append(content)
    if letters[0] != letters[1] or not LETTER.fullmatch(letters[0]):
        return False
    return not all(texts) or same(texts[0], texts[1], MAX_DEPTH)


def same_options(answer: str, truth: str) -> bool:
    """Whether both name the same several options: A, C is AC and (A)(C)."""
    texts = [re.sub(r"[{}]", "", TEXT_COMMAND.sub(r"\1", text)).strip() for text in (answer, truth)]
    if not all(SEVERAL.fullmatch(text) for text in texts):
        return False
    if all(text.isalpha() for text in texts):  # AC may be a line, and no CA
        return texts[0] == texts[1]
    return sorted(LETTER.findall(texts[0])) == sorted(LETTER.findall(texts[1]))


# --- numbers, words, clock times ---

CLOCK = re.compile(r"(.*?[0-9])\s*([apAP])\.?\s*[mM]\.?(.*)")


def same_leaf(answer: str, truth: str) -> bool:
    """Whether two texts are the same number, or are spelled alike; and in the same unit, if both
    have one."""
    answer, truth = unlabelled(answer, truth)
    answer_time = CLOCK.fullmatch(TEXT_COMMAND.sub(r"\1", answer))
    true_time = CLOCK.fullmatch(TEXT_COMMAND.sub(r"\1", truth))
    if answer_time and true_time:
        return clock_parts(answer_time) == clock_parts(true_time)
    answer_core, unit, true_core, true_unit = split_units(answer, truth)
    if not units_agree(unit, true_unit):
        return False
    short = spelling(answer_core)
    true_short = spelling(true_core)
    if short == true_short:
        return short != ""
    value = rational(short)
    if value is None or rational(true_short) is None:
        return False
    return rounds_to(value, short_form(true_core), 5)


def clock_parts(time: re.Match) -> tuple[str, str, str]:
    """("8:30", "a", "") of 8:30 a.m."""
    return short_form(time[1]), time[2].lower(), short_form(time[3])


def rounds_to(value: Fraction, decimal: str, min_digits: int) -> bool:
    """Whether a decimal is the value rounded, with enough digits behind the point: MAWPS has
    0.6666666667 for 2/3."""
    digits = decimal.partition(".")[2]
    true_value = rational(decimal)
    if true_value is None or not digits.isdecimal() or len(digits) < min_digits:
        return False
    return round(value, len(digits)) == true_value


# --- formulas ---

RATIO = re.compile(r"[0-9a-zA-Z}]\s*:\s*[0-9a-zA-Z\\]")
OTHER_BASE = re.compile(r"[0-9)]\s*_")
DERIVATIVE = re.compile(r"\\frac\{\s*d(?![a-zA-Z]{2})[^{}]*\}\s*\{\s*d\s*[a-zA-Z]")
NTH_DERIVATIVE = re.compile(r"\^\s*\{\s*\(\s*[0-9a-z]\s*\)\s*\}")
SPELLED_ONLY = (RATIO, OTHER_BASE, DERIVATIVE, NTH_DERIVATIVE)
MORE_THAN_LETTERS = re.compile(r"[0-9+\-*/^!|()\[\]\\']")
WORD = re.compile(
    r"(?<![\\a-zA-Z])(?:[a-zA-Z]{3,}(?=\s+[a-zA-Z0-9])|(?<=[a-zA-Z0-9]\s)[a-zA-Z]{3,})"
)


def same_formula(answer: str, truth: str) -> bool:
    """By value; words, ratios, times, derivatives and numbers in other bases have only their
    spelling."""
    answer_core, unit, true_core, true_unit = split_units(answer, truth)
    if not units_agree(unit, true_unit):
        return False
    texts = [formula(answer_core), formula(true_core)]
    for text in texts:
        if WORD.search(text) or any(pattern.search(text) for pattern in SPELLED_ONLY):
            return False
    if not any(MORE_THAN_LETTERS.search(text) for text in texts):  # "no" is not "on"
        return False
    value = rational(short_form(answer_core))
    true_value = rational(short_form(true_core))
    if value is not None and true_value is not None:
        return False
    if formulas.same_value(texts[0], texts[1]):
        return True
    if true_value is not None:
        return is_rounded(texts[0], short_form(true_core))
    return value is not None and is_rounded(texts[1], short_form(answer_core))


def is_rounded(text: str, decimal: str, min_digits: int = 6) -> bool:
    """Whether 1.414214 is the value of \\sqrt{2}: six digits behind the point, and as many that are
    not zeros."""
    significant = decimal.replace(".", "").strip("-0")
    if len(significant) < min_digits:
        return False
    value = formulas.real_value(text)
    return value is not None and rounds_to(value, decimal, min_digits)


def formula(text: str) -> str:
    """As common/rewards/formulas.py reads it: without upright letters, degrees, and commas in one
    large number."""
    text = re.sub(r"\\text\{\s*([A-Za-z])\s*\}", r"{\1}", text)
    if not TRIGONOMETRIC.search(text):
        text = text.replace("°", "")
    if DECIMAL.fullmatch(text):
        return text.replace(",", "")
    return re.sub(r"\{([A-Za-z])\}(?=['_])", r"\1", text)


# --- equations and inequalities ---

Relation = tuple[list[str], list[str]]  # (["2", "x", "5"], ["<", "\\le"]) of 2 < x \le 5
SIGN = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|sim)(?![a-zA-Z])|[<>=]")
FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le", "=": "=", "\\ne": "\\ne"}
EQUALITY = {"=", "\\in", "\\approx"}
LESS, GREATER = {"<", "\\le"}, {">", "\\ge"}
VARIABLE = re.compile(r"\{?[A-Za-z]\}?|\\[a-z]+")
LETTERS = (  # x, x_1, AB, \vec{a}, \angle A
    r"(?:\\(?:overline|vec|hat|angle|triangle)(?![a-z])\s*)?(?:\{?[A-Z]{1,3}\}?|\{?[a-z]\}?|\\[a-z]+)'*"
    r"(?:_\s*(?:\{[^{}]*\}|[0-9a-zA-Z]))?"
)
NAMES = [
    rf"{LETTERS}(?:\^\s*\{{?\s*-1\s*\}}?)?(?:\s*\(\s*[A-Za-z0-9]\s*\))?",  # x, f^{-1}(x)
    r"[fghA-Z]'*\s*\([^()]*\)",  # P(X = 2)
    # m\angle A, \sin A
    r"m\s*\\angle\s*[A-Z]+|\\(?:sin|cos|tan)\s*(?:\\angle\s*)?(?:[A-Z]+|\\[a-z]+)",
    # A \cup B
    rf"(?:\\complement\s*(?:_\s*\{{?[A-Z]\}}?)?\s*)?{LETTERS}(?:\s*\\c[au]p\s*{LETTERS})?",
    r"\|\s*(?:[A-Z]{2}|\\vec\s*\{?[a-zA-Z]+\}?)\s*\|",  # |AB|
    r"\(\s*[a-z](?:\s*,\s*[a-z])+\s*\)",  # (x, y)
    r"\\frac\s*\{\s*[A-Z]{2}\s*\}\s*\{\s*[A-Z]{2}\s*\}|[A-Z]{2}\s*[:/]\s*[A-Z]{2}",  # AB : CD
]
NAME = re.compile("|".join(NAMES))
WORDS = re.compile(r"(?:\s|\\text\{[^{}0-9]*\}|[A-Za-z]{3,}+)+")


def relation(text: str) -> Relation | None:
    """None of a text without a relation outside of all brackets, and of a list, a union or the like
    of them."""
    signs = outside(text, SIGN)
    if not signs or outside(text, SEPARATOR):
        return None
    for pattern in (UNION, INTERSECTION):
        parts = split_outside(text, pattern)
        if len(parts) > 1 and all(outside(part, SIGN) for part in parts):
            return None
    sides: list[str] = []
    start = 0
    for sign in signs:
        sides.append(text[start : sign.start()].strip())
        start = sign.end()
    sides.append(text[start:].strip())
    return sides, [sign[0] for sign in signs]


def without_label(text: str) -> str:
    """5 of x = 5, of 5 = x, of Area = 5 and of x = 2 + 3 = 5; [0,1] of x in [0,1]; other texts as
    they are."""
    parsed = relation(text)
    if not parsed or not set(parsed[1]) <= EQUALITY:
        return text
    sides, signs = parsed
    if signs[-1] == "\\in" and VARIABLE.fullmatch(sides[-1]):  # a \in A
        return text
    if has_prose(sides):
        return text
    if sides[-1] and (NAME.fullmatch(sides[0]) or WORDS.fullmatch(sides[0])):
        return sides[-1]
    if len(sides) == 2 and sides[0] and NAME.fullmatch(sides[1]):
        return sides[0]
    return text


def has_prose(sides: list[str]) -> bool:
    """Whether words stand between two signs, as in x = 5 when y = 3."""
    return any(re.search(r"\\text|(?<![\\A-Za-z])[A-Za-z]{3,}", side) for side in sides[1:-1])


def unlabelled(answer: str, truth: str) -> tuple[str, str]:
    """Both without a label; but x = 5 and y = 5 are two lines."""
    if labels_differ(answer, truth):
        return answer, truth
    return without_label(answer), without_label(truth)


def label(text: str) -> str:
    """The x of x = 5, of 5 = x and of x = 5, 6, the Area of Area = 5; "" if there is none."""
    items = split_outside(text, SEPARATOR)
    parsed = relation(items[0])
    if any(map(relation, items[1:])):
        return ""
    if parsed and set(parsed[1]) <= EQUALITY:
        sides = parsed[0]
        for side in sides if len(sides) == 2 else sides[:1]:
            if NAME.fullmatch(side) or WORDS.fullmatch(side):
                return TEXT_COMMAND.sub(r" \1 ", side).strip()
    return ""


def labels_differ(answer: str, truth: str) -> bool:
    """Whether two labels of one kind differ, as x and y, f(1) and f(2), Area and Perimeter; y is
    f(x), AB is BA."""
    name = label(answer)
    true_name = label(truth)
    if not name or not true_name:
        return False
    is_symbol = NAME.fullmatch(name) is not None
    true_is_symbol = NAME.fullmatch(true_name) is not None
    if is_symbol != true_is_symbol or ("(" in name) != ("(" in true_name):
        return False
    if not is_symbol:
        return not is_subset(name.lower().split(), true_name.lower().split())
    letters, *index = bare_name(name).split("_")
    true_letters, *true_index = bare_name(true_name).split("_")
    if letters.isupper() and sorted(letters) == sorted(true_letters):  # AB and BA
        letters = true_letters
    return letters != true_letters or (index != true_index and index != [] and true_index != [])


def is_subset(words: list[str], other: list[str]) -> bool:
    """Of the other, or the other way round."""
    return {*words} <= {*other} or {*other} <= {*words}


def bare_name(name: str) -> str:
    """AB of |AB|, \\overline{AB} and m\\angle AB."""
    return re.sub(r"[\s{}|]|^m\s*(?=\\angle)|\\(?:overline|angle|triangle)(?![a-z])", "", name)


def same_relation(answer: Relation, truth: Relation, depth: int) -> bool:
    """Side by side, also when turned around, or as intervals; what has one sign also by a constant
    factor."""
    sides, signs = answer
    true_sides, true_signs = truth
    solved = interval_of(sides, signs)
    true_solved = interval_of(true_sides, true_signs)
    if solved and true_solved and solved[0] == true_solved[0]:  # x \in [0, 1] is 0 \le x \le 1
        return same(solved[1], true_solved[1], depth - 1)
    if len(signs) != len(true_signs) or not FLIPPED.keys() >= {*signs, *true_signs}:
        return False
    turned = (sides[::-1], [FLIPPED[sign] for sign in reversed(signs)])
    for some_sides, some_signs in (answer, turned):
        if some_signs == true_signs:
            pairs = zip(some_sides, true_sides)
            if all(same(side, true_side, depth - 1) for side, true_side in pairs):
                return True
    if len(signs) > 1:
        return False
    if any(RATIO.search(side) or WORD.search(side) for side in (*sides, *true_sides)):
        return False
    sign = signs[0]
    true_sign = true_signs[0]
    if true_sign not in (sign, FLIPPED[sign]):
        return False
    direction = 0
    if sign in LESS | GREATER:
        direction = 1 if sign == true_sign else -1
    left, right = map(formula, sides)
    true_left, true_right = map(formula, true_sides)
    return formulas.same_relation((left, right), (true_left, true_right), direction)


def same_as_relation(text: str, other: str, depth: int) -> bool:
    """x = 5 is 5, 2 + 3 = 5 is 5, 2 < x < 5 is (2, 5), x in [0, 1] is [0, 1]; \\sqrt{2} \\approx
    1.41 is either."""
    parsed = relation(text)
    if parsed is None:
        return False
    sides, signs = parsed
    if signs[-1] == "\\approx" and is_rounded(sides[-2], short_form(sides[-1]), min_digits=1):
        return any(same(side, other, depth - 1) for side in sides[-2:])
    value = without_label(text)
    if value != text:
        return same(value, other, depth - 1)
    if set(signs) == {"="} and not symbols_in(text):
        return same(sides[0], other, depth - 1) and same(sides[-1], other, depth - 1)
    interval = interval_of(sides, signs)
    return interval is not None and same(interval[1], other, depth - 1)


def is_result(result: Relation, truth: str, depth: int) -> bool:
    """Whether a + b = 7 or 3 + 4 = 7 tells the number that is asked for; 2x = 6 does not."""
    sides, signs = result
    is_number = re.search("[0-9]", sides[-1]) and not symbols_in(sides[-1])
    if set(signs) != {"="} or not is_number or len(symbols_in(sides[0])) == 1 or has_prose(sides):
        return False
    return same(sides[-1], truth, depth - 1)


def symbols_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\\A-Za-z])[A-Za-z](?:_\{?[A-Za-z0-9]+)?", text))


def interval_of(sides: list[str], signs: list[str]) -> tuple[str, str] | None:
    r"""("x", "(2, \infty)") of x > 2 and of 2 < x, a union of x \ne 2; None if no side is a
    letter."""
    if signs == ["\\ne"] and VARIABLE.fullmatch(sides[0]):
        return sides[0], reals_without(sides[1])
    if signs == ["\\in"] and VARIABLE.fullmatch(sides[0]) and not VARIABLE.fullmatch(sides[1]):
        return sides[0], sides[1]
    if set(signs) <= GREATER:
        sides = sides[::-1]
        signs = [FLIPPED[sign] for sign in reversed(signs)]
    if not set(signs) <= LESS:
        return None
    if len(sides) == 2 and VARIABLE.fullmatch(sides[0]):
        sides = ["-\\infty", *sides]
        signs = ["<", *signs]
    elif len(sides) == 2:
        sides = [*sides, "\\infty"]
        signs = [*signs, "<"]
    if len(sides) != 3 or not VARIABLE.fullmatch(sides[1]):
        return None
    start = "[" if signs[0] == "\\le" else "("
    end = "]" if signs[1] == "\\le" else ")"
    return sides[1], f"{start}{sides[0]}, {sides[2]}{end}"


def reals_without(number: str) -> str:
    return rf"(-\infty, {number}) \cup ({number}, \infty)"


# --- lists, sets, tuples, intervals, unions, matrices ---

OPENING = {"\\{": "\\}", "\\langle": "\\rangle", "(": ")", "[": "]", "{": "}", "\\begin": "\\end"}
BRACKET = re.compile(r"\\[{}]|\\[lr]angle(?![a-zA-Z])|[()\[\]{}]|\\(?:begin|end)(?![a-zA-Z])")
SEPARATOR = re.compile(r"[,;]")
REALS = re.compile(r"\\mathbb\s*\{?\s*R\s*\}?|\\R|\{R\}")
REALS_WITHOUT = re.compile(
    rf"(?:{REALS.pattern})\s*(?:\\setminus|\\backslash|-)\s*\\\{{([^,;]*)\\\}}"
)
UNION = re.compile(r"\\cup(?![a-zA-Z])")
INTERSECTION = re.compile(r"\\cap(?![a-zA-Z])")
SUCH_THAT = re.compile(r"[|:]")
PLUS_MINUS = re.compile(r"\\[pm][pm](?![a-zA-Z])")
MEASURE = re.compile(r"([0-9]+)\s*([A-Za-z]+)\.?\s*")
MEASURES = re.compile(rf"(?:{MEASURE.pattern}){{2,}}")
UNORDERED = {"list", "set", "union", "intersection"}
MATRIX = re.compile(r"\\begin\{([a-zA-Z]*)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)


def collection(text: str) -> tuple[str, list[str]]:
    r"""(kind, items): "list" of what has no order, brackets such as "(]" of what has one, "union",
    "matrix 2x2", and "set-builder"; ("", [text]) of what is no collection.

    A set is a list: \{1, 2\} is 1, 2. What has \pm is a list of two.
    """
    match = MATRIX.fullmatch(text)
    if match:
        lines = match[2].strip().removesuffix("\\\\").split("\\\\")
        rows = [line.split("&") for line in lines]
        bars = match[1] if match[1] in ("v", "V") else ""
        shape = ",".join(str(len(row)) for row in rows)
        return f"{bars}matrix {shape}", [cell.strip() for row in rows for cell in row]
    if REALS.fullmatch(text):
        return "()", ["-\\infty", "\\infty"]
    match = REALS_WITHOUT.fullmatch(text)
    if match:
        text = reals_without(match[1])
    for kind, pattern in (("union", UNION), ("intersection", INTERSECTION)):
        parts = split_outside(text, pattern)
        if len(parts) > 1:
            return kind, parts
    start, inner, end = in_brackets(text)
    if start == "\\{":
        return set_of(inner)
    items = list_items(text)
    if len(items) > 1:
        return "list", items
    items = items_of(inner)
    if not start or (len(items) == 1 and start not in ("(", "{")):
        return "", [text]
    if start == "{" or len(items) == 1 or not outside(inner, SEPARATOR):  # (1 \pm \sqrt{2})
        return "list", items
    return ("()" if start == "\\langle" else start + end), items


def set_of(inner: str) -> tuple[str, list[str]]:
    r"""The collection that \{…\} is: \{x | x > 2\} is (2, \infty), and \{\emptyset\} is no
    \emptyset."""
    head, *condition = split_outside(inner, SUCH_THAT, at_most=1)
    if condition:
        variable = re.sub(rf"\\in\s*(?:{REALS.pattern})$", "", head).strip()
        solution = solution_set(variable, condition[0])
        return collection(solution) if solution else ("set-builder", [head, *condition])
    items = items_of(inner)
    if len(items) == 1:
        (item,) = items
        if item == "\\emptyset" or in_brackets(item)[0] == "\\{":
            return "set of a set", items
    return "set", items


def solution_set(variable: str, condition: str) -> str:
    r"""(-\infty, 1)\cup(2, \infty) of x and x < 1 \cup x > 2; "" of what are no inequalities of the
    variable."""
    intervals = []
    for part in split_outside(condition, UNION):
        parsed = relation(part)
        interval = interval_of(*parsed) if parsed else None
        if not interval or interval[0] != variable:
            return ""
        intervals.append(interval[1])
    return " \\cup ".join(intervals)


def same_collection(
    kind: str, items: list[str], true_kind: str, true_items: list[str], depth: int
) -> bool:
    """In any order for lists, sets and unions; (1, 2) is 1, 2 in this order, and no \\{1, 2\\}."""
    kinds = {kind or "list", true_kind or "list"}
    if kinds <= UNORDERED and (len(kinds) == 1 or "list" in kinds):
        return same_items(items, true_items, depth)
    if len(items) != len(true_items):
        return False
    if kinds == {"set-builder"}:
        head, condition = items
        true_head, true_condition = true_items
        if short_form(head) != short_form(true_head):
            return False
        return same(condition, true_condition, depth - 1)
    if len(kinds) == 1 or kinds == {"list", "()"}:
        return all(same(item, true_item, depth - 1) for item, true_item in zip(items, true_items))
    return False


def same_items(items: list[str], true_items: list[str], depth: int) -> bool:
    """In any order. Of those that are spelled differently all pairs are compared, if they are
    few."""
    if len(items) != len(true_items):
        return False
    rest = list(items)
    spellings = [spelling(item) for item in items]
    unmatched = []
    for true_item in true_items:
        short = spelling(true_item)
        if short in spellings:
            place = spellings.index(short)
            del spellings[place], rest[place]
        else:
            unmatched.append(true_item)
    if len(unmatched) > MAX_UNMATCHED:
        return False
    for true_item in unmatched:
        for item in rest:
            if same(item, true_item, depth - 1):
                rest.remove(item)
                break
        else:
            return False
    return True


def list_items(text: str) -> list[str]:
    """The items of a list; of x = 1, 2 without the label, and of \\pm 3 both; [text] of what is no
    list."""
    if DECIMAL.fullmatch(split_unit(text)[0]):  # 1,234 cans
        return [text]
    return items_of(text)


def items_of(text: str) -> list[str]:
    """As `list_items`, of what stands in brackets, where 1,234 are two numbers."""
    items = measures(text) or split_outside(text, SEPARATOR)
    if len(items) > 1 and relation(items[0]) and not any(map(relation, items[1:])):
        items[0] = without_label(items[0])
    signed_items: list[str] = []
    for item in items:
        signed_items += both_signs(item)
    return signed_items


def both_signs(text: str) -> list[str]:
    r"""["1 + x", "1 - x"] of 1 \pm x; [text] of what has no \pm."""
    if not PLUS_MINUS.search(text):
        return [text]
    upper = {"\\pm": "+", "\\mp": "-"}
    lower = {"\\pm": "-", "\\mp": "+"}
    return [
        PLUS_MINUS.sub(lambda match, signs=signs: signs[match[0]], text) for signs in (upper, lower)
    ]


def measures(text: str) -> list[str]:
    """["3 hours", "20 minutes"] of 3 hours 20 minutes; [] of all else."""
    text = TEXT_COMMAND.sub(r"\1", text)
    if not MEASURES.fullmatch(text):
        return []
    quantities = []
    for number, unit in MEASURE.findall(text):
        if not unit_name(unit):
            return []
        quantities.append(f"{number} {unit}")
    return quantities


def in_brackets(text: str) -> tuple[str, str, str]:
    """("(", "1, 2", "]") of (1, 2]; ("", "", "") of a text that is not in one pair of brackets."""
    brackets = list(BRACKET.finditer(text))
    if len(brackets) < 2 or brackets[0].start() != 0 or brackets[-1].end() != len(text):
        return "", "", ""
    first = brackets[0]
    last = brackets[-1]
    if first[0] not in OPENING or first[0] == "\\begin" or last[0] in OPENING:
        return "", "", ""
    depth = 0
    for bracket in brackets[:-1]:
        depth += 1 if bracket[0] in OPENING else -1
        if depth == 0:  # (1 + 2)(3 + 4)
            return "", "", ""
    return first[0], text[first.end() : last.start()].strip(), last[0]


def split_outside(text: str, pattern: re.Pattern, at_most: int | None = None) -> list[str]:
    """The parts between the first `at_most` matches that stand outside of all brackets."""
    parts: list[str] = []
    start = 0
    for match in outside(text, pattern)[:at_most]:
        parts.append(text[start : match.start()].strip())
        start = match.end()
    return [*parts, text[start:].strip()]


def outside(text: str, pattern: re.Pattern) -> list[re.Match]:
    """Matches of a pattern that stand outside of all brackets."""
    brackets = list(BRACKET.finditer(text))
    matches = []
    depth = 0
    next_bracket = 0
    for match in pattern.finditer(text):
        while next_bracket < len(brackets):
            bracket = brackets[next_bracket]
            if bracket.start() >= match.start():
                break
            depth += 1 if bracket[0] in OPENING else -1
            next_bracket += 1
        if depth == 0:
            matches.append(match)
    return matches
