"""Numeric: the last number of the completion."""

from __future__ import annotations

import re
from decimal import Context, Decimal

from contracts.rewards import NumericReward, RewardItem
from reward_service.scorers.refusals import BadReference

NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+])?"  # a sign, but not the minus of `7-3`
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?|\.\d+)"  # 1,234.5 or 1234. or .5
    r"(?:[eE][-+]?\d{1,6}(?!\d))?",
    re.ASCII,
)
"""No two repetitions can share a digit, so that a search is linear in the text and needs no deadline."""

ARITHMETIC = Context(prec=50, traps=[])
"""Decimals, since 9007199254740993 equals ...992 as floats; without traps an overflow is infinite, hence unequal."""


def score(component: NumericReward, item: RewardItem) -> float:
    """1.0 if |last number - reference| ≤ tolerance; 0.0 too if there is no number. Raises BadReference."""
    reference = _reference_number(item.reference)
    numbers = NUMBER.findall(_ascii_minus(item.completion))
    if not numbers:
        return 0.0
    distance = ARITHMETIC.abs(ARITHMETIC.subtract(_decimal(numbers[-1]), reference))
    return float(distance.is_finite() and distance <= Decimal(component.tolerance))


def _reference_number(reference: str) -> Decimal:
    text = _ascii_minus(reference).strip()
    if not NUMBER.fullmatch(text):
        raise BadReference("the reference is not a number", field="reference", cure="write it as 42, -1,234 or 2.5e-3")
    return _decimal(text)


def _decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _ascii_minus(text: str) -> str:
    return text.replace("\N{MINUS SIGN}", "-")
