"""What an external trainer trains: the batches of the open iteration, claimed by a thread that runs ahead of it.

    claimed ─▶ checked ─▶ columns of its stages ─▶ queue of PREFETCHED batches ─▶ micro-batches of whole groups
                     └──▶ an evaluation stays here; its score is read at the commit

Waits for generators and stages, for `timeouts.iteration_s`; JobEnded, FencedOff and the reason of a dead batch come out
of the iterator.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import UNSET

from broker.trainer_side import Arrived, TrainerSide
from contracts.errors import BatchFailed, FenceViolation, InvalidInput
from contracts.events import BatchDead, JobEvent
from contracts.experience.columns import BASE_COLUMNS, CARRIED_COLUMNS, Column, base_values
from contracts.rollouts import RolloutBatch
from contracts.spec import JobSpec
from onbeat.client.rows import RowKey, Rows
from onbeat.client.training.numbers import SampledNumbers
from onbeat.loop.expected import ExpectedIteration
from onbeat.loop.generator_watch import GeneratorWatch
from onbeat.loop.stage_watch import StageWatch
from onbeat.loop.staged import staged_batch
from onbeat.process.waiting import Waiting

PREFETCHED = 2
"""Batches that wait in memory, decoded, for the trainer."""
CLAIMED_AT_ONCE = 4
WAIT_S = 1.0
RECONCILE_EVERY_S = 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, repr=False)
class MicroBatch(Rows):
    """Whole groups of one rollout batch: row r is sample r % group_size of its prompt r // group_size."""

    group_size: int
    """G."""
    rewards: np.ndarray = field(repr=False)
    """float64[n]: the job's rewards, with what its stages add to them."""


@dataclass(frozen=True, kw_only=True)
class HeldIteration:
    """What the thread needs of the job that this process trains."""

    side: TrainerSide
    spec: JobSpec
    check: Callable[[], None]
    """Raises where the process must stop: JobEnded, FencedOff, Unavailable."""
    generators: GeneratorWatch
    stages: StageWatch
    reread: Callable[[frozenset[str]], None]
    """Looks at versions that generators refuse, by their folders; raises where one is damaged."""
    tell: Callable[[JobEvent], None]
    record: Callable[[Arrived, RolloutBatch], None]
    """Is given what came first, and the batch as it is trained: the job's records may have it."""


