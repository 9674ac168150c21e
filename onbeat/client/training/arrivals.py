"""The batches that an external trainer trains: of the open iteration, claimed by a thread that runs ahead of it.

    claimed ─▶ checked ─▶ columns of its stages ─▶ queue of PREFETCHED batches ─▶ micro-batches of whole groups
                     └──▶ an evaluation stays here; its score is read at the commit

Waits for generators and stages, for `timeouts.iteration_s`; JobEnded, FencedOff and the reason of a dead batch come out
of the iterator.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec import UNSET

from broker.trainer_side import Arrived
from contracts.errors import InvalidInput
from contracts.events import IterationMetrics
from contracts.experience.columns import BASE_COLUMNS, CARRIED_COLUMNS, Column, base_values
from contracts.rollouts import RolloutBatch
from contracts.spec.job import JobSpec
from onbeat.base.process.waiting import Waiting
from onbeat.client.rows import RowKey, Rows
from onbeat.data.kept_sets import unpack_kept_sets
from onbeat.loop.expected import ExpectedIteration
from onbeat.loop.gathering import WAIT_S, Gathering
from onbeat.loop.sampled import BatchesOf, SampledNumbers, SampledStats, numbers_of
from onbeat.loop.trained_job import TrainedJob

PREFETCHED = 2
"""Batches that wait in memory, decoded, for the trainer."""


class TrainedNumbers:
    """An iteration in numbers: what was sampled, and what its trainer says of itself. One thread adds."""

    def __init__(self) -> None:
        self._stats: list[SampledStats] = []
        self._generation_s = 0.0
        self._started_s = time.time()

    def __len__(self) -> int:
        """Returns the number of batches."""
        return len(self._stats)

    def add(self, batch: RolloutBatch, rewards: np.ndarray) -> None:
        """Adds a batch and its rewards, float64[k·G], with what stages add."""
        self._stats.append(SampledStats.of(batch, rewards.reshape(len(batch.groups), batch.group_size)))
        self._generation_s += sum(timings.generation_ended_s - timings.generation_started_s for timings in batch.rounds)

    def metrics(
        self, expected: ExpectedIteration, *, trainer_epoch: int, loss: float, grad_norm: float, learning_rate: float
    ) -> IterationMetrics:
        """Returns the iteration's numbers; what an external trainer doesn't measure is 0.0, or left out."""
        sampled = numbers_of(SampledNumbers, BatchesOf(self._stats))
        wall_s = time.time() - self._started_s
        return IterationMetrics(
            **dataclasses.asdict(sampled),
            iteration=expected.number,
            policy_version=expected.number,
            trainer_epoch=trainer_epoch,
            num_unscorable=expected.num_unscorable,
            loss=loss,
            loss_metrics={},
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            mismatch_k3=0.0,
            mismatch_max=0.0,
            effective_sample_share=1.0,
            started_s=self._started_s,
            wall_s=wall_s,
            generation_s=self._generation_s,
            training_s=0.0,
            waiting_s=0.0,
            step_s=0.0,
            publish_s=0.0,
            tokens_per_s=sampled.num_tokens / wall_s,
            trajectories=expected.played.metrics(),
            difficulty_pools=expected.pool_shares or UNSET,
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingRows(Rows):
    """Whole groups of one rollout batch: row r is sample r % group_size of its prompt r // group_size."""

    group_size: int
    """G."""
    rewards: np.ndarray = field(repr=False)
    """float64[n]: the job's rewards, with what its stages add to them."""
    packed_kept_sets: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def kept_sets(self) -> list[list[np.ndarray]] | None:
        """[n][S] the ids that each sampled token was drawn from, none for the whole vocabulary; None where the job
        doesn't truncate its sampling. `generator_logprobs` are normalised over them."""
        if not self.packed_kept_sets:
            return None
        unpacked = (unpack_kept_sets(packed) for packed in self.packed_kept_sets)
        return [np.split(ids, np.cumsum(counts)[:-1]) for ids, counts in unpacked]


