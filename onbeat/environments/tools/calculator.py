"""A calculator: exact arithmetic over a small grammar. Nothing is evaluated as Python, and each number is bounded."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from math import isqrt
from typing import Any

MAX_CHARS = 500
MAX_BITS = 4096
MAX_EXPONENT = 4096
DIGITS = 12
"""Significant digits of a result that is no whole number."""


class NoNumber(Exception):
    """The text has no value here; the message is for the model."""


def calculate(expression: str) -> str:
    """Evaluates an arithmetic expression with + - * / // % ** ( ), abs, min, max, round and sqrt.

    Args:
        expression: The expression, e.g. "(17 + 4) * 3 / 2".
    """
    if len(expression) > MAX_CHARS:
        raise NoNumber(f"an expression has {MAX_CHARS} characters at most")
    try:
        tree = ast.parse(
            expression.strip().replace("^", "**").replace("\u00d7", "*").replace("\u00f7", "/"), mode="eval"
        )
        return _text(_value(tree.body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NoNumber("this is no arithmetic expression") from None
    except ZeroDivisionError:
        raise NoNumber("it divides by zero") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(repr(number)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return _bounded(Fraction(BINARY[type(op)](_value(left), _value(right))))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _called(name, [_value(argument) for argument in arguments])
    raise NoNumber("it has something else than numbers, + - * / // % **, brackets, abs, min, max, round and sqrt")


def _called(name: str, values: list[Fraction]) -> Fraction:
    try:
        return _bounded(Fraction(FUNCTIONS[name](*values)))
    except TypeError:
        raise NoNumber(f"{name} takes another number of values") from None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent == Fraction(1, 2):
        return _root(base)
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise NoNumber(f"an exponent is a whole number up to {MAX_EXPONENT}, or 0.5")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent.numerator) > MAX_BITS:
        raise NoNumber("the number is too large")
    return Fraction(base**exponent.numerator)


def _root(value: Fraction) -> Fraction:
    if value < 0:
        raise NoNumber("a root of a negative number is no number here")
    whole = Fraction(isqrt(value.numerator), isqrt(value.denominator) or 1)
    if whole * whole == value:
        return whole
    context = Context(prec=40)
    return Fraction(context.sqrt(context.divide(Decimal(value.numerator), Decimal(value.denominator))))


def _rounded(value: Fraction, digits: Fraction = Fraction(0)) -> Fraction:
    if digits.denominator != 1 or abs(digits) > DIGITS:
        raise NoNumber(f"round takes up to {DIGITS} digits")
    return Fraction(round(value, digits.numerator))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NoNumber("the number is too large")
    return value


def _text(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    context = Context(prec=DIGITS)
    quotient = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    if -DIGITS < quotient.adjusted() < DIGITS:
        return format(quotient.normalize(context), "f")
    return str(quotient)


BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {"abs": abs, "min": min, "max": max, "round": _rounded, "sqrt": _root}
