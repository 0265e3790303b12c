r"""Equality of formulas: LaTeX is read token by token into sympy's expressions, which are compared
at points.

A formula is read whole or not at all: what is not known here (an operator, a command, two numbers
side by side) is `Unreadable`, and then only its spelling tells. Two formulas are equal if they
agree at a few fixed points, to more digits than a coincidence has. Constants are compared exactly
if both are rational, otherwise to a relative precision, however small they are. Sizes are bounded
before sympy computes anything.
"""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

from common.rewards.answers.values import (
    NO_VALUE,
    Point,
    agree,
    exact,
    is_close,
    is_outside_domain,
    ratio_at,
    value_of,
)

if TYPE_CHECKING:
    import sympy

MAX_CHARACTERS = 200  # of a formula
MAX_BITS = 100_000  # bits of the numbers that a formula leads to
MAX_ROOT_BITS = 256  # bits of a number under a root: sympy tries to factor it
MAX_EXPONENT = 10_000  # value of an exponent of e, or of one that is no integer
MAX_EXPONENT_BITS = 128  # bits of such an exponent, and of the n of n! if it has symbols
# bits of the argument of a logarithm, and of sin and the like, which need as many digits of pi
MAX_ARGUMENT_BITS = 4096
MAX_ROUNDED = 10**200  # number in a floor or a ceiling
MAX_FACTORIAL = 999
MAX_BINOMIAL = 9999
MAX_FUNCTION_DEPTH = 4  # functions inside each other
MAX_BRACKET_DEPTH = 40

TRIGONOMETRIC = ("sin", "cos", "tan", "cot", "sec", "csc")
EXPONENTIAL = ("exp", "sinh", "cosh", "tanh")  # computed from e^x
# name in LaTeX -> name in sympy
FUNCTIONS = {name: name for name in (*TRIGONOMETRIC, *EXPONENTIAL)}
FUNCTIONS |= {f"arc{name}": f"a{name}" for name in TRIGONOMETRIC}
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
FUNCTION_LETTERS = set("fghFGHPQ")  # f(x) is a value of f, not a product

TOKEN = re.compile(
    r"""(?x)
    (?P<number> [0-9]+ (?: \.[0-9]* )? | \.[0-9]+ )
    # \vec{a}: a symbol, too
    | (?P<accent> \\(?:ACCENTS) \s* (?: \{ [A-Za-z0-9\s]* \} | [A-Za-z] ) )
    # a word is one symbol; up to three letters are a product
    | (?P<symbol> (?: [A-Za-z]{4,} | [A-Za-z] | \\(?:GREEK)(?![A-Za-z]) )
        (?: _ \s* (?: [A-Za-z0-9] | \{ [A-Za-z0-9\s,+\-]* \} ) )?  # a subscript
        (?: '  # primes, and a transpose: x^\top, A^T
            | \^\s* (?: \\top | \{\s*\\top\s*\} )
            | (?<=[A-Z]) \^\s* (?: T (?![A-Za-z]) | \{\s*T\s*\} ) )* )
    | (?P<command> \\[A-Za-z]+ )
    | (?P<operator> [-+*/^!°()|{}\[\]_] )
    """.replace("ACCENTS", "|".join(ACCENTS.split())).replace("GREEK", "|".join(GREEK.split()))
)

# what is raised where there is no answer: sympy's errors, and Unreadable, a ValueError
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
        return is_identity(read_formula(answer), read_formula(truth))
    except NO_VERDICT:
        return False


def same_relation(answer: tuple[str, str], truth: tuple[str, str], direction: int) -> bool:
    """Whether left - right of two equations or inequalities agree up to a constant factor.

    direction: 0 for equations, with any factor; 1 for inequalities that point the same way, with a
    positive factor; -1 for inequalities that point in opposite ways, with a negative one.
    """
    is_equation = direction == 0
    try:
        difference = difference_of(answer, is_equation)
        true_difference = difference_of(truth, is_equation)
        return is_multiple(difference, true_difference, direction)
    except NO_VERDICT:
        return False


