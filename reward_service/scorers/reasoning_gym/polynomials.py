"""Polynomials with rational coefficients that a model wrote; exponents may be negative.

A value is {monomial: coefficient}, without zeros; a monomial is its ((name, exponent), …), sorted, without zeros.
"""

from __future__ import annotations

from fractions import Fraction

from reward_service.scorers.reasoning_gym.arithmetic import MAX_BITS, Malformed, bounded

Monomial = tuple[tuple[str, int], ...]
Polynomial = dict[Monomial, Fraction]

MAX_EXPONENT = 1000
MAX_TERMS = 500
MAX_FACTORS = 64
"""Highest power of a sum, where sums may be multiplied at all."""
MAX_WORK = 200_000
"""Products and sums of terms in one expression; an answer that needs more is not one."""


class Polynomials:
    """Names and numbers under + - * / **.

    `expands` False: a product of two sums is malformed. Where the task is to multiply, a copy of the question is no
    answer.
    """

    def __init__(self, *, expands: bool) -> None:
        self._expands = expands
        self._work = 0

    def number(self, text: str) -> Polynomial:
        if text[:2] in ("0x", "0X"):
            raise Malformed(f"`{text}` is not decimal")
        return _constant(Fraction(text))

    def name(self, text: str) -> Polynomial:
        return {((text, 1),): Fraction(1)}

    def negative(self, value: Polynomial) -> Polynomial:
        self._spend(len(value))
        return {monomial: -coefficient for monomial, coefficient in value.items()}

    def combine(self, operator: str, left: Polynomial, right: Polynomial) -> Polynomial:
        if operator == "+":
            return self._sum(left, right, 1)
        if operator == "-":
            return self._sum(left, right, -1)
        if operator == "*":
            return self._product(left, right)
        if operator == "/" and len(right) == 1:
            return self._product(left, _inverse(right))
        if operator == "**":
            return self._power(left, right)
        raise Malformed(f"`{operator}` has no value here")

    def _sum(self, left: Polynomial, right: Polynomial, sign: int) -> Polynomial:
        self._spend(len(right))
        for monomial, coefficient in right.items():  # into the left: a long sum must not be copied at each term
            _add(left, monomial, sign * coefficient)
        return left

    def _product(self, left: Polynomial, right: Polynomial) -> Polynomial:
        if not self._expands and len(left) > 1 and len(right) > 1:
            raise Malformed("a product of sums is not expanded")
        # A sum times a term that isn't a number: sympy, too, spreads numbers alone over a sum.
        is_proper = (len(left) > 1 and () not in right) or (len(right) > 1 and () not in left)
        if not self._expands and is_proper:
            raise Malformed("a product of a sum is not expanded")
        self._spend(len(left) * len(right))
        product: Polynomial = {}
        for left_monomial, left_coefficient in left.items():
            for right_monomial, right_coefficient in right.items():
                _add(product, _times(left_monomial, right_monomial), left_coefficient * right_coefficient)
        if len(product) > MAX_TERMS:
            raise Malformed("too many terms")
        return product

    def _power(self, base: Polynomial, exponent: Polynomial) -> Polynomial:
        power = _whole(exponent)
        if len(base) == 1:
            return _power_of_term(base, power)
        if not self._expands or not 0 <= power <= MAX_FACTORS:
            raise Malformed("a power of a sum is not expanded")
        value = _constant(Fraction(1))
        for _ in range(power):
            value = self._product(value, base)
        return value

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise Malformed("too many terms on the way")


def derivative(polynomial: Polynomial, name: str) -> Polynomial:
    result: Polynomial = {}
    for monomial, coefficient in polynomial.items():
        exponent = dict(monomial).get(name, 0)
        if exponent:
            _add(result, _times(monomial, ((name, -1),)), coefficient * exponent)
    return result


def _constant(value: Fraction) -> Polynomial:
    return {(): bounded(value)} if value else {}


def _add(polynomial: Polynomial, monomial: Monomial, coefficient: Fraction) -> None:
    total = bounded(polynomial.get(monomial, Fraction(0)) + coefficient)
    if total:
        polynomial[monomial] = total
    else:
        polynomial.pop(monomial, None)


def _times(left: Monomial, right: Monomial) -> Monomial:
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, 0) + exponent
    if any(abs(exponent) > MAX_EXPONENT for exponent in exponents.values()):
        raise Malformed("an exponent is too large")
    return tuple(sorted((name, exponent) for name, exponent in exponents.items() if exponent))


def _inverse(term: Polynomial) -> Polynomial:
    ((monomial, coefficient),) = term.items()
    return {tuple((name, -exponent) for name, exponent in monomial): 1 / coefficient}


def _whole(value: Polynomial) -> int:
    if not value:
        return 0
    if value.keys() == {()} and value[()].denominator == 1 and abs(value[()]) <= MAX_EXPONENT:
        return int(value[()])
    raise Malformed("an exponent is no whole number, or too large")


def _power_of_term(term: Polynomial, power: int) -> Polynomial:
    ((monomial, coefficient),) = (term if power >= 0 else _inverse(term)).items()
    raised = tuple((name, exponent * abs(power)) for name, exponent in monomial if power)
    if any(abs(exponent) > MAX_EXPONENT for _, exponent in raised):
        raise Malformed("an exponent is too large")
    bits = max(coefficient.numerator.bit_length(), coefficient.denominator.bit_length())
    if bits > 1 and bits * abs(power) > MAX_BITS:
        raise Malformed("a number on the way is too large")
    return {raised: coefficient ** abs(power)}
