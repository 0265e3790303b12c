r"""Units and counted things: 5\text{ cm}^2 is 5 and centimetre^2, 9 (red apples) is 9 and red
apple."""

import re

from common.rewards.answers.typesetting import TEXT_COMMAND, TRIGONOMETRIC

# {unit: its spellings}; a single letter is a unit in upright type, as in 5\,\mathrm{m}, in a rate
# (5 m/s), or if the other answer has this unit
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
QUALIFIER_WORDS = """
or and not no if mod modulo more less fewer than least most about approximately over under
above below increase decrease increases decreases increased decreased rise fall gain gains
loss losses profit profits deficit surplus win debt credit debit am pm bc ad north south
east west before after ago even odd positive negative true false inclusive exclusive minimum
maximum min max base remainder hundred thousand million billion trillion hundreds thousands
millions billions trillions lakh lakhs crore crores dozen dozens minus plus squared cubed is are
always never sometimes only all none both solutions roots undefined infinite infinity instead too
twice excluding except without factorial reciprocal opposite binary octal hexadecimal
"""
QUALIFIERS = set(QUALIFIER_WORDS.split())
# words that do so only as the last ones: 123 (left) is another answer, 123 (third graders) is 123
FINAL_QUALIFIER_WORDS = """
up down left right long short late early faster slower much many double triple wrong correct
incorrect valid invalid impossible extraneous half halves third thirds fourths fifths sixths
sevenths eighths ninths tenths hundredths thousandths tens times
"""
FINAL_QUALIFIERS = set(FINAL_QUALIFIER_WORDS.split())
# 2 thirds of the class and 5 twelfths are no 2 and 5; but 3 quarters may be coins
FRACTIONS = re.compile(
    r"halves|(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|[a-z]*teenth"
    r"|[a-z]+tieth|[a-z]*hundredth|[a-z]*thousandth|[a-z]+illionth)s"
)
# plural:singular
IRREGULAR_WORDS = """
people:person children:child men:man women:woman sheep:sheep fish:fish deer:deer feet:foot
mice:mouse geese:goose teeth:tooth potatoes:potato tomatoes:tomato
"""
IRREGULAR_PLURALS = dict(word.split(":") for word in IRREGULAR_WORDS.split())

POWER = r"(?:\s*\^\s*(?:\{\s*-?[0-9]\s*\}|-?[0-9]))?"
# of a unit: a word, a sign, or the letter behind a slash
PIECE = re.compile(
    r"(?:\\text\{[^{}]*\}|(?<![\\A-Za-z])[A-Za-z][A-Za-z'-]+\.?|(?<=/)[A-Za-z]"
    rf"|°|\\%|\\\$|[€£¢₹元¥₩₽]){POWER}"
)
MAX_PIECES = 8  # of a unit
GAP = re.compile(r"\s*(?:/|-|\\cdot)?\s*")  # between them
RATE_TAIL = re.compile(rf"(?<=[0-9}}\s])\s*(?:km|m|cm|mi|ft)\s*/\s*(?:h|s|hr|min|sec){POWER}$")
NOUN_TAIL = re.compile(r"\s*\(\s*((?:[^()0-9\\^_=+*]|\\%)*?)\s*\)[\s.]*$")  # 9 (apples)
CURRENCY = re.compile(r"^([-+]?)\s*(\\\$|[€£¥₹₩₽])\s*(?=[-+]?\s*[0-9.\\])")
# the amount of $15 per hour and of $15/\text{hour}
PRICE = re.compile(
    r"([-+]?[0-9][0-9,]*(?:\.[0-9]*)?|[-+]?\.[0-9]+)\s*"
    r"(?=/\s*(?:\\text|[A-Za-z])|(?:\\text\{\s*)?(?:per|/)\s)"
)
FACTOR = re.compile(r"\s*(\\%|\\\$|°?[A-Za-z]+|[°€£¢₹元¥₩₽])\.?(?:\s*\^\s*\{?\s*(-?[0-9])\s*\}?)?")
PLAIN_NUMBER = re.compile(
    r"[-+]?\s*(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)?\s*(?:\\frac\{[0-9]+\}\{[0-9]+\}|/\s*[0-9]+)?"
)
MEASURE = re.compile(r"([0-9]+)\s*([A-Za-z]+)\.?\s*")
MEASURES = re.compile(rf"(?:{MEASURE.pattern}){{2,}}")


def split_units(answer: str, truth: str) -> tuple[str, str, str, str]:
    """(answer, its unit, truth, its unit). If only one shows a unit, the other is read again with
    this as its `other_unit`."""
    answer_core, unit = split_unit(answer)
    true_core, true_unit = split_unit(truth)
    if unit and not true_unit:
        true_core, true_unit = split_unit(truth, unit)
    elif true_unit and not unit:
        answer_core, unit = split_unit(answer, true_unit)
    return answer_core, unit, true_core, true_unit


