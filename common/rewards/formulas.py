r"""Equality of formulas: LaTeX is read token by token into sympy's expressions, which are compared
at points.

A formula is read whole or not at all: what is not known here (an operator, a command, two numbers
side by side) is `Unreadable`, and then only its spelling tells. Two formulas are equal if they
agree at random points, to more digits than a coincidence has; constants are compared exactly if
both are rational, and else relatively, however small. Sizes are bounded before sympy computes
anything.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from common.rewards.values import NO_VALUE, Point, agree, exact, is_close, ratio_at, value_of

if TYPE_CHECKING:
    import sympy

MAX_CHARACTERS = 200
MAX_BITS = 100_000  # of the numbers that a formula may lead to
MAX_ROOT_BITS = 256  # of a number under a root, which sympy tries to factor
MAX_EXPONENT = 10_000  # that is no integer, or of e
MAX_EXPONENT_BITS = 128  # of one with symbols
MAX_ANGLE_BITS = 4096  # of a number in sin and other functions, which need as many digits of pi
MAX_ROUNDED = 10**200  # in floor and ceiling
MAX_FACTORIAL = 999
MAX_BINOMIAL = 9999
MAX_FUNCTIONS = 4  # inside each other
MAX_BRACKETS = 40  # inside each other

FUNCTIONS = {
    **{
        name: name
        for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "exp")
    },
    **{f"arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
}
GROWING_FUNCTIONS = ("exp", "sinh", "cosh", "tanh")
LOGARITHMS = ("ln", "log", "lg")
GREEK = """
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi
rho sigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon
Phi Psi Omega ell hbar
"""
ACCENTS = """
overline bar vec overrightarrow hat widehat tilde widetilde underline mathbb mathcal
mathfrak mathscr
"""
NAMES_OF_FUNCTIONS = set("fghFGHPQ")  # of which x(…) is a value, not a product

TOKEN = re.compile(
    r"""(?x)
    (?P<number> [0-9]+ (?: \.[0-9]* )? | \.[0-9]+ )
    | (?P<accent> \\(?:ACCENTS) \s* (?: \{ [A-Za-z0-9\s]* \} | [A-Za-z] ) )
    | (?P<symbol> (?: [A-Za-z]{4,} | [A-Za-z] | \\(?:GREEK)(?![A-Za-z]) )
        (?: _ \s* (?: [A-Za-z0-9] | \{ [A-Za-z0-9\s,+\-]* \} ) )?
        (?: ' | \^\s* (?: \\top | \{\s*\\top\s*\} )
            | (?<=[A-Z]) \^\s* (?: T (?![A-Za-z]) | \{\s*T\s*\} ) )* )
    | (?P<command> \\[A-Za-z]+ )
    | (?P<operator> [-+*/^!°()|{}\[\]_] )
    """.replace("ACCENTS", "|".join(ACCENTS.split())).replace("GREEK", "|".join(GREEK.split()))
)


# what sympy raises where it has no answer, Unreadable among them
NO_VERDICT = (
    ArithmeticError,
    AttributeError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
)


class Unreadable(ValueError):
    """A text that is no formula known here, or one too large to compute with."""


def same_value(answer: str, truth: str) -> bool:
    """Whether two formulas have one value; False if either is `Unreadable`."""
    try:
        return is_identity(read(answer), read(truth))
    except NO_VERDICT:
        return False


def same_relation(answer: tuple[str, str], truth: tuple[str, str], direction: int) -> bool:
    """Whether left - right of two equations or inequalities agree up to a constant factor.

    direction: 0 for equations, with any factor; 1 for inequalities that point the same way, whose
    factor is positive;
    -1 for those that point in opposite ways.
    """
    from sympy import together

    try:
        differences = [read(left) - read(right) for left, right in (answer, truth)]
        if direction == 0:  # y = 2/x is xy = 2
            differences = [together(difference).as_numer_denom()[0] for difference in differences]
        for difference in differences:
            check_size(difference)
        return is_multiple(*differences, direction)
    except NO_VERDICT:
        return False


def real_value(text: str) -> Fraction | None:
    """The real number that a formula without symbols is, to 600 digits; None of all else."""
    try:
        return exact(value_of(read(text)))
    except NO_VERDICT:
        return None


# --- comparison ---


def is_identity(a: "sympy.Expr", b: "sympy.Expr") -> bool:
    if a == b:
        return True
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return agree(a, b, {}) is True
    agreements = 0
    for point in points_for(symbols, a, b):
        verdict = agree(a, b, point)
        if verdict is False:
            return False
        agreements += verdict is True  # it may be undefined at a point
    return agreements >= 2


def is_multiple(a: "sympy.Expr", b: "sympy.Expr", direction: int) -> bool:
    """Whether a / b is a constant, of the sign of `direction` if that is not 0."""
    if not a.free_symbols or a.free_symbols != b.free_symbols:
        return False
    ratios = []
    for point in points_for(sorted(a.free_symbols, key=str), a, b):
        ratio = ratio_at(a, b, point)
        if ratio is not None:
            ratios.append(ratio)
    if len(ratios) < 2 or (direction and exact(ratios[0]) * direction <= 0):
        return False
    return all(is_close(ratio, ratios[0]) for ratio in ratios[1:])


def points_for(symbols: list["sympy.Symbol"], *expressions: "sympy.Expr") -> list[Point]:
    """Integers for n! and n choose k, also large numbers for what is rounded."""
    from sympy import binomial, ceiling, factorial, floor

    if any(expression.has(binomial, factorial) for expression in expressions):
        return integer_points(symbols)
    if any(expression.has(floor, ceiling) for expression in expressions):
        return points(symbols) + points(symbols, scale=101)
    return points(symbols)


def points(symbols: list["sympy.Symbol"], scale: int = 1) -> list[Point]:
    """Four points, all positive, all negative, and mixed; no two symbols are equal at one."""
    chosen: list[Point] = []
    for signs in ((1, 1), (-1, -1), (1, -1), (-1, 1)):
        point = {}
        for i, symbol in enumerate(symbols):
            magnitude = scale * Fraction(7 + 4 * i + len(chosen), 5 + 2 * len(chosen))
            point[symbol] = signs[i % 2] * magnitude
        chosen.append(point)
    return chosen


def integer_points(symbols: list["sympy.Symbol"]) -> list[Point]:
    """Four points, in two the symbols grow from the first to the last, in two they fall."""
    chosen: list[Point] = []
    for order in (symbols, symbols[::-1]):
        for first in (3, 6):
            chosen.append({symbol: Fraction(first + 2 * i) for i, symbol in enumerate(order)})
    return chosen


def check_real(expression: "sympy.Expr") -> None:
    r"""Of what stands in a function and comes out of it; \arcsin 2 is complex."""
    if expression.free_symbols:
        return
    try:
        exact(value_of(expression))
    except NO_VALUE as error:
        raise Unreadable("a function of or with a complex value") from error


def check_size(expression: "sympy.Expr") -> None:
    if bits_of(expression) > MAX_BITS:
        raise Unreadable("the numbers are too large")


def bits_of(expression: "sympy.Expr") -> int:
    """A bound on the bits of an expression's value at a point, if that is rational."""
    if expression.is_Rational:
        return int(expression.p).bit_length() + int(expression.q).bit_length()
    if expression.is_Symbol:
        return 20
    if not expression.args:  # pi, e, i
        return 16
    total = sum(bits_of(argument) for argument in expression.args)
    if expression.is_Pow and expression.exp.is_Integer:
        total = bits_of(expression.base) * abs(int(expression.exp))
    return min(total, 10 * MAX_BITS)