def difference_of(sides: tuple[str, str], is_equation: bool) -> "sympy.Expr":
    """left - right; of an equation without its denominator: y = 2/x is xy = 2."""
    from sympy import together

    left, right = sides
    difference = read_formula(left) - read_formula(right)
    if is_equation:
        difference, _ = together(difference).as_numer_denom()
    check_size(difference)
    return difference


def real_value(text: str) -> Fraction | None:
    """The real number that a formula without symbols is, to 600 digits; None for any other text."""
    try:
        return exact(value_of(read_formula(text)))
    except NO_VERDICT:
        return None


# --- comparison ---


def is_identity(a: "sympy.Expr", b: "sympy.Expr") -> bool:
    r"""Whether two expressions agree at each point where both are real, and at two points or more:
    \ln x - \ln y and \ln(x/y) differ where y alone is negative, and are complex there."""
    if a == b:
        return True
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return bool(agree(a, b, {}))
    agreements = 0
    for point in points_for(symbols, a, b):
        verdict = agree(a, b, point)
        if verdict is False and not is_outside_domain(a, b, point):
            return False
        if verdict:  # None where a formula is undefined
            agreements += 1
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
    """Points for comparing: integers where n! or n choose k occurs, else fractions around 1; larger
    or smaller ones, too, where a formula may have no value around 1, or be another one there."""
    from sympy import Abs, binomial, ceiling, factorial, floor
    from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction

    if any(expression.has(binomial, factorial) for expression in expressions):
        return integer_points(symbols)
    if any(expression.has(floor, ceiling) for expression in expressions):
        far = fraction_points(symbols, scale=101)
        return fraction_points(symbols) + far + whole_points(symbols)
    # |x + 3| is x + 3 near 0, and \arcsin(\sin x) is x
    if any(expression.has(Abs, InverseTrigonometricFunction) for expression in expressions):
        return fraction_points(symbols) + fraction_points(symbols, scale=1009)
    # \sqrt{x^2 - 4} is real only far from 0, \sqrt{x - x^2} only between 0 and 1
    if any(map(has_domain, expressions)):
        small = fraction_points(symbols, scale=Fraction(1, 5))
        return fraction_points(symbols) + fraction_points(symbols, scale=101) + small
    return fraction_points(symbols)


def has_domain(expression: "sympy.Expr") -> bool:
    """Whether an expression has a logarithm, or a power of symbols whose exponent is no integer."""
    from sympy import Pow, log

    powers = expression.atoms(Pow)
    return expression.has(log) or any(p.base.free_symbols and not p.exp.is_Integer for p in powers)


def fraction_points(symbols: list["sympy.Symbol"], scale: int | Fraction = 1) -> list[Point]:
    """Six points, in two of which all symbols are positive; at no point are two of them equal."""
    points: list[Point] = []
    all_signs = ("++++", "----", "+-+-", "-+-+", "++++", "--++")
    for signs, denominator in zip(all_signs, (5, 7, 11, 13, 17, 23)):
        point = {}
        for i, symbol in enumerate(symbols):
            # all different, in no arithmetic progression (b^2 is (a + c)^2/4 in one), and no
            # integers, at which unequal formulas may agree
            magnitude = scale * Fraction(7 + 4 * i + i * i + len(points), denominator)
            point[symbol] = magnitude if signs[i % 4] == "+" else -magnitude
        points.append(point)
    return points


def whole_points(symbols: list["sympy.Symbol"]) -> list[Point]:
    r"""Six points around a multiple of 2, 3, …, 10, where \lfloor n/2 \rfloor + 1 is not
    \lceil n/2 \rceil."""
    return [
        {symbol: Fraction(2520 * (i + 1) + shift) for i, symbol in enumerate(symbols)}
        for shift in range(-3, 3)
    ]


