"""Recorded batches are sampled again, by a real generator on a person's word, and are the same bit for bit (I7)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.rollouts import batch_digest
from contracts.run_folder import RunFolder
from onbeat.cli import run
from onbeat.recording.files import INDEX, RecordedFiles, write_record
from onbeat.recording.records import RecordedBatch
from tests.chaos.short_job import DEADLINE_S, LAG, long_variant, running, short_job
from tests.pipeline import REPOSITORY, Pipeline
from tests.played import FORGETFUL

ALL: dict[str, Any] = {"evaluations": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "an older version of a lag": LAG,
    "several updates": {"algorithm__updates_per_iteration": 2},
    "adapters": {"trainer__lora": {"rank": 4}},
    "deltas": {"weights": {"transport": "delta"}},
    "resampled prompts": {"rollout__max_resamples": 2},
    "turns with a tool": {
        "model__path": "configs/models/secret-table",
        "dataset": {"type": "environment", "num_train_prompts": 64},
        "environment": FORGETFUL,
        "reward__components": [],
    },
}


def replayed(run_root: Path, job_id: str, batch_id: str, capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    """Runs `onbeat replay --json`: its exit code, and what it printed."""
    iteration, purpose, index = batch_id.split("/")
    flags += ("--run-dir", str(run_root), "--model-root", str(REPOSITORY), "--timeout", str(DEADLINE_S), "--json")
    flags += ("--evaluation",) if purpose == "evaluation" else ()
    threads = () if "--threads" in flags else ("--threads", "1")
    capsys.readouterr()
    try:
        code = run(["replay", job_id, "--iteration", iteration, "--batch", index, *flags, *threads])
    except SystemExit as ended:
        code = int(str(ended.code))
    return code, json.loads(capsys.readouterr().out)


def with_another_token(record: RecordedBatch) -> RecordedBatch:
    """A record that says that the model sampled another last token, and has the digest of that."""
    group = record.batch.groups[0]
    completion = group.rollouts[0].completion
    *tokens, last = unpack_int32(completion.token_ids)
    other = replace(completion, token_ids=pack_int32([*tokens, last + 1]))
    rollouts = (replace(group.rollouts[0], completion=other), *group.rollouts[1:])
    batch = replace(record.batch, groups=(replace(group, rollouts=rollouts), *record.batch.groups[1:]))
    return replace(record, batch=batch, batch_digest=batch_digest(batch))


def forge(files: RecordedFiles, record: RecordedBatch) -> None:
    """Puts a record in its place, and into the index of its iteration."""
    batch = record.batch
    write_record(files.path_of(batch.batch_id), record)
    index = files.index(batch.iteration)
    listed = tuple(
        replace(one, batch_digest=record.batch_digest) if one.batch_id == batch.batch_id else one
        for one in index.batches
    )
    write_record(files.folder_of(batch.iteration) / INDEX, replace(index, batches=listed))


def test_a_batch_is_the_same_again_and_a_changed_record_is_told_by_its_token_from_a_run_folder_alone(
    pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    with running(pipeline, "producer-first"):
        job_id = pipeline.train(short_job(iterations=2, recording=ALL))
    # Another machine: the folder of the job, and nothing of the stack that trained it.
    moved = RunFolder(tmp_path / "runs", job_id)
    shutil.copytree(RunFolder(pipeline.settings.run_root_path, job_id).path, moved.path)
    before = {path: path.read_bytes() for path in moved.path.rglob("*") if path.is_file()}
    files = RecordedFiles(moved)
    code, answer = replayed(moved.run_root, job_id, "1/train/2", capsys)
    assert (code, answer["equal"], answer["reason"]) == (0, True, "")
    assert answer["digest"] == answer["recorded_digest"] == files.read("1/train/2").batch_digest
    assert before == {path: path.read_bytes() for path in moved.path.rglob("*") if path.is_file()}
    assert [path.name for path in moved.run_root.iterdir()] == [job_id], "nothing is left beside it"
    forge(files, with_another_token(files.read("0/train/1")))
    request.getfixturevalue("forked_services")  # the first process was executed, as a person's is
    code, answer = replayed(moved.run_root, job_id, "0/train/1", capsys)
    assert (code, answer["equal"]) == (1, False)
    assert answer["reason"].startswith("group 0, sample 0: ")
    shutil.rmtree(moved.weights)
    code, answer = replayed(moved.run_root, job_id, "1/train/2", capsys)
    assert (code, "is not kept" in str(answer)) == (2, True)


@long_variant
def test_an_object_store_keeps_the_versions_of_recorded_batches_when_the_job_is_over(
    pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = (tmp_path / "bucket").as_uri()
    with running(pipeline, "producer-of-objects", objects=objects):
        job_id = pipeline.train(
            short_job(iterations=2, recording=ALL, weights={"transport": "object"}), objects=objects
        )
    monkeypatch.setenv("ONBEAT_OBJECTS", objects)
    code, answer = replayed(tmp_path / "another host", job_id, "1/train/2", capsys)
    assert (code, answer["equal"], answer["reason"]) == (0, True, "")


@long_variant
def test_another_kind_of_engine_says_so_instead_of_a_digest(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(pipeline, "producer-of-one-thread"):
        job_id = pipeline.train(short_job(iterations=2, recording=ALL))
    code, answer = replayed(pipeline.settings.run_root_path, job_id, "1/train/0", capsys, "--threads", "2")
    assert (code, answer["equal"], answer["digest"]) == (1, None, "")
    assert "--threads that the job was sampled with" in answer["reason"]


@long_variant
@pytest.mark.usefixtures("forked_services")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_is_the_same_however_its_job_samples(
    pipeline: Pipeline, capsys: pytest.CaptureFixture[str], variant: str
) -> None:
    with running(pipeline, "producer-variant"):
        job_id = pipeline.train(short_job(**{"iterations": 4, "recording": ALL, **VARIANTS[variant]}))
    for batch_id in ("0/train/0", "3/train/1", "0/evaluation/0"):
        code, answer = replayed(pipeline.settings.run_root_path, job_id, batch_id, capsys)
        assert (code, answer["equal"]) == (0, True), f"{batch_id}: {answer['reason']}"