def split_unit(text: str, other_unit: str = "") -> tuple[str, str]:
    r"""Split a number and its unit: 5\text{ cm}^2 gives ("5", "centimetre^2"), 9 (apples) gives
    ("9", "apple"). Without a unit: (text, "").

    other_unit: that of the other answer. A single letter that is neither upright nor in a rate
    counts as a unit only if it names this one; for nouns see `noun_name`.
    """
    rest = text  # without a currency in front
    currency = ""
    match = CURRENCY.match(text)
    if match:
        rest = match[1] + text[match.end() :]
        currency = UNIT_OF.get(match[2], match[2])
        price = PRICE.match(rest)
        if price:  # 15 $ per hour
            rate = unit_behind(f"{price[1]} {match[2]} {rest[price.end() :]}", other_unit)
            if rate:
                return rate
    quantity, unit = unit_behind(rest, other_unit) or unit_in_brackets(rest) or (rest, currency)
    if currency and unit == "kelvin":  # $5K
        return rest, currency
    if currency and unit != currency:
        unit = f"{currency} {unit}"
    return quantity, unit


def unit_behind(text: str, other_unit: str) -> tuple[str, str] | None:
    """("9", "apple") of 9 apples."""
    for start, tail in unit_tails(text):
        before = text[:start].rstrip()
        words = TEXT_COMMAND.sub(r" \1 ", tail)
        unit = unit_name(words)
        if unit and is_quantity(before, tail):
            return before, unit
        unit = noun_name(words, other_unit)
        if unit and before and PLAIN_NUMBER.fullmatch(before):
            return before, unit
    match = re.search(rf"(?<=[0-9])\s*([A-Za-z]{POWER})$", text)
    if match and other_unit and unit_name(match[1]) == other_unit:  # 7 m is 7 (m)
        return text[: match.start()], other_unit
    return None


def unit_in_brackets(text: str) -> tuple[str, str] | None:
    """("9", "apple") of 9 (apples)."""
    text = TEXT_COMMAND.sub(r"\1", text)
    match = NOUN_TAIL.search(text)
    if match is None:
        return None
    before = text[: match.start()].rstrip()
    unit = unit_name(match[1]) or noun_name(match[1], is_in_brackets=True)
    if unit and before and PLAIN_NUMBER.fullmatch(before):
        return before, unit
    return None


def unit_tails(text: str) -> list[tuple[int, str]]:
    """(start, text) of what may be a unit at the end, the longest first."""
    starts = []
    end = len(text)
    last_pieces = list(PIECE.finditer(text))[-MAX_PIECES:]
    for piece in reversed(last_pieces):
        if not GAP.fullmatch(text[piece.end() : end]):
            break
        starts.append(piece.start())
        end = piece.start()
    match = RATE_TAIL.search(text)
    if match:
        starts.append(match.start())
    return [(start, text[start:]) for start in sorted(starts)]


def is_quantity(text: str, tail: str) -> bool:
    """Whether `tail` may be the unit of the text before it: a number, or a formula with one. A unit
    of several letters may also follow a command or a single letter."""
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
        exponent = "" if abs(power) == 1 else f"^{abs(power)}"
        side = dividends if power > 0 else divisors
        side.append(name + exponent)
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
        elif lower == "old" and factors == [("year", 1)]:  # years old
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


def noun_name(text: str, other_unit: str = "", is_in_brackets: bool = False) -> str:
    """The things that are counted, as "red apple" of red apples; "" of words that tell more.

    In brackets each noun counts things; elsewhere it has to be a plural, a measure of something (kg
    of rice), or `other_unit`.
    """
    words = re.sub(r"[./-]", " ", text.lower()).split()
    if not 1 <= len(words) <= 6:
        return ""
    if not all(re.fullmatch(r"[a-z]['a-z]*", word) for word in words):
        return ""
    if QUALIFIERS.intersection(words) or words[-1] in FINAL_QUALIFIERS or len("".join(words)) < 2:
        return ""
    if any(FRACTIONS.fullmatch(word) for word in words) or words[:2] == ["quarters", "of"]:
        return ""
    if words[-1].endswith("ed") and len(words[-1]) > 4:  # rejected, excluded
        return ""
    head = len(words) - 1
    if "of" in words[1:]:  # pieces of candy
        head = words.index("of") - 1
    head_word = words[head]
    words[head] = UNIT_OF.get(head_word) or singular(head_word)
    name = " ".join(words)
    is_measure = "of" in words[1:] and head_word in UNIT_OF  # kg of rice
    if is_in_brackets or is_measure or is_plural(head_word) or name == other_unit:
        return name
    return ""


def is_plural(word: str) -> bool:
    if word in IRREGULAR_PLURALS:
        return True
    return word.endswith("s") and not word.endswith(("ss", "us", "is"))


def singular(word: str) -> str:
    if word in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[word]
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
    """Whether two units are the same; one may be missing. Of two nouns one may tell more: 9 apples
    are 9 (red apples), 5 pounds are 5 pounds of sand."""
    if not unit or not other or unit == other:
        return True
    words = set(unit.split())
    other_words = set(other.split())
    are_units = all(word.partition("^")[0] in UNITS for word in words | other_words)
    if are_units or "/" in unit + other:
        return False
    return words <= other_words or other_words <= words


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