def integer_points(symbols: list["sympy.Symbol"]) -> list[Point]:
    """Four points. The symbols grow from first to last in two of them, and fall in the other
    two."""
    points: list[Point] = []
    falling = symbols[::-1]
    # in steps that differ: where n - k is 2, (n - k)! is n - k
    for order, first, step in ((symbols, 3, 2), (symbols, 6, 5), (falling, 4, 3), (falling, 7, 4)):
        points.append({symbol: Fraction(first + step * i) for i, symbol in enumerate(order)})
    return points


def check_real(expression: "sympy.Expr") -> None:
    r"""Unreadable if a number has no real value: functions take and give real numbers here, but
    \arcsin 2 is complex."""
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
        return 20  # numerator and denominator of a coordinate in `fraction_points`
    if not expression.args:
        return 16  # pi, e, i: as much as a short number
    if expression.is_Pow and expression.exp.is_Integer:
        bits = bits_of(expression.base) * abs(int(expression.exp))
    else:
        bits = sum(bits_of(argument) for argument in expression.args)
    return min(bits, 10 * MAX_BITS)  # above every limit; powers of powers stay a small int


# --- reading ---


@lru_cache(maxsize=256)
def read_formula(text: str) -> "sympy.Expr":
    """The expression of a formula. Raises Unreadable."""
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"more than {MAX_CHARACTERS} characters")
    reader = Reader(text)
    expression = reader.sum_of_products()
    if reader.kind:
        raise Unreadable(f"{reader.token!r} is left over")
    check_size(expression)
    return expression


