"""A task of reasoning-gym in several tries: `name = "reasoning_gym"`, `params = {tries = 3}`.

The task is the example's (a data set of type `reasoning_gym`), or one that the package makes of the seed, with
`params = {task = "chain_sum"}`. After a wrong answer the model is told so, and tries again. An answer counts where the
task's scorer gives 1.0. Tasks are played whose scorers evaluate nothing (contracts/known_tasks.py).
"""

from __future__ import annotations

import contextlib
import io
from importlib import metadata
from typing import Any

from contracts import known_tasks
from contracts.errors import InvalidInput
from onbeat.environments.adapters.answers import last_tagged
from onbeat.environments.author import BadTask, Environment, InitialObservation, Message, Reply

SEEDS = 2**31
MAX_TRIES = 100
GUARDED = frozenset({"complex_arithmetic", "rubiks_cube", "rush_hour"})
"""Their scorers don't bear every answer, or take one for the right one: the reward service has guards for them."""
PLAYED = known_tasks.ITS_SCORERS - GUARDED
ASK = "\nGive your answer as <answer>…</answer>."
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Exceptions that the package's parsers raise for an answer of another form."""


class ReasoningGym(Environment):
    """A task that the model answers in several tries.

    `tries`: answers at most. `discount`: the factor by which each further try multiplies the reward.
    """

    global_random = True

    def __init__(self, *, tries: int = 3, discount: float = 1.0, task: str = "", ask: str = ASK) -> None:
        import reasoning_gym

        known_tasks.check_version(metadata.version("reasoning-gym"))
        if not 1 <= tries <= MAX_TRIES or not 0.0 <= discount <= 1.0:
            raise ValueError(f"tries is from 1 to {MAX_TRIES}, and discount from 0 to 1")
        if task and task not in PLAYED - known_tasks.NOT_GENERATED.keys():
            raise ValueError(f"`{task}` is none of the tasks that can be played in several tries")
        self._gym = reasoning_gym
        self._tries = tries
        self._discount = discount
        self._task = task
        self._ask = ask

    def reset(self, task: dict[str, Any], seed: int) -> InitialObservation:
        name, self._entry = self._generated(seed) if self._task else _entry_of(str(task.get("entry", "")))
        self._score = self._gym.get_score_answer_fn(name)
        return InitialObservation(str(self._entry["question"]) + self._ask)

    def step(self, message: Message, turn: int) -> Reply:
        answer = last_tagged(message.content)
        left = self._tries - turn - 1
        if answer is not None and self._is_right(answer):
            return Reply("That is right.", self._discount**turn, True, {"tries": turn + 1.0})
        verdict = "There is no <answer>…</answer> in it."
        if answer is not None:
            verdict = "That is not right."
        if left == 0:
            return Reply(verdict, done=True, metrics={"tries": turn + 1.0})
        return Reply(
            f"{verdict} You have {left} more {'try' if left == 1 else 'tries'}.", metrics={"tries": turn + 1.0}
        )

    def _is_right(self, answer: str) -> bool:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # some print what the model wrote
                return float(self._score(answer, self._entry)) == 1.0  # pyright: ignore[reportCallIssue]
        except MALFORMED:
            return False

    def _generated(self, seed: int) -> tuple[str, dict[str, Any]]:
        return self._task, self._gym.create_dataset(self._task, seed=seed % SEEDS, size=1)[0]


def _entry_of(entry: str) -> tuple[str, dict[str, Any]]:
    try:
        known = known_tasks.read_task_entry(entry)
    except InvalidInput as error:
        raise BadTask(str(error)) from error
    if known.task not in PLAYED:
        raise BadTask(f"`{known.task}` is none of the tasks that can be played in several tries")
    return known.task, known.entry
