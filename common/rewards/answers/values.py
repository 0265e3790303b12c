r"""Values of sympy's expressions at points: exact where they are rational, and else to 600 digits.

Unlike sympy's own `evalf`, which may take for ever where functions of complex numbers stand inside
each other, each part of an expression is computed once.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

import mpmath
from mpmath.libmp import to_rational

if TYPE_CHECKING:
    import sympy

Value = Fraction | mpmath.mpf | mpmath.mpc
Point = Mapping["sympy.Symbol", Fraction]

PRECISION = 2000  # bits
NOISE = mpmath.ldexp(1, -1600)  # the relative difference up to which two values are equal
# of an irrational angle in sin and the like, which need its digits behind the point
MAX_ANGLE = mpmath.ldexp(1, 100)
PERIODIC = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTION_NAMES = "asin acos atan acot asec acsc sinh cosh tanh exp log re im arg sign conjugate"
FUNCTIONS = FUNCTION_NAMES.split()
ROUNDINGS = {"floor": math.floor, "ceiling": math.ceil}
COUNTS = {"factorial": math.factorial, "binomial": math.comb}  # of integers up to MAX_COUNTED
MAX_COUNTED = 10_000
MAX_POWER_BITS = 200_000  # of an exact power: at x = 101, x^{x^6} would fill the memory

# the errors of an expression that has no value
NO_VALUE = (ArithmeticError, TypeError, ValueError)


def agree(a: "sympy.Expr", b: "sympy.Expr", point: Point) -> bool | None:
    """Whether two expressions have the same value at a point; None where one has no value."""
    try:
        values = values_at(a, b, point, PRECISION)
        if all(isinstance(value, Fraction) for value in values):
            return values[0] == values[1]
        if is_close(*values):
            return True
        # of 1 - \cos^2 x - \sin^2 x only noise is left, which more digits make smaller
        finer_values = values_at(a, b, point, 2 * PRECISION)
        with mpmath.workprec(2 * PRECISION):
            return distance(*finer_values) <= NOISE * distance(*values)
    except NO_VALUE:
        return None


def is_outside_domain(a: "sympy.Expr", b: "sympy.Expr", point: Point) -> bool:
    r"""Whether one of two expressions has a complex value at a point. False if they have i, or
    differ in the number of absolute values: \ln|x| is no \ln x, and only their domains differ."""
    from sympy import Abs, I

    if a.has(I) or b.has(I) or a.count(Abs) != b.count(Abs):
        return False
    values = values_at(a, b, point, PRECISION)
    return any(isinstance(value, mpmath.mpc) for value in values)


def ratio_at(a: "sympy.Expr", b: "sympy.Expr", point: Point) -> Value | None:
    """a / b at a point; None where one is zero or has no value."""
    from sympy import S

    if agree(a, S.Zero, point) is not False or agree(b, S.Zero, point) is not False:
        return None
    dividend, divisor = values_at(a, b, point, PRECISION)
    if isinstance(dividend, Fraction) and isinstance(divisor, Fraction):
        return dividend / divisor
    with mpmath.workprec(PRECISION):
        return inexact(dividend) / inexact(divisor)


def values_at(
    a: "sympy.Expr", b: "sympy.Expr", point: Point, precision: int
) -> tuple[Value, Value]:
    with mpmath.workprec(precision):
        return value_at(a, point), value_at(b, point)


def is_close(a: Value, b: Value) -> bool:
    """Whether two values are equal but for noise; exactly, if both are rational."""
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a == b
    with mpmath.workprec(PRECISION):
        return distance(a, b) <= NOISE * max(distance(a), distance(b))


def distance(a: Value, b: Value = Fraction(0)) -> mpmath.mpf:
    """Absolute value of a - b. ValueError if it is not finite."""
    size = abs(inexact(a) - inexact(b))
    if not mpmath.isfinite(size):
        raise ValueError("an infinite value")
    return size


def inexact(value: Value) -> mpmath.mpf | mpmath.mpc:
    if isinstance(value, Fraction):
        return mpmath.mpf(value.numerator) / value.denominator
    return value


def exact(value: Value) -> Fraction:
    """A value as a fraction. ValueError unless it is a finite real number."""
    if isinstance(value, Fraction):
        return value
    if isinstance(value, mpmath.mpc) or not mpmath.isfinite(value):
        raise ValueError("no real number")
    return Fraction(*to_rational(value._mpf_))


def value_of(number: "sympy.Expr") -> Value:
    """The value of an expression without symbols. Raises as `value_at` does."""
    with mpmath.workprec(PRECISION):
        return value_at(number, {})


def value_at(expression: "sympy.Expr", point: Point) -> Value:
    """The value at a point. Raises one of NO_VALUE where there is none, or for what is not known
    here."""
    import sympy

    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    if expression in point:
        return point[expression]
    if expression == sympy.I:
        return mpmath.mpc(0, 1)
    # + computes a constant to the precision in force
    if expression == sympy.pi:
        return +mpmath.pi
    if expression == sympy.E:
        return +mpmath.e
    if not expression.args:
        raise ValueError(f"{expression} has no value")
    values = [value_at(argument, point) for argument in expression.args]
    if expression.is_Add:
        return sum(values[1:], start=values[0])
    if expression.is_Mul:
        return math.prod(values[1:], start=values[0])
    if expression.is_Pow:
        base, exponent = values
        # \sqrt[3]{-8} is -2, and not the complex root that mpmath gives
        fraction = expression.exp
        is_odd_root = fraction.is_Rational and fraction.q > 1 and fraction.q % 2 == 1
        if is_odd_root and not isinstance(base, mpmath.mpc) and base < 0:
            size = power(-base, exponent)
            return -size if fraction.p % 2 == 1 else size
        return power(base, exponent)
    return function_value(type(expression).__name__, values)


def power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = base.numerator.bit_length() + base.denominator.bit_length()
        if bits * abs(int(exponent)) <= MAX_POWER_BITS:
            return base ** int(exponent)
    return mpmath.power(inexact(base), inexact(exponent))


def function_value(name: str, values: list[Value]) -> Value:
    """The value of a function, by its name in sympy, of the values of its arguments."""
    if name == "Abs":
        return abs(values[0])
    if name in ROUNDINGS:
        return Fraction(ROUNDINGS[name](near_integer(exact(values[0]))))
    if name in COUNTS:
        return Fraction(COUNTS[name](*map(whole_number, values)))
    if name in PERIODIC:
        return periodic_value(name, values[0])
    if name in FUNCTIONS:
        return getattr(mpmath, name)(*map(inexact, values))
    raise ValueError(f"{name} is not known")


def near_integer(value: Fraction) -> Fraction:
    """The integer that a value is but for noise, as \\log_2 8 may be; other values as they are."""
    nearest = round(value)
    return Fraction(nearest) if abs(value - nearest) < Fraction(1, 2**200) else value


def whole_number(value: Value) -> int:
    """The argument of a factorial or binomial; ValueError unless it is an integer in bounds."""
    number = exact(value)
    if number.denominator > 1 or number > MAX_COUNTED:
        raise ValueError(f"{number} is not counted")
    return int(number)


def periodic_value(name: str, angle: Value) -> Value:
    if not isinstance(angle, Fraction):
        if abs(angle) > MAX_ANGLE:
            raise ValueError("too large an angle")
        return getattr(mpmath, name)(angle)
    extra_bits = angle.numerator.bit_length()  # at least those before the point
    with mpmath.extraprec(extra_bits):
        value = getattr(mpmath, name)(inexact(angle))
    return +value  # rounded to the precision in force
