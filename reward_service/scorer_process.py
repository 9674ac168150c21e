"""The parent's side of one scorer process: start, ask with a deadline, kill."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import wait

from contracts.errors import ContractViolation
from contracts.rewards import RewardComponent, RewardItem, Scored, Unscorable
from contracts.wire import decode, encode
from reward_service import scorer_worker
from reward_service.scorer_worker import WorkerAnswer, WorkerTask
from reward_service.scorers import rubric

REAP_TIMEOUT_S = 5.0
"""A killed process that is still not gone is stuck in the kernel; its lane goes on without it."""


class WorkerLate(Exception):
    """No answer by the deadline; the process may still be busy and must be ended."""


class WorkerDied(Exception):
    """The process is gone, or what it sends is no answer; it must be ended."""


class ScorerProcess:
    """Used by one lane. After WorkerLate or WorkerDied only `end` may follow. The starting thread must stay alive."""

    def __init__(self, *, warm_up_timeout_s: float) -> None:
        """Returns as soon as the process exists; the first task waits for its start."""
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        self._pipe, far_end = context.Pipe(duplex=True)
        self._process = context.Process(
            target=scorer_worker.serve, args=(far_end, os.getpid()), name="scorer", daemon=True
        )
        self._process.start()
        far_end.close()
        self._warm_up_timeout_s = warm_up_timeout_s
        self._started = False
        self._warm: frozenset[str] = frozenset()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def warm_up(self, components: tuple[RewardComponent, ...]) -> Unscorable | None:
        """Has the slow imports done once per kind of scorer; why no item can be scored, or None."""
        if not self._started:
            self._receive(timeout_s=self._warm_up_timeout_s, doing="its start")
            self._started = True
        keys = rubric.warm_up_keys(components)
        if keys <= self._warm:
            return None
        self._send(WorkerTask(components=components, item=None))
        refusal = self._receive(timeout_s=self._warm_up_timeout_s, doing="importing the scorer")
        if isinstance(refusal, Unscorable):
            return refusal
        self._warm |= keys
        return None

    def score(
        self, components: tuple[RewardComponent, ...], item: RewardItem, *, item_timeout_s: float
    ) -> Scored | Unscorable:
        """Call `warm_up` first: the deadline is the item's alone."""
        self._send(WorkerTask(components=components, item=item))
        result = self._receive(timeout_s=item_timeout_s, doing="scoring the item")
        if result is None:
            raise WorkerDied("the scorer's process answered out of turn")
        return result

    def kill(self) -> None:
        """SIGKILL to the process and to whatever a plugin started in its group; does not wait."""
        if self._started and self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def end(self) -> None:
        """Kills, reaps and closes the pipe."""
        self.kill()
        self._process.join(REAP_TIMEOUT_S)
        self._pipe.close()

    def _send(self, task: WorkerTask) -> None:
        try:
            self._pipe.send_bytes(encode(task))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._death() from error

    def _receive(self, *, timeout_s: float, doing: str) -> Scored | Unscorable | None:
        ready = wait([self._pipe, self._process.sentinel], timeout_s)
        if not ready:
            raise WorkerLate(f"{doing} took more than {timeout_s:g} s; its process was killed")
        if self._pipe not in ready and not self._pipe.poll():  # it may have answered and died
            raise self._death()
        try:
            return decode(self._pipe.recv_bytes(), WorkerAnswer).result
        except (EOFError, ConnectionResetError) as error:
            raise self._death() from error
        except ContractViolation as error:
            raise WorkerDied(f"the scorer's process sent what is no answer: {error}") from error

    def _death(self) -> WorkerDied:
        self._process.join(REAP_TIMEOUT_S)
        code = self._process.exitcode
        if code is None:
            return WorkerDied("the scorer's process closed its pipe")
        if code < 0:
            return WorkerDied(f"the scorer's process died of {signal.Signals(-code).name}")
        return WorkerDied(f"the scorer's process ended with exit code {code}")
