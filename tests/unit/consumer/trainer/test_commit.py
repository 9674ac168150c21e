"""How an iteration ends, with a fence, ranks and a run log that the test plays: what comes before what."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from broker.fence import FenceState
from broker.trainer_side import IterationOpening
from consumer.gradient.statistics import Scaling
from consumer.trainer.commit import Commits, save
from consumer.trainer.iteration import Iteration
from consumer.trainer.step import Stepped
from contracts.checkpoints import OlderVersion
from contracts.errors import FencedOff, FenceViolation, Unavailable, WeightsRejected
from contracts.events import AuditRecord, TimelineSpan
from contracts.run_folder import RunFolder
from contracts.schedule import Schedule
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest
from onbeat.data.prompts.prompt_batches import PromptBatches
from onbeat.loop.chain_file import ChainFile
from onbeat.loop.health.watch import HealthWatch
from onbeat.loop.trained_job import Succession, TrainedJob
from onbeat.loop.window import AskedIteration, Window
from onbeat.recording.recorder import Recorder
from tests.builders import DIGEST, commit_record, job_spec, manifest
from tests.contract.golden_files import iteration_metrics


def stepped(iteration: int) -> Stepped:
    metrics = replace(iteration_metrics(), iteration=iteration, policy_version=iteration)
    return Stepped(manifest=manifest(iteration + 1), metrics=metrics, scaling=Scaling(count=1))


class NoBatches(PromptBatches):
    """Iterations without training batches; those of an evaluating job have one word to evaluate."""

    environment = ""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec

    def learn(self, iteration: int, drawn: object) -> None: ...

    def training(self, iteration: int, manifest: WeightManifest) -> tuple[Any, ...]:
        return ()

    def num_evaluation(self, iteration: int) -> int:
        return int(self._spec.evaluates(iteration))

    def evaluation(self, iteration: int, manifest: WeightManifest) -> tuple[Any, ...]:
        return (f"evaluation of {manifest.policy_version}",) * self.num_evaluation(iteration)


class Published:
    """Older versions that can be read back, unless one is damaged."""

    is_damaged = False

    def save(self, manifests: list[WeightManifest], folder: Path) -> tuple[OlderVersion, ...]:
        if self.is_damaged:
            raise WeightsRejected("version 1 is damaged")
        for one in manifests:
            (folder / f"older-v{one.policy_version:06d}.safetensors").write_bytes(b"weights")
        return ()


def asked(number: int) -> AskedIteration:
    return AskedIteration(number=number, weights_digest=DIGEST, batches=(), samplers={number: DIGEST})


def record_of(iteration: int) -> AuditRecord:
    return commit_record(iteration)


class Synced(ChainFile):
    """A chain file that says when it is on disk."""

    def __init__(self, folder: RunFolder, said: list[str]) -> None:
        folder.path.mkdir(parents=True, exist_ok=True)
        super().__init__(folder)
        self._said = said

    def sync(self) -> None:
        super().sync()
        self._said.append("records on disk")


class Played(TrainedJob):
    """A held job; `said` has what was asked of its parts, in order."""

    def __init__(self, folder: RunFolder, **spec: Any) -> None:
        self.spec = job_spec(**({"evaluation__num_prompts": 0} | spec))
        self.schedule = Schedule(self.spec.schedule, self.spec.max_policy_lag)
        self.window = Window(self.schedule, NoBatches(self.spec), last_iteration=self.spec.last_iteration)
        self.window.add(manifest(0))
        self.published = Published()
        self.folder = folder
        self.job_id = folder.job_id
        self.outline: list[AuditRecord] = []
        self.recorder = Recorder(folder, self.spec, token_texts=partial(pytest.fail, "nothing is recorded"))
        self.settled: WeightManifest | None = None
        self.forked = UNSET
        self.said: list[str] = []
        self.run_files = None
        self.chain_file = Synced(folder, self.said)
        self.records: list[AuditRecord] = []
        self.is_on_disk = True
        self.side = self.jobs = self.generators = self.weights = self
        self.trainer_epoch = 1
        self.reported: list[TimelineSpan] = []
        self.spans = SimpleNamespace(take=lambda: self.reported)
        self.health = HealthWatch(self, folder, self.spec)  # type: ignore[arg-type]
        policy = SimpleNamespace(adapters=None)
        self.ranks = SimpleNamespace(
            learner=SimpleNamespace(policy=policy), save=self._save, rest=lambda: self.said.append("memory given back")
        )

    def trace(self, spans: object) -> None:
        """No collector is told here."""

    def forks_of(self, job_id: str) -> dict[str, int]:
        return {}

    def measure(self, spans: object, numbers: object) -> None:
        """No process serves metrics here."""

    def commit(
        self,
        record: AuditRecord,
        trained: dict[str, str],
        *,
        event: object,
        opening: IterationOpening | None,
        next_version: tuple[int, str] | None,
    ) -> None:
        digest = record.next_weights_digest
        assert next_version == ((record.iteration + 1, digest) if digest else None)
        self.records.append(record)
        self.said.append(f"committed {record.iteration}, opened {opening.iteration if opening else 'none'}")

    def fence(self) -> FenceState:
        return FenceState(state="closed", committed=-1, versions={}, trainer_epoch=1, lease_until_s=0.0)

    def audit_outline(self, job_id: str, *, seen: object) -> tuple[list[AuditRecord], str]:
        return self.outline, "before"

    def dispatch(self, iteration: int, batches: tuple[object, ...]) -> None:
        self.said.append(f"sent {', '.join(map(str, batches))} into iteration {iteration}")

    def open_iteration(self, opening: IterationOpening, versions: dict[int, str]) -> None:
        assert versions[opening.iteration] == DIGEST
        self.said.append(f"opened {opening.iteration}")

    def renew(self) -> None:
        self.said.append("renewed")

    def confirm(self, iteration: int) -> None:
        if not self.is_on_disk:
            raise FenceViolation("a restart of the server has lost the commit")
        self.said.append(f"confirmed {iteration}")

    def _save(self, folder: Path) -> None:
        self.said.append("saved")
        (folder / "model.safetensors").write_bytes(b"weights")

    def loading(self, *, before: int) -> frozenset[str]:
        return frozenset()

    def remove_before(self, policy_version: int, *, in_use: frozenset[str]) -> None:
        self.said.append(f"removed versions before {policy_version}")

    def reset_trainer_starts(self, job_id: str) -> None:
        self.said.append("progress")

    def tell(self, event: object) -> None: ...

    # RunLog

    def evaluation(self, score: object) -> None:
        self.said.append("evaluation")

    def metrics(self, metrics: object) -> None:
        self.said.append("metrics")

    def timeline(self, spans: Sequence[TimelineSpan]) -> None:
        self.said.append(" ".join(["timeline", *(span.what for span in spans)]))


def commits(held: Any, *, furthest: int = -1) -> Commits:
    held.outline = [record_of(number) for number in range(furthest + 1)]
    return Commits(held, held, Succession(held))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, "job")


SAVED = ("saved", "renewed", "timeline checkpoint", "removed versions before 0", "progress")


@pytest.mark.parametrize(
    ("schedule", "committed", "after"),
    [
        ("periodic", "committed 0, opened 1", ()),
        ("colocated", "committed 0, opened none", ("memory given back", "opened 1")),
    ],
)
def test_numbers_come_before_the_commit_and_the_lease_and_the_disk_before_a_checkpoint(
    folder: RunFolder, schedule: str, committed: str, after: tuple[str, ...]
) -> None:
    """A colocated trainer ends its turn before the next iteration is opened."""
    held = Played(folder, schedule=schedule, trainer__checkpoint_every_iterations=1)
    ends = commits(held)
    boundary = ends.commit(Iteration(asked(0), trainer_epoch=1), stepped(0))
    before = ("metrics", "timeline", committed, "renewed", "renewed", "confirmed 0", "records on disk")
    assert held.said == [*before, *SAVED, *after]
    assert (ends.succession.next, held.settled) == (1, manifest(1))
    assert boundary.opening_started_s <= boundary.opened_s


def test_what_generators_reported_stands_in_the_timeline_behind_the_commit(folder: RunFolder) -> None:
    held = Played(folder)
    wait = TimelineSpan(who="g1", what="wait", iteration=0, started_s=1.0, ended_s=2.0)
    held.reported = [wait]
    commits(held).commit(Iteration(asked(0), trainer_epoch=1), stepped(0))
    assert held.said[1:5] == ["timeline", "committed 0, opened 1", "renewed", "timeline wait"]


def test_a_trainer_that_slept_since_its_commit_writes_nothing_beside_its_successor(folder: RunFolder) -> None:
    held = Played(folder)
    held.reported = [TimelineSpan(who="g1", what="wait", iteration=0, started_s=1.0, ended_s=2.0)]

    def slept() -> None:
        raise FencedOff("epoch 1 is over", field="trainer_epoch")

    held.renew = slept  # type: ignore[method-assign]
    with pytest.raises(FencedOff):
        commits(held).commit(Iteration(asked(0), trainer_epoch=1), stepped(0))
    assert held.said[-1] == "committed 0, opened 1", "its files are as they were at the commit"


def test_a_colocated_job_s_last_commit_opens_nothing(folder: RunFolder) -> None:
    held = Played(folder, schedule="colocated", iterations=1)
    ends = commits(held)
    ends.commit(Iteration(asked(0), trainer_epoch=1), stepped(0))
    assert ends.succession.next is None
    assert not [said for said in held.said if said.startswith("opened")]


def test_an_iteration_that_only_evaluates_is_the_last_one_and_changes_no_file(folder: RunFolder) -> None:
    held = Played(folder, trainer__checkpoint_every_iterations=1)
    ends = commits(held)
    ends.commit(Iteration(asked(4), trainer_epoch=1), None)
    assert (ends.succession.next, held.said) == (None, ["timeline", "committed 4, opened none", "renewed"])


ENDS_EARLY: dict[str, Any] = {
    "evaluation__num_prompts": 8,
    "evaluation__every_iterations": 2,
    "evaluation__stop_when": {"held_out": 0.9},
}


def test_a_trainer_that_has_the_version_at_which_the_job_ended_early_has_no_work_and_one_with_an_older_has(
    folder: RunFolder,
) -> None:
    """A trainer died between its last checkpoint and the end of the job."""
    held = Played(folder, **ENDS_EARLY)
    ended = replace(record_of(2), next_weights_digest="", held_out=0.95, stopped="version 2 is good enough")
    held.outline = [record_of(0), record_of(1), ended]
    succession = Succession(held)
    assert not succession.has_work(2)
    assert succession.has_work(1)
    assert succession.last_iteration == 2


def test_an_iteration_that_evaluated_nothing_ends_no_job(folder: RunFolder) -> None:
    held = Played(folder, **ENDS_EARLY)
    assert Succession(held).stop_reason(Iteration(asked(1), trainer_epoch=1)) == ""


def test_what_is_settled_is_saved_once_and_nothing_is_where_the_commit_is_lost(folder: RunFolder) -> None:
    held: Any = Played(folder)
    save(held)
    held.settled = manifest(0)
    save(held)
    assert held.said == []
    held.settled = manifest(3)
    held.is_on_disk = False
    with pytest.raises(FenceViolation):
        save(held)
    assert held.said == []
    held.is_on_disk = True
    save(held)
    save(held)
    assert held.said == ["confirmed 2", "records on disk", "saved"]


def test_a_checkpoint_follows_every_so_many_iterations_and_the_last_one() -> None:
    spec = job_spec(iterations=7, trainer__checkpoint_every_iterations=3)
    assert [iteration for iteration in range(7) if spec.checkpoints_after(iteration)] == [2, 5, 6]


LAGGING: dict[str, Any] = {
    "iterations": 6,
    "schedule": "delayed",
    "max_policy_lag": 2,
    "algorithm__correction": "tis",
    "trainer__checkpoint_every_iterations": 1,
}


def test_under_a_lag_a_commit_opens_a_later_iteration_and_the_next_one_is_evaluated_after_it(folder: RunFolder) -> None:
    held = Played(folder, **LAGGING, evaluation__num_prompts=8, evaluation__every_iterations=1)
    held.evaluation = lambda score: None  # type: ignore[attr-defined]
    held.window.begin(0)
    ends = commits(held)
    ends.commit(Iteration(asked(0), trainer_epoch=1), stepped(0))
    assert ends.succession.next == 1
    at = held.said.index("committed 0, opened 3")
    after = ["committed 0, opened 3", "renewed", "sent evaluation of 1 into iteration 1", "renewed"]
    assert held.said[at : at + 4] == after


def test_a_checkpoint_under_a_lag_takes_the_older_versions_of_its_window_and_they_stay_until_the_next_commit(
    folder: RunFolder,
) -> None:
    held = Played(folder, **LAGGING)
    held.window.begin(0)
    chain = commits(held)
    for number in range(4):
        held.window.turn_to(number)
        chain.commit(Iteration(asked(number), trainer_epoch=1), stepped(number))
    names = sorted(path.name for path in folder.checkpoint_after(3).glob("older-*"))
    assert names == ["older-v000002.safetensors", "older-v000003.safetensors"]
    assert [line for line in held.said if line.startswith("removed")] == [
        f"removed versions before {version}" for version in (0, 0, 0, 1)
    ]


def test_a_trainer_ends_where_an_older_version_cannot_be_read_back(folder: RunFolder) -> None:
    held = Played(folder, **LAGGING)
    held.window.begin(0)
    held.published.is_damaged = True
    with pytest.raises(Unavailable, match="the trainer that starts next publishes it again"):
        commits(held).commit(Iteration(asked(0), trainer_epoch=1), stepped(0))
    assert not folder.checkpoint_after(0).exists()
