"""A generator that loses nothing: each claimed batch ends published, failed with its reason, or given up to another."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from broker.generator_side import PublishOutcome
from broker.presence import RELOAD_PAUSES_S
from contracts.errors import BatchFailed, BrokerUnavailable, ContractViolation, EngineUnavailable, RewardUnavailable
from contracts.rollouts import PromptBatch
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest, WeightShard
from onbeat.base.process.dependency import REWARD_SERVICE, Dependency
from onbeat.work.calls import BrokerCalls
from onbeat.work.declined_work import PAUSES_S
from producer.active_jobs import ASK_AGAIN_S, ActiveJobs
from producer.generator import MAX_FINISHING, Generator
from producer.served_model import ServedModel
from tests.builders import job_spec, prompt_batch
from tests.fakes import Changes, EngineShop, FakeJobs, FakeRewards, FakeSide, LoggedEngine, fake_version, spell

OF_ENVIRONMENT: dict[str, Any] = {"environment": {"name": "echo", "renderer": "text"}, "reward__components": []}


GENERATES = "generate job 0/train/0"


async def at_once(_seconds: float) -> None:
    """A pause that is over."""


class NoPlayers:
    """What samples a job without an environment: one call of the engine."""

    async def prepare(self, spec: object) -> None:
        return None

    def play_for(self, spec: object, loaded: object) -> None:
        return None


class Stack:
    """A generator over fakes."""

    def __init__(
        self,
        run_root: Path,
        *,
        stop_grace_s: float = 20.0,
        not_reproducible: str = "",
        no_kept_sets: str = "",
        no_routes: str = "",
        has_to_prove: bool = False,
    ) -> None:
        self.run_root = run_root
        self.now_s = 0.0
        """How far the generator's clock runs ahead."""
        self.changes = Changes()
        self.jobs = FakeJobs(self.changes)
        self.rewards = FakeRewards(self.changes)
        self.shop = EngineShop(run_root)
        self.sides: dict[str, FakeSide] = {}
        self.players: Any = NoPlayers()
        calls = BrokerCalls(timeout_s=0.05, full_timeout_s=0.05)
        model = ServedModel(self.shop.make, lambda model: spell, wait=at_once, has_to_prove=has_to_prove)
        self.model = model
        self.service = Dependency(REWARD_SERVICE, "http://r", probe=self._probe)
        self.generator = Generator(
            generator_id="generator-a",
            jobs=ActiveJobs(
                self.jobs,
                self._side,
                calls=calls,
                fingerprint=lambda spec: f"kind a; {spec.model.dtype}",
                not_reproducible=lambda: not_reproducible or model.not_reproducible,
                no_kept_sets=no_kept_sets,
                no_routes=no_routes,
                clock=self._clock,
            ),
            presence=self.jobs,
            calls=calls,
            model=model,
            rewards=self.rewards,
            players=self.players,
            services=(self.service,),
            stop_grace_s=stop_grace_s,
            clock=self._clock,
        )

    async def _probe(self) -> None:
        raise RewardUnavailable("no answer: ConnectError")

    def _clock(self) -> float:
        return self.now_s + time.monotonic()

    def _side(self, job_id: str, engine: str | None) -> FakeSide:
        self.sides[job_id].engine = engine
        return self.sides[job_id]

    def add_job(self, job_id: str = "job", *, num_batches: int = 0, **spec: Any) -> FakeSide:
        side = self.sides[job_id] = FakeSide(self.changes)
        for number in range(num_batches):
            side.add(*self.work(job_id, number))
        self.jobs.specs[job_id] = job_spec(**spec)
        self.jobs.active.append(job_id)
        return side

    def work(self, job_id: str, number: int, *, version: int = 0) -> tuple[PromptBatch, WeightManifest]:
        manifest = fake_version(self.run_root, job_id, version)
        batch = prompt_batch(
            [[5, 6], [7]],
            job_id=job_id,
            batch_id=f"{version}/train/{number}",
            iteration=version,
            policy_version=version,
            weights_digest=manifest.weights_digest,
        )
        return batch, manifest

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """The generator as a task that must end by itself after `stop`."""
        task = self.changes.worker = asyncio.create_task(self.generator.run())
        task.add_done_callback(lambda _: self.changes.notify())
        yield task
        self.generator.stop()
        async with asyncio.timeout(120.0):
            await task


