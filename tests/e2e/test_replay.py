"""Recorded batches are sampled again, by a real generator on a person's word, and are the same bit for bit (I7)."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from broker.replays import Replays
from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.recorded.batches import RecordedBatch
from contracts.recorded.files import INDEX, RecordedFiles, write_record
from contracts.rollouts import batch_digest
from contracts.run_folder import RunFolder
from onbeat.cli import run
from tests.chaos.short_job import DEADLINE_S, LAG, long_variant, running, short_job
from tests.e2e.test_turns import ENVIRONMENT
from tests.every_key import every_key
from tests.pipeline import REPOSITORY, Pipeline, free_port, until_ready, wait_for_exit

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
        "environment": ENVIRONMENT,
        "reward__components": [],
    },
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with Pipeline(tmp_path_factory.mktemp("replay")) as pipeline:
        yield pipeline


@pytest.fixture(scope="module")
def gateway(pipeline: Pipeline) -> str:
    """Its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    until_ready(f"{url}/readyz", pipeline.start("gateway", port=port))
    return url


def files_of(pipeline: Pipeline, job_id: str) -> RecordedFiles:
    return RecordedFiles(RunFolder(pipeline.settings.run_root_path, job_id))


def replayed(gateway: str, job_id: str, batch_id: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """Runs `onbeat replay --json`: its exit code, and what it printed."""
    iteration, purpose, index = batch_id.split("/")
    flags = ["--gateway", gateway, "--api-key", "test-key", "--timeout", str(DEADLINE_S), "--json"]
    flags += ["--evaluation"] if purpose == "evaluation" else []
    capsys.readouterr()
    try:
        code = run(["replay", job_id, "--iteration", iteration, "--batch", index, *flags])
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


def test_a_batch_is_the_same_again_and_a_changed_record_is_told_by_its_token(
    pipeline: Pipeline, gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(pipeline, "producer-first"):
        job_id = pipeline.train(short_job(iterations=2, recording=ALL))
        dump = {key: pipeline.broker.redis.dump(key) for key in every_key(pipeline.broker.job_keys(job_id))}
        files = files_of(pipeline, job_id)
        code, found = replayed(gateway, job_id, "1/train/2", capsys)
        assert (code, found["equal"], found["reason"]) == (0, True, "")
        assert found["digest"] == files.read("1/train/2").batch_digest
        forge(files, with_another_token(files.read("0/train/1")))
        code, found = replayed(gateway, job_id, "0/train/1", capsys)
    assert (code, found["state"], found["equal"]) == (1, "done", False)
    assert found["reason"].startswith("group 0, sample 0: ")
    assert dump == {key: pipeline.broker.redis.dump(key) for key in every_key(pipeline.broker.job_keys(job_id))}, (
        "no fence saw it"
    )


def offline(run_root: Path, job_id: str, *flags: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """Runs `onbeat replay --offline --json`: its exit code, and what it printed."""
    capsys.readouterr()
    place = ["--run-dir", str(run_root), "--model-root", str(REPOSITORY), "--threads", "1"]
    try:
        code = run(["replay", job_id, "--offline", *place, "--timeout", str(DEADLINE_S), "--json", *flags])
    except SystemExit as ended:
        code = int(str(ended.code))
    return code, json.loads(capsys.readouterr().out)


def test_a_run_folder_alone_is_enough_to_sample_a_batch_again(
    pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(pipeline, "producer-elsewhere"):
        job_id = pipeline.train(short_job(iterations=2, recording=ALL))
    # Another machine: the folder of the job, and nothing of the stack that trained it.
    moved = RunFolder(tmp_path / "runs", job_id)
    shutil.copytree(RunFolder(pipeline.settings.run_root_path, job_id).path, moved.path)
    before = {path: path.read_bytes() for path in moved.path.rglob("*") if path.is_file()}
    batch = ("--iteration", "1", "--batch", "2")
    code, found = offline(moved.run_root, job_id, *batch, capsys=capsys)
    assert (code, found["equal"]) == (0, True)
    assert before == {path: path.read_bytes() for path in moved.path.rglob("*") if path.is_file()}
    assert [path.name for path in moved.run_root.iterdir()] == [job_id], "nothing is left beside it"
    shutil.rmtree(moved.weights)
    code, found = offline(moved.run_root, job_id, *batch, capsys=capsys)
    assert code != 0
    assert "is not kept any more" in str(found)
    code, found = offline(moved.run_root, "job-of-nobody", *batch, capsys=capsys)
    assert code != 0
    assert "--run-dir names the folder that has the job's" in str(found)


@long_variant
@pytest.mark.parametrize("variant", ["turns with a tool", "deltas"])
def test_offline_is_as_with_a_stack(
    variant: str, pipeline: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = VARIANTS[variant]
    if "environment" in changes and "environment_service" not in pipeline.children:
        pipeline.start_environments()
    with running(pipeline, f"producer-before-{variant.split()[0]}"):
        job_id = pipeline.train(short_job(iterations=2, recording=ALL, **changes))
    run_root = pipeline.settings.run_root_path
    code, found = offline(run_root, job_id, "--iteration", "1", "--batch", "0", capsys=capsys)
    assert (code, found["equal"]) == (0, True)
    files = files_of(pipeline, job_id)
    forge(files, with_another_token(files.read("0/train/1")))
    code, found = offline(run_root, job_id, "--iteration", "0", "--batch", "1", capsys=capsys)
    assert (code, found["reason"][:19]) == (1, "group 0, sample 0: ")
    code, found = offline(run_root, job_id, "--iteration", "1", "--batch", "0", "--threads", "2", capsys=capsys)
    assert code != 0
    assert "--threads that the job was sampled with" in str(found)


@long_variant
def test_a_generator_that_dies_of_a_replay_leaves_it_to_another(
    pipeline: Pipeline, gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(pipeline, "producer-trains"):
        job_id = pipeline.train(short_job(iterations=2, recording=ALL))
    record = files_of(pipeline, job_id).read("1/train/0")
    dying = pipeline.start("producer-dying", crash_at="producer.replaying")
    Replays(pipeline.broker).request(job_id, "1/train/0", recorded_digest=record.batch_digest)
    assert wait_for_exit(dying, DEADLINE_S) == -signal.SIGKILL
    with running(pipeline, "producer-second"):
        code, found = replayed(gateway, job_id, "1/train/0", capsys)
    assert (code, found["equal"]) == (0, True)


@long_variant
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_batch_is_the_same_however_its_job_samples(
    pipeline: Pipeline, gateway: str, capsys: pytest.CaptureFixture[str], variant: str
) -> None:
    if variant == "turns with a tool" and "environment_service" not in pipeline.children:
        pipeline.start_environments()
    with running(pipeline, "producer-variant"):
        job_id = pipeline.train(short_job(**{"iterations": 4, "recording": ALL, **VARIANTS[variant]}))
        for batch_id in ("0/train/0", "3/train/1", "0/evaluation/0"):
            code, found = replayed(gateway, job_id, batch_id, capsys)
            assert (code, found["equal"]) == (0, True), f"{batch_id}: {found['reason']}"


@long_variant
def test_a_running_job_is_not_held_up_and_ends_with_the_same_weights(
    pipeline: Pipeline, gateway: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its one generator samples an old batch again between two iterations."""
    with running(pipeline, "producer-busy"):
        digest = pipeline.final_digest(pipeline.train(short_job(iterations=20)))
        job_id, _ = pipeline.jobs.create(short_job(iterations=20, recording={**ALL, "keep_iterations": 100}))
        trainer = pipeline.start(f"consumer-{job_id}", job_id)
        while not files_of(pipeline, job_id).iterations()[1:]:
            assert trainer.exit_code is None
        for _ in range(3):
            code, found = replayed(gateway, job_id, "0/train/0", capsys)
            assert (code, found.get("equal")) == (0, True), found
        assert wait_for_exit(trainer, DEADLINE_S) == 0
    assert pipeline.final_digest(job_id) == digest
