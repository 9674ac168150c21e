"""What a batch needs is away, or one process can't reach or read it: that costs no attempt, and no bit (I6, I7)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.monitor import job_status
from contracts.jobs import JobState
from contracts.spec.job import JobSpec
from onbeat.base.process.child_process import ChildProcess
from onbeat.stack.ports import free_port
from tests.chaos.short_job import (
    DEADLINE_S,
    IS_LONG,
    LAG,
    assert_undisturbed,
    committed,
    long_variant,
    running,
    sequential_digest,
    short_job,
    succeed,
    undisturbed_digest,
    until,
)
from tests.forked import STAGE_WORKER
from tests.judge_server import judge_server, says
from tests.pipeline import Pipeline, wait_for_exit
from tests.played import needs

AWAY_S = 60.0 if IS_LONG else 0.0
"""How long a service stays away after the job's status has said so."""
REWARD = "reward_service"
JUDGE = {"type": "llm_judge", "model": "m", "prompt": "{completion}"}
QUICK: dict[str, Any] = {
    "reward__request_timeout_s": 8.0,
    "rollout__max_attempts": 1,
    "timeouts__generator_lease_s": 60.0,
}
"""A hang is noticed soon, not so soon that a loaded machine counts as one: a single attempt of a batch ends the job. A
lease that a generator was too slow to renew would be one."""
PLAIN = short_job(**QUICK)
KINDS = {
    "plain": PLAIN,
    "lag": short_job(**LAG, **QUICK),
    "environment": short_job(
        iterations=4,
        model__path="configs/models/secret-table",
        dataset={"type": "environment", "num_train_prompts": 64},
        environment={
            "name": "secret_table",
            "renderer": "text",
            "max_turns": 3,
            "max_tokens": 32,
            "request_timeout_s": 8.0,
            "max_attempts": 1,
        },
        reward__components=[{"type": "length", "target_chars": 4, "max_chars": 64}],
        **QUICK,
    ),
}


Outage = Callable[[Pipeline], Callable[[], object]]
"""Takes the reward service away; answers what brings it back."""


def signalled(pipeline: Pipeline, number: signal.Signals) -> None:
    pid = pipeline.children[REWARD].pid
    assert pid is not None
    os.kill(pid, number)


def stopped(pipeline: Pipeline) -> Callable[[], object]:
    signalled(pipeline, signal.SIGSTOP)
    return lambda: signalled(pipeline, signal.SIGCONT)


def killed(pipeline: Pipeline) -> Callable[[], object]:
    """Its port is closed then."""
    signalled(pipeline, signal.SIGKILL)
    assert wait_for_exit(pipeline.children[REWARD], DEADLINE_S) == -signal.SIGKILL
    return pipeline.start_reward_service


def waits_for(pipeline: Pipeline, job_id: str, service: str) -> Callable[[], bool]:
    """Whether a person is told so, by the page and by `watch`."""
    return lambda: service in job_status(pipeline.broker, job_id).reason


def lives(trainer: ChildProcess, condition: Callable[[], bool]) -> Callable[[], bool]:
    """The condition, asked of a trainer that must not have ended before it holds."""

    def asked() -> bool:
        assert trainer.exit_code is None, trainer.tail()
        return condition()

    return asked


def num_failed(pipeline: Pipeline, job_id: str) -> int:
    """Attempts that generators gave back with a reason."""
    count: Any = pipeline.broker.redis.hget(pipeline.broker.job_keys(job_id).counters, "failed")
    return int(count or 0)


def outlast(pipeline: Pipeline, spec: JobSpec, outages: list[Outage]) -> str:
    """Runs the job through the outages, one after the other, each in the middle of it; its id."""
    job_id, _ = pipeline.jobs.create(spec)
    with running(pipeline, "producer-a"), running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        for number, make in enumerate(outages, start=1):
            until(lives(trainer, committed(pipeline, job_id, number)), f"{number} iterations")
            heal = make(pipeline)
            until(lives(trainer, waits_for(pipeline, job_id, REWARD.replace("_", " "))), "a word of it")
            time.sleep(AWAY_S)
            heal()
        succeed(trainer)
    assert num_failed(pipeline, job_id) == 0, "no attempt is lost to it"
    return job_id


