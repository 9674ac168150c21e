"""How large an expression of sympy becomes once it is evaluated or expanded, from its unevaluated tree: linear.

math-verify parses without evaluating, and compares by evaluating: what would not end is known in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction

import sympy
from sympy.core.function import Function

from reward_service.scorers.texts import TooComplex

MAX_NODES = 4000
MAX_BITS = 1 << 20
"""The size of the largest number: some 300,000 digits, which sympy computes in a tenth of a second."""
MAX_TERMS = 200
"""The most terms of a sum with symbols, once its products and powers are expanded."""
MAX_NUMERIC_TERMS = 1000
"""The most terms of a sum without symbols, such as (1 + sqrt(2))**n."""
MAX_FUNCTION_POWER = 40
"""The highest power of an expression with a sine or another function: simplifying expands these in many ways."""
MAX_FACTORIAL = 20_000
MAX_EXACT_BITS = 1 << 12
PRIME = (1 << 61) - 1


@dataclass(frozen=True)
class Size:
    """The bounds that are known of a part of an expression."""

    bits: int
    """Upper bound of its numbers' lengths."""
    terms: int
    """Upper bound of its terms, expanded."""
    has_function: bool = False
    has_symbol: bool = False
    value: Fraction | None = None
    """Where it is a rational number of at most MAX_EXACT_BITS."""


def check_size(expression: sympy.Basic | sympy.MatrixBase) -> None:
    """Raises TooComplex."""
    if isinstance(expression, sympy.MatrixBase):
        for entry in expression.flat():
            check_size(entry)
        return
    sizes: dict[int, Size] = {}
    for node in _children_first(expression):
        size = _size(node, [sizes[id(child)] for child in node.args])
        if size.bits > MAX_BITS or size.terms > (MAX_TERMS if size.has_symbol else MAX_NUMERIC_TERMS):
            raise TooComplex(f"a number of {size.bits} bits, or a sum of {size.terms} terms")
        sizes[id(node)] = size


def are_surely_unequal(first: object, second: object) -> bool:
    """True only if both are rational functions that differ at a point, modulo a prime: a proof, in linear time."""
    if not isinstance(first, sympy.Basic) or not isinstance(second, sympy.Basic):
        return False
    residues = (_residue(first), _residue(second))
    return None not in residues and residues[0] != residues[1]


def _children_first(expression: sympy.Basic) -> list[sympy.Basic]:
    order: list[sympy.Basic] = []
    waiting = [expression]
    while waiting:
        node = waiting.pop()
        order.append(node)
        if len(order) > MAX_NODES:
            raise TooComplex(f"more than {MAX_NODES} parts")
        waiting.extend(node.args)
    return order[::-1]


def _size(node: sympy.Basic, parts: list[Size]) -> Size:
    if isinstance(node, sympy.Rational):
        return _number(Fraction(int(node.p), int(node.q)))
    has_function = isinstance(node, Function) or any(part.has_function for part in parts)
    has_symbol = isinstance(node, sympy.Symbol) or any(part.has_symbol for part in parts)
    if isinstance(node, sympy.Add):
        # A sum of n whole numbers has at most log2 n bits more than the largest of them: n is above that.
        bits = max(part.bits for part in parts) + len(parts)
        return Size(bits, sum(part.terms for part in parts), has_function, has_symbol, _exactly(sum, parts))
    if isinstance(node, sympy.Mul):
        # The lengths of factors add up; each term of one meets each term of the others.
        bits, terms = sum(part.bits for part in parts), math.prod(part.terms for part in parts)
        return Size(bits, terms, has_function, has_symbol, _exactly(math.prod, parts))
    if isinstance(node, sympy.Pow):
        return replace(_power(*parts), has_function=has_function, has_symbol=has_symbol)
    if isinstance(node, sympy.factorial | sympy.factorial2 | sympy.binomial):
        return _factorial(parts)
    if isinstance(node, sympy.UnevaluatedExpr):
        return parts[0]
    bits = max((part.bits for part in parts), default=64 if isinstance(node, sympy.Float) else 0)
    return Size(bits, max((part.terms for part in parts), default=1), has_function, has_symbol)


