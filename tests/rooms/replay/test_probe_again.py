"""`onbeat verify --probe` computes a run's probes again, from the model's folder and from its checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import UNSET

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner, OptimizerStep
from consumer.gradient.saved_state import adapter_state, save_state
from consumer.model.checkpoint import write_checkpoint
from consumer.trainer.probes import rows_of
from contracts.answers import ProbeCheck
from contracts.encoding.wire import decode_json, encode_json
from contracts.events import AuditRecord, record_digest
from contracts.jobs import JobState, JobStatus
from contracts.probes import LIMITS, ProbedVersion, rows_digest
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.audit.chain import AuditEntry
from onbeat.commands.exports.audit_file import write_audit_at
from onbeat.loop.trained_job import job_prompts
from onbeat.replay import probe_again
from onbeat.weights.hashing import tensors_digest
from tests.builders import commit_record, job_spec, rollout_batch, tiny_model_folder
from tests.trajectories import ENVIRONMENT
from tests.unit.consumer.gradient.test_probe import Collected

LORA: dict[str, Any] = {"trainer__lora": {"rank": 2}}


class Run:
    """A run of two iterations, whose checkpoints and probes are those that a trainer leaves."""

    def __init__(self, root: Path, **changes: Any) -> None:
        tiny_model_folder(root)
        self.spec: JobSpec = job_spec(
            rollout__batches_per_iteration=1, rollout__probe={"rows": 4, "tokens": 8}, **changes
        )
        self.settings = StackSettings(model_root=str(root), run_root=str(root / "runs"))
        self.folder = RunFolder(root / "runs", "job")
        learner = make_learner(self.settings, self.spec)
        rows = rows_of(self.spec, learner.policy, job_prompts(self.settings, self.spec, "job").train)
        self.rows = rows_digest(rows)
        probes = [self._probe(learner.probe(rows))]
        digests = [digest_of(learner)]
        for iteration in range(2):
            learner.train(rollout_batch(seed=iteration, batch_id=f"{iteration}/train/0"))
            learner.step(
                OptimizerStep(iteration=iteration, divisor=1.0, learning_rate=0.05, is_last=True, syncs_reference=False)
            )
            probes.append(self._probe(learner.probe(rows)))
            digests.append(digest_of(learner))
            self._save(learner, iteration, digests[-1])
        self.records = [
            commit_record(
                iteration,
                weights_digest=digests[iteration],
                next_weights_digest=digests[iteration + 1],
                probe=probes[iteration + 1],
                first_probe=UNSET if iteration else probes[0],
            )
            for iteration in range(2)
        ]

    def _probe(self, logprobs: bytes) -> ProbedVersion:
        return ProbedVersion(rows=self.rows, logprobs=logprobs)

    def _save(self, learner: Learner, iteration: int, digest: str) -> None:
        adapters = None
        if learner.policy.adapters is not None:
            adapters = adapter_state(learner.policy)
        write_checkpoint(
            self.folder.checkpoint_after(iteration),
            job_id="job",
            iteration=iteration,
            weights_digest=digest,
            adapters=adapters,
            save=lambda scratch: save_state(scratch, learner.policy, learner.optimizer),
        )

    def entries(self, *records: AuditRecord) -> list[AuditEntry]:
        return [AuditEntry(record=record, digest=record_digest(record)) for record in records or self.records]

    def check(self, *records: AuditRecord) -> ProbeCheck:
        return probe_again.check(self.settings, self.folder, self.spec, self.entries(*records))


def digest_of(learner: Learner) -> str:
    weights: Any = Collected()
    learner.publish(weights)
    return tensors_digest(weights)


@pytest.mark.parametrize("changes", [{}, LORA], ids=["full", "LoRA"])
def test_each_version_on_disk_computes_the_bits_that_its_probe_says(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = Run(tmp_path, **changes)
    checked = run.check()
    assert (checked.gaps, checked.notes) == ((), ())
    found = [(computed.version, computed.source, computed.is_equal, computed.gap) for computed in checked.versions]
    assert found == [
        (0, "the model's folder", True, 0.0),
        (1, "job/checkpoints/i000000", True, 0.0),
        (2, "job/checkpoints/i000001", True, 0.0),
    ]


@pytest.fixture(name="run", scope="module")
def run_that_is_read(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


def with_probe(record: AuditRecord, *, plus: float) -> AuditRecord:
    assert record.probe is not UNSET
    # Four rows of two scored tokens: the fourth number is the last one of row 1.
    logprobs = np.frombuffer(record.probe.logprobs, dtype="<f4") + np.float32([*[0.0] * 3, plus, *[0.0] * 4])
    return msgspec.structs.replace(record, probe=msgspec.structs.replace(record.probe, logprobs=logprobs.tobytes()))


def test_a_version_that_computes_otherwise_than_its_probe_is_a_gap_with_row_and_gap(run: Run) -> None:
    checked = run.check(run.records[0], with_probe(run.records[1], plus=0.5))
    (gap,) = checked.gaps
    assert gap.startswith("job/checkpoints/i000001: version 2 computes otherwise than its probe says: row 1 is ")
    assert gap.endswith(f"off, and {LIMITS['float32']:.2g} is allowed")
    assert [computed.is_equal for computed in checked.versions] == [True, True, False]


def test_a_probe_of_another_length_than_its_rows_give_is_a_gap_and_the_other_versions_are_compared(run: Run) -> None:
    probe = run.records[0].probe
    assert probe is not UNSET
    shorter = msgspec.structs.replace(probe, logprobs=probe.logprobs[:-4])
    checked = run.check(msgspec.structs.replace(run.records[0], probe=shorter), run.records[1])
    # Four rows of two scored tokens, in float32.
    assert checked.gaps == ("job/checkpoints/i000000: version 1 has a probe of 28 bytes, its rows give 32",)
    assert [computed.version for computed in checked.versions] == [0, 2]
    assert checked.notes == (), "its weights are on disk"


def test_rounding_is_said_and_no_gap(run: Run) -> None:
    checked = run.check(with_probe(run.records[0], plus=1e-5), run.records[1])
    assert checked.gaps == ()
    rounded = checked.versions[1]
    assert (rounded.is_equal, rounded.row) == (False, 1)
    assert 0.0 < rounded.gap < 1e-5


def test_other_rows_than_those_of_seed_and_prompts_are_a_gap(run: Run) -> None:
    other = [
        msgspec.structs.replace(record, probe=msgspec.structs.replace(record.probe, rows="f" * 64), first_probe=UNSET)
        for record in run.records
        if record.probe is not UNSET
    ]
    assert "the probes have other rows than the spec's seed and prompts give" in run.check(*other).gaps[0]


def test_versions_without_weights_are_counted_and_an_abandoned_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path)
    shutil.rmtree(run.folder.checkpoint_after(0))
    assert run.check().notes == ("the weights of 1 of 3 versions are no longer on disk",)
    other = msgspec.structs.replace(run.records[1], next_weights_digest="9" * 64)
    checked = run.check(run.records[0], other)
    assert [computed.version for computed in checked.versions] == [0]
    assert checked.notes == ("the weights of 2 of 3 versions are no longer on disk",)


def test_a_damaged_checkpoint_is_a_gap_that_names_it(tmp_path: Path) -> None:
    run = Run(tmp_path)
    file = run.folder.checkpoint_after(1) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (gap,) = run.check().gaps
    assert gap.startswith("job/checkpoints/i000001: ")
    assert "model.safetensors" in gap


def test_a_run_without_probes_and_one_of_an_environment_are_notes(run: Run) -> None:
    bare = [msgspec.structs.replace(record, probe=UNSET, first_probe=UNSET) for record in run.records]
    assert run.check(*bare) == ProbeCheck(notes=("no version has a probe that could be computed again",))
    played = job_spec(environment=ENVIRONMENT)
    (note,) = probe_again.check(run.settings, run.folder, played, run.entries()).notes
    assert "prompts that an environment makes" in note


def test_a_model_that_is_gone_is_a_gap_that_names_the_field(run: Run, tmp_path: Path) -> None:
    nowhere = msgspec.structs.replace(run.settings, model_root=str(tmp_path))
    (gap,) = probe_again.check(nowhere, run.folder, run.spec, run.entries()).gaps
    assert gap.startswith("no probe can be computed again: model.path: ")


def test_the_process_reads_the_chain_and_writes_its_answer(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.folder.spec.write_bytes(encode_json(run.spec))
    status = JobStatus(
        job_id="job", name="job", state=JobState.SUCCEEDED, schedule="periodic", iterations=2, created_s=1.0
    )
    write_audit_at(tmp_path / "audit.json", status, run.entries())
    for name, value in run.settings.environment().items():
        monkeypatch.setenv(name, value)
    answer = tmp_path / "answer.json"
    assert probe_again.main("job", str(tmp_path / "audit.json"), str(answer)) == 0
    assert [computed.is_equal for computed in decode_json(answer.read_bytes(), ProbeCheck).versions] == [True] * 3
    assert probe_again.main("job", str(tmp_path / "nothing.json"), str(answer)) == probe_again.REFUSED