class Reader:
    """Recursive descent, a method for each level of precedence. `kind` and `token` are those of the
    next token, and "" at the end."""

    def __init__(self, text: str):
        self.tokens: list[tuple[str, str]] = []
        end = 0
        for match in TOKEN.finditer(text):
            if text[end : match.start()].strip():
                break  # not a token: reported below
            kind = match.lastgroup
            self.tokens.append(("symbol" if kind == "accent" else kind, match[0]))
            end = match.end()
        if text[end:].strip() or not self.tokens:
            raise Unreadable(f"not a formula: {text[end:]!r:.40}")
        self.position = 0
        self.function_depth = 0
        self.bracket_depth = 0
        self.open_bars = 0  # of absolute values

    @property
    def kind(self) -> str:
        return self.tokens[self.position][0] if self.position < len(self.tokens) else ""

    @property
    def token(self) -> str:
        return self.tokens[self.position][1] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.token
        self.position += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise Unreadable(f"expected {token}")

    def sum_of_products(self) -> "sympy.Expr":
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

    def factors(self, of_function: bool = False) -> "sympy.Expr":
        r"""Factors side by side; in a/bc they are the denominator. 2\frac{1}{2} is 2.5.

        of_function: whether they are a function's argument, which ends before another function.
        """
        start = self.position
        latest_is_number = self.kind == "number"  # the latest factor begins with one: 2, 2^3, 2!
        value = self.power()
        is_lone_number = latest_is_number and self.position == start + 1  # no power, no factorial
        may_be_mixed = is_lone_number and self.tokens[start][1].isdecimal()
        while self.starts_factor() and not (of_function and self.starts_function()):
            follows_bracket_or_mark = self.tokens[self.position - 1][0] == "operator"
            # (x)2 and x!2 are products; x2, 2 3 and 2^{3}4 are not known here
            if self.kind == "number" and (latest_is_number or not follows_bracket_or_mark):
                raise Unreadable("a number behind a number or a letter")
            latest_is_number = self.kind == "number"
            if may_be_mixed and self.token == "\\frac":
                value = self.mixed_number(value)
            else:
                value = value * self.power()
            may_be_mixed = False
        return value

    def starts_factor(self) -> bool:
        if self.kind in ("number", "symbol"):
            return True
        if self.kind == "command":
            return self.token not in ("\\cdot", "\\times", "\\div", "\\rfloor", "\\rceil")
        # inside of |...| a bar closes
        return self.token in ("(", "{") or (self.token == "|" and not self.open_bars)

    def starts_function(self) -> bool:
        return self.token.removeprefix("\\") in (*FUNCTIONS, *LOGARITHMS)

    def power(self) -> "sympy.Expr":
        return self.with_marks(self.atom())

    def mixed_number(self, whole: "sympy.Expr") -> "sympy.Expr":
        r"""2\frac{1}{2} and 2\frac{1}{2}°; a product if the fraction is not between 0 and 1."""
        fraction = self.atom()
        if not (fraction.is_Rational and 0 < fraction < 1):
            return whole * self.with_marks(fraction)
        if self.token in ("^", "!"):
            raise Unreadable("a power or factorial of a mixed number")
        return self.with_marks(whole + fraction)

    def with_marks(self, value: "sympy.Expr") -> "sympy.Expr":
        """The value with the powers, factorials and degrees that follow it."""
        import sympy

        while self.token in ("^", "!", "°"):
            mark = self.take()
            if mark == "°":
                value = value * sympy.pi / 180
            elif mark == "!":
                if self.token == "!":
                    raise Unreadable("a double factorial")
                value = factorial(value)
            else:
                value = raised(value, self.argument())
                if self.token == "^":
                    raise Unreadable("a tower of powers without braces")
        return value

    def argument(self) -> "sympy.Expr":
        """What a command or ^ applies to: a group in braces, a number, a symbol, or one of four
        commands; also -3 and (n+1), as typed without LaTeX."""
        if self.token == "{":
            return self.group("{", "}")
        if self.token == "(":  # x^(n+1)
            return self.group("(", ")")
        if self.token == "-":  # 10^-3
            self.take()
            return -self.argument()
        is_command = self.token in ("\\pi", "\\frac", "\\sqrt", "\\infty")
        if self.kind in ("number", "symbol") or is_command:
            return self.atom()
        raise Unreadable(f"no argument: {self.token!r}")

    def group(self, start: str, end: str) -> "sympy.Expr":
        self.expect(start)
        return self.rest_of_group(end)

    def rest_of_group(self, end: str) -> "sympy.Expr":
        self.bracket_depth += 1
        if self.bracket_depth > MAX_BRACKET_DEPTH:
            raise Unreadable("too many brackets")
        outer_bars = self.open_bars
        self.open_bars = 0  # in brackets a bar opens, as at the start
        value = self.sum_of_products()
        self.expect(end)
        self.open_bars = outer_bars
        self.bracket_depth -= 1
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
            self.open_bars += 1
            value = self.sum_of_products()
            self.expect("|")
            self.open_bars -= 1
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
        next_tokens = [text for _, text in self.tokens[self.position : self.position + 3]]
        has_bracket = next_tokens[:1] == ["("]
        has_lone_argument = next_tokens[2:] == [")"]  # y(0), u(t)
        if has_bracket and (name[0] in FUNCTION_LETTERS or has_lone_argument):
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
        if name == "lfloor":
            return rounded(self.rest_of_group("\\rfloor"), "floor")
        if name == "lceil":
            return rounded(self.rest_of_group("\\rceil"), "ceiling")
        if name in FUNCTIONS or name in LOGARITHMS:
            return self.function(name)
        raise Unreadable(f"\\{name} is not known")

    def function(self, name: str) -> "sympy.Expr":
        r"""A function of a bracket, or of the factors up to the next function: \sin(x), \sin 2x,
        \sin^2 x, \log_2 8."""
        self.function_depth += 1
        if self.function_depth > MAX_FUNCTION_DEPTH:
            raise Unreadable("too many functions inside each other")
        scripts: dict[str, sympy.Expr] = {}  # "_" and "^" -> what stands there
        while self.token in ("_", "^"):
            mark = self.take()
            if mark in scripts or (mark == "_" and name != "log"):
                raise Unreadable(f"{mark} behind {name}")
            scripts[mark] = self.argument()
        if self.token == "(":
            argument = self.group("(", ")")
        else:
            argument = self.factors(of_function=True)
        self.function_depth -= 1
        return function_value(name, argument, scripts.get("_"), scripts.get("^"))