# --- reading ---


@lru_cache(maxsize=256)
def read(text: str) -> "sympy.Expr":
    """The expression of a formula. Raises Unreadable."""
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"more than {MAX_CHARACTERS} characters")
    reader = Reader(text)
    expression = reader.sum()
    if reader.kind:
        raise Unreadable(f"{reader.token!r} is left over")
    check_size(expression)
    return expression


class Reader:
    """Recursive descent, a method for each level of precedence. `kind`, `token`: of the next token,
    "" at the end."""

    def __init__(self, text: str):
        self.tokens: list[tuple[str, str]] = []
        end = 0
        for match in TOKEN.finditer(text):
            if text[end : match.start()].strip():
                break
            kind = match.lastgroup
            self.tokens.append(("symbol" if kind == "accent" else kind, match[0]))
            end = match.end()
        if text[end:].strip() or not self.tokens:
            raise Unreadable(f"not a formula: {text[end:]!r:.40}")
        self.place = 0
        self.functions = 0
        self.brackets = 0
        self.bars = 0  # absolute values that are open

    @property
    def kind(self) -> str:
        return self.tokens[self.place][0] if self.place < len(self.tokens) else ""

    @property
    def token(self) -> str:
        return self.tokens[self.place][1] if self.place < len(self.tokens) else ""

    def take(self) -> str:
        token = self.token
        self.place += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise Unreadable(f"expected {token}")

    def sum(self) -> "sympy.Expr":
        total = self.signed_product()
        while self.token in ("+", "-"):
            total = total + self.signed_product()
        return total

    def signed_product(self) -> "sympy.Expr":
        sign = 1
        while self.token in ("+", "-"):
            if self.take() == "-":
                sign = -sign
        return sign * self.product()

    def product(self) -> "sympy.Expr":
        value = self.factors()
        while self.token in ("*", "\\cdot", "\\times", "/", "\\div"):
            divides = self.take() in ("/", "\\div")
            sign = 1
            if self.token == "-":  # 2 * -3
                self.take()
                sign = -1
            factor = sign * self.factors()
            value = divided(value, factor) if divides else value * factor
        return value

    def factors(self) -> "sympy.Expr":
        """Factors side by side; in a/bc they are the denominator."""
        was_number = self.kind == "number"
        is_whole = was_number and self.token.isdecimal()
        value = self.power()
        while self.starts_factor():
            follows_operator = self.tokens[self.place - 1][0] == "operator"
            if self.kind == "number" and (was_number or not follows_operator):
                raise Unreadable("a number behind a number or a letter")
            was_number = self.kind == "number"
            is_fraction = self.token == "\\frac"
            factor = self.power()
            is_mixed = is_whole and is_fraction and factor.is_Rational and 0 < factor < 1
            value = value + factor if is_mixed else value * factor
            is_whole = False
        return value

    def starts_factor(self) -> bool:
        if self.kind in ("number", "symbol"):
            return True
        if self.kind == "command":
            return self.token not in ("\\cdot", "\\times", "\\div", "\\rfloor", "\\rceil")
        return self.token in ("(", "{") or (self.token == "|" and not self.bars)

    def power(self) -> "sympy.Expr":
        import sympy

        value = self.atom()
        while self.token in ("^", "!", "°"):
            if self.token == "°":
                self.take()
                value = value * sympy.pi / 180
            elif self.take() == "!":
                if self.token == "!":
                    raise Unreadable("a double factorial")
                value = factorial(value)
            else:
                value = raised(value, self.argument())
                if self.token == "^":
                    raise Unreadable("a tower of powers without braces")
        return value

    def argument(self) -> "sympy.Expr":
        """What a command or ^ applies to: a group in braces, a digit, a symbol or a command."""
        if self.token == "{":
            return self.group("{", "}")
        if self.token == "-" or self.token == "(":  # 10^-3, x^(n+1), as typed without LaTeX
            if self.token == "(":
                return self.group("(", ")")
            self.take()
            return -self.argument()
        if self.kind in ("number", "symbol") or self.token in (
            "\\pi",
            "\\frac",
            "\\sqrt",
            "\\infty",
        ):
            return self.atom()
        raise Unreadable(f"no argument: {self.token!r}")

    def group(self, start: str, end: str) -> "sympy.Expr":
        self.expect(start)
        self.brackets += 1
        if self.brackets > MAX_BRACKETS:
            raise Unreadable("too many brackets")
        bars = self.bars
        self.bars = 0
        value = self.sum()
        self.expect(end)
        self.bars = bars
        self.brackets -= 1
        return value

    def atom(self) -> "sympy.Expr":
        import sympy

        kind = self.kind
        token = self.token
        if kind == "number":
            return sympy.Rational(self.take())
        if kind == "symbol":
            return self.symbol()
        if kind == "command":
            return self.command()
        if token == "(":
            return self.group("(", ")")
        if token == "{":
            return self.group("{", "}")
        if token == "|":
            self.take()
            self.bars += 1
            value = self.sum()
            self.expect("|")
            self.bars -= 1
            return sympy.Abs(value)
        raise Unreadable(f"unexpected {token!r}")

    def symbol(self) -> "sympy.Expr":
        import sympy

        token = self.take()
        if token == "e":
            return sympy.E
        if token == "i":
            return sympy.I
        name = re.sub(r"[\s{}]", "", token)
        follows = [following for _, following in self.tokens[self.place : self.place + 3]]
        # y(0), u(t)
        if follows[:1] == ["("] and (name[0] in NAMES_OF_FUNCTIONS or follows[2:] == [")"]):
            raise Unreadable("the value of a function")
        return sympy.Symbol(name)

    def command(self) -> "sympy.Expr":
        import sympy

        name = self.take().removeprefix("\\")
        if name == "pi":
            return sympy.pi
        if name == "infty":
            return sympy.oo
        if name == "frac":
            above = self.argument()
            return divided(above, self.argument())
        if name == "binom":
            above = self.argument()
            return binomial(above, self.argument())
        if name == "sqrt":
            degree = sympy.Integer(2)
            if self.token == "[":
                degree = self.group("[", "]")
            return raised(self.argument(), divided(sympy.Integer(1), degree))
        if name in ("lfloor", "lceil"):
            self.brackets += 1
            value = self.sum()
            self.expect(f"\\r{name[1:]}")
            self.brackets -= 1
            return rounded(value, "floor" if name == "lfloor" else "ceiling")
        if name in FUNCTIONS or name in LOGARITHMS:
            return self.function(name)
        raise Unreadable(f"\\{name} is not known")

    def function(self, name: str) -> "sympy.Expr":
        r"""\sin(x), \sin 2x, \sin^2 x, \log_2 8: of a bracket, or of the factors up to another
        function."""
        import sympy

        self.functions += 1
        if self.functions > MAX_FUNCTIONS:
            raise Unreadable("too many functions inside each other")
        base = {"ln": sympy.E, "log": sympy.Integer(10), "lg": sympy.Integer(10)}.get(name)
        exponent = None
        while self.token in ("_", "^"):
            if self.take() == "_" and name == "log":
                base = self.argument()
            else:
                exponent = self.argument()
        if self.token == "(":
            value = self.group("(", ")")
        else:
            value = self.power()
            while self.starts_factor() and self.token.removeprefix("\\") not in (
                *FUNCTIONS,
                *LOGARITHMS,
            ):
                value = value * self.power()
        self.functions -= 1
        function = FUNCTIONS.get(name)
        if exponent == -1 and function and f"arc{name}" in FUNCTIONS:
            function = FUNCTIONS[f"arc{name}"]
            exponent = None
        check_real(value)
        if name in GROWING_FUNCTIONS:
            check_growing(value)
        elif bits_of(value) > MAX_ANGLE_BITS:
            raise Unreadable("the argument is too large")
        if base is not None:
            result = divided(sympy.log(value), sympy.log(base))
        else:
            result = getattr(sympy, function)(value)
        check_real(result)
        return result if exponent is None else raised(result, exponent)


