"""Arithmetic that a model wrote, by a grammar of our own: linear in the text, of any depth, and nothing is evaluated
but the numbers that it is asked for.

    expression = operand (operator operand)*        operand = sign* (number | name | "(" expression ")")
    operators, from loose to tight: << >>, + -, * /, sign, ** (to the right); an algebra refuses what it doesn't know
"""

from __future__ import annotations

import operator as arithmetic
import re
from fractions import Fraction
from typing import Any, Generic, Protocol, TypeVar

TOKEN = re.compile(
    r"(?P<number>0[xX][0-9a-fA-F]+|[0-9]+(?:\.[0-9]+)?)|(?P<name>[A-Za-z_][A-Za-z_0-9]*)"
    r"|(?P<operator>\*\*|<<|>>|[-+*/()])|(?P<space>[ \t\r\n]+)|(?P<unknown>[\s\S])"
)
MAX_TOKEN_CHARS = 1000
"""A longer number is no answer to any task, and would cost quadratic time to read."""
MAX_BITS = 1 << 11
"""The size of the largest numerator or denominator on the way; no task's answer comes near it."""
MAX_INTEGER_BITS = 1 << 15
"""The size of the largest whole number on the way: twice what the hardest bitwise task can reach."""
MAX_SHIFT = 64

Value = TypeVar("Value")

SIGNS = {"-": "negative", "+": "positive"}
BASIC = {"+": arithmetic.add, "-": arithmetic.sub, "*": arithmetic.mul}
TIGHTNESS = {"<<": 0, ">>": 0, "+": 1, "-": 1, "*": 2, "/": 2, "negative": 3, "positive": 3, "**": 4}


class Malformed(Exception):
    """The text is not an expression of the grammar, or its algebra gives it no value."""


class Algebra(Protocol[Value]):
    """What the leaves and operators of an expression mean. Each raises Malformed for what it doesn't know."""

    def number(self, text: str) -> Value: ...

    def name(self, text: str) -> Value: ...

    def negative(self, value: Value) -> Value: ...

    def combine(self, operator: str, left: Value, right: Value) -> Value: ...


def value_of(text: str, algebra: Algebra[Value]) -> Value:
    """Raises Malformed."""
    reading = _Reading(algebra)
    for found in TOKEN.finditer(text):
        if found.lastgroup == "space":
            continue
        if found.lastgroup == "unknown" or len(found[0]) > MAX_TOKEN_CHARS:
            raise Malformed(f"not arithmetic at character {found.start()}")
        reading.take(str(found.lastgroup), found[0])
    return reading.end()


class _Reading(Generic[Value]):
    """Dijkstra's two stacks: no recursion, so that depth costs memory alone."""

    def __init__(self, algebra: Algebra[Value]) -> None:
        self._algebra = algebra
        self._values: list[Value] = []
        self._operators: list[str] = []
        self._wants_operand = True

    def take(self, kind: str, token: str) -> None:
        if self._wants_operand:
            self._take_operand(kind, token)
        else:
            self._take_operator(token if kind == "operator" else "")

    def end(self) -> Value:
        if self._wants_operand:
            raise Malformed("an operand is missing at the end")
        while self._operators:
            if self._operators[-1] == "(":
                raise Malformed("a parenthesis is not closed")
            self._apply()
        return self._values[0]

    def _take_operand(self, kind: str, token: str) -> None:
        if kind == "operator":
            if token != "(" and token not in SIGNS:
                raise Malformed(f"`{token}` stands where an operand is due")
            self._operators.append(SIGNS.get(token, token))
            return
        self._values.append(self._algebra.number(token) if kind == "number" else self._algebra.name(token))
        self._wants_operand = False

    def _take_operator(self, token: str) -> None:
        if token == ")":
            while self._operators and self._operators[-1] != "(":
                self._apply()
            if not self._operators:
                raise Malformed("a parenthesis is not open")
            self._operators.pop()
            return
        if token not in TIGHTNESS:
            raise Malformed("two operands stand side by side")
        while self._operators and self._binds_before(self._operators[-1], token):
            self._apply()
        self._operators.append(token)
        self._wants_operand = True

    @staticmethod
    def _binds_before(waiting: str, token: str) -> bool:
        if waiting == "(":
            return False
        return TIGHTNESS[waiting] > TIGHTNESS[token] or (waiting != "**" and TIGHTNESS[waiting] == TIGHTNESS[token])

    def _apply(self) -> None:
        operator = self._operators.pop()
        right = self._values.pop()
        if operator == "negative":
            right = self._algebra.negative(right)
        elif operator != "positive":
            right = self._algebra.combine(operator, self._values.pop(), right)
        self._values.append(right)


class _Numbers(Generic[Value]):
    """An algebra without names."""

    def name(self, text: str) -> Value:
        raise Malformed(f"`{text}` is not a number")

    def negative(self, value: Any) -> Any:
        return -value

    def _basic(self, operator: str, left: Value, right: Value) -> Value:
        if operator not in BASIC:
            raise Malformed(f"`{operator}` has no value here")
        return BASIC[operator](left, right)


class Rationals(_Numbers[Fraction]):
    """Whole numbers under + - * /, exactly; remembers the numbers that were written."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def number(self, text: str) -> Fraction:
        if not text.isdigit():
            raise Malformed(f"`{text}` is not a whole number")
        self.written.append(int(text))
        return Fraction(self.written[-1])

    def combine(self, operator: str, left: Fraction, right: Fraction) -> Fraction:
        return bounded(left / right if operator == "/" and right else self._basic(operator, left, right))


class Integers(_Numbers[int]):
    """Whole numbers, hexadecimal ones too, under + - * << >>."""

    def number(self, text: str) -> int:
        if "." in text:
            raise Malformed(f"`{text}` is not a whole number")
        return int(text, 16) if text[:2] in ("0x", "0X") else int(text)

    def combine(self, operator: str, left: int, right: int) -> int:
        if operator == "<<" and 0 <= right <= MAX_SHIFT:
            value = left << right
        elif operator == ">>" and right >= 0:
            value = left >> right
        else:
            value = self._basic(operator, left, right)
        if value.bit_length() > MAX_INTEGER_BITS:
            raise Malformed("a number on the way is too large")
        return value


def bounded(value: Fraction) -> Fraction:
    """Raises Malformed for a number that only grows time and memory."""
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise Malformed("a number on the way is too large")
    return value
