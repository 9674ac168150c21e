"""A trainer that records what it trains: the records are whole, bounded and repeatable, and the run is the same."""

from __future__ import annotations

import errno
import random
import string
from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

import consumer.trainer.trainer as trainer
from broker.connection.client import Broker
from broker.job_store import JobStore
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Iteration
from consumer.trainer.step import Stepped
from contracts.encoding.json_lines import read_json_lines
from contracts.events import IterationMetrics
from contracts.rollouts import batch_digest
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.recording import RecordingSpec
from onbeat.data.rendering.token_texts import TokenTexts
from onbeat.recording import recorder
from onbeat.recording.files import INDEX, RecordedFiles
from onbeat.recording.recorder import Recorder
from onbeat.recording.records import RecordedBatch
from tests.builders import job_spec
from tests.own_trainer import generating, names_in, one_trainer

pytestmark = pytest.mark.usefixtures("restored_process")

STEP = trainer.step
FULL = OSError(errno.ENOSPC, "No space left on device")


class Dead(Exception):
    """An error that no trainer expects, and that no other repeats word for word."""

    def __init__(self) -> None:
        super().__init__("".join(random.choices(string.ascii_letters, k=24)))


def trained(own: StackSettings, broker: Broker, **changes: object) -> tuple[RecordedFiles, RunFolder, str]:
    """Runs a job to its end: its records, its folder, the digest of its final weights."""
    jobs = JobStore(broker)
    fields = {"iterations": 3, "rollout__batches_per_iteration": 2, "evaluation__num_prompts": 4, **changes}
    job_id, _ = jobs.create(job_spec(**{"timeouts__trainer_lease_s": 0.5, "optimizer__learning_rate": 1e-3, **fields}))
    with generating(broker, job_id):
        assert one_trainer(own, broker, job_id) == 0
    folder = RunFolder(own.run_root_path, job_id)
    digests = [record.next_weights_digest for record in jobs.audit(job_id) if record.next_weights_digest]
    return RecordedFiles(folder), folder, digests[-1]


def records_of(files: RecordedFiles) -> list[RecordedBatch]:
    return [files.read(one.batch_id) for number in files.iterations() for one in files.index(number).batches]


def test_the_record_has_what_was_published_and_what_the_trainer_measured_of_it(
    own: StackSettings, broker: Broker
) -> None:
    files, folder, digest = trained(own, broker, recording={"evaluations": True}, algorithm__updates_per_iteration=2)
    _, _, without = trained(own, broker, algorithm__updates_per_iteration=2)
    assert digest == without, "recording changes no weight"
    chain = {name: known for record in JobStore(broker).audit(folder.job_id) for name, known in record.batches.items()}
    records = records_of(files)
    assert {record.batch.batch_id: record.batch_digest for record in records} == chain, "every batch of the chain"
    numbers = {one.iteration: one for one in read_json_lines(folder.metrics, IterationMetrics)}
    largest = dict.fromkeys(numbers, 0.0)
    for record in records:
        batch = record.batch
        assert batch_digest(replace(batch, columns=UNSET)) == record.batch_digest
        assert record.manifest is not None
        assert (record.manifest.policy_version, record.manifest.weights_digest) == (
            batch.policy_version,
            batch.weights_digest,
        )
        assert record.prompt_batch.weights_digest == batch.weights_digest
        if batch.purpose == "evaluation":
            assert (record.advantages, record.trainer_logprobs) == (None, None)
            continue
        assert record.advantages is not None
        assert record.trainer_logprobs is not None
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        for rollout, advantage, found in zip(rollouts, record.advantages, record.trainer_logprobs, strict=True):
            assert (found is None) == (advantage == 0.0), "what teaches nothing doesn't go through the model"
            tokens = np.frombuffer(rollout.completion.token_ids, "<i4").tolist()
            assert all(token in record.text_of for token in tokens)
            if found is not None:
                gap = np.abs(np.frombuffer(found, "<f4") - np.frombuffer(rollout.completion.generator_logprobs, "<f4"))
                largest[batch.iteration] = max(largest[batch.iteration], float(gap.max()))
    assert largest == pytest.approx({number: one.mismatch_max for number, one in numbers.items()})


def test_old_iterations_go_first_and_versions_stay_as_long_as_what_they_sampled(
    own: StackSettings, broker: Broker
) -> None:
    files, folder, _ = trained(own, broker, iterations=6, recording={"keep_iterations": 2}, evaluation__num_prompts=0)
    assert files.iterations() == [4, 5]
    assert {"v000004", "v000005", "v000006"} <= set(names_in(folder.weights))
    assert not {"v000000", "v000001", "v000002"} & set(names_in(folder.weights))
    _, without, _ = trained(own, broker, iterations=6, recording={"max_version_bytes": 0}, evaluation__num_prompts=0)
    assert names_in(without.weights) == ["v000005", "v000006"], "as in a job that records nothing"


