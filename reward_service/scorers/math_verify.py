"""math-verify: mathematical equality by sympy. Some expressions never end to simplify: runs in the pool.

Its own timeouts are signal.alarm and are off: the pool kills the process, which also ends a loop inside C code.
"""

from __future__ import annotations

import functools
import logging
import re
from typing import Any

from contracts.references import MATH_DELIMITER, MATH_WORD
from contracts.rewards import MathVerifyReward, RewardItem
from reward_service.scorers.refusals import BadReference

TAG = re.compile(r"</?[A-Za-z][\w-]*>")
"""Set apart from what it encloses: math-verify finds no number in `<answer>42</answer>`."""


def warm_up(component: MathVerifyReward) -> None:
    """Imports sympy and builds the LaTeX grammar: seconds, which are not the item's to pay."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on each call that its timeouts are off
    _parse(r"$\frac{1}{2}$")


def score(component: MathVerifyReward, item: RewardItem) -> float:
    """1.0 if an answer in the completion equals the reference; 0.0 too if it holds none. Raises BadReference.

    A completion that math-verify cannot parse or compare has not been shown equal, hence 0.0.
    """
    import math_verify

    gold = _parse_reference(item.reference)
    answers = _parse(TAG.sub(r" \g<0> ", item.completion))
    return float(math_verify.verify(list(gold), answers, timeout_seconds=None))


@functools.lru_cache(maxsize=1024)
def _parse_reference(reference: str) -> tuple[Any, ...]:
    """Expressions of the reference, cached: the G completions of a group share it.

    A bare `2x+1` is set between $ signs, since math-verify reads only the 2 of it otherwise.
    """
    bare = not MATH_DELIMITER.search(reference) and not MATH_WORD.search(reference)
    gold = tuple(_parse(f"${reference}$" if bare else reference))
    if all(isinstance(expression, str) for expression in gold):
        raise BadReference("math-verify finds no expression in the reference", field="reference", cure="write $…$")
    return gold


def _parse(text: str) -> list[Any]:
    import math_verify

    return math_verify.parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]  (None is documented)
