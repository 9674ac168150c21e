"""Generators of vLLM and of transformers on one stack: `make test-vllm` runs it, with vLLM's own environment."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.connection.client import connect
from contracts.errors import InvalidInput
from contracts.jobs import JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.audit.chain import verify_run
from onbeat.audit.folder import read_spec
from onbeat.audit.weights import digests_on_disk
from onbeat.base.process import child_process
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import load_spec
from onbeat.installing.self_test import run_self_test
from onbeat.stack.options import StackOptions
from onbeat.stack.ports import free_port
from onbeat.stack.profile import GeneratorProfile, StackProfile, load_profile
from onbeat.stack.stack import EmbeddedStack
from tests import until as asked
from tests.contract.engine_rigs import start_vllm_server

REPOSITORY = Path(__file__).resolve().parents[2]
MIXED = REPOSITORY / "configs" / "stacks" / "mixed.toml"
VLLM, TRANSFORMERS = "generator-1", "generator-2"
VLLM_PYTHON = ".venv-vllm/bin/python"
DEADLINE_S = 900.0
WORKERS = {"two parts": {"tensor_parallel_size": 2}, "two copies": {"data_parallel_size": 2}}

pytestmark = [
    pytest.mark.skipif("TEST_VLLM" not in os.environ, reason="needs the environment that `make test-vllm` makes"),
    pytest.mark.timeout(1800),
]


class Run:
    """A job on the mixed stack, and which generators were seen to hold a batch of it."""

    def __init__(self, stack: EmbeddedStack, client: GatewayClient) -> None:
        self.stack = stack
        self.client = client

    def submit(self, file: str = "demo.toml", **settings: Any) -> str:
        return self.client.submit(shorter_spec(file, **settings), idempotency_key=uuid.uuid4().hex).job_id

    def until(self, reached: Callable[[], bool], what: str) -> None:
        asked.until(reached, what, deadline_s=DEADLINE_S, tick=self.stack.tick)

    def holding(self, job_id: str) -> set[str]:
        """Ids of the generators that hold a batch now: a name, and what is new with each process."""
        return {lease["generator_id"] for lease in self.client.streams(job_id)["leases"]}

    def holders(self, job_id: str) -> set[str]:
        """Names of the generators that hold a batch now."""
        return {generator_id.rpartition("-")[0] for generator_id in self.holding(job_id)}

    def end(self, job_id: str) -> JobStatus:
        self.until(lambda: self.client.job(job_id).state.is_final, f"the end of {job_id}")
        return self.client.job(job_id)

    def watched_end(self, job_id: str) -> tuple[JobStatus, set[str]]:
        """Also records the generators that were seen to hold a batch until then."""
        seen: set[str] = set()

        def ended() -> bool:
            seen.update(self.holders(job_id))
            return self.client.job(job_id).state.is_final

        self.until(ended, f"the end of {job_id}")
        return self.client.job(job_id), seen

    def assert_proved(self, status: JobStatus, *, num_generators: int) -> None:
        """The engines have shown each version that sampled, and no proof was refused.

        num_generators: those that each have shown the first version.
        """
        assert self.stack.redis is not None
        broker = connect(StackSettings(redis_url=self.stack.redis.url))
        counters = broker.redis.hgetall(broker.job_keys(status.job_id).counters)
        broker.close()
        proofs = {name.decode(): int(number) for name, number in counters.items() if name.startswith(b"proof_")}
        proofs.pop("proof_cant_tell", None)
        assert proofs == {}
        assert int(counters[b"proved"]) >= status.policy_version + num_generators

    def assert_verified(self, status: JobStatus) -> None:
        folder = RunFolder(self.stack.options.run_root.resolve(), status.job_id)
        chain, on_disk = self.client.audit(status.job_id), digests_on_disk(folder)
        # A job that was cancelled has fewer iterations than its spec.
        complete = status.state is JobState.SUCCEEDED
        assert verify_run(chain, read_spec(folder), complete=complete, digests_on_disk=on_disk).gaps == ()


def shorter_spec(file: str = "demo.toml", **settings: Any) -> JobSpec:
    """A shipped job, shorter."""
    fields = {
        "deterministic": "false",
        "iterations": 8,
        "rollout.prompts_per_batch": 8,
        "evaluation.num_prompts": 64,
        "evaluation.prompts_per_batch": 32,
    }
    chosen = [f"{key}={value}" for key, value in (fields | settings).items()]
    return load_spec(REPOSITORY / "configs" / file, chosen)


@contextlib.contextmanager
def started(profile: StackProfile, run_root: Path) -> Iterator[Run]:
    """Starts a stack with a profile's generators, and stops it at the end."""
    options = StackOptions(
        run_root=run_root,
        model_root=REPOSITORY,
        generators=len(profile.each),
        profile=profile,
        threads=1,
    )
    with EmbeddedStack(options) as stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
        yield Run(stack, client)


