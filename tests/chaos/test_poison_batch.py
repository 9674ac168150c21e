"""A batch kills every generator that samples it: it ends, and neither the stack nor another job ends with it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from contracts.events import BatchDead
from contracts.jobs import JobState, JobStatus
from onbeat.client.gateway import GatewayClient
from onbeat.stack.options import StackOptions
from onbeat.stack.stack import MODULES, EmbeddedStack
from onbeat.stack.supervision import RestartPolicy
from tests.chaos.short_job import long_variant, short_job
from tests.chaos.stand_ins.poisoned_generator import POISON_BATCH, POISON_SEED
from tests.forked import ForkedChild
from tests.pipeline import REPOSITORY
from tests.until import until

STAND_INS = Path(__file__).parent / "stand_ins"
IMPATIENT = RestartPolicy(first_pause_s=0.1, longest_pause_s=0.1, max_in_a_row=1)
"""The stack gives up at the second death of a generator that could not start."""
DEADLINE_S = 400.0


def final(stack: EmbeddedStack, client: GatewayClient, job_id: str) -> JobStatus:
    until(lambda: client.job(job_id).state.is_final, f"{job_id} to end", deadline_s=DEADLINE_S, tick=stack.tick)
    return client.job(job_id)


@long_variant
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs PR_SET_PDEATHSIG")
def test_a_batch_that_kills_its_generators_is_dead_after_its_attempts_and_the_stack_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(STAND_INS))
    options = StackOptions(run_root=tmp_path / "runs", model_root=REPOSITORY, threads=1)
    modules = {**MODULES, "generator": "poisoned_generator"}
    few = {
        "iterations": 2,
        "evaluation__num_prompts": 0,
        "rollout__max_attempts": 2,
        "timeouts__generator_lease_s": 4.0,
    }
    poisoned = short_job(seed=POISON_SEED, rollout__on_failed_batch="abandon", **few)
    stack = EmbeddedStack(options, modules=modules, restarts=IMPATIENT, child=ForkedChild)
    with stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
        first = client.submit(poisoned, idempotency_key="poisoned").job_id
        second = client.submit(short_job(**few), idempotency_key="harmless").job_id
        ended = final(stack, client, first)
        assert (ended.state, ended.batches_dead) == (JobState.SUCCEEDED, 1)
        (dead,) = [event for _, event in client.events(first) if isinstance(event, BatchDead)]
        assert (dead.batch_id, dead.reason) == (POISON_BATCH, "its generators died 2 times")
        other = final(stack, client, second)
        assert (other.state, other.batches_dead) == (JobState.SUCCEEDED, 0)
        assert [one.child.name for one in stack._supervised if one.num_restarts] == ["generator-1"]
        assert sum(one.num_restarts for one in stack._supervised) == 2
