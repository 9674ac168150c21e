"""Gathering, with a fence, generators and ranks that the test plays: a batch is published when the trainer waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, cast

import pytest

import consumer.trainer.gather as gather_module
import onbeat.loop.gathering as gathering
from broker.fence import FenceState
from broker.ledger import SAME_WORDS
from broker.trainer_side import Arrived
from consumer.gradient.advantages.estimators import batch_rewards
from consumer.gradient.learner import Trained
from consumer.gradient.statistics import BatchStats
from consumer.trainer.gather import gather
from consumer.trainer.iteration import Iteration
from contracts.encoding.arrays import pack_float32
from contracts.errors import (
    BatchFailed,
    DeadlineExceeded,
    FenceViolation,
    Unavailable,
    WeightsRejected,
    WeightsUnfit,
)
from contracts.events import BatchDead, GeneratorsChanged
from contracts.experience.columns import values_digest
from contracts.jobs import WindowIteration
from contracts.monitor import GeneratorSeen
from contracts.rollouts import RolloutBatch, batch_digest
from contracts.run_folder import RunFolder
from contracts.schedule import Schedule
from contracts.versions import WeightManifest
from onbeat.base.process.waiting import Waiting
from onbeat.loop.window import AskedIteration
from onbeat.recording.recorder import Recorder
from tests.builders import DIGEST, batch_of, job_spec, manifest, prompt_batch, rollout
from tests.until import Clock

IDS = ("0/train/0", "0/train/1", "0/train/2")
STAGE: dict[str, Any] = {
    "type": "external",
    "name": "brief",
    "inputs": ["text"],
    "outputs": [{"name": "score", "type": "float32"}],
    "reward_column": "score",
    "weight": 2.0,
}


def sampled(batch_id: str) -> Arrived:
    batch = batch_of([([5], [rollout([7], 0.0), rollout([8], 1.0)])], batch_id=batch_id)
    return Arrived(batch=batch, digest=batch_digest(batch), num_bytes=0)


class Played:
    """The parts of a held job that gathering speaks to, in one; `said` has what happened, in order."""

    def __init__(
        self,
        folder: RunFolder,
        *coming: str,
        schedule: Literal["periodic", "synchronous", "colocated"] = "periodic",
        on_failed_batch: str = "fail",
        dead: dict[str, str] | None = None,
        rejected: str = "",
        stages: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.spec = job_spec(rollout__on_failed_batch=on_failed_batch, stages=list(stages), recording=None)
        self.stages = NeverLate(self)
        self.schedule = Schedule(schedule)
        self.folder = folder
        self.recorder = Recorder(folder, self.spec, token_texts=partial(pytest.fail, "nothing is recorded"))
        self.window = Ahead()
        self.committed = -1
        self.changes: list[GeneratorsChanged] = []
        self.side = self.ranks = self.keeper = self.generators = self
        self.published = ReadBack(self)
        self.unfit: dict[str, str] = {}
        self.live: list[GeneratorSeen] = []
        self.awaited = ""
        self.said: list[str] = []
        self.told: list[object] = []
        self.handed_over: list[RolloutBatch] = []
        self._coming = list(coming)
        self._published: list[Arrived] = []
        self._num_published = 0
        self._dead = dead or {}
        self._rejected = rejected
        self._trained: list[Trained] = []

    # TrainerSide

    def fence(self) -> FenceState:
        return FenceState(
            state="open",
            committed=self.committed,
            window=(
                WindowIteration(
                    iteration=0,
                    oldest_version=0,
                    newest_version=0,
                    batches_expected=len(IDS),
                    batches_published=self._num_published,
                    batches_dead=len(self._dead),
                ),
            ),
            versions={0: DIGEST},
            trainer_epoch=1,
            lease_until_s=0.0,
        )

    def claim_rollouts(self, iteration: int, *, max_batches: int) -> tuple[list[Arrived], int]:
        arrived, self._published = self._published[:max_batches], self._published[max_batches:]
        return arrived, len(self._dead)

    def dead_batches(self, iteration: int) -> dict[str, str]:
        return self._dead

    def awaited_batch(self, live: Sequence[GeneratorSeen]) -> str:
        return self.awaited

    def wait_for_rollouts(self, iteration: int, timeout_s: float) -> None:
        batch_id = self._coming.pop(0)
        self.said.append(f"published {batch_id}")
        self._published.append(sampled(batch_id))
        self._num_published += 1

    def columns(self, batch: RolloutBatch) -> dict[str, tuple[bytes, ...]]:
        assert batch.purpose == "train"
        self.said.append(f"columns of {batch.batch_id}")
        return {"score": (pack_float32([0.5]),) * batch.num_completions}

    # Ranks

    most_handed_out = 2**10
    trains_at_the_end = False
    """Whether what is handed over is trained only once all of it is sampled."""

    def train(
        self, batch: RolloutBatch | None = None, *, wait_s: float = 0.0, is_sampled: bool = False
    ) -> list[Trained]:
        """What is handed over is trained at once, or at the end."""
        if is_sampled and self.trains_at_the_end:
            self.said.append("all sampled")
            self.trains_at_the_end = False
        if batch is not None:
            self.said.append(f"trained {batch.batch_id}")
            self.handed_over.append(batch)
            stats = BatchStats.of(batch, batch_rewards(batch))
            self._trained.append(Trained(stats=stats, rank=0, started_s=1.0, ended_s=2.0))
        if self.trains_at_the_end:
            return []
        trained, self._trained = self._trained, []
        return trained

    # LeaseKeeper, GeneratorWatch, HeldJob

    def check(self) -> frozenset[str]:
        return frozenset({self._rejected})

    def take_changes(self) -> list[GeneratorsChanged]:
        changes, self.changes = self.changes, []
        return changes

    def wait_for_turn(self, job_id: str, check: object) -> None:
        assert job_id == self.folder.job_id
        self.said.append("generators sleep")

    def training(self, *, longest_pass_s: float) -> AbstractContextManager[None]:
        assert longest_pass_s == self.spec.timeouts.iteration_s
        return nullcontext()

    def tell(self, event: object) -> None:
        self.told.append(event)

    def publish_weights(self, policy_version: int, *, is_again: bool) -> None:
        assert is_again
        self.said.append(f"wrote version {policy_version} again")
        self._rejected = ""

    def check_published(self, manifest: WeightManifest) -> None:
        self.said.append(f"read version {manifest.policy_version} back")
        if self.is_damaged:
            raise Unavailable("it is damaged")

    is_damaged = False

    def reconcile(self, iteration: int, batches: Sequence[object]) -> int:
        self.said.append(f"asked for {len(batches)} of iteration {iteration}")
        return 0


class Slow(Played):
    """A rank that trains one batch at a time beside the loop, each during some waits, of which three are longer than
    the deadline of an iteration; all batches are published from the beginning."""

    def __init__(self, folder: RunFolder, *, clock: Clock, num_waits: int) -> None:
        super().__init__(folder)
        self._published = [sampled(batch_id) for batch_id in IDS]
        self._clock = clock
        self._num_waits = num_waits
        self._num_left = 0

    most_handed_out = 1

    def claim_rollouts(self, iteration: int, *, max_batches: int) -> tuple[list[Arrived], int]:
        return super().claim_rollouts(iteration, max_batches=1)

    def train(
        self, batch: RolloutBatch | None = None, *, wait_s: float = 0.0, is_sampled: bool = False
    ) -> list[Trained]:
        if batch is not None:
            self._num_left, self.trains_at_the_end = self._num_waits, True
        elif wait_s:
            self._clock.now_s += 0.4 * self.spec.timeouts.iteration_s
            self._num_left -= 1
            self.trains_at_the_end = self._num_left > 0
        return super().train(batch, wait_s=wait_s)


class ReadBack:
    """What reads published versions back."""

    def __init__(self, played: Played) -> None:
        self._played = played

    def check(self, manifest: WeightManifest) -> None:
        self._played.said.append(f"read version {manifest.policy_version} back")
        if self._played.is_damaged:
            raise WeightsRejected("it is damaged")


class NeverLate:
    """A watch over stages that notes what it is asked."""

    def __init__(self, played: Played) -> None:
        self._played = played

    def check(self, iteration: int) -> None:
        assert iteration == 0
        if self._played.spec.stages:
            self._played.said.append("looked for stage workers")


class Ahead:
    """A window with iterations 1 and 2 open beyond the one that is gathered, and the versions -2 to 0."""

    manifests = tuple(manifest(version) for version in (-2, -1, 0))

    def ahead_of(self, iteration: int) -> list[tuple[int, tuple[str, ...]]]:
        return [(iteration + 1, ("a", "b")), (iteration + 2, ())]


def opened() -> Iteration:
    batches = tuple(prompt_batch([[5]], batch_id=batch_id) for batch_id in IDS)
    asked = AskedIteration(number=0, weights_digest=DIGEST, batches=batches, samplers={0: DIGEST})
    return Iteration(asked, trainer_epoch=1)


def gathered(held: Any) -> Iteration:
    iteration = opened()
    gather(held, iteration)
    return iteration


@pytest.fixture
def folder(tmp_path: Any) -> RunFolder:
    return RunFolder(tmp_path, "job")


def test_periodic_trains_a_batch_as_soon_as_it_is_published(folder: RunFolder) -> None:
    held = Played(folder, *IDS)
    assert [stats.batch_id for stats in gathered(held).stats] == list(IDS)
    assert held.said == [f"{what} {batch_id}" for batch_id in IDS for what in ("published", "trained")]


def test_ranks_that_train_several_batches_learn_once_that_the_last_one_is_published(folder: RunFolder) -> None:
    held = Played(folder, *IDS)
    held.trains_at_the_end = True
    gathered(held)
    expected = [word for batch_id in IDS for word in (f"published {batch_id}", f"trained {batch_id}")]
    assert held.said == [*expected, "all sampled"]


def test_passes_that_go_on_past_the_time_of_an_iteration_end_no_job_and_one_that_hangs_does(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(gather_module, "Waiting", partial(Waiting, clock=clock))
    assert len(gathered(Slow(folder, clock=clock, num_waits=2)).stats) == len(IDS)
    with pytest.raises(DeadlineExceeded, match="for the passes of 1 batches of iteration 0"):
        gathered(Slow(folder, clock=clock, num_waits=4))


def test_a_batch_is_trained_with_its_columns_which_the_audit_record_will_name(folder: RunFolder) -> None:
    held = Played(folder, *IDS, stages=[STAGE])
    iteration = gathered(held)
    steps = ("looked for stage workers", "published {}", "columns of {}", "trained {}")
    assert held.said == [step.format(batch_id) for batch_id in IDS for step in steps]
    for batch in held.handed_over:
        assert batch.columns == {"score": (pack_float32([0.5]),) * 2}
        assert [one.reward for one in batch.groups[0].rollouts] == [1.0, 2.0]
    digest = values_digest({"score": [pack_float32([0.5])] * 2})
    assert iteration.columns == dict.fromkeys(IDS, digest)
    assert iteration.digests == {batch_id: sampled(batch_id).digest for batch_id in IDS}


def test_a_batch_that_died_in_a_stage_fails_the_job_by_its_name(folder: RunFolder) -> None:
    held = Played(folder, *IDS[1:], dead={IDS[0]: "stage brief: no such file"}, stages=[STAGE])
    with pytest.raises(BatchFailed, match=r"^stage brief: no such file; so batch 0/train/0 is dead$"):
        gathered(held)


def test_synchronous_trains_none_before_the_last_one_is_published(folder: RunFolder) -> None:
    held = Played(folder, *IDS, schedule="synchronous")
    assert [stats.batch_id for stats in gathered(held).stats] == list(IDS)
    assert held.said == [f"{what} {batch_id}" for what in ("published", "trained") for batch_id in IDS]


def test_colocated_waits_once_for_the_generators_to_sleep_when_the_last_batch_is_published(folder: RunFolder) -> None:
    held = Played(folder, *IDS, schedule="colocated")
    assert len(gathered(held).stats) == len(IDS)
    published, trained = ([f"{what} {batch_id}" for batch_id in IDS] for what in ("published", "trained"))
    assert held.said == [*published, "generators sleep", *trained]


def test_synchronous_does_not_wait_for_a_batch_that_is_dead(folder: RunFolder) -> None:
    held = Played(folder, *IDS[1:], schedule="synchronous", dead={IDS[0]: "no reward"}, on_failed_batch="abandon")
    iteration = gathered(held)
    assert [stats.batch_id for stats in iteration.stats] == list(IDS[1:])
    assert iteration.abandoned == {IDS[0]: "no reward"}


def test_a_dead_batch_fails_the_job_by_its_reason_unless_the_spec_goes_on_without(folder: RunFolder) -> None:
    held = Played(folder, *IDS[1:], dead={IDS[0]: "no reward"})
    with pytest.raises(BatchFailed, match=r"^no reward; so batch 0/train/0 is dead, after \d+ attempts$"):
        gathered(held)
    assert [event.batch_id for event in held.told if isinstance(event, BatchDead)] == [IDS[0]]
    assert held.said == []


def test_a_batch_that_failed_twice_by_the_same_words_fails_the_job_without_a_number_of_attempts(
    folder: RunFolder,
) -> None:
    held = Played(folder, *IDS[1:], dead={IDS[0]: f"KeyError: 'layers'{SAME_WORDS}"})
    with pytest.raises(
        BatchFailed, match=r"^KeyError: 'layers' \(word for word as in an attempt before\); so batch 0/train/0 is dead$"
    ):
        gathered(held)


def test_a_wait_for_a_batch_says_who_has_it_and_why_it_is_not_there(folder: RunFolder) -> None:
    held = Played(folder)
    held.awaited = "batch 0/train/0, which g1 failed at attempt 1, and which is tried again: KeyError: 'layers'"
    iteration = opened()
    waits = gathering.Gathering(cast(Any, held), iteration, train=cast(Any, print), repair=cast(Any, print))
    assert waits.missing_in_words == iteration.missing_in_words
    waits._reconciled_s = -math.inf
    waits.look()
    assert waits.missing_in_words == f"{iteration.missing_in_words}: {held.awaited}"


def test_a_second_copy_of_a_batch_is_not_trained(folder: RunFolder) -> None:
    held = Played(folder, IDS[0], IDS[0], *IDS[1:])
    assert [stats.batch_id for stats in gathered(held).stats] == list(IDS)


def test_the_open_version_is_written_again_where_a_generator_refuses_it_and_no_other_is(folder: RunFolder) -> None:
    held = Played(folder, *IDS, rejected="job/weights/v000000")
    gathered(held)
    assert held.said.count("wrote version 0 again") == 1
    other = Played(folder, *IDS, rejected="job/weights/v000007")
    gathered(other)
    assert len(other.said) == 2 * len(IDS)


def test_a_whole_version_that_no_generator_can_load_ends_the_job_at_once_by_what_it_has(folder: RunFolder) -> None:
    """More generators of that kind would refuse it as well: none is waited for."""
    held = Played(folder, *IDS, rejected="job/weights/v000000")
    held.unfit = {"job/weights/v000000": "g0: version 0 has 4 tensors that the model lacks, the first: a"}
    with pytest.raises(
        WeightsUnfit, match=r"version 0 is whole, and no engine can load it: g0: version 0 has 4 tensors"
    ):
        gathered(held)
    assert held.said == ["read version 0 back"]


def test_a_damaged_version_that_no_generator_can_load_is_written_again(folder: RunFolder) -> None:
    """A name of a tensor is bytes of the file, too."""
    held = Played(folder, *IDS, rejected="job/weights/v000000")
    held.unfit, held.is_damaged = {"job/weights/v000000": "g0: version 0 lacks 1 tensors, the first: a"}, True
    gathered(held)
    assert held.said[:2] == ["read version 0 back", "wrote version 0 again"]


def test_an_older_version_that_is_refused_is_read_back_and_where_it_is_damaged_the_trainer_ends(
    folder: RunFolder,
) -> None:
    whole = Played(folder, *IDS, rejected=manifest(-1).directory)
    gathered(whole)
    assert whole.said[:2] == ["read version -1 back", "wrote version 0 again"]
    damaged = Played(folder, *IDS, rejected=manifest(-1).directory)
    damaged.is_damaged = True
    with pytest.raises(Unavailable):
        gathered(damaged)
    assert damaged.said == ["read version -1 back"]


def test_what_a_restart_has_lost_of_any_open_iteration_is_looked_for(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "RECONCILE_EVERY_S", 0.0)
    held = Played(folder, *IDS)
    gathered(held)
    asked = ["asked for 3 of iteration 0", "asked for 2 of iteration 1", "asked for 0 of iteration 2"]
    assert held.said[:3] == asked


@pytest.mark.parametrize("committed", [-2, 0])
def test_a_trainer_whose_last_commit_a_restart_has_lost_ends(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, committed: int
) -> None:
    monkeypatch.setattr(gathering, "RECONCILE_EVERY_S", 0.0)
    held = Played(folder, *IDS)
    held.committed = committed
    with pytest.raises(FenceViolation, match=f"has lost the commits since {committed}"):
        gathered(held)


def test_generators_that_came_or_went_are_told_to_those_who_watch_the_job(folder: RunFolder) -> None:
    held = Played(folder, *IDS)
    change = GeneratorsChanged(at_s=1.0, came=("generator-2",), gone=("generator-1",), num_live=1)
    held.changes = [change]
    gathered(held)
    assert [event for event in held.told if isinstance(event, GeneratorsChanged)] == [change]
