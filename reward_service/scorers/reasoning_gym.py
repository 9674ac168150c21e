"""reasoning-gym: the scorer of the task that made the prompt. Its parsers are not ours: runs in the pool."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from contracts.errors import InvalidInput
from contracts.rewards import ReasoningGymReward, RewardItem
from contracts.wire import Record, decode_json
from reward_service.scorers.refusals import BadReference
from reward_service.scorers.regex import last_answer

ENTRY_FIELDS = frozenset({"question", "answer", "metadata"})


class TaskEntry(Record, frozen=True, kw_only=True):
    """What RewardItem.task_entry holds as JSON."""

    task: str
    """Name in reasoning-gym, e.g. "chain_sum"."""
    entry: dict[str, Any]
    """The dataset's item: question, answer, metadata."""


def warm_up(component: ReasoningGymReward) -> None:
    """Imports the package: seconds, which are not the item's to pay."""
    import reasoning_gym  # noqa: F401


def score(component: ReasoningGymReward, item: RewardItem) -> float:
    """The task's own score in [0, 1] of the extracted answer; `strict` keeps 1.0 only. Raises BadReference.

    No match of `answer_pattern` is 0.0: the model was asked for that format.
    """
    task_entry = _task_entry(item.task_entry)
    score_answer = _task_scorer(task_entry.task)
    answer = _answer(component, item.completion)
    if answer is None:
        return 0.0
    value = float(score_answer(answer, task_entry.entry))
    return float(value == 1.0) if component.strict else value


def _answer(component: ReasoningGymReward, completion: str) -> str | None:
    if not component.answer_pattern:
        return completion
    return last_answer(re.compile(component.answer_pattern), completion)


def _task_entry(text: str) -> TaskEntry:
    try:
        task_entry = decode_json(text, TaskEntry)
    except InvalidInput as error:
        raise BadReference(str(error), field="task_entry", cure='{"task": name, "entry": {…}}') from error
    missing = ENTRY_FIELDS - task_entry.entry.keys()
    if missing:
        raise BadReference(f"entry lacks {', '.join(sorted(missing))}", field="task_entry")
    return task_entry


@functools.lru_cache(maxsize=256)
def _task_scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    import reasoning_gym

    try:
        return reasoning_gym.get_score_answer_fn(task)  # pyright: ignore[reportReturnType]  (annotated without arguments)
    except ValueError as error:
        raise BadReference(f"reasoning-gym has no task `{task}`", field="task_entry") from error
