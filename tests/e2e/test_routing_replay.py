"""A job that replays routes keeps the promise of test_same_weights.py (I7), and its batches can be sampled again."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from contracts.encoding.wire import decode_json
from contracts.events import IterationMetrics
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.cli import run
from onbeat.recording.files import RecordedFiles
from tests.building.specs import trained_job
from tests.families import family_folder
from tests.pipeline import Pipeline

pytestmark = pytest.mark.usefixtures("forked_ranks")

ITERATIONS = 3


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with Pipeline(tmp_path_factory.mktemp("routes")) as pipeline:
        pipeline.data.mkdir()
        family_folder(pipeline.data, "qwen3_moe")
        pipeline.start_generators(1)
        yield pipeline


def replayed_spec(pipeline: Pipeline, **changes: object) -> JobSpec:
    """A mixture with random weights earns rewards for its completions' lengths."""
    fields = {
        "iterations": ITERATIONS,
        "model__path": str(pipeline.data / "qwen3_moe"),
        "reward__components": [{"type": "length", "target_chars": 2, "max_chars": 9}],
        "evaluation__num_prompts": 0,
        "timeouts__generator_lease_s": 1.0,
        "algorithm__routing_replay": True,
    }
    return trained_job.but(**fields)(**changes)


@pytest.fixture(scope="module")
def oracle(pipeline: Pipeline) -> str:
    """The job of the undisturbed synchronous run with one generator."""
    job_id = pipeline.train(replayed_spec(pipeline, schedule="synchronous", recording={}))
    pipeline.start("producer-2")
    return job_id


def mismatches(pipeline: Pipeline, job_id: str) -> list[float]:
    lines = RunFolder(pipeline.settings.run_root_path, job_id).metrics.read_bytes().splitlines()
    return [decode_json(line, IterationMetrics).mismatch_max for line in lines]


def test_killed_trainer_and_generator_leave_the_weights_of_the_undisturbed_run(pipeline: Pipeline, oracle: str) -> None:
    job_id, _ = pipeline.jobs.create(replayed_spec(pipeline))
    assert pipeline.train_until_death(job_id, crash_at=f"consumer.after_step:{ITERATIONS}") == -signal.SIGKILL
    killed = pipeline.start("producer-3")
    pipeline.children["producer-2"].kill()
    pipeline.train_to_the_end(job_id)
    assert pipeline.jobs.state(job_id) is JobState.SUCCEEDED
    assert killed.exit_code is None
    assert pipeline.final_digest(job_id) == pipeline.final_digest(oracle)
    assert pipeline.verdict(job_id).gaps == ()
    assert max(mismatches(pipeline, job_id)) < 1e-4


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_ranks_leave_the_weights_of_one(pipeline: Pipeline, oracle: str, sharding: str) -> None:
    """Ranks that share the model go through it together: what one replays is of no other's tokens."""
    job_id = pipeline.train(replayed_spec(pipeline, trainer__world_size=2, trainer__sharding=sharding))
    assert pipeline.final_digest(job_id) == pipeline.final_digest(oracle)


def test_a_recorded_batch_has_its_routes_and_is_sampled_again_with_them(
    pipeline: Pipeline, oracle: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(pipeline.settings.run_root_path, oracle)
    batch = RecordedFiles(folder).read("1/train/2").batch
    completions = [rollout.completion for group in batch.groups for rollout in group.rollouts]
    # Two layers with a router, two experts of a byte each; the last token of a completion goes through none.
    assert [len(completion.routes or b"") for completion in completions] == [
        4 * (completion.num_tokens - 1) for completion in completions
    ]
    assert [len(group.rollouts[0].completion.prompt_routes or b"") for group in batch.groups] == [
        len(group.prompt_token_ids) for group in batch.groups
    ]
    capsys.readouterr()
    roots = ["--run-dir", str(folder.run_root), "--model-root", str(pipeline.data)]
    batch_options = ["--iteration", "1", "--batch", "2", "--threads", "1", "--timeout", "300", "--json"]
    assert run(["replay", oracle, *batch_options, *roots]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["equal"], answer["reason"]) == (True, "")
