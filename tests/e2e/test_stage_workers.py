"""Jobs with stages of Onbeat's own end as they should: with the weights of the job without, or with a reason."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from broker.presence import StagePresence
from contracts.encoding.json_lines import read_json_lines
from contracts.events import TimelineSpan
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.timeline import kind_of
from onbeat.process.waiting import Waiting
from tests.builders import job_spec
from tests.judge_server import JudgeServer, judge_server, says
from tests.pipeline import DEADLINE_S, Pipeline, wait_for_exit
from tests.scorer_folder import scorer_folder

REFERENCE = {"type": "reference", "lease_s": 1.0}


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeServer]:
    """A judge that rates a completion by its length, and answers words to one that is told to."""

    def answer(question: Any) -> Any:
        return says("I'd rather not") if "refuse" in question.text else says(str(len(question.text) % 11))

    with judge_server(answer) as server:
        yield server


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, judge: JudgeServer) -> Iterator[Pipeline]:
    with Pipeline(tmp_path_factory.mktemp("pipeline")) as pipeline:
        scorer_folder(pipeline.data)
        pipeline.start_generators(1)
        pipeline.start("consumer.stages-1", judge_url=judge.url, judge_key="key-of-the-judge")
        yield pipeline


def spec(*stages: dict[str, Any], **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "iterations": 3,
        "model__path": "configs/models/two-digit-addition",
        "rollout__prompts_per_batch": 4,
        "optimizer__learning_rate": 1e-3,
        "evaluation__num_prompts": 0,
        "timeouts__trainer_lease_s": 2.0,
        "stages": list(stages),
    }
    return job_spec(**(fields | changes))


@pytest.fixture(scope="module")
def oracle(pipeline: Pipeline) -> str:
    """Final digest of the job whose trainer has the reference itself."""
    return pipeline.final_digest(pipeline.train(spec(algorithm__kl_coefficient=0.1)))


def until_live(pipeline: Pipeline, count: int) -> None:
    board, waiting = StagePresence(pipeline.broker), Waiting(f"{count} stage workers", deadline_s=DEADLINE_S)
    while len(board.live()) < count:
        waiting.poke()
        time.sleep(0.01)


def test_a_reference_off_the_trainer_gives_the_very_weights_that_the_trainer_would_have_made(
    pipeline: Pipeline, oracle: str
) -> None:
    job_id = pipeline.train(spec(REFERENCE, algorithm__kl_coefficient=0.1))
    assert pipeline.final_digest(job_id) == oracle
    assert pipeline.verdict(job_id).gaps == ()
    # What the worker did before the last commit stands in the timeline, as a lane of its own.
    spans = read_json_lines(RunFolder(pipeline.settings.run_root_path, job_id).timeline, TimelineSpan)
    computed = [span for span in spans if kind_of(span.who) == "stage"]
    assert {span.what for span in computed} == {"compute reference"}


def test_two_workers_of_which_one_is_killed_at_work_change_no_bit(
    pipeline: Pipeline, oracle: str, judge: JudgeServer
) -> None:
    doomed = pipeline.start("consumer.stages-doomed", judge_url=judge.url, crash_at="stage.after_compute")
    until_live(pipeline, 2)
    job_id = pipeline.train(spec(REFERENCE, algorithm__kl_coefficient=0.1))
    wait_for_exit(doomed)
    assert doomed.exit_code == -signal.SIGKILL
    assert pipeline.final_digest(job_id) == oracle
    assert pipeline.verdict(job_id).gaps == ()


def test_a_reward_models_scores_are_trained_and_audited(pipeline: Pipeline) -> None:
    scorer = {"type": "reward_model", "model": str(pipeline.data / "scorer"), "weight": 0.5}
    job_id = pipeline.train(spec(scorer, iterations=2))
    commits = [record for record in pipeline.jobs.audit(job_id) if record.batches]
    assert [set(record.columns or ()) for record in commits] == [set(record.batches) for record in commits]
    assert pipeline.verdict(job_id).gaps == ()


def test_a_judge_is_asked_once_for_each_row_and_its_numbers_are_trained(pipeline: Pipeline, judge: JudgeServer) -> None:
    stage = {"type": "llm_judge", "model": "m", "prompt": "Rate {completion} for {prompt} with {reference}"}
    before = len(judge.questions)
    job = spec(stage, iterations=2, deterministic=False)
    job_id = pipeline.train(job)
    rollout = job.rollout
    rows = 2 * rollout.batches_per_iteration * rollout.prompts_per_batch * rollout.group_size
    assert len(judge.questions) - before == rows
    assert pipeline.verdict(job_id).gaps == ()


def test_a_judge_that_never_answers_a_number_fails_the_job_with_its_words(
    pipeline: Pipeline, judge: JudgeServer
) -> None:
    stage = {"type": "llm_judge", "model": "m", "prompt": "refuse {completion}", "max_attempts": 2}
    job_id, _ = pipeline.jobs.create(spec(stage, deterministic=False))
    trainer = pipeline.start(f"consumer-{job_id}", job_id)
    assert wait_for_exit(trainer) == 2
    assert pipeline.jobs.state(job_id) is JobState.FAILED
    reason = pipeline.jobs.fields(job_id)["reason"].decode()
    assert "stage llm_judge: the judge's answer has no number" in reason
