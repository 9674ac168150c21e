"""Jobs with stages of Onbeat's own end as they should: with the weights of the job without, or with a reason."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from contracts.encoding.json_lines import read_json_lines
from contracts.encoding.wire import decode_json
from contracts.events import IterationMetrics, TimelineSpan
from contracts.jobs import EvaluationScore, JobState
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from contracts.timeline import kind_of
from tests.building.specs import trained_job
from tests.chaos.short_job import long_variant
from tests.forked import STAGE_WORKER
from tests.judge_server import JudgeServer, judge_server, says
from tests.pipeline import Pipeline, wait_for_exit
from tests.scorer_folder import scorer_folder

pytestmark = pytest.mark.usefixtures("forked_ranks")

REFERENCE = {"type": "reference", "lease_s": 1.0}
TEACHER = {"type": "teacher", "model": "configs/models/two-digit-addition-teacher", "lease_s": 1.0}
BRIEF = {
    "type": "external",
    "name": "brief",
    "inputs": ["completion_ids"],
    "outputs": [{"name": "tokens", "type": "float32"}],
}
KL_JOBS: dict[str, dict[str, object]] = {
    "two updates, several passes": {
        "algorithm__kl_coefficient": 0.05,
        "algorithm__updates_per_iteration": 2,
        "trainer__max_tokens_per_micro_batch": 300,
    },
    "adapters over a model that two ranks share, KL in the reward": {
        "algorithm__kl_coefficient": 0.1,
        "algorithm__kl_placement": "reward",
        "algorithm__kl_estimator": "k1",
        "trainer__lora": {"rank": 4},
        "trainer__world_size": 2,
        "trainer__sharding": "fsdp",
    },
}
T = TypeVar("T", IterationMetrics, EvaluationScore)


@pytest.fixture(scope="module")
def judge() -> Iterator[JudgeServer]:
    """A judge that rates a completion by its length, and answers words to one that is told to."""

    def answer(question: Any) -> Any:
        number = len(question.text) % 11
        rubric = f'{{"long": {number}, "short": {10 - number}}}'
        return (
            says("I'd rather not")
            if "refuse" in question.text
            else says(rubric if "JSON" in question.text else str(number))
        )

    with judge_server(answer) as server:
        yield server


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, judge: JudgeServer) -> Iterator[Pipeline]:
    with Pipeline(tmp_path_factory.mktemp("pipeline")) as pipeline:
        scorer_folder(pipeline.data)
        pipeline.start_generators(1)
        pipeline.start(f"{STAGE_WORKER}-1", judge_url=judge.url, judge_key="key-of-the-judge")
        yield pipeline


staged_job = trained_job.but(
    iterations=3, rollout__prompts_per_batch=4, evaluation__num_prompts=0, timeouts__trainer_lease_s=2.0
)


@pytest.mark.parametrize(
    "name",
    [
        "two updates, several passes",
        pytest.param("adapters over a model that two ranks share, KL in the reward", marks=long_variant),
    ],
)
def test_a_reference_off_the_trainer_gives_the_very_weights_that_the_trainer_would_have_made(
    pipeline: Pipeline, name: str
) -> None:
    alone = pipeline.train(staged_job(**KL_JOBS[name]))
    staged = pipeline.train(staged_job(stages=[REFERENCE], **KL_JOBS[name]))
    assert pipeline.final_digest(staged) == pipeline.final_digest(alone)
    assert pipeline.verdict(staged).gaps == ()
    # What the worker did before the last commit stands in the timeline, as a lane of its own.
    spans = read_json_lines(RunFolder(pipeline.settings.run_root_path, staged).timeline, TimelineSpan)
    assert {span.what for span in spans if kind_of(span.who) == "stage"} == {"compute reference"}


def test_a_teacher_and_a_reward_are_learnt_alike_by_two_ranks_and_after_a_kill(pipeline: Pipeline) -> None:
    scorer = {"type": "reward_model", "model": str(pipeline.data / "scorer"), "weight": 0.5}
    fields: dict[str, object] = {
        "algorithm__distillation_coefficient": 1.0,
        "evaluation__num_prompts": 16,
        "evaluation__prompts_per_batch": 16,
    }
    undisturbed = pipeline.train(staged_job(stages=[TEACHER, scorer], **fields, trainer__world_size=2))
    killed, _ = pipeline.jobs.create(staged_job(stages=[TEACHER, scorer], **fields))
    assert pipeline.train_until_death(killed, crash_at="consumer.after_step:3") == -signal.SIGKILL
    pipeline.train_to_the_end(killed)
    assert pipeline.final_digest(killed) == pipeline.final_digest(undisturbed)
    assert pipeline.verdict(killed).gaps == pipeline.verdict(undisturbed).gaps == ()
    commits = [record for record in pipeline.jobs.audit(undisturbed) if record.next_weights_digest]
    assert [set(record.columns or ()) for record in commits] == [
        {f"{iteration}/train/{index}" for index in range(4)} for iteration in range(3)
    ]
    for metrics in lines_of(pipeline, undisturbed, "metrics.jsonl", IterationMetrics):
        kl_to_teacher = metrics.loss_metrics["kl_to_teacher"]
        assert kl_to_teacher > 0.0
        parts = metrics.reward_components
        assert metrics.reward_mean == pytest.approx(parts["exact"] + 0.5 * parts["reward_model"])
    # Evaluations pass no stage: each of their 16 sums is right or wrong.
    scores = lines_of(pipeline, undisturbed, "evaluations.jsonl", EvaluationScore)
    assert [(16 * score.sampled) % 1.0 for score in scores] == [0.0, 0.0]


MODELS = {"sums": TEACHER["model"], "more": "configs/models/two-digit-addition"}
TEACHERS: dict[str, dict[str, Any]] = {
    "likely tokens of one for each source": {"type": "teacher", "models": MODELS, "top_k": 4, "lease_s": 1.0},
    "hidden states": TEACHER | {"hidden_size": 192, "lease_s": 1.0},
}


@pytest.mark.parametrize(
    ("sends", "num_ranks"),
    [
        ("likely tokens of one for each source", 1),
        pytest.param("likely tokens of one for each source", 2, marks=long_variant),
        pytest.param("hidden states", 2, marks=long_variant),
    ],
)
def test_distributions_of_teachers_are_learnt_alike_by_all_ranks_and_after_kills_under_a_lag(
    pipeline: Pipeline, judge: JudgeServer, sends: str, num_ranks: int
) -> None:
    teacher = TEACHERS[sends]
    fields: dict[str, object] = {
        "dataset": {"type": "mixture", "sources": [{"name": name, "dataset": {"type": "addition"}} for name in MODELS]},
        "algorithm__advantage": "none",
        "algorithm__distillation_coefficient": 1.0,
        "algorithm__distillation_beta": 0.5,
        "algorithm__correction": "none",
        "schedule": "delayed",
        "max_policy_lag": 1,
    }
    undisturbed = pipeline.train(staged_job(stages=[teacher], **fields, trainer__world_size=num_ranks))
    pipeline.children[f"{STAGE_WORKER}-1"].stop(grace_s=10.0)
    killed, _ = pipeline.jobs.create(staged_job(stages=[teacher], **fields))
    worker = pipeline.start(f"{STAGE_WORKER}-{sends[0]}", crash_at="stage.after_compute:2")
    trainer = pipeline.start(f"consumer-{killed}", killed, crash_at="consumer.after_step:2")
    assert wait_for_exit(worker) == -signal.SIGKILL
    pipeline.start(f"{STAGE_WORKER}-1", judge_url=judge.url, judge_key="key-of-the-judge")
    assert wait_for_exit(trainer) == -signal.SIGKILL
    pipeline.train_to_the_end(killed)
    assert pipeline.final_digest(killed) == pipeline.final_digest(undisturbed)
    assert pipeline.verdict(killed).gaps == pipeline.verdict(undisturbed).gaps == ()
    single = pipeline.train(staged_job(stages=[TEACHER | {"top_k": 4}], **fields))
    assert pipeline.final_digest(single) != pipeline.final_digest(undisturbed), "what else the teacher tells counts"


def lines_of(pipeline: Pipeline, job_id: str, name: str, kind: type[T]) -> list[T]:
    lines = (RunFolder(pipeline.settings.run_root_path, job_id).path / name).read_bytes().splitlines()
    return [decode_json(line, kind) for line in lines]


def test_a_job_whose_stage_has_no_worker_fails_by_its_name(pipeline: Pipeline) -> None:
    unserved = staged_job(stages=[BRIEF], timeouts__no_stage_worker_s=1.0)
    assert "s for a live worker of stage brief" in reason_of(pipeline, unserved)


def reason_of(pipeline: Pipeline, job: JobSpec) -> str:
    """Why a job failed that can't go on."""
    job_id, _ = pipeline.jobs.create(job)
    assert wait_for_exit(pipeline.start(f"consumer-{job_id}", job_id)) == 2
    assert pipeline.jobs.state(job_id) is JobState.FAILED
    return pipeline.jobs.fields(job_id)["reason"].decode()