async def test_every_claimed_batch_is_published_complete_under_the_verified_version(stack: Stack) -> None:
    side = stack.add_job(num_batches=3)
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 3)
    assert sorted(batch.batch_id for batch in side.published) == ["0/train/0", "0/train/1", "0/train/2"]
    expected, manifest = stack.work("job", 0)
    batch = next(batch for batch in side.published if batch.batch_id == "0/train/0")
    assert (batch.policy_version, batch.weights_digest) == (0, manifest.weights_digest)
    assert (batch.generator_id, batch.attempt, batch.purpose) == ("generator-a", 1, "train")
    assert [group.prompt_token_ids for group in batch.groups] == [p.token_ids for p in expected.prompts]
    for group in batch.groups:
        for rollout in group.rollouts:
            assert rollout.text == "x" * rollout.completion.num_tokens
            assert rollout.reward == len(rollout.text)
    times = batch.timings
    assert times.generation_started_s <= times.generation_ended_s <= times.scoring_started_s
    assert times.scoring_started_s <= times.scoring_ended_s
    assert (side.failed, stack.jobs.left) == ([], ["generator-a"])


async def test_prompts_and_references_are_published_with_a_training_batch_where_a_stage_reads_them(
    stack: Stack,
) -> None:
    side = stack.add_job(stages=[{"type": "reward_model", "model": "scorer"}])
    batch, manifest = stack.work("job", 0)
    side.add(batch, manifest)
    side.add(replace(batch, batch_id="0/evaluation/0", purpose="evaluation"), manifest)
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 2)
    texts = {batch.purpose: [(g.prompt_text, g.reference) for g in batch.groups] for batch in side.published}
    assert texts["train"] == [("prompt 0", "0"), ("prompt 1", "1")]
    assert texts["evaluation"] == [(UNSET, UNSET)] * 2


async def test_an_idle_generator_reads_the_next_version_while_it_is_written(stack: Stack) -> None:
    def shard(job_id: str, version: int) -> WeightShard:
        path = f"{job_id}/weights/.v00000{version}.0123456789ab/a.safetensors"
        return WeightShard(policy_version=version, path=path, name="a.safetensors", num_bytes=8)

    side = stack.add_job(num_batches=1)
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 1)
        side.shards = [shard("job", 1), shard("job", 2), shard("another", 1), shard("job", 1)]
        await stack.changes.until(lambda: not side.shards)
        side.add(*stack.work("job", 0, version=1))
        await stack.changes.until(lambda: len(side.published) == 2)
    loads = [event for event in stack.shop.log if event.startswith("load")]
    assert loads == ["load 0", "load 1 ahead", "load 1 ahead", "load 1"]
    assert side.published[1].policy_version == 1


async def test_a_colocated_job_s_generator_sleeps_once_no_batch_needs_its_engine_and_says_so(stack: Stack) -> None:
    side = stack.add_job(num_batches=2, schedule="colocated")
    # Each turn lasts until a beat has told of it, as one that samples does.
    turns_end = [stack.shop.gates.setdefault(name, asyncio.Event()) for name in ("0/train/1", "1/train/0")]
    async with stack.running():
        await stack.changes.until(lambda: "job" in [beat.awake_for for beat in stack.jobs.beats])
        turns_end[0].set()
        await stack.changes.until(lambda: "sleep" in stack.shop.log)
        await stack.changes.until(lambda: len(side.published) == 2)
        await stack.changes.until(lambda: stack.jobs.beats[-1].awake_for == "")
        side.add(*stack.work("job", 0, version=1))
        await stack.changes.until(lambda: stack.jobs.beats[-1].awake_for == "job")
        turns_end[1].set()
        await stack.changes.until(lambda: stack.shop.log.count("sleep") == 2)
        await stack.changes.until(lambda: stack.jobs.beats[-1].awake_for == "")
    assert [event for event in stack.shop.log[:-1] if "open" not in event] == [
        "load 0",
        "generate job 0/train/0",
        "generate job 0/train/1",
        "sleep",
        "wake",
        "load 1",
        "generate job 1/train/0",
        "sleep",
    ]
    turns = [beat.awake_for for beat in stack.jobs.beats]
    changes = [turn for turn, before in zip(turns[1:], turns, strict=False) if turn != before]
    assert changes == ["job", "", "job", ""]


async def test_nothing_is_claimed_beyond_what_the_reward_service_keeps_up_with(stack: Stack) -> None:
    side = stack.add_job(num_batches=MAX_FINISHING + 2, timeouts__generator_lease_s=0.03)
    stack.rewards.gate.clear()
    async with stack.running():
        await stack.changes.until(lambda: len(stack.rewards.requests) == MAX_FINISHING)
        await side.beats()
        assert len(side.claimed) == MAX_FINISHING
        stack.rewards.gate.set()
        await stack.changes.until(lambda: len(side.published) == MAX_FINISHING + 2)