def test_a_job_outlasts_a_reward_service_that_is_killed_and_stays_away(pipeline: Pipeline, undisturbed: str) -> None:
    job_id = outlast(pipeline, PLAIN, [killed])
    assert_undisturbed(pipeline, job_id, undisturbed)


@long_variant
def test_a_job_with_an_environment_outlasts_what_scores_and_plays(pipeline: Pipeline) -> None:
    spec = KINDS["environment"]
    needs("secret_table")
    with running(pipeline, "producer-oracle"):
        oracle = undisturbed_digest(pipeline, spec)
    job_id = outlast(pipeline, spec, [stopped, killed])
    assert_undisturbed(pipeline, job_id, oracle)


@long_variant
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [stopped, killed])
def test_a_job_of_any_kind_outlasts_each_outage(pipeline: Pipeline, tmp_path: Path, kind: str, make: Outage) -> None:
    spec = KINDS[kind]
    if spec.environment is not None:
        needs(spec.environment.name)
    if spec.max_policy_lag:
        oracle = sequential_digest(pipeline, spec, tmp_path)
    else:
        with running(pipeline, "producer-oracle"):
            oracle = undisturbed_digest(pipeline, spec)
    job_id = outlast(pipeline, spec, [make, make])
    assert_undisturbed(pipeline, job_id, oracle)


@long_variant
def test_a_job_outlasts_a_judge_that_is_away(pipeline: Pipeline) -> None:
    port = free_port()
    spec = short_job(deterministic=False, stages=[JUDGE | {"max_attempts": 1}], iterations=4, **QUICK)
    job_id, _ = pipeline.jobs.create(spec)
    settings = {"judge_url": f"http://127.0.0.1:{port}", "judge_timeout_s": 1.0}
    with (
        running(pipeline, "producer-a"),
        running(pipeline, f"{STAGE_WORKER}-a", **settings),
        running(pipeline, f"consumer-{job_id}", job_id) as trainer,
    ):
        until(waits_for(pipeline, job_id, "judge"), "a word of it")
        with judge_server(lambda _: says("7"), port=port):
            until(committed(pipeline, job_id, 1), "an iteration")
        until(waits_for(pipeline, job_id, "judge"), "a word of it")
        time.sleep(AWAY_S)
        with judge_server(lambda _: says("7"), port=port):
            succeed(trainer)
    assert pipeline.verdict(job_id).gaps == ()


def test_past_its_deadline_an_outage_fails_the_job_by_its_name_and_a_resume_goes_on(
    pipeline: Pipeline, undisturbed: str
) -> None:
    job_id, _ = pipeline.jobs.create(short_job(**QUICK, timeouts__dependency_s=2.5))
    with running(pipeline, "producer-a"):
        heal = killed(pipeline)
        with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
            wait_for_exit(trainer, DEADLINE_S)
        heal()
        status = job_status(pipeline.broker, job_id)
        assert status.state is JobState.FAILED
        assert f"for the reward service at http://127.0.0.1:{pipeline.reward_port}: no answer: Con" in status.reason
        pipeline.jobs.resume(job_id)
        pipeline.train_to_the_end(job_id)
    assert_undisturbed(pipeline, job_id, undisturbed)


def test_a_generator_that_reads_no_weights_costs_no_attempt_and_says_why(pipeline: Pipeline, undisturbed: str) -> None:
    elsewhere = pipeline.folder / "another mount"
    elsewhere.mkdir(exist_ok=True)
    job_id, _ = pipeline.jobs.create(PLAIN)
    with (
        running(pipeline, "producer-bad", weight_root=str(elsewhere)),
        running(pipeline, f"consumer-{job_id}", job_id) as trainer,
    ):
        until(waits_for(pipeline, job_id, "doesn't serve it: version 0 is not at"), "a word of it")
        with running(pipeline, "producer-good"):
            succeed(trainer)
    assert num_failed(pipeline, job_id) == 0
    assert_undisturbed(pipeline, job_id, undisturbed)