# --- arithmetic within bounds ---


def divided(above: "sympy.Expr", below: "sympy.Expr") -> "sympy.Expr":
    if below == 0:
        raise Unreadable("a division by zero")
    return above / below


def raised(base: "sympy.Expr", exponent: "sympy.Expr") -> "sympy.Expr":
    from sympy import E

    if base == E or not exponent.is_Integer:
        check_growing(exponent)
    elif bits_of(base) * abs(int(exponent)) > MAX_BITS:
        raise Unreadable("the power is too large")
    elif base == 0 and exponent < 0:
        raise Unreadable("a division by zero")
    if not exponent.is_Integer and not base.free_symbols and bits_of(base) > MAX_ROOT_BITS:
        raise Unreadable("the root of too large a number")
    return base**exponent


def rounded(value: "sympy.Expr", name: str) -> "sympy.Expr":
    """The floor or ceiling; of a number at once, which sympy would compute to its last digit."""
    import sympy

    if value.free_symbols:
        return getattr(sympy, name)(value)
    if not is_below(MAX_ROUNDED, value):
        raise Unreadable("too large a number to round")
    return sympy.Integer(int(exact(value_of(getattr(sympy, name)(value, evaluate=False)))))


def check_growing(exponent: "sympy.Expr") -> None:
    """Of e or of a number: no towers, such as e^{e^{e^x}} and x^{n!}, and no numbers beyond all
    bounds."""
    from sympy import preorder_traversal

    if not exponent.is_rational_function() and grows(exponent):
        raise Unreadable("a tower of powers")
    if bits_of(exponent) > MAX_EXPONENT_BITS:
        raise Unreadable("the exponent is too large")
    for part in preorder_traversal(exponent):
        if part.is_number and not is_below(MAX_EXPONENT, part):
            raise Unreadable("the exponent is too large")