async def test_a_generator_whose_batches_find_no_room_samples_those_that_make_room_and_nothing_more(
    stack: Stack,
) -> None:
    """Else all generators may hold younger batches, and none takes the oldest iteration's that another has failed."""
    side = stack.add_job(num_batches=1, timeouts__generator_lease_s=0.03)
    side.outcomes = {"0/train/0": PublishOutcome.NO_ROOM}
    async with stack.running():
        # At the second refusal the generator knows of the first.
        await stack.changes.until(lambda: len(side.refused) > 1)
        side.add(*stack.work("job", 1))
        await side.beats()
        assert len(side.claimed) == 1
        side.is_oldest = {"0/train/1"}
        await stack.changes.until(lambda: len(side.published) == 1)
        side.outcomes = {}
        await stack.changes.until(lambda: len(side.published) == 2)


async def test_nothing_is_loaded_while_a_batch_is_sampled_that_came_again_under_its_name(stack: Stack) -> None:
    """A rewind opens its iteration again: the first copy is in the engine yet, and both are of one attempt."""
    stack.shop.capacity = 100
    side = stack.add_job(num_batches=1, timeouts__generator_lease_s=0.03)
    first = stack.shop.gates["0/train/0"] = asyncio.Event()
    async with stack.running():
        await stack.changes.until(lambda: len(side.claimed) == 1 and stack.shop.log[-1:] == [GENERATES])
        again = stack.shop.gates["0/train/0"] = asyncio.Event()
        side.add(*stack.work("job", 0))
        await stack.changes.until(lambda: stack.shop.log.count(GENERATES) == 2)
        first.set()
        await stack.changes.until(lambda: len(side.published) == 1)
        side.add(*stack.work("job", 0, version=1))
        await stack.changes.until(lambda: len(side.claimed) == 3)
        await side.beats()
        assert side.renewed[-1] == ["0/train/0", "1/train/0"], "the lease of the second copy is kept"
        assert "load 1" not in stack.shop.log
        again.set()
        await stack.changes.until(lambda: len(side.published) == 3)
    one, other = (batch for batch in side.published if batch.batch_id == "0/train/0")
    assert replace(other, timings=one.timings) == one, "both have the bits of their version"


async def test_a_lease_that_was_lost_with_its_iteration_takes_no_other_of_its_name_with_it(stack: Stack) -> None:
    stack.shop.capacity = 100
    side = stack.add_job(num_batches=1, timeouts__generator_lease_s=0.03)
    gate = stack.shop.gates["0/train/0"] = asyncio.Event()
    async with stack.running():
        await stack.changes.until(lambda: stack.shop.log[-1:] == [GENERATES])
        side.add(*stack.work("job", 0))
        await stack.changes.until(lambda: stack.shop.log.count(GENERATES) == 2)
        side.over.append(side.claimed[0])
        await stack.changes.until(lambda: stack.shop.log.count("drop job 0/train/0") == 1)
        await side.beats()
        assert side.renewed[-1] == ["0/train/0"]
        gate.set()
        await stack.changes.until(lambda: len(side.published) == 1)