def _power(base: Size, exponent: Size) -> Size:
    power = exponent.value
    if power is None:
        if exponent.bits > 64:
            raise TooComplex("an exponent beyond any number")
        return Size(max(base.bits, exponent.bits), base.terms)
    if power.denominator != 1:
        return Size(base.bits + exponent.bits, base.terms)
    if base.value is not None:
        bits = base.bits * abs(int(power))
        if bits <= MAX_EXACT_BITS and (base.value or power > 0):
            return _number(base.value ** int(power))
        return Size(bits, 1)
    if base.has_function and abs(power) > MAX_FUNCTION_POWER:
        raise TooComplex(f"a function to the power of {power}")
    if base.terms == 1:
        return Size(base.bits * abs(int(power)), 1)
    if abs(power) > MAX_NUMERIC_TERMS:
        raise TooComplex(f"a sum to the power of {power}")
    # Ways to choose `power` of the base's terms with repetition: the terms of the expanded power.
    terms = math.comb(abs(int(power)) + base.terms - 1, base.terms - 1)
    return Size(base.bits * abs(int(power)), terms)


def _factorial(parts: list[Size]) -> Size:
    values = [part.value for part in parts]
    largest = max((abs(value) for value in values if value is not None), default=Fraction(0))
    is_open = any(value is None and part.bits > 64 for value, part in zip(values, parts, strict=True))
    if is_open or largest > MAX_FACTORIAL:
        raise TooComplex("a factorial beyond any number")
    whole = int(largest)
    if len(values) == 1 and largest == whole and whole <= 20:
        return _number(Fraction(math.factorial(whole)))
    # n! is below n**n, which has n · log2 n bits.
    return Size(max(128, whole * whole.bit_length()), 1)


def _number(value: Fraction) -> Size:
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    return Size(bits, 1, value=value if bits <= MAX_EXACT_BITS else None)


def _exactly(combine: object, parts: list[Size]) -> Fraction | None:
    values = [part.value for part in parts]
    if any(value is None for value in values) or sum(part.bits for part in parts) > MAX_EXACT_BITS:
        return None
    return Fraction(combine(values))  # type: ignore[operator]


def _residue(expression: sympy.Basic) -> int | None:
    """The value modulo PRIME where each symbol stands for a number made of its name; None where there is none."""
    residues: dict[int, int] = {}
    sizes: dict[int, Size] = {}
    try:
        for node in _children_first(expression):
            parts = [residues[id(child)] for child in node.args]
            sizes[id(node)] = _exponent_size(node, [sizes[id(child)] for child in node.args])
            residues[id(node)] = _residue_of(node, parts, [sizes[id(child)].value for child in node.args])
    except (TooComplex, ValueError):
        return None
    return residues[id(expression)]


def _exponent_size(node: sympy.Basic, parts: list[Size]) -> Size:
    """Sizes are wanted for exponents alone here: what is too large is no exponent, and no reason to stop."""
    try:
        return _size(node, parts)
    except TooComplex:
        return Size(MAX_BITS, 1)


def _residue_of(node: sympy.Basic, parts: list[int], values: list[Fraction | None]) -> int:
    """Raises ValueError for what is no rational function, and for a pole."""
    if isinstance(node, sympy.Rational):
        # p / q modulo PRIME: q's inverse; ValueError where q is a multiple of PRIME.
        return int(node.p) * pow(int(node.q), -1, PRIME) % PRIME
    if isinstance(node, sympy.Symbol):
        # From 2 on: at 0 and 1 different powers of a symbol would have the same value.
        return int.from_bytes(node.name.encode("utf-8", "replace"), "big") % (PRIME - 2) + 2
    if isinstance(node, sympy.Add):
        return sum(parts) % PRIME
    if isinstance(node, sympy.Mul):
        return math.prod(parts) % PRIME
    if isinstance(node, sympy.UnevaluatedExpr):
        return parts[0]
    if isinstance(node, sympy.Pow) and values[1] is not None and values[1].denominator == 1:
        return pow(parts[0], int(values[1]), PRIME)
    raise ValueError(f"{type(node).__name__} is no rational function")
