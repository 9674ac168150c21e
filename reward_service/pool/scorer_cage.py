"""The service's side of one cage: start it, have a fresh scorer process forked, ask it under a deadline, end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from contracts.encoding.wire import decode, encode, encode_json
from contracts.errors import ContractViolation
from contracts.rewards import RewardComponent, RewardItem, Scored, Unscorable, breakdown_names, stated_scores
from reward_service.cage.cage import CageRules
from reward_service.pool.frames import Frames, Gone, Late
from reward_service.pool.nursery import Order, Report
from reward_service.pool.scorer_process import ScorerAnswer, ScorerTask
from reward_service.scorers import rubric

REAP_TIMEOUT_S = 5.0
"""A killed process that is still not gone is stuck in the kernel; its lane goes on without it."""
MAX_ANSWER_BYTES = 64 * 1024
"""Many times what 32 components' scores need: whatever a scorer process makes up costs the service little to read."""
START = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from reward_service.pool.nursery import main
main(int(sys.argv[1]), sys.argv[2])
"""


class ScorerLate(Exception):
    """No answer by the deadline; the scorer process may still be busy and must be ended."""


class ScorerDied(Exception):
    """The scorer process is gone, or what it sends is no answer; it must be ended."""


class ScorerCage:
    """Used by one lane. After ScorerLate or ScorerDied only `end` may follow, or `fresh_scorer` where `is_alive`.

    The thread that makes it must stay alive: Linux ends a child together with the thread that started it.
    """

    def __init__(
        self, rules: CageRules, *, warm_up_timeout_s: float, on_empty: Callable[[], None] = lambda: None
    ) -> None:
        """Returns as soon as the process exists; the first warm-up waits for its start.

        on_empty: called by `end`, where nothing is left in the cage.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", START, str(theirs.fileno()), encode_json(rules).decode(), _import_path()],
                env={},  # from the first instruction on: what a process was started with stays readable in /proc
                cwd=rules.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._on_empty = on_empty
        self._orders = Frames(ours, max_bytes=MAX_ANSWER_BYTES)
        self._scorer: Frames | None = None
        self._warm_up_timeout_s = warm_up_timeout_s
        self._warm: frozenset[str] = frozenset()
        self.missing: tuple[str, ...] | None = None
        """Locks that this cage doesn't have; None before its start was waited for."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def warm_up(self, components: tuple[RewardComponent, ...], *, keys: frozenset[str]) -> Unscorable | None:
        """Has the slow imports done in the nursery, once for each key; why no item can be scored, or None."""
        self._wait_for_start()
        if keys <= self._warm:
            return None
        deadline_s = time.monotonic() + self._warm_up_timeout_s
        refusal = self._order(Order(what="warm_up", components=components), deadline_s).refusal
        if refusal is None:
            self._warm |= keys
        return refusal

    def fresh_scorer(self) -> None:
        """Ends the scorer process, if there is one, and has the next forked; `score` may follow at once."""
        self._wait_for_start()
        self._drop_scorer()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._orders.send_handle(encode(Order(what="scorer")), theirs.fileno())
            except Gone as error:
                ours.close()
                raise self._death() from error
        self._scorer = Frames(ours, max_bytes=MAX_ANSWER_BYTES)

    def warm_up_scorer(self, components: tuple[RewardComponent, ...]) -> Unscorable | None:
        """As `warm_up`, in the scorer process itself: for foreign code, which may start threads."""
        deadline_s = time.monotonic() + self._warm_up_timeout_s
        self._send(ScorerTask(components=components, items=()), deadline_s, doing=_importing(self._warm_up_timeout_s))
        answer = self._receive(deadline_s, doing=_importing(self._warm_up_timeout_s))
        return answer if isinstance(answer, Unscorable) else None

    def score(
        self, components: tuple[RewardComponent, ...], items: Sequence[RewardItem], *, item_timeout_s: float
    ) -> Iterator[Scored | Unscorable]:
        """Results in order, as they come; each has the whole deadline from the one before it."""
        doing = f"scoring the item took more than {item_timeout_s:g} s"
        self._send(
            ScorerTask(components=components, items=tuple(items)), time.monotonic() + item_timeout_s, doing=doing
        )
        for _ in items:
            result = self._receive(time.monotonic() + item_timeout_s, doing=doing)
            if result is None:
                raise ScorerDied("the scorer's process answered out of turn")
            if not _is_plausible(result, components):
                raise ScorerDied("the scorer's process sent what is no answer")
            yield result

    def kill(self) -> None:
        """Has the keeper end the whole cage; does not wait."""
        self._process.terminate()

    def end_scorer(self) -> int | None:
        """Kills the scorer process with all that it started, and waits for it; its exit code, None if unknown."""
        self._drop_scorer()
        try:
            return self._order(Order(what="end_scorer"), time.monotonic() + REAP_TIMEOUT_S).exit_code
        except (ScorerDied, ScorerLate):
            self.kill()
            return None

    def end(self) -> None:
        """Ends the cage, and reaps it."""
        if self.is_alive and self.missing is not None:
            self.end_scorer()
        self.kill()
        try:
            self._process.wait(REAP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(REAP_TIMEOUT_S)
        self._drop_scorer()
        self._orders.close()
        if self._process.returncode not in (None, -signal.SIGKILL):  # else its keeper didn't end what it kept
            self._on_empty()

    def _wait_for_start(self) -> None:
        if self.missing is None:
            deadline_s = time.monotonic() + self._warm_up_timeout_s
            self.missing = self._report(deadline_s, f"its start took more than {self._warm_up_timeout_s:g} s").missing

    def _order(self, order: Order, deadline_s: float) -> Report:
        try:
            self._orders.send(encode(order), deadline_s=deadline_s)
        except Gone as error:
            raise self._death() from error
        except Late as error:
            raise ScorerLate("the scorer's process doesn't read; it was killed") from error
        return self._report(deadline_s, _importing(self._warm_up_timeout_s))

    def _report(self, deadline_s: float, doing: str) -> Report:
        try:
            return decode(self._orders.receive(deadline_s=deadline_s), Report)
        except Late as error:
            raise ScorerLate(f"{doing}; its process was killed") from error
        except Gone as error:
            raise self._death() from error

    def _send(self, task: ScorerTask, deadline_s: float, *, doing: str) -> None:
        assert self._scorer is not None
        try:
            self._scorer.send(encode(task), deadline_s=deadline_s)
        except Late as error:
            raise ScorerLate(f"{doing}; its process was killed") from error
        except Gone as error:
            raise self._scorer_death() from error

    def _receive(self, deadline_s: float, *, doing: str) -> Scored | Unscorable | None:
        assert self._scorer is not None
        try:
            return decode(self._scorer.receive(deadline_s=deadline_s), ScorerAnswer).result
        except Late as error:
            raise ScorerLate(f"{doing}; its process was killed") from error
        except Gone as error:
            raise self._scorer_death() from error
        except ContractViolation as error:
            raise ScorerDied(f"the scorer's process sent what is no answer: {error}") from error

    def _scorer_death(self) -> ScorerDied:
        code = self.end_scorer()
        if code is None:
            return self._death()
        return ScorerDied(_of_what(code))

    def _death(self) -> ScorerDied:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_TIMEOUT_S)
        code = self._process.returncode
        return ScorerDied("the scorer's process closed its socket" if code is None else _of_what(code))

    def _drop_scorer(self) -> None:
        if self._scorer is not None:
            self._scorer.close()
            self._scorer = None


def _is_plausible(result: Scored | Unscorable, components: tuple[RewardComponent, ...]) -> bool:
    """Whether a sound scorer process may say so of this rubric: foreign code in it can write its answers."""
    names = breakdown_names(components)
    if isinstance(result, Unscorable):
        return len(result.detail) <= rubric.MAX_DETAIL_CHARS and result.component in ("", *names)
    return (
        set(result.breakdown) == set(names)
        and all(map(rubric.is_score, (result.reward, *result.breakdown.values())))
        and result.unscorable.keys() <= stated_scores(components).keys()
    )


def _of_what(code: int) -> str:
    if code < 0:
        known = {one.value: one.name for one in signal.Signals}
        return f"the scorer's process died of {known.get(-code, f'signal {-code}')}"
    return f"the scorer's process ended with exit code {code}"


def _importing(timeout_s: float) -> str:
    return f"importing the scorer took more than {timeout_s:g} s"


def _import_path() -> str:
    """What this process imports from: with an empty environment, and alone, Python wouldn't find it."""
    return json.dumps([os.path.abspath(entry) for entry in sys.path])
