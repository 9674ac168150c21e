"""Numeric: the last number of the completion, by the grammar of contracts/encoding/numbers.py."""

from __future__ import annotations

from contracts.encoding.numbers import Number, last_number, read_number
from contracts.rewards import NumericReward, RewardItem
from reward_service.scorers.refusals import BadReference


def score(component: NumericReward, item: RewardItem) -> float:
    """1.0 if |last number - reference| ≤ tolerance; 0.0 too if there is no number. Raises BadReference."""
    reference = _reference_number(item.reference)
    number = last_number(item.completion)
    return float(number is not None and number.is_near(reference, tolerance=component.tolerance))


def _reference_number(reference: str) -> Number:
    number = read_number(reference)
    if number is None:
        raise BadReference("the reference is not a number", field="reference", cure="write it as 42, -1,234 or 2.5e-3")
    return number
