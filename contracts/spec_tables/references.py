"""Can a reward compare anything with this reference? What is known without the scorer's own parser."""

from __future__ import annotations

import re

from contracts.encoding.numbers import read_number
from contracts.errors import InvalidInput
from contracts.rewards import (
    ExactReward,
    MathVerifyReward,
    NumericReward,
    ReasoningGymReward,
    RegexReward,
    RewardComponent,
)
from contracts.spec_tables.reasoning_tasks import read_task_entry

MATH_DELIMITER = re.compile(r"\$|\\boxed|\\\(|\\\[")
MATH_WORD = re.compile(r"(?<![\\A-Za-z])(?!sqrt(?![A-Za-z]))[A-Za-z]{3,}")
"""Letters that would be read as a product of symbols, c·a·t; `\\frac` is a command and sqrt is understood."""


def check_reference(component: RewardComponent, *, reference: str, task_entry: str) -> None:
    """Raises InvalidInput, with the cure, for what the component refuses whatever a model answers."""
    if isinstance(component, NumericReward) and read_number(reference) is None:
        raise InvalidInput("`numeric` finds no number in the reference", cure="write it as 42, -1,234, 1/2 or 2.5e-3")
    if isinstance(component, ExactReward | MathVerifyReward) and not reference.strip():
        raise InvalidInput(f"`{component.name}` needs a reference, and it is empty", cure="fill it in")
    has_group = isinstance(component, RegexReward) and "answer" in re.compile(component.pattern).groupindex
    if has_group and not reference.strip():
        raise InvalidInput("the pattern's group `answer` needs a reference, and it is empty", cure="fill it in")
    if isinstance(component, MathVerifyReward):
        _check_mathematics(reference)
    if isinstance(component, ReasoningGymReward):
        read_task_entry(task_entry)


def _check_mathematics(reference: str) -> None:
    is_bare = not MATH_DELIMITER.search(reference)
    if is_bare and MATH_WORD.search(reference) and not re.search(r"\d", reference):
        raise InvalidInput("`math_verify` finds no expression in the reference", cure="write $…$ around it")
    braces = re.findall(r"(?<!\\)[{}]", reference)
    if braces.count("{") != braces.count("}"):
        raise InvalidInput("`math_verify` finds an unbalanced brace in the reference", cure="write balanced LaTeX")