def test_a_judge_is_asked_once_for_each_row_and_its_numbers_are_trained(pipeline: Pipeline, judge: JudgeServer) -> None:
    stage = {"type": "llm_judge", "model": "m", "prompt": "Rate {completion} for {prompt} with {reference}"}
    before = len(judge.questions)
    job = staged_job(stages=[stage], iterations=2, deterministic=False)
    job_id = pipeline.train(job)
    rollout = job.rollout
    rows = 2 * rollout.batches_per_iteration * rollout.prompts_per_batch * rollout.group_size
    assert len(judge.questions) - before == rows
    assert pipeline.verdict(job_id).gaps == ()


def test_a_judge_alone_is_a_reward(pipeline: Pipeline) -> None:
    stage = {"type": "llm_judge", "model": "m", "prompt": "Rate {completion}"}
    job = staged_job(stages=[stage], reward={}, evaluation__num_prompts=0, iterations=2, deterministic=False)
    folder = RunFolder(pipeline.settings.run_root_path, pipeline.train(job))
    for line in folder.metrics.read_text().splitlines():
        metrics = decode_json(line.encode(), IterationMetrics)
        assert metrics.reward_mean == pytest.approx(metrics.reward_components["llm_judge"])
        assert metrics.reward_std > 0.0


def test_a_judge_s_criteria_are_compared_each_by_itself_and_have_metrics_of_their_own(pipeline: Pipeline) -> None:
    stage = {"type": "llm_judge", "model": "m", "prompt": "JSON for {completion}", "answer": "json"}
    rubric = stage | {"criteria": {"long": 3, "short": 1}, "weight": 2.0}
    job_id = pipeline.train(staged_job(stages=[rubric], iterations=2, deterministic=False, algorithm__advantage="gdpo"))
    for metrics in lines_of(pipeline, job_id, "metrics.jsonl", IterationMetrics):
        parts = metrics.reward_components
        assert parts["llm_judge_long"] + parts["llm_judge_short"] == pytest.approx(1.0)
        whole = parts["exact"] + 1.5 * parts["llm_judge_long"] + 0.5 * parts["llm_judge_short"]
        assert metrics.reward_mean == pytest.approx(whole)
    assert pipeline.verdict(job_id).gaps == ()


def test_a_judge_that_never_answers_a_number_fails_the_job_with_its_words(pipeline: Pipeline) -> None:
    stage = {"type": "llm_judge", "model": "m", "prompt": "refuse {completion}", "max_attempts": 2}
    reason = reason_of(pipeline, staged_job(stages=[stage], deterministic=False))
    assert "stage llm_judge: the judge's answer has no number" in reason