def assert_sampled_and_verified(run: Run) -> None:
    """Runs a whole job on the stack's only generator."""
    job_id = run.submit()
    status, seen = run.watched_end(job_id)
    assert (status.state.value, status.reason) == ("succeeded", "")
    assert seen == {VLLM}
    run.assert_verified(status)
    run.assert_proved(status, num_generators=1)
    assert max(metrics.mismatch_max for metrics in run.client.metrics(job_id)) < 1e-3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    with started(load_profile(MIXED), tmp_path_factory.mktemp("stack") / "runs") as of_both:
        # vLLM takes long to start: a short job would be over before.
        job_id = of_both.submit(iterations=1000)
        of_both.until(lambda: VLLM in of_both.holders(job_id), "a batch at vLLM")
        of_both.client.cancel(job_id)
        of_both.end(job_id)
        yield of_both


def test_a_job_is_sampled_by_vllm_and_by_transformers_on_policy_and_verified(run: Run) -> None:
    job_id = run.submit(iterations=30)
    status, seen = run.watched_end(job_id)
    assert (status.state.value, status.reason) == ("succeeded", "")
    assert {VLLM, TRANSFORMERS} <= seen
    run.assert_verified(status)
    run.assert_proved(status, num_generators=2)
    for metrics in run.client.metrics(job_id):
        # Both engines' log-probs are those of the trainer's own forward pass.
        assert metrics.mismatch_max < 1e-3


def test_truncated_sampling_of_vllm_trains_at_a_ratio_of_1(run: Run) -> None:
    settings = {"rollout.sampling.top_k": 12, "rollout.sampling.top_p": 0.95}
    job_id = run.submit(iterations=30, **settings)
    status, seen = run.watched_end(job_id)
    assert (status.state.value, status.reason) == ("succeeded", "")
    assert {VLLM, TRANSFORMERS} <= seen
    run.assert_verified(status)
    # Over all tokens the log-probs would be apart by what was kept out: up to -log 0.95.
    assert max(metrics.mismatch_max for metrics in run.client.metrics(job_id)) < 1e-3


def test_adapters_reach_vllm_and_transformers_through_redis(run: Run) -> None:
    job_id = run.submit("demo-lora.toml", iterations=30)
    status, seen = run.watched_end(job_id)
    assert (status.state.value, status.reason) == ("succeeded", "")
    run.assert_verified(status)
    run.assert_proved(status, num_generators=2)
    assert {VLLM, TRANSFORMERS} <= seen
    assert max(metrics.mismatch_max for metrics in run.client.metrics(job_id)) < 1e-3


def test_an_engine_core_that_is_killed_ends_its_generator_and_the_job_goes_on_without_and_with_it(run: Run) -> None:
    job_id = run.submit(iterations=1000)
    run.until(lambda: VLLM in run.holders(job_id) and run.client.job(job_id).policy_version > 0, "a batch at vLLM")
    before, gone = run.stack.pids[VLLM], run.holding(job_id)
    child_process.kill_all(child_process.descendants(before))
    run.until(lambda: run.stack.pids[VLLM] != before, "another generator")
    assert "its engine core died" in run.stack.children[VLLM].tail(200)
    run.until(
        lambda: any(one.startswith(VLLM) for one in run.holding(job_id) - gone), "the new generator's first batch"
    )
    version = run.client.job(job_id).policy_version
    run.until(lambda: run.client.job(job_id).policy_version > version, "another iteration")
    run.client.cancel(job_id)
    status = run.end(job_id)
    assert status.state.value == "cancelled"
    run.assert_verified(status)