def is_below(limit: int, number: "sympy.Expr") -> bool:
    try:
        return bool(abs(value_of(number)) < limit)
    except NO_VALUE:
        return False


def grows(expression: "sympy.Expr") -> bool:
    """Whether an exponential, a factorial or the like is in an expression."""
    import sympy

    growing = (sympy.exp, sympy.sinh, sympy.cosh, sympy.factorial, sympy.binomial)
    for part in sympy.preorder_traversal(expression):
        if isinstance(part, growing) or (part.is_Pow and not part.exp.is_Rational):
            return True
    return False


def factorial(value: "sympy.Expr") -> "sympy.Expr":
    return bounded("factorial", MAX_FACTORIAL, value)


def binomial(above: "sympy.Expr", below: "sympy.Expr") -> "sympy.Expr":
    return bounded("binomial", MAX_BINOMIAL, above, below)


def bounded(name: str, largest: int, *arguments: "sympy.Expr") -> "sympy.Expr":
    """A factorial or binomial of small numbers, or of symbols with + - * alone, as n!, (2n+1)! and
    n choose k."""
    import sympy

    for argument in arguments:
        if argument.free_symbols:
            if not argument.is_polynomial() or bits_of(argument) > MAX_EXPONENT_BITS:
                raise Unreadable(f"a {name} of a formula")
        elif not argument.is_Integer or not 0 <= argument <= largest:
            raise Unreadable(f"a {name} of a number that is not from 0 to {largest}")
    function: Callable[..., sympy.Expr] = getattr(sympy, name)
    return function(*arguments)