def test_the_bound_in_bytes_drops_the_oldest_and_leaves_out_what_alone_is_larger(
    own: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Recorder.__init__
    bounds = [20_000]

    def bounded(self: Recorder, *args: object, **options: object) -> None:
        made(self, *args, **options)  # type: ignore[arg-type]
        self._policy = replace(RecordingSpec(), max_bytes=bounds[-1])

    monkeypatch.setattr(Recorder, "__init__", bounded)
    files, _, _ = trained(own, broker, iterations=6, recording={}, evaluation__num_prompts=0)
    total = sum(map(files.num_bytes, files.iterations()))
    assert 5_000 < total <= 20_000 + 2_000, "an index may be beyond it"
    assert files.iterations()[-1] == 5
    assert len(files.iterations()) < 6
    bounds.append(1_000)
    files, _, _ = trained(own, broker, recording={}, evaluation__num_prompts=0)
    assert [files.index(number).num_left_out for number in files.iterations()] == [2, 2, 2]
    messages = [record.getMessage() for record in caplog.records]
    said = [message for message in messages if "can't be recorded; the run goes on" in message]
    assert len(said) == 3, "once an iteration"
    assert "recording.max_bytes" in said[0]


def test_a_disk_that_refuses_costs_the_record_and_not_the_run(
    own: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, refused = recorder.write_record, []

    def full(path: Path, record: object) -> int:
        if path.parent.name == "i000001":
            refused.append(path.name)
            raise FULL
        return write(path, record)  # type: ignore[arg-type]

    _, _, digest = trained(own, broker, evaluation__num_prompts=0)
    monkeypatch.setattr(recorder, "write_record", full)
    files, _, with_full_disk = trained(own, broker, recording={}, evaluation__num_prompts=0)
    assert digest == with_full_disk
    assert refused == ["train-000000.msgpack", "train-000001.msgpack", INDEX]
    assert [(number, len(list(files.batch_paths(number)))) for number in files.iterations()] == [(0, 2), (1, 0), (2, 2)]
    assert "No space left on device" in caplog.text


def test_what_a_dead_trainer_recorded_is_recorded_again_with_the_same_bytes(
    own: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fatal(held: HeldJob, current: Iteration) -> Stepped:
        if current.number == 3:
            raise Dead
        return STEP(held, current)

    jobs = JobStore(broker)
    spec = job_spec(
        iterations=4,
        recording={},
        evaluation__num_prompts=0,
        timeouts__trainer_lease_s=0.5,
        trainer__checkpoint_every_iterations=2,
    )
    job_id, _ = jobs.create(spec)
    files = RecordedFiles(RunFolder(own.run_root_path, job_id))
    with generating(broker, job_id):
        monkeypatch.setattr(trainer, "step", fatal)
        with pytest.raises(Dead):
            one_trainer(own, broker, job_id)
        before = {path: path.read_bytes() for path in files.path.glob("*/*")}
        assert len([path for path in before if path.parent.name == "i000003"]) == 4, "four batches, and no index yet"
        (files.path / ".i000001.0123456789ab").mkdir()
        (files.folder_of(3) / ".train-000000.msgpack.0123456789ab").write_bytes(b"torn")
        monkeypatch.setattr(trainer, "step", STEP)
        assert one_trainer(own, broker, job_id) == 0
    after = {path: path.read_bytes() for path in files.path.rglob("*") if path.is_file()}
    assert before.items() <= after.items()
    assert {path.name for path in after.keys() - before.keys()} == {INDEX}
    assert not list(files.path.rglob(".*"))


def test_a_spec_without_a_word_has_a_batch_of_each_iteration_recorded_and_no_version_kept(
    own: StackSettings, broker: Broker
) -> None:
    rollout = {"rollout__batches_per_iteration": 1, "evaluation__num_prompts": 0}
    files, folder, digest = trained(own, broker, **rollout)
    assert files.iterations() == [0, 1, 2]
    assert names_in(folder.weights) == ["v000002", "v000003"], "as in a job that records nothing"
    for nothing in (None, {"share": 0.0}):
        files, _, without = trained(own, broker, recording=nothing, **rollout)
        assert (files.iterations(), without) == ([], digest)
    assert job_spec(rollout__batches_per_iteration=8).recording_policy == replace(
        RecordingSpec(), share=1 / 8, max_bytes=2**26, max_version_bytes=0
    )
    only_held_out = RecordingSpec(share=0.0, evaluations=True)
    assert job_spec(recording=only_held_out).recording_policy == only_held_out


class Odd:
    """A tokenizer with a sentencepiece space, half a surrogate pair, and an id that it doesn't know."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        if token_ids[0] > 2:
            raise IndexError(token_ids[0])
        return ["the", "\ud800", "\x1b[2J"][token_ids[0]]

    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = False) -> str:
        return "\u2581the" if ids == 0 else "x"


def test_a_piece_is_text_that_utf_8_has_whatever_the_tokenizer_says() -> None:
    pieces = TokenTexts(Odd()).of([0, 1, 2, 3, 0])
    assert pieces == (" the", "?", "\x1b[2J", "[3]", " the")