class TrainingIteration:
    """One open iteration. Iterating takes each batch once; it is acknowledged by the commit of the iteration alone."""

    def __init__(
        self,
        held: HeldIteration,
        expected: ExpectedIteration,
        *,
        max_rows: int,
        fail: Callable[[BaseException], None],
    ) -> None:
        """max_rows: of a micro-batch; at least one group comes at once. fail: is told what ended the arrivals."""
        self.expected = expected
        self.numbers = SampledNumbers()
        self._held = held
        self._max_rows = max_rows
        self._fail = fail
        self._queue: queue.Queue[MicroBatch | BaseException | None] = queue.Queue(maxsize=PREFETCHED)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="arrivals", daemon=True)
        self._is_gathered = False
        self._error: BaseException | None = None
        self._pieces: deque[MicroBatch] = deque()
        self._reconciled_s = time.monotonic()
        self._thread.start()

    def __repr__(self) -> str:
        return f"TrainingIteration({self.number})"

    @property
    def number(self) -> int:
        """t: it trains version t and makes version t + 1."""
        return self.expected.number

    @property
    def is_taken(self) -> bool:
        """Whether every batch has come out of the iterator."""
        return self._is_gathered and not self._pieces

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yields what is left of the iteration, in the order of arrival, until none is missing.

        Raises JobEnded, FencedOff, BatchFailed, DeadlineExceeded, BrokerUnavailable.
        """
        while self._pieces or not self._is_gathered:
            if self._pieces:
                yield self._pieces.popleft()
            elif self._error is not None:
                raise self._error
            else:
                self._receive()

    def _receive(self) -> None:
        try:
            arrived = self._queue.get(timeout=WAIT_S)
        except queue.Empty:
            if not self._thread.is_alive() and self._queue.empty():
                raise InvalidInput("was closed before it was taken", field=f"iteration {self.number}") from None
            return
        if arrived is None:
            self._is_gathered = True
        elif isinstance(arrived, BaseException):
            self._error = arrived
            self._fail(arrived)
        else:
            self._pieces += self._in_pieces(arrived)

    def close(self) -> None:
        """Ends the thread; what it claimed is claimed again by the next trainer."""
        self._closing.set()
        self._thread.join(timeout=10.0)

    def _work(self) -> None:
        try:
            self._gather()
            self._hand_over(None)
        except BaseException as error:
            self._hand_over(error)

    def _gather(self) -> None:
        held, expected = self._held, self.expected
        waiting = Waiting(
            expected.missing_in_words, deadline_s=held.spec.timeouts.iteration_s, cure="raise timeouts.iteration_s"
        )
        while not expected.is_complete and not self._closing.is_set():
            held.check()
            if self._take():
                continue
            waiting.poke(expected.missing_in_words)
            held.stages.check(self.number)
            if refused := held.generators.check():
                held.reread(refused)
            self._reconcile()
            held.side.wait_for_rollouts(self.number, WAIT_S)

    def _take(self) -> int:
        arrived, num_dead = self._held.side.claim_rollouts(self.number, max_batches=CLAIMED_AT_ONCE)
        if num_dead > len(self.expected.abandoned):
            self._settle_dead()
        for item in arrived:
            batch = item.batch
            if not self.expected.take(item):
                continue
            if batch.purpose != "train":
                self._held.record(item, batch)
                continue
            rows, as_trained = self._as_trained(batch)
            self._held.record(item, as_trained)
            self.numbers.add(as_trained, rows.rewards)
            self._hand_over(rows)
        return len(arrived)

    def _as_trained(self, batch: RolloutBatch) -> tuple[MicroBatch, RolloutBatch]:
        """Puts beside a batch what its stages have made of it. Raises FenceViolation where that is gone."""
        spec = self._held.spec
        columns: dict[str, tuple[bytes, ...]] = {}
        as_trained = batch
        if spec.stages:
            columns = self._held.side.columns(batch)
            as_trained, digest = staged_batch(batch, columns, spec)
            self.expected.put_columns(as_trained, digest)
        rewards = np.array([rollout.reward for group in as_trained.groups for rollout in group.rollouts])
        return micro_batch(batch, columns, spec, rewards), as_trained

    def _settle_dead(self) -> None:
        held = self._held
        for batch_id, reason in self.expected.abandon(held.side.dead_batches(self.number)).items():
            held.tell(BatchDead(at_s=time.time(), batch_id=batch_id, reason=reason))
            if held.spec.rollout.on_failed_batch == "fail":
                attempts = held.spec.rollout.max_attempts
                raise BatchFailed(f"is dead after {attempts} attempts: {reason}", field=f"batch {batch_id}")
            log.warning("batch %s is abandoned: %s", batch_id, reason)

    def _reconcile(self) -> None:
        """Dispatches again what a restarted server has lost. Raises FenceViolation where a commit is gone."""
        if time.monotonic() - self._reconciled_s < RECONCILE_EVERY_S:
            return
        self._reconciled_s = time.monotonic()
        committed = self._held.side.fence().committed
        if committed != self.number - 1:
            raise FenceViolation(
                f"the trainer is at iteration {self.number}, a restart of the server has lost the commits since "
                f"{committed}",
                cure="start the process again: it goes on from what the server has",
            )
        if again := self._held.side.reconcile(self.number, self.expected.missing):
            log.warning("%d batches of iteration %d were lost and go out again", again, self.number)

    def _hand_over(self, what: MicroBatch | BaseException | None) -> None:
        while not self._closing.is_set():
            try:
                return self._queue.put(what, timeout=WAIT_S)
            except queue.Full:
                if not isinstance(what, BaseException):
                    self._held.check()

    def _in_pieces(self, rows: MicroBatch) -> Iterator[MicroBatch]:
        groups = max(1, self._max_rows // rows.group_size)
        size = groups * rows.group_size
        for start in range(0, len(rows), size):
            yield _slice(rows, start, start + size)


def micro_batch(
    batch: RolloutBatch, columns: Mapping[str, Sequence[bytes]], spec: JobSpec, rewards: np.ndarray
) -> MicroBatch:
    """A rollout batch as it was published, what the job's stages made of it, and its rewards with theirs → its rows."""
    num_rows = batch.num_completions
    is_carried = batch.groups[0].prompt_text is not UNSET
    base = {name: column for name, column in BASE_COLUMNS.items() if is_carried or name not in CARRIED_COLUMNS}
    made: dict[str, Column] = {column.name: column for column in spec.stage_plan.outputs}
    return MicroBatch(
        keys_of_rows=tuple(
            RowKey(iteration=batch.iteration, batch_id=batch.batch_id, row=row) for row in range(num_rows)
        ),
        columns=base | made,
        values_as_bytes={**base_values(batch, base, range(num_rows)), **columns},
        group_size=batch.group_size,
        rewards=rewards,
    )


def _slice(rows: MicroBatch, start: int, end: int) -> MicroBatch:
    return MicroBatch(
        keys_of_rows=rows.keys_of_rows[start:end],
        columns=rows.columns,
        values_as_bytes={name: values[start:end] for name, values in rows.values_as_bytes.items()},
        group_size=rows.group_size,
        rewards=rows.rewards[start:end],
    )


def require_taken(iteration: TrainingIteration) -> None:
    """Raises InvalidInput where the iteration was not taken to its end."""
    if not iteration.is_taken:
        raise InvalidInput(
            f"iteration {iteration.number} was not taken to its end",
            field="commit",
            cure="go through all of its micro-batches first",
        )
    if not iteration.numbers.num_batches:
        raise BatchFailed(f"every training batch of iteration {iteration.number} is dead", field="rollout")
