"""A reward service that dies, hangs, or talks nonsense: a batch is scored in the end, or it is dead with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from broker.monitor import job_status
from contracts.events import BatchDead
from contracts.jobs import JobState, ResumeRequest
from contracts.rewards import RewardItem
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from gateway.run_files import iteration_metrics
from tests.chaos.moody_rewards import MoodyRewards
from tests.chaos.short_job import DEADLINE_S, assert_undisturbed, committed, running, short_job, succeed, until
from tests.pipeline import Pipeline, until_ready, wait_for_exit

FAILED = 2
"""Exit code of a trainer whose job failed."""
FEW: dict[str, Any] = {"rollout__max_attempts": 2, "timeouts__generator_lease_s": 60.0, "evaluation__num_prompts": 0}
"""None of its attempts is lost to a lease, however slow the machine is."""


class MoodyPipeline(Pipeline):
    """Its generators reach the reward service through a proxy that can be told to misbehave."""

    rewards: MoodyRewards | None = None

    @property
    def settings(self) -> StackSettings:
        settings = super().settings
        return replace(settings, reward_url=self.rewards.url) if self.rewards else settings


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MoodyPipeline]:
    pipeline = MoodyPipeline(tmp_path_factory.mktemp("reward-faults"))
    with pipeline, MoodyRewards(pipeline.settings.reward_url) as rewards:
        pipeline.rewards = rewards
        pipeline.start_generators(1)
        yield pipeline


@pytest.fixture
def rewards(pipeline: MoodyPipeline) -> MoodyRewards:
    assert pipeline.rewards is not None
    pipeline.rewards.reason = "raised"
    pipeline.rewards.unscorable = lambda _item: False
    return pipeline.rewards


class FirstPrompt:
    """Whether an item is of the first prompt that ever came."""

    def __init__(self) -> None:
        self.prompt = ""

    def __call__(self, item: RewardItem) -> bool:
        if not self.prompt:
            self.prompt = item.prompt
        return item.prompt == self.prompt


def test_no_answer_nonsense_and_a_killed_service_are_asked_again_and_then_fail_the_batch_which_is_tried_again(
    pipeline: MoodyPipeline, rewards: MoodyRewards, undisturbed: str
) -> None:
    moods = ["silence", "silence", "500", "garbage", "empty", "cut"]
    rewards.moods[:] = moods
    job_id, _ = pipeline.jobs.create(short_job(reward__request_timeout_s=0.5, reward__max_attempts=2))
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        until(committed(pipeline, job_id, 2), "two iterations")
        pipeline.children["reward_service"].kill()
        service = pipeline.start("reward_service", port=pipeline.reward_port)
        until_ready(f"http://127.0.0.1:{pipeline.reward_port}/readyz", service)
        succeed(trainer)
    assert rewards.spoilt == moods
    assert_undisturbed(pipeline, job_id, undisturbed)


@pytest.mark.parametrize("policy", ["fail", "abandon"])
def test_an_item_that_always_fails_ends_the_job_or_only_its_batch(
    pipeline: MoodyPipeline, rewards: MoodyRewards, policy: str
) -> None:
    rewards.unscorable = FirstPrompt()
    spec = short_job(**FEW, rollout__on_failed_batch=policy)
    job_id, _ = pipeline.jobs.create(spec)
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        exit_code = wait_for_exit(trainer, DEADLINE_S)
    status = job_status(pipeline.broker, job_id)
    (dead,) = [event for _, event in pipeline.jobs.events_after(job_id, "0-0") if isinstance(event, BatchDead)]
    assert "reward `exact` raised the scorer cannot read this, on " in dead.reason
    assert status.batches_dead == 1
    if policy == "fail":
        assert (exit_code, status.state) == (2, JobState.FAILED)
        assert status.reason == f"{dead.reason}; so batch {dead.batch_id} is dead, after 2 attempts"
        return
    assert (exit_code, status.state) == (0, JobState.SUCCEEDED)
    abandoned = [record.abandoned for record in pipeline.jobs.audit(job_id) if record.abandoned]
    assert abandoned == [{dead.batch_id: dead.reason}]
    assert pipeline.verdict(job_id).gaps == ()


def test_a_poison_completion_ends_its_job_until_a_resume_states_a_score_and_the_chain_says_from_when(
    pipeline: MoodyPipeline, rewards: MoodyRewards
) -> None:
    spec = short_job(**FEW, reward__max_attempts=1)
    job_id, _ = pipeline.jobs.create(spec)
    rewards.reason = "timeout"
    with running(pipeline, f"consumer-{job_id}", job_id) as trainer:
        until(committed(pipeline, job_id, 2), "two iterations")
        rewards.unscorable = FirstPrompt()
        assert wait_for_exit(trainer, DEADLINE_S) == FAILED
    before = pipeline.jobs.audit(job_id)
    pipeline.jobs.resume(job_id, ResumeRequest(on_unscorable={"exact": -0.5}))
    pipeline.train_to_the_end(job_id)
    after = pipeline.jobs.audit(job_id)[len(before) :]
    assert pipeline.verdict(job_id).gaps == ()
    assert {record.on_unscorable for record in before} == {UNSET}
    commits = [record for record in after if record.kind == "commit"]
    assert all(record.on_unscorable == {"exact": -0.5} for record in commits)
    ((batch_id, counts),) = [pair for record in commits for pair in (record.unscorable or {}).items()]
    assert counts == {"exact: timeout": spec.rollout.group_size}
    metrics = iteration_metrics(RunFolder(pipeline.settings.run_root_path, job_id)).records()
    told = {one.iteration: one.num_unscorable for one in metrics if one.num_unscorable}
    assert told == {int(batch_id.split("/")[0]): spec.rollout.group_size}
