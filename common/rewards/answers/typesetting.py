r"""One way of typesetting: \dfrac12, \frac 1 2 and ½ are \frac{1}{2}, and \left( is (."""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from common.rewards.answers.brackets import split_brackets

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
# symbol -> what is written in its place
SYMBOLS = {symbol: f"{command} " for symbol, command in COMMAND_PAIRS}
SYMBOLS |= {letter: f"\\{name} " for letter, name in zip(GREEK, GREEK_NAMES.split())}
SYMBOLS |= {"−": "-", "–": "-", "—": "-", "′": "'", "’": "'", "∣": "|", "∶": ":", "⁄": "/"}
SYMBOLS |= {"%": "\\%", "、": ", ", "。": ".", "或": " or ", "和": " and "}
SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
SUBSCRIPTS = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
TO_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-" * 2)
# full width, and the mathematical alphabets
STYLED_LETTERS = re.compile("[\uff01-\uff5e\U0001d400-\U0001d7ff]")

TEXT_COMMAND = re.compile(r"\\text\{([^{}]*)\}")
RELATION_SIGN = re.compile(r"\\(?:le|ge|ne|in|approx|equiv|sim)(?![a-zA-Z])|[<>=]")
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
    # pi, infty, sqrt and sin as typed without LaTeX; \surd is a root of all the digits behind it
    (
        rf"(?<![\\a-zA-Z])(pi|infty|infinity){WORD_END}",
        lambda m: "\\pi " if m[1] == "pi" else "\\infty ",
    ),
    (r"(?<![\\a-zA-Z])sqrt(?=\s*[({0-9])", r"\\surd "),
    (
        r"(?<![\\a-zA-Z])(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|ln|log)"
        r"(?=\s*[\^_({0-9\\]|\s*[a-zA-Z](?![a-zA-Z]))",
        r"\\\1 ",
    ),
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
    # the product of vectors or sets, which is not that of numbers
    (
        r"(\{[A-Za-z]\}|\\vec\s*\{?[A-Za-z]+\}?|(?<![A-Za-z])[A-Z])\s*\\times(?=\s*(?:\{[A-Za-z]\}|\\vec|[A-Z]))",
        r"\1\\cross ",
    ),
    # degrees: part of a formula, or at its end a unit
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
    text = text.replace("\\%", "%")  # SYMBOLS escapes them all
    text = "".join(SYMBOLS.get(char, char) for char in text)
    for pattern, replacement in TYPESETTING:
        text = re.sub(pattern, replacement, text)
    text = text.strip()
    whole = TEXT_COMMAND.fullmatch(text)  # \text{(1, 2)}
    if whole:
        text = whole[1].strip()
    opening, inner, _ = split_brackets(text)
    if opening == "{" and len(inner) > 1:
        text = inner
    return ARTICLE.sub("", text)


def is_between_relations(match: re.Match) -> bool:
    """Whether a match stands between two equations or inequalities, as in x = 1 \\quad y = 2."""
    before = match.string[: match.start()]
    after = match.string[match.end() :]
    return bool(RELATION_SIGN.search(before) and RELATION_SIGN.search(after))


def subscript(word: str) -> str:
    return f"_{{{BASES.get(word, word)}}}"


def system(rows: str) -> str:
    r"""The rows x = 1 \\ y = 2 as the list x = 1, y = 2; "" if they are no equations."""
    if "\\text" in rows:
        return ""
    equations = []
    for row in rows.removesuffix("\\\\").split("\\\\"):
        if "=" not in row:
            return ""
        equations.append(row.replace("&", "").strip(" ,.;"))
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