# --- arithmetic within bounds ---


def function_value(
    name: str,
    argument: "sympy.Expr",
    base: "sympy.Expr | None",
    exponent: "sympy.Expr | None",
) -> "sympy.Expr":
    r"""A function by its name in LaTeX. base: of \log; 10 if None. exponent: that of \sin^2 x."""
    import sympy

    if name in TRIGONOMETRIC and exponent == -1:  # \sin^{-1} x is \arcsin x
        name = f"arc{name}"
        exponent = None
    check_real(argument)
    if name in EXPONENTIAL:
        check_exponent(argument)
    elif bits_of(argument) > MAX_ARGUMENT_BITS:
        raise Unreadable("the argument is too large")
    if name == "ln":
        value = sympy.log(argument)
    elif name in LOGARITHMS:
        base = sympy.Integer(10) if base is None else base
        value = divided(sympy.log(argument), sympy.log(base))
    else:
        value = getattr(sympy, FUNCTIONS[name])(argument)
    check_real(value)
    if exponent is None:
        return value
    return raised(value, exponent)


def divided(above: "sympy.Expr", below: "sympy.Expr") -> "sympy.Expr":
    if below == 0:
        raise Unreadable("a division by zero")
    return above / below


def raised(base: "sympy.Expr", exponent: "sympy.Expr") -> "sympy.Expr":
    from sympy import E

    if exponent.is_Integer and base != E:
        if base == 0 and exponent < 0:
            raise Unreadable("a division by zero")
        if bits_of(base) * abs(int(exponent)) > MAX_BITS:
            raise Unreadable("the power is too large")
        return base**exponent
    check_exponent(exponent)
    may_be_root = not exponent.is_Integer and not base.free_symbols
    if may_be_root and bits_of(base) > MAX_ROOT_BITS:
        raise Unreadable("the root of too large a number")
    return base**exponent


def rounded(value: "sympy.Expr", name: str) -> "sympy.Expr":
    """The floor or ceiling. That of a number is computed here: sympy would compute the number to
    its last digit."""
    import sympy

    function = getattr(sympy, name)
    if value.free_symbols:
        return function(value)
    if not is_below(value, MAX_ROUNDED):
        raise Unreadable("too large a number to round")
    integer = exact(value_of(function(value, evaluate=False)))
    return sympy.Integer(int(integer))


def check_exponent(exponent: "sympy.Expr") -> None:
    """Unreadable for the exponent of a tower such as e^{e^x} or x^{n!}, and for one with numbers
    above the bounds."""
    from sympy import preorder_traversal

    if not exponent.is_rational_function() and grows(exponent):
        raise Unreadable("a tower of powers")
    if bits_of(exponent) > MAX_EXPONENT_BITS:
        raise Unreadable("the exponent is too large")
    for part in preorder_traversal(exponent):
        if part.is_number and not is_below(part, MAX_EXPONENT):
            raise Unreadable("the exponent is too large")


def is_below(number: "sympy.Expr", limit: int) -> bool:
    """Whether |number| < limit; False without a value."""
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
    """A factorial or binomial of numbers up to `largest`, or of polynomials in symbols, such as n!,
    (2n+1)! and n choose k."""
    import sympy

    for argument in arguments:
        if argument.free_symbols:
            if not argument.is_polynomial() or bits_of(argument) > MAX_EXPONENT_BITS:
                raise Unreadable(f"a {name} of a formula")
        elif not argument.is_Integer or not 0 <= argument <= largest:
            raise Unreadable(f"a {name} of a number that is not from 0 to {largest}")
    function: Callable[..., sympy.Expr] = getattr(sympy, name)
    return function(*arguments)
