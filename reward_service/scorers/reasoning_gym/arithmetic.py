"""Arithmetic that a model wrote, by a grammar of our own: linear in the text, of any depth, and nothing is evaluated
but the numbers that it is asked for.

    expression = operand (operator operand)*        operand = sign* (number | name | "(" expression ")")
    operators, from loose to tight: + -, * /, sign, ** (to the right), which has no value
"""

from __future__ import annotations

import operator as arithmetic
import re
from fractions import Fraction

TOKEN = re.compile(
    r"(?P<number>0[xX][0-9a-fA-F]+|[0-9]+(?:\.[0-9]+)?)|(?P<name>[A-Za-z_][A-Za-z_0-9]*)"
    r"|(?P<operator>\*\*|[-+*/()])|(?P<space>[ \t\r\n]+)|(?P<unknown>[\s\S])"
)
MAX_TOKEN_CHARS = 1000
"""A longer number is no answer to any task, and would cost quadratic time to read."""
MAX_BITS = 1 << 11
"""The size of the largest numerator or denominator on the way; no task's answer comes near it."""

SIGNS = {"-": "negative", "+": "positive"}
BASIC = {"+": arithmetic.add, "-": arithmetic.sub, "*": arithmetic.mul}
TIGHTNESS = {"+": 1, "-": 1, "*": 2, "/": 2, "negative": 3, "positive": 3, "**": 4}


class Malformed(Exception):
    """The text is not an expression of the grammar, or has no value."""


def value_of(text: str, algebra: Rationals) -> Fraction:
    """Computes the value of an expression. Raises Malformed."""
    reading = _Reading(algebra)
    for token in TOKEN.finditer(text):
        if token.lastgroup == "space":
            continue
        if token.lastgroup == "unknown" or len(token[0]) > MAX_TOKEN_CHARS:
            raise Malformed(f"not arithmetic at character {token.start()}")
        reading.take(str(token.lastgroup), token[0])
    return reading.end()


class _Reading:
    """Dijkstra's two stacks: no recursion, so that depth costs memory alone."""

    def __init__(self, algebra: Rationals) -> None:
        self._algebra = algebra
        self._values: list[Fraction] = []
        self._operators: list[str] = []
        self._wants_operand = True

    def take(self, kind: str, token: str) -> None:
        if self._wants_operand:
            self._take_operand(kind, token)
        else:
            self._take_operator(token if kind == "operator" else "")

    def end(self) -> Fraction:
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


class Rationals:
    """Whole numbers under + - * /, exactly; remembers the numbers that were written."""

    def __init__(self) -> None:
        self.written: list[int] = []

    def number(self, text: str) -> Fraction:
        if not text.isdigit():
            raise Malformed(f"`{text}` is not a whole number")
        self.written.append(int(text))
        return Fraction(self.written[-1])

    def name(self, text: str) -> Fraction:
        raise Malformed(f"`{text}` is not a number")

    def negative(self, value: Fraction) -> Fraction:
        return -value

    def combine(self, operator: str, left: Fraction, right: Fraction) -> Fraction:
        return bounded(left / right if operator == "/" and right else _result(operator, left, right))


def bounded(value: Fraction) -> Fraction:
    """Raises Malformed for a number that only grows time and memory."""
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise Malformed("a number on the way is too large")
    return value


def _result(operator: str, left: Fraction, right: Fraction) -> Fraction:
    """Computes one of + - *. Raises Malformed for another operator."""
    if operator not in BASIC:
        raise Malformed(f"`{operator}` has no value here")
    return BASIC[operator](left, right)
