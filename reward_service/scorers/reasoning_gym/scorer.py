"""reasoning-gym: the score of the task that made the prompt. The package's parsers are not ours: runs in the pool.

task_entry ─▶ known_tasks.py ─┬─ its scorer evaluates nothing ─▶ package_scorers.py ─▶ the package
                              ├─ its scorer rewards what the question forbids ─▶ corrected_scorers.py
                              └─ its scorer evaluates text ─▶ refused by name, when the job is submitted
"""

from __future__ import annotations

from contracts.errors import InvalidInput
from contracts.known_tasks import OUR_SCORERS, read_task_entry
from contracts.rewards import ReasoningGymReward, RewardItem, TaskEntry
from reward_service.scorers.last_tag import last_answer
from reward_service.scorers.reasoning_gym import corrected_scorers, package_scorers
from reward_service.scorers.reasoning_gym.known_package import check_package
from reward_service.scorers.texts import BadReference


def warm_up(component: ReasoningGymReward) -> None:
    """Imports the package: seconds, which are not the item's to pay. Raises InvalidInput for another version."""
    check_package()
    import reasoning_gym  # noqa: F401


def score(component: ReasoningGymReward, item: RewardItem) -> float:
    """Returns the task's own score in [0, 1] of the extracted answer; `strict` keeps 1.0 only. Raises BadReference.

    No match of `answer_pattern` is 0.0: the model was asked for that format.
    """
    task_entry = _task_entry(item.task_entry)
    answer = last_answer(component.answer_pattern, item.completion) if component.answer_pattern else item.completion
    if answer is None:
        return 0.0
    scorer = corrected_scorers if task_entry.task in OUR_SCORERS else package_scorers
    value = scorer.score(task_entry.task, answer, task_entry.entry)
    return float(value == 1.0) if component.strict else value


def _task_entry(text: str) -> TaskEntry:
    try:
        return read_task_entry(text)
    except InvalidInput as error:
        raise BadReference(error.problem, field=error.field, cure=error.cure) from error