class TrainingIteration:
    """An open iteration of an external trainer.

    Iterating takes each batch once; the commit of the iteration alone acknowledges it.
    """

    def __init__(
        self,
        job: TrainedJob,
        expected: ExpectedIteration,
        *,
        check: Callable[[], None],
        reread: Callable[[frozenset[str]], None],
        max_rows: int,
        ended_by: Callable[[BaseException], None],
    ) -> None:
        """check: raises where the process must stop (JobEnded, FencedOff, Unavailable). reread: looks at versions that
        generators refuse, by their folders; raises where one is damaged. max_rows: of a micro-batch; at least one group
        comes at once. ended_by: is told what ended the arrivals, before it comes out of the iterator."""
        self.expected = expected
        self.numbers = TrainedNumbers()
        self._job = job
        self._check = check
        self._gathering = Gathering(job, expected, train=self._take, repair=reread)
        self._max_rows = max_rows
        self._ended_by = ended_by
        self._queue: queue.Queue[TrainingRows | BaseException | None] = queue.Queue(maxsize=PREFETCHED)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="arrivals", daemon=True)
        self._is_gathered = False
        self._error: BaseException | None = None
        self._pieces: deque[TrainingRows] = deque()
        self._thread.start()

    def __repr__(self) -> str:
        return f"TrainingIteration({self.number})"

    @property
    def number(self) -> int:
        """The iteration's number t: it trains version t and makes version t + 1."""
        return self.expected.number

    @property
    def is_taken(self) -> bool:
        """True once every batch has come out of the iterator."""
        return self._is_gathered and not self._pieces

    def __iter__(self) -> Iterator[TrainingRows]:
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
            self._ended_by(arrived)
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
            # The trainer that waits for the next batch raises it.
            self._hand_over(error)

    def _gather(self) -> None:
        expected = self.expected
        gathering = self._gathering
        waiting = Waiting(
            gathering.missing_in_words,
            deadline_s=self._job.spec.timeouts.iteration_s,
            cure="raise timeouts.iteration_s",
        )
        while not expected.is_complete and not self._closing.is_set():
            self._check()
            if gathering.take():
                continue
            waiting.poke(gathering.missing_in_words)
            gathering.look()
            gathering.wait()

    def _take(self, item: Arrived, as_trained: RolloutBatch) -> None:
        # Advantages and log-probs of this trainer are its own: the record has none.
        self._job.recorder.write(as_trained.batch_id)
        rewards = np.array([rollout.reward for group in as_trained.groups for rollout in group.rollouts])
        self.numbers.add(as_trained, rewards)
        columns = {} if as_trained.columns is UNSET else as_trained.columns
        self._hand_over(training_rows(item.batch, columns, self._job.spec, rewards))

    def _hand_over(self, what: TrainingRows | BaseException | None) -> None:
        while not self._closing.is_set():
            try:
                return self._queue.put(what, timeout=WAIT_S)
            except queue.Full:
                if not isinstance(what, BaseException):
                    self._check()

    def _in_pieces(self, rows: TrainingRows) -> Iterator[TrainingRows]:
        groups = max(1, self._max_rows // rows.group_size)
        size = groups * rows.group_size
        for start in range(0, len(rows), size):
            yield _slice(rows, start, start + size)


def training_rows(
    batch: RolloutBatch, columns: Mapping[str, Sequence[bytes]], spec: JobSpec, rewards: np.ndarray
) -> TrainingRows:
    """Returns the rows of a rollout batch.

    Args:
        batch: The batch as it was published, of k prompts with G completions each.
        columns: The outputs of the job's stages, k·G values each.
        spec: The job's.
        rewards: float64[k·G], with what stages add.
    """
    num_rows = batch.num_completions
    is_carried = batch.groups[0].prompt_text is not UNSET
    base = {name: column for name, column in BASE_COLUMNS.items() if is_carried or name not in CARRIED_COLUMNS}
    sets_of_rollouts = [rollout.completion.kept_sets for group in batch.groups for rollout in group.rollouts]
    stage_outputs: dict[str, Column] = {column.name: column for column in spec.stage_graph.outputs}
    return TrainingRows(
        keys_of_rows=tuple(
            RowKey(iteration=batch.iteration, batch_id=batch.batch_id, row=row) for row in range(num_rows)
        ),
        columns=base | stage_outputs,
        values_as_bytes={**base_values(batch, base, range(num_rows)), **columns},
        group_size=batch.group_size,
        rewards=rewards,
        packed_kept_sets=tuple(packed for packed in sets_of_rollouts if packed is not UNSET),
    )


def _slice(rows: TrainingRows, start: int, end: int) -> TrainingRows:
    return dataclasses.replace(
        rows,
        keys_of_rows=rows.keys_of_rows[start:end],
        values_as_bytes={name: values[start:end] for name, values in rows.values_as_bytes.items()},
        rewards=rows.rewards[start:end],
        packed_kept_sets=rows.packed_kept_sets[start:end],
    )


def require_taken(iteration: TrainingIteration) -> None:
    """Raises InvalidInput where the iteration was not taken to its end."""
    if not iteration.is_taken:
        raise InvalidInput(
            f"iteration {iteration.number} was not taken to its end",
            field="commit",
            cure="go through all of its micro-batches first",
        )
    if not len(iteration.numbers):
        raise iteration.expected.all_dead()