async def test_a_load_is_said_when_it_begins_and_when_it_ends_however_late_the_next_beat_is(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer keeps the version that is said to be loading, and counts who holds it."""
    monkeypatch.setattr("onbeat.work.heartbeat.PRESENCE_S", 100.0)
    loads, samples = (stack.shop.gates.setdefault(name, asyncio.Event()) for name in ("load 0", "0/train/0"))
    side = stack.add_job(num_batches=1, timeouts__generator_lease_s=600.0)
    async with stack.running():
        await stack.changes.until(lambda: bool(stack.jobs.beats and stack.jobs.beats[-1].loading_weights))
        loads.set()
        await stack.changes.until(lambda: stack.jobs.beats[-1].policy_version == 0)
        assert stack.jobs.beats[-1].loading_weights == ()
        samples.set()
        await stack.changes.until(lambda: len(side.published) == 1)


async def test_leases_are_renewed_from_claim_to_end_and_a_lost_one_is_let_go(stack: Stack) -> None:
    side = stack.add_job(num_batches=2, timeouts__generator_lease_s=0.03)
    stack.rewards.gate.clear()
    async with stack.running():
        await stack.changes.until(lambda: side.renewed.count(["0/train/0", "0/train/1"]) >= 2)
        side.lost.add("0/train/0")
        await stack.changes.until(lambda: side.renewed[-2:] == [["0/train/1"]] * 2)
        assert stack.jobs.beats[-1].policy_version == 0
        assert stack.jobs.beats[-1].batches == ("job 0/train/1 (attempt 1)",)
        stack.rewards.gate.set()
        await stack.changes.until(lambda: len(side.published) == 2)


@pytest.mark.parametrize(("deterministic", "tries"), [(True, 6), (False, 3)])
async def test_how_often_luck_has_to_strike_before_a_stated_score_is_the_jobs_and_no_matter_of_its_generators_deaths(
    deterministic: bool, tries: int, stack: Stack
) -> None:
    side = stack.add_job(num_batches=1, deterministic=deterministic, rollout__max_attempts=2, reward__max_attempts=3)
    stack.rewards.errors.append(BatchFailed("a time-out"))
    async with stack.running():
        await stack.changes.until(lambda: len(side.failed) == 1)
        side.attempt = 2
        side.add(*stack.work("job", 0))
        await stack.changes.until(lambda: len(side.published) == 1)
    assert stack.rewards.tries == [tries, tries]


def in_doubt(error: RewardUnavailable) -> RewardUnavailable:
    error.is_doubtful = True
    return error


@pytest.mark.parametrize("error", [BatchFailed("2 completions: timeout"), in_doubt(RewardUnavailable("broken off"))])
async def test_a_batch_without_scores_is_failed_with_its_reason_and_the_next_goes_on(
    error: Exception, stack: Stack
) -> None:
    side = stack.add_job(num_batches=2)
    stack.rewards.errors.append(error)
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 1 and len(side.failed) == 1)
    assert side.failed[0][1] == str(error)
    assert {side.failed[0][0], side.published[0].batch_id} == {"0/train/0", "0/train/1"}


async def test_a_batch_that_a_service_left_without_scores_is_given_back_and_has_no_attempt_less(stack: Stack) -> None:
    side = stack.add_job(num_batches=2)
    stack.rewards.errors.append(RewardUnavailable("no answer"))
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 2)
    assert ([reason for _, reason in side.released], side.failed) == (["no answer"], [])


async def test_while_a_service_is_away_a_generator_claims_nothing_and_says_why(stack: Stack) -> None:
    scored, played = (stack.add_job("scored", num_batches=1), stack.add_job("played", num_batches=1, **OF_ENVIRONMENT))
    stack.service.missed(RewardUnavailable("no answer: ConnectError"))
    async with stack.running():
        await stack.changes.until(lambda: bool(stack.jobs.beats and stack.jobs.beats[-1].service(REWARD_SERVICE).why))
        said = stack.jobs.beats[-1].service(REWARD_SERVICE)
        assert (said.away_s or 0.0, said.why) > (0.0, "at http://r: no answer: ConnectError")
        assert scored.claimed == played.claimed == []
        stack.service.answered()
        await stack.changes.until(lambda: bool(scored.published and played.published))
        await stack.changes.until(lambda: stack.jobs.beats[-1].service(REWARD_SERVICE).answered_s is not None)
    assert scored.failed == scored.released == played.failed == played.released == []


async def test_weights_are_loaded_before_the_first_batch_of_a_version_and_what_can_not_be_loaded_is_left_alone(
    tmp_path: Path, stack: Stack
) -> None:
    side = stack.add_job(num_batches=2)
    bad_batch, bad_manifest = stack.work("job", 0, version=1)
    weights = tmp_path / bad_manifest.directory / "weights.safetensors"
    kept = weights.read_bytes()
    weights.unlink()
    side.add(bad_batch, bad_manifest)
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 2 and len(side.released) == 1)
        await stack.changes.until(lambda: "version 1 is not at" in stack.jobs.beats[-1].leaves_alone.get("job", ""))
        looks = stack.shop.log.count("load 1")
        stack.now_s += PAUSES_S[1]
        await stack.changes.until(lambda: stack.shop.log.count("load 1") > looks)
        assert len(side.claimed) == 3, "nothing is claimed to find out that it is still away"
        weights.write_bytes(kept)
        stack.now_s += PAUSES_S[1]
        await stack.changes.until(lambda: len(side.published) == 3)
        await stack.changes.until(lambda: stack.jobs.beats[-1].leaves_alone == {})
    assert stack.shop.log[:4] == ["open qwen3", "load 0", "generate job 0/train/0", "generate job 0/train/1"]
    assert stack.shop.log[4 : 5 + len(RELOAD_PAUSES_S)] == ["load 1"] * (1 + len(RELOAD_PAUSES_S))
    assert stack.shop.log[-2:] == ["generate job 1/train/0", "close qwen3"]
    assert side.released[0][0] == "1/train/0"
    assert "version 1 is not at" in side.released[0][1]
    assert side.failed == []


async def test_an_engine_gets_as_many_batches_at_once_as_it_takes(stack: Stack) -> None:
    stack.shop.capacity = 8
    side = stack.add_job(num_batches=4, timeouts__generator_lease_s=0.03)
    for number in range(4):
        stack.shop.gates[f"0/train/{number}"] = asyncio.Event()
    async with stack.running():
        await stack.changes.until(lambda: len(side.claimed) == 2)
        await side.beats()
        assert len(side.claimed) == 2, "a batch has 4 completions"
        stack.shop.gates["0/train/1"].set()
        await stack.changes.until(lambda: len(side.claimed) == 3 and len(side.published) == 1)
        for gate in stack.shop.gates.values():
            gate.set()
        await stack.changes.until(lambda: len(side.published) == 4)
    assert side.published[0].batch_id == "0/train/1"
    assert stack.shop.log[2:5] == [f"generate job 0/train/{number}" for number in range(3)]


async def test_of_two_generators_each_has_its_share_of_an_iteration_at_a_time_and_goes_on_once_a_batch_is_done(
    stack: Stack,
) -> None:
    stack.shop.capacity, stack.jobs.others = 100, 1
    side = stack.add_job(num_batches=4, rollout__batches_per_iteration=4, timeouts__generator_lease_s=0.03)
    for number in range(4):
        stack.shop.gates[f"0/train/{number}"] = asyncio.Event()
    async with stack.running():
        await stack.changes.until(lambda: len(side.claimed) == 2)
        await side.beats()
        assert len(side.claimed) == 2
        stack.shop.gates["0/train/0"].set()
        await stack.changes.until(lambda: len(side.claimed) == 3)
        for gate in stack.shop.gates.values():
            gate.set()
        await stack.changes.until(lambda: len(side.published) == 4)


async def test_a_generator_that_samples_copies_nothing_of_others(stack: Stack) -> None:
    stack.shop.capacity = 100
    side = stack.add_job(num_batches=1, timeouts__generator_lease_s=0.03)
    side.late.append(stack.work("job", 7))
    stack.shop.gates["0/train/0"] = asyncio.Event()
    async with stack.running():
        await stack.changes.until(lambda: len(side.renewed) >= 3)
        assert [claim.hedged for claim in side.claimed] == [False]
        stack.shop.gates["0/train/0"].set()
        await stack.changes.until(lambda: len(side.claimed) == 2)
        assert side.claimed[1].hedged


async def test_weights_are_replaced_once_every_batch_of_the_old_ones_is_sampled(stack: Stack) -> None:
    stack.shop.capacity = 100
    side = stack.add_job(num_batches=2, timeouts__generator_lease_s=0.03)
    side.add(*stack.work("job", 0, version=1))
    stack.shop.gates["0/train/0"] = asyncio.Event()
    async with stack.running():
        await stack.changes.until(lambda: len(side.claimed) == 3)
        await side.beats()
        assert "load 1" not in stack.shop.log
        stack.shop.gates["0/train/0"].set()
        await stack.changes.until(lambda: len(side.published) == 3)
    assert {batch.batch_id: batch.policy_version for batch in side.published} == {
        "0/train/0": 0,
        "0/train/1": 0,
        "1/train/0": 1,
    }


async def test_an_engine_that_is_gone_ends_the_generator_whose_batch_goes_back_with_the_reason(stack: Stack) -> None:
    side = stack.add_job(num_batches=1)
    stack.shop.errors["0/train/0"] = EngineUnavailable("its core died", field="vllm")
    with pytest.raises(BaseExceptionGroup) as caught:
        await stack.generator.run()
    assert caught.group_contains(EngineUnavailable, match="its core died")
    assert side.failed == [("0/train/0", "vllm: its core died")], "another generator takes it at once"


async def test_an_engine_that_hangs_ends_the_generator_at_the_jobs_deadline_and_is_not_waited_for(stack: Stack) -> None:
    side = stack.add_job(num_batches=1, timeouts__generation_s=0.05)
    stack.shop.gates["0/train/0"] = asyncio.Event()
    with pytest.raises(BaseExceptionGroup) as caught:
        await stack.generator.run()
    assert caught.group_contains(
        EngineUnavailable, match=r"timeouts\.generation_s: batch 0/train/0 is not done after 0\.05 s"
    )
    ((batch_id, reason),) = side.failed
    assert batch_id == "0/train/0", "another generator takes it at once"
    assert reason == "timeouts.generation_s: batch 0/train/0 is not done after 0.05 s (raise it)"
    assert not [event for event in stack.shop.log if event.startswith("close")], "its thread would never come back"


async def test_an_engine_whose_bytes_depend_on_what_ran_leaves_deterministic_jobs_alone(tmp_path: Path) -> None:
    stack = Stack(tmp_path, not_reproducible="vllm")
    strict = stack.add_job("strict", num_batches=1)
    loose = stack.add_job("loose", num_batches=2, deterministic=False)
    async with stack.running():
        await stack.changes.until(lambda: len(loose.published) == 2)
    assert strict.claimed == []
    assert stack.jobs.beats[-1].not_reproducible == "vllm"


async def test_an_engine_that_says_no_kept_sets_leaves_jobs_of_truncated_sampling_alone_and_says_why(
    tmp_path: Path,
) -> None:
    stack = Stack(tmp_path, no_kept_sets="vllm")
    truncated = stack.add_job("truncated", num_batches=1, rollout__sampling__top_p=0.9)
    whole = stack.add_job("whole", num_batches=2)
    bounded = stack.add_job("bounded", num_batches=1, rollout__sampling__top_p=0.9, rollout__sampling__top_k=5)
    async with stack.running():
        await stack.changes.until(lambda: len(whole.published) == 2 and bool(bounded.claimed))
    assert truncated.claimed == []
    assert stack.jobs.beats[-1].no_kept_sets == "vllm"
    why = "vllm doesn't report which tokens rollout.sampling.top_p = 0.9 keeps without a top_k"
    assert stack.jobs.beats[-1].leaves_alone == {"truncated": why}


async def test_an_engine_that_says_no_routes_leaves_jobs_of_routing_replay_alone_and_says_why(tmp_path: Path) -> None:
    stack = Stack(tmp_path, no_routes="openai")
    replayed = stack.add_job("replayed", num_batches=1, algorithm__routing_replay=True)
    plain = stack.add_job("plain", num_batches=1)
    async with stack.running():
        await stack.changes.until(lambda: len(plain.published) == 1)
    assert replayed.claimed == []
    assert stack.jobs.beats[-1].no_routes == "openai"
    why = "algorithm.routing_replay needs the transformers engine: openai doesn't report the experts"
    assert stack.jobs.beats[-1].leaves_alone == {"replayed": why}


async def test_a_job_whose_spec_cannot_be_read_is_left_alone_and_the_others_are_served(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    readable = stack.jobs.spec

    def spec_of_readable_jobs(job_id: str) -> JobSpec:
        if job_id == "old":
            raise ContractViolation("JobSpec: Invalid enum value 'decoupled' - at `$.algorithm.correction`")
        return readable(job_id)

    monkeypatch.setattr(stack.jobs, "spec", spec_of_readable_jobs)
    stack.jobs.active.append("old")
    side = stack.add_job(num_batches=2)
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 2)


async def test_jobs_of_one_model_are_served_in_turn(stack: Stack) -> None:
    sides = [stack.add_job(job_id, num_batches=3) for job_id in ("a", "b")]
    async with stack.running():
        await stack.changes.until(lambda: all(len(side.published) == 3 for side in sides))
    served = [event.split()[1] for event in stack.shop.log if event.startswith("generate")]
    assert served == ["a", "b"] * 3


async def test_one_model_is_in_memory_at_a_time(stack: Stack) -> None:
    first = stack.add_job("a", num_batches=2)
    second = stack.add_job("b", num_batches=1, model__path="other")
    async with stack.running():
        await stack.changes.until(lambda: len(first.published) == 2 and len(second.published) == 1)
    models = [event for event in stack.shop.log if event.split()[0] in ("open", "close")]
    assert models == ["open qwen3", "close qwen3", "open other", "close other"]


async def test_a_stop_lets_the_batches_in_flight_end_and_claims_nothing_more(stack: Stack) -> None:
    side = stack.add_job(num_batches=MAX_FINISHING + 2)
    stack.rewards.gate.clear()
    async with stack.running() as task:
        await stack.changes.until(lambda: len(stack.rewards.requests) == MAX_FINISHING)
        stack.generator.stop()
        stack.rewards.gate.set()
        await stack.changes.until(task.done)
    assert len(side.claimed) == len(side.published) == MAX_FINISHING
    assert stack.jobs.left == ["generator-a"]


async def test_a_stop_gives_up_what_does_not_end_within_the_grace(tmp_path: Path) -> None:
    stack = Stack(tmp_path, stop_grace_s=0.05)
    side = stack.add_job(num_batches=1)
    stack.rewards.gate.clear()
    async with stack.running() as task:
        await stack.changes.until(lambda: len(stack.rewards.requests) == 1)
        stack.generator.stop()
        await stack.changes.until(task.done)
    assert (side.published, side.failed) == ([], []), "its lease expires, and another generator takes it"
    assert stack.jobs.left == ["generator-a"]


async def test_a_background_task_that_dies_ends_the_generator(stack: Stack) -> None:
    stack.add_job(num_batches=1)
    stack.rewards.errors.append(BrokerUnavailable("connection refused"))
    with pytest.raises(BaseExceptionGroup) as caught:
        await stack.generator.run()
    assert caught.group_contains(BrokerUnavailable, match="connection refused")
    assert stack.shop.log[-1] == "close qwen3"


async def test_a_broker_that_stays_away_ends_the_generator_with_that_error(stack: Stack) -> None:
    stack.jobs.away = True
    with pytest.raises(BaseExceptionGroup) as caught:
        await stack.generator.run()
    assert caught.group_contains(BrokerUnavailable, match="connection refused")


@pytest.mark.parametrize(
    ("outcome", "fails"),
    [
        (PublishOutcome.OVERSIZE, True),
        (PublishOutcome.WRONG_WEIGHTS, True),
        (PublishOutcome.STALE, False),
        (PublishOutcome.DUPLICATE, False),
        (PublishOutcome.CLOSED, False),
    ],
)
async def test_a_refusal_fails_the_batch_only_if_it_would_be_refused_again(
    outcome: PublishOutcome, fails: bool, stack: Stack
) -> None:
    side = stack.add_job(num_batches=2)
    side.outcomes["0/train/0"] = outcome
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 1)
    reasons = [("0/train/0", f"the fence refused it as {outcome.value}")]
    assert side.failed == (reasons if fails else [])


async def test_a_batch_whose_engine_has_failed_a_proof_since_is_given_back_at_no_attempt(stack: Stack) -> None:
    side = stack.add_job(num_batches=2)
    side.outcomes["0/train/0"] = PublishOutcome.UNPROVED
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 1 and bool(side.released))
    batch_id, reason = side.released[0]
    assert batch_id == "0/train/0"
    assert "the engine has not shown the version that sampled it" in reason
    assert side.failed == []


async def test_an_idle_generator_hedges_and_losing_the_race_is_no_failure(stack: Stack) -> None:
    side = stack.add_job(num_batches=1)
    side.late.append(stack.work("job", 7))
    side.outcomes["0/train/7"] = PublishOutcome.DUPLICATE
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 1 and len(side.refused) == 1)
    assert [(claim.prompt_batch.batch_id, claim.hedged) for claim in side.claimed] == [
        ("0/train/0", False),
        ("0/train/7", True),
    ]
    assert (side.refused, side.failed) == (["0/train/7"], [])


async def test_the_work_of_one_job_comes_before_a_copy_for_another(stack: Stack) -> None:
    first, second = stack.add_job("a"), stack.add_job("b", num_batches=3)
    first.late.append(stack.work("a", 7))
    async with stack.running():
        await stack.changes.until(lambda: len(first.published) == 1)
    assert [event for event in stack.shop.log if event.startswith("generate")] == [
        *[f"generate b 0/train/{number}" for number in range(3)],
        "generate a 0/train/7",
    ]
    assert len(second.published) == 3


@pytest.mark.parametrize("hedged", [False, True], ids=["a straggler", "a hedger"])
async def test_a_generation_that_nobody_needs_is_dropped_and_the_next_batch_is_claimed(
    hedged: bool, stack: Stack
) -> None:
    side = stack.add_job(timeouts__generator_lease_s=0.03)
    (side.late.append if hedged else lambda work: side.add(*work))(stack.work("job", 0))
    stack.shop.gates["0/train/0"] = asyncio.Event()
    async with stack.running():
        await stack.changes.until(lambda: len(side.renewed) >= 2)
        side.settled.add("0/train/0")
        side.add(*stack.work("job", 1))
        await stack.changes.until(lambda: len(side.published) == 1)
    assert [batch.batch_id for batch in side.published] == ["0/train/1"]
    assert stack.shop.log[2:5] == ["generate job 0/train/0", "drop job 0/train/0", "generate job 0/train/1"]
    assert (side.failed, side.refused) == ([], [])


async def test_a_copy_is_looked_after_between_the_beats_and_its_colocated_turn_ends_with_its_need(stack: Stack) -> None:
    side = stack.add_job(num_batches=1, schedule="colocated")
    side.late.append(stack.work("job", 7))
    stack.rewards.gate.clear()
    stack.shop.gates["0/train/7"] = asyncio.Event()
    async with stack.running():
        # The lease of its own batch waits for the beats: a renewal at one of them would name both.
        await stack.changes.until(lambda: ["0/train/0", "0/train/7"] in side.renewed)
        await stack.changes.until(lambda: side.renewed[-3:] == [["0/train/7"]] * 3)
        side.settled.add("0/train/7")
        await stack.changes.until(lambda: "sleep" in stack.shop.log)
        assert stack.shop.log[-2:] == ["drop job 0/train/7", "sleep"]
        await stack.changes.until(lambda: stack.jobs.beats[-1].awake_for == "")
        stack.rewards.gate.set()
        await stack.changes.until(lambda: len(side.published) == 1)
    assert (side.failed, side.refused) == ([], [])


async def test_a_copy_that_is_settled_while_its_weights_load_is_never_sampled(stack: Stack) -> None:
    side = stack.add_job(timeouts__generator_lease_s=0.03)
    side.late.append(stack.work("job", 7))
    loading = stack.shop.gates["load 0"] = asyncio.Event()
    async with stack.running():
        await stack.changes.until(lambda: ["0/train/7"] in side.renewed)
        beats = len(stack.jobs.beats)
        side.settled.add("0/train/7")
        side.add(*stack.work("job", 1))
        await stack.changes.until(lambda: () in [beat.batches for beat in stack.jobs.beats[beats:]])
        loading.set()
        await stack.changes.until(lambda: len(side.published) == 1)
    assert [event for event in stack.shop.log if "generate" in event] == ["generate job 0/train/1"]
    assert (side.failed, side.refused) == ([], [])


async def test_a_generation_whose_lease_went_to_another_is_finished(stack: Stack) -> None:
    side = stack.add_job(num_batches=2, timeouts__generator_lease_s=0.03)
    stack.rewards.gate.clear()
    generation = stack.shop.gates["0/train/1"] = asyncio.Event()
    async with stack.running():
        await stack.changes.until(lambda: ["0/train/0", "0/train/1"] in side.renewed)
        side.lost.add("0/train/1")
        await stack.changes.until(lambda: side.renewed[-2:] == [["0/train/0"]] * 2)
        generation.set()
        stack.rewards.gate.set()
        await stack.changes.until(lambda: len(side.published) == 2)


async def test_a_deterministic_job_is_claimed_by_the_engine_s_fingerprint_and_another_job_by_none(stack: Stack) -> None:
    sides = [stack.add_job("strict", num_batches=1), stack.add_job("loose", num_batches=1, deterministic=False)]
    async with stack.running():
        await stack.changes.until(lambda: all(side.published for side in sides))
    assert [side.engine for side in sides] == ["kind a; float32", None]
    assert stack.jobs.beats[-1].engine == "kind a; float32"


async def test_a_job_that_another_kind_of_engine_samples_is_left_to_it_and_said_once(
    caplog: pytest.LogCaptureFixture, stack: Stack
) -> None:
    refused, other = stack.add_job("job", num_batches=1), stack.add_job("other", num_batches=1)
    refused.sampled_with = "kind b; float32"
    async with stack.running():
        await stack.changes.until(lambda: bool(other.published))
        assert "job: is sampled with (kind b; float32), this generator has (kind a; float32)" in caplog.text
        await stack.changes.until(lambda: stack.jobs.beats[-1].wrong_engine == ("job",))
        # A resume has freed it: it is asked again after a while.
        refused.sampled_with = None
        stack.now_s += ASK_AGAIN_S
        await stack.changes.until(lambda: bool(refused.published))
        await stack.changes.until(lambda: stack.jobs.beats[-1].wrong_engine == ())
    assert caplog.text.count("leaves a job to others") == 1


async def test_an_engine_that_has_to_prove_it_is_tried_before_the_first_deterministic_batch_is_claimed(
    tmp_path: Path,
) -> None:
    stack = Stack(tmp_path, has_to_prove=True)
    stack.shop.capacity = 64
    side = stack.add_job(num_batches=2)
    async with stack.running():
        await stack.changes.until(lambda: len(side.published) == 2)
    first = next(index for index, event in enumerate(stack.shop.log) if event.startswith("generate job"))
    tried = [event for event in stack.shop.log[:first] if event.startswith("generate self-test")]
    assert len(tried) > 3
    assert not [event for event in stack.shop.log[first:] if event.startswith("generate self-test")]
    assert stack.jobs.beats[-1].not_reproducible == ""


async def test_an_engine_that_fails_its_self_test_claims_no_deterministic_batch_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(tmp_path, has_to_prove=True)

    async def differs(engine: object) -> str:
        return "beside 4 other batches"

    monkeypatch.setattr(LoggedEngine, "difference", differs)
    strict, loose = (stack.add_job("strict", num_batches=1), stack.add_job("loose", num_batches=1, deterministic=False))
    async with stack.running():
        await stack.changes.until(lambda: bool(loose.published))
        why = "a batch has other bytes beside 4 other batches than alone"
        await stack.changes.until(lambda: stack.jobs.beats[-1].not_reproducible == why)
    assert (strict.claimed, strict.failed) == ([], [])
    assert "beside 4 other batches" in caplog.text