def test_a_generator_that_is_killed_takes_its_engine_core_with_it(run: Run) -> None:
    generator = run.stack.pids[VLLM]
    below = child_process.descendants(generator)
    assert below
    os.kill(generator, 9)
    run.until(lambda: not child_process.living(below), "the end of its engine core")


def test_a_colocated_job_is_sampled_by_vllm_which_shows_a_version_after_each_wake(tmp_path: Path) -> None:
    engine = {"type": "vllm", "kv_cache_mb": 64, "timeout_s": DEADLINE_S}
    profile = StackProfile(generators=(GeneratorProfile(python=VLLM_PYTHON, engine=engine),))
    with started(profile, tmp_path / "runs") as run:
        job_id = run.submit(iterations=4, schedule='"colocated"')
        status = run.end(job_id)
        assert (status.state.value, status.reason) == ("succeeded", "")
        run.assert_verified(status)
        run.assert_proved(status, num_generators=1)


def test_a_deterministic_job_is_sampled_by_the_other_generator_alone(run: Run) -> None:
    job_id = run.submit(deterministic="true", iterations=3)
    status = run.end(job_id)
    assert (status.state.value, status.reason) == ("succeeded", "")
    assert "leaves" not in run.stack.children[TRANSFORMERS].tail(200)
    run.assert_verified(status)


def test_a_profile_of_vllm_alone_refuses_a_deterministic_job_before_anything_starts() -> None:
    profile = load_profile(REPOSITORY / "configs" / "stacks" / "vllm.toml")
    with pytest.raises(InvalidInput, match="deterministic"):
        profile.check(shorter_spec(deterministic="true"))


def test_the_self_test_of_the_environment_that_setup_made_passes() -> None:
    proof = run_self_test(str(REPOSITORY / VLLM_PYTHON))
    assert proof.iterations == 2
    assert proof.largest_difference < 1e-3


@pytest.mark.parametrize("workers", WORKERS)
def test_a_job_is_sampled_by_two_workers_which_end_with_their_generator(tmp_path: Path, workers: str) -> None:
    engine = {"type": "vllm", "kv_cache_mb": 64, "timeout_s": DEADLINE_S, **WORKERS[workers]}
    profile = StackProfile(generators=(GeneratorProfile(python=VLLM_PYTHON, engine=engine),))
    with started(profile, tmp_path / "runs") as run:
        assert_sampled_and_verified(run)
        generator = run.stack.pids[VLLM]
        below = child_process.descendants(generator)
        # Two parts are two workers below one engine core, and each copy is in an engine core of its own.
        assert len([process for process in below if "spawn_main" in " ".join(process.cmdline())]) >= 2
        os.kill(generator, 9)
        run.until(lambda: not child_process.living(below), "the end of its engine cores and workers")


def test_a_job_is_sampled_by_a_server_of_ones_own_whose_model_is_in_two_parts(tmp_path: Path) -> None:
    model = REPOSITORY / shorter_spec().model.path
    url = f"http://127.0.0.1:{free_port()}"
    python = str(REPOSITORY / VLLM_PYTHON)
    server = start_vllm_server(model, url, tmp_path / "server.log", python=python, num_parts=2)
    engine = {"type": "openai", "url": url, "timeout_s": DEADLINE_S}
    try:
        with started(StackProfile(generators=(GeneratorProfile(engine=engine),)), tmp_path / "runs") as run:
            assert_sampled_and_verified(run)
            assert server.poll() is None
    finally:
        server.terminate()
        server.wait(60.0)
