"""The calculator: exact, bounded, and nothing but arithmetic."""

from __future__ import annotations

import pytest

from onbeat.environments.tools.calculator import NoNumber, calculate

VALUES = {
    "1 + 2 * 3": "7",
    "(1 + 2) * 3": "9",
    "0.1 + 0.2": "0.3",
    "10 / 4": "2.5",
    "1/3": "0.333333333333",
    "-7 // 2": "-4",
    "-3 % 5": "2",
    "2 ** -2": "0.25",
    "2^10": "1024",
    "3 \u00d7 4": "12",
    "sqrt(16) + 2 ** 0.5 * 0": "4",
    "max(1, 2, 3) - min(4, 5) + abs(-6)": "5",
    "round(2.567, 1)": "2.6",
    "1 / 10 ** 20": "1E-20",
    "10 ** 30": "1" + "0" * 30,
}
REFUSED = {
    "1 / 0": "divides by zero",
    "2 ** 99999": "an exponent is a whole number up to 4096",
    "9 ** 4096": "too large",
    "9 ** 1000 * 9 ** 1000": "too large",
    "1e999": "no arithmetic expression",
    "(" * 400: "no arithmetic expression",
    "1" * 501: "500 characters at most",
    "sqrt(-1)": "negative",
    "sqrt(1, 2)": "another number of values",
    "round(1, 1000)": "up to 12 digits",
    "__import__('os').system('true')": "something else",
    "True + 1": "something else",
    "x + 1": "something else",
    "(1).real": "something else",
    "[1][0]": "something else",
    "": "no arithmetic expression",
}


@pytest.mark.parametrize("expression", VALUES)
def test_an_expression_has_its_value(expression: str) -> None:
    assert calculate(expression) == VALUES[expression]


@pytest.mark.parametrize("expression", REFUSED)
def test_what_is_no_bounded_arithmetic_is_refused_in_words(expression: str) -> None:
    with pytest.raises(NoNumber, match=REFUSED[expression]):
        calculate(expression)
