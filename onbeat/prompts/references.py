"""Can a reward compare anything with this reference, and has it what it reads? What is known without the scorer's own
parser: a job fails at its start, or when it is submitted, not at the batch that holds the example."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from contracts import rewards
from contracts.encoding.numbers import read_number
from contracts.errors import InvalidInput
from contracts.spec_tables.datasets import DatasetSpec, ReasoningGymDataset, sources_of
from onbeat.process.entry_points import load_entry_point

TASKS = "onbeat.known_tasks"
"""A group of entry points: what knows the tasks of a package, by the type of its data sets and rewards."""
MATH_DELIMITER = re.compile(r"\$|\\boxed|\\\(|\\\[")
MATH_WORD = re.compile(r"(?<![\\A-Za-z])(?!sqrt(?![A-Za-z]))[A-Za-z]{3,}")
"""Letters that would be read as a product of symbols, c·a·t; `\\frac` is a command and sqrt is understood."""


def check_job(dataset: DatasetSpec, components: tuple[rewards.RewardComponent, ...]) -> None:
    """Checks what is known of a job's tasks from its spec alone. Raises InvalidInput that names the field."""
    for source, part in sources_of(dataset).items():
        reads = [isinstance(one, rewards.ReasoningGymReward) and one.scores(source) for one in components]
        if any(reads) or isinstance(part, ReasoningGymDataset):
            known_tasks("dataset.task").check_source(part, [place for place, is_read in enumerate(reads) if is_read])


def check_reference(component: rewards.RewardComponent, *, reference: str, task_entry: str) -> None:
    """Raises InvalidInput, with the cure, for what the component refuses whatever a model answers."""
    if isinstance(component, rewards.NumericReward) and read_number(reference) is None:
        raise InvalidInput("`numeric` finds no number in the reference", cure="write it as 42, -1,234, 1/2 or 2.5e-3")
    has_group = isinstance(component, rewards.RegexReward) and "answer" in re.compile(component.pattern).groupindex
    if (has_group or isinstance(component, rewards.ExactReward | rewards.MathVerifyReward)) and not reference.strip():
        reader = "the pattern's group `answer`" if has_group else f"`{component.name}`"
        raise InvalidInput(f"{reader} needs a reference, and it is empty", cure="fill it in")
    if isinstance(component, rewards.MathVerifyReward):
        _check_mathematics(reference)
    if isinstance(component, rewards.ReasoningGymReward):
        known_tasks("task_entry").read_task_entry(task_entry)


def _check_mathematics(reference: str) -> None:
    is_bare = not MATH_DELIMITER.search(reference)
    if is_bare and MATH_WORD.search(reference) and not re.search(r"\d", reference):
        raise InvalidInput("`math_verify` finds no expression in the reference", cure="write $…$ around it")
    braces = re.findall(r"(?<!\\)[{}]", reference)
    if braces.count("{") != braces.count("}"):
        raise InvalidInput("`math_verify` finds an unbalanced brace in the reference", cure="write balanced LaTeX")


@cache  # each example asks, and each look goes through all that is installed
def known_tasks(field: str) -> Any:
    return load_entry_point(TASKS, "reasoning_gym", field=field, where="job")
