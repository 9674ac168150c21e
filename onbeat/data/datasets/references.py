"""Checks of a reward against what it compares with, by what is known without the scorer's own parser."""

from __future__ import annotations

import re

from contracts import rewards
from contracts.encoding.numbers import read_number
from contracts.errors import InvalidInput
from contracts.known_tasks import read_task_entry

MATH_DELIMITER = re.compile(r"\$|\\boxed|\\\(|\\\[")
MATH_WORD = re.compile(r"(?<![\\A-Za-z])(?!sqrt(?![A-Za-z]))[A-Za-z]{3,}")
"""Letters that would be read as a product of symbols, c·a·t; `\\frac` is a command and sqrt is understood."""


def check_reference(component: rewards.RewardComponent, *, reference: str, task_entry: str) -> None:
    """Raises InvalidInput, with the cure, for what the component refuses whatever a model answers."""
    is_number = isinstance(component, rewards.RegexReward) and component.compare == "number"
    if (is_number or isinstance(component, rewards.NumericReward)) and read_number(reference) is None:
        raise InvalidInput(
            f"`{component.name}` finds no number in the reference",
            cure="write it as 42, -1,234, 1/2 or 2.5e-3; where the number follows a marker, as #### in GSM8K, name the "
            "marker by dataset.columns.reference_after",
        )
    has_group = isinstance(component, rewards.RegexReward) and component.compares
    if (has_group or isinstance(component, rewards.ExactReward | rewards.MathVerifyReward)) and not reference.strip():
        reader = "the pattern's group `answer`" if has_group else f"`{component.name}`"
        raise InvalidInput(f"{reader} needs a reference, and it is empty", cure="fill it in")
    if isinstance(component, rewards.MathVerifyReward):
        _check_mathematics(reference)
    if isinstance(component, rewards.ReasoningGymReward):
        read_task_entry(task_entry)


def check_needs_no_reference(component: rewards.RewardComponent) -> None:
    """Raises InvalidInput, with the cure, for a reward of a file whose function needs a reference: a parameter of that
    name without a default."""
    if not isinstance(component, rewards.PluginReward):
        return
    if "reference" in (component.arguments or ()):
        raise InvalidInput(
            f"the reward `{component.entry_point}` needs a reference, and this held-out row has none",
            cure="name the column of the answers by dataset.columns.reference, or set evaluation.num_prompts = 0",
        )


def _check_mathematics(reference: str) -> None:
    is_bare = not MATH_DELIMITER.search(reference)
    if is_bare and MATH_WORD.search(reference) and not re.search(r"\d", reference):
        raise InvalidInput("`math_verify` finds no expression in the reference", cure="write $…$ around it")
    braces = re.findall(r"(?<!\\)[{}]", reference)
    if braces.count("{") != braces.count("}"):
        raise InvalidInput("`math_verify` finds an unbalanced brace in the reference", cure="write balanced LaTeX")
