"""Hand-written twins of the services, driven by gates and awaited changes instead of sleeps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from broker.generator_side import Claim, ProofDue, PublishOutcome, WeightNews
from broker.leases import FailOutcome, Renewal
from contracts.errors import BrokerUnavailable, NotFound, WrongEngine
from contracts.events import TimelineSpan
from contracts.monitor import GeneratorSeen
from contracts.probes import LogProbs, ProofVerdict
from contracts.rewards import RewardItem, RewardSpec, Scored
from contracts.rollouts import Completion, PromptBatch, RolloutBatch
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec, ModelSpec
from contracts.versions import WeightFile, WeightManifest, WeightShard, weights_digest
from producer.engine.base import Turn, check_version
from tests.fake_engine import FakeEngine

FAKE_TENSORS = frozenset({"scale"})
"""What `FakeEngine` is told to expect of the versions that `fake_version` writes."""


def fake_version(run_root: Path, job_id: str, version: int) -> WeightManifest:
    """A published version for a FakeEngine; its tensor, so its digest, is the version's own."""
    folder = RunFolder(run_root, job_id)
    directory = folder.weights_of(version)
    directory.mkdir(parents=True, exist_ok=True)
    tensor = np.full(3, version, dtype=np.float32)
    path = directory / "weights.safetensors"
    save_file({"scale": tensor}, path)
    return WeightManifest(
        policy_version=version,
        weights_digest=weights_digest([("scale", "float32", tensor.shape, tensor.tobytes())]),
        dtype="float32",
        directory=folder.relative(directory),
        files=(WeightFile(name=path.name, num_bytes=path.stat().st_size),),
    )


class Changes:
    """Lets a test await what fakes record, also from other threads."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self.worker: asyncio.Task[None] | None = None
        """Once it has ended nothing changes any more: what it died of ends a wait."""

    def notify(self) -> None:
        if self._loop is not None:  # else the test awaits nothing yet
            self._loop.call_soon_threadsafe(self._changed.set)

    async def until(self, reached: Callable[[], bool], *, deadline_s: float = 120.0) -> None:
        """Returns once `reached()` is true; it is asked after every change."""
        self._loop = asyncio.get_running_loop()
        async with asyncio.timeout(deadline_s):
            while not reached():
                self._changed.clear()
                if reached():
                    return
                if self.worker is not None and self.worker.done():
                    self.worker.result()
                    raise AssertionError("the worker has ended")
                await self._changed.wait()


class FakeSide:
    """The generator's side of one job, in memory."""

    def __init__(self, changes: Changes, work: Iterable[tuple[PromptBatch, WeightManifest]] = ()) -> None:
        self._changes = changes
        self._work = list(work)
        self.claimed: list[Claim] = []
        self.published: list[RolloutBatch] = []
        self.refused: list[str] = []
        self.failed: list[tuple[str, str]] = []
        self.released: list[tuple[str, str]] = []
        self.renewed: list[list[str]] = []
        self.spans: list[TimelineSpan] = []
        """What the generator reported."""
        self.late: list[tuple[PromptBatch, WeightManifest]] = []
        """Batches that another generator is late with: for hedges."""
        self.lost: set[str] = set()
        self.settled: set[str] = set()
        self.over: list[Claim] = []
        """Claims of an iteration that is over, though it may be open again."""
        self.outcomes: dict[str, PublishOutcome] = {}
        self.shards: list[WeightShard] = []
        """Versions that are announced, and not yet noticed by the generator."""
        self.attempt = 1
        """The attempt number of what is claimed next."""
        self._more = threading.Event()
        self.announced: list[WeightManifest] = []
        """Versions of a job with a lag, as the trainer announces them."""
        self.engine: str | None = None
        """The fingerprint that the generator names."""
        self.sampled_with: str | None = None
        """Another kind of engine, which samples the job; None for none."""
        self.held: list[tuple[int, str] | None] = []
        """What the generator said at each claim that it holds."""
        self.verdicts: list[ProofVerdict] = []
        """What the fence says of proofs, in their order, and the last one for ever; []: none is due."""
        self.shown: list[int] = []
        """The versions that were shown, in order."""
        self._proved: set[int] = set()
        self.is_oldest: set[str] = set()
        """Batches of the oldest iteration, where a claim may ask for those alone."""

    def announce(self, *manifests: WeightManifest) -> None:
        """Replaces what is announced."""
        self.announced = list(manifests)
        self._changes.notify()

    def wait_for_weights(self, timeout_s: float) -> WeightNews:
        threading.Event().wait(min(timeout_s, 0.02))
        shards, self.shards = self.shards, []
        self._changes.notify()
        return WeightNews(versions=tuple(self.announced), shards=tuple(shards))

    def add(self, batch: PromptBatch, manifest: WeightManifest) -> None:
        self._work.append((batch, manifest))
        self._more.set()

    def claim(
        self,
        lease_s: float,
        *,
        hedge: bool,
        loaded: tuple[int, str] | None = None,
        oldest_only: bool = False,
        is_idle: bool = True,
    ) -> Claim | ProofDue | None:
        if self.sampled_with is not None:
            raise WrongEngine.between(job_engine=self.sampled_with, own=self.engine or "", job_id="job")
        work = self._work or (self.late if hedge and is_idle else [])
        if not work or (oldest_only and work[0][0].batch_id not in self.is_oldest):
            return None
        if self.verdicts and work[0][1].policy_version not in self._proved:
            return ProofDue(manifest=work[0][1])
        batch, manifest = work.pop(0)
        hedged = work is self.late
        claim = Claim(
            prompt_batch=batch, number=1 + len(self.claimed), attempt=self.attempt, manifest=manifest, hedged=hedged
        )
        self.claimed.append(claim)
        self.held.append(loaded)
        self._changes.notify()
        return claim

    def prove(self, manifest: WeightManifest, logprobs: LogProbs, *, kind: str) -> ProofVerdict:
        verdict = self.verdicts.pop(0) if len(self.verdicts) > 1 else self.verdicts[0]
        self.shown.append(manifest.policy_version)
        if verdict.is_proved:
            self._proved.add(manifest.policy_version)
        self._changes.notify()
        return verdict

    def report_spans(self, spans: Sequence[TimelineSpan]) -> None:
        self.spans.extend(spans)
        self._changes.notify()

    def announced_weights(self) -> list[WeightManifest]:
        return self.announced or ([self._work[0][1]] if self._work else [])

    def wait_for_prompts(self, timeout_s: float) -> list[WeightShard]:
        self._more.wait(min(timeout_s, 0.02))
        self._more.clear()
        shards, self.shards = self.shards, []
        self._changes.notify()
        return shards

    def renew(self, claims: Sequence[Claim]) -> Renewal[Claim]:
        self.renewed.append([claim.prompt_batch.batch_id for claim in claims])
        self._changes.notify()
        return Renewal(
            lost=tuple(claim for claim in claims if claim.prompt_batch.batch_id in self.lost),
            settled=tuple(one for one in claims if one in self.over or one.prompt_batch.batch_id in self.settled),
        )

    async def beats(self) -> None:
        """Returns after three more renewals: what a generator does not do by then, it waits with."""
        enough = len(self.renewed) + 3
        await self._changes.until(lambda: len(self.renewed) >= enough)

    def publish(self, claim: Claim, batch: RolloutBatch) -> PublishOutcome:
        outcome = self.outcomes.get(batch.batch_id, PublishOutcome.ACCEPTED)
        if outcome is PublishOutcome.ACCEPTED:
            self.published.append(batch)
        else:
            self.refused.append(batch.batch_id)
        self._changes.notify()
        return outcome

    def fail(self, claim: Claim, reason: str, *, is_released: bool = False, fault: str = "") -> FailOutcome:
        """A batch that is released may be claimed again, as it is from the server."""
        (self.released if is_released else self.failed).append((claim.prompt_batch.batch_id, reason))
        if is_released:
            self.add(claim.prompt_batch, claim.manifest)
        self._changes.notify()
        return FailOutcome.RELEASED if is_released else FailOutcome.RETRIED


class FakeJobs:
    """The job store and the presence board of a stack."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self.specs: dict[str, JobSpec] = {}
        self.active: list[str] = []
        self.beats: list[GeneratorSeen] = []
        self.left: list[str] = []
        self.others = 0
        """Generators that live beside the one under test."""
        self.away = False
        """Whether Redis doesn't answer."""

    def active_jobs(self) -> list[str]:
        if self.away:
            raise BrokerUnavailable("connection refused")
        return list(self.active)

    def spec(self, job_id: str) -> JobSpec:
        if job_id not in self.specs:
            raise NotFound(f"no job {job_id}")
        return self.specs[job_id]

    def beat(self, worker: GeneratorSeen) -> None:
        self.beats.append(worker)
        self._changes.notify()

    def live(self) -> list[GeneratorSeen]:
        return [GeneratorSeen(worker_id=str(n)) for n in range(1 + self.others)]

    def leave(self, generator_id: str) -> None:
        self.left.append(generator_id)


class FakeRewards:
    """Scores each completion by its length, or by its place in the request, once its gate is open."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[list[RewardItem]] = []
        self.tries: list[int] = []
        """How often a completion had to fail before its stated score, in each request."""
        self.errors: list[Exception] = []
        """Raised by the next requests, in order."""
        self.equal_prompts: set[str] | None = None
        """If set: all completions of these prompts score 0.0, and no two of any other prompt the same."""

    async def score(
        self, reward: RewardSpec, items: list[RewardItem], *, job_id: str, tries: int, **_: Any
    ) -> list[Scored]:
        self.requests.append(items)
        self.tries.append(tries)
        self._changes.notify()
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        return [Scored(reward=self._reward(item, place), breakdown={"exact": 1.0}) for place, item in enumerate(items)]

    def _reward(self, item: RewardItem, place: int) -> float:
        if self.equal_prompts is None:
            return float(len(item.completion))
        return 0.0 if item.prompt in self.equal_prompts else float(place)


def spell(completions: Sequence[Completion]) -> list[str]:
    """A detokenizer: one letter a token."""
    return ["x" * completion.num_tokens for completion in completions]


class EngineShop:
    """Makes FakeEngines, and remembers in which order models came and went."""

    def __init__(self, run_root: Path) -> None:
        self._run_root = run_root
        self.capacity = 1
        """`max_concurrent_completions` of the engines that are made next."""
        self.log: list[str] = []
        self.rows: list[int] = []
        """The longest row of each engine that was made."""
        self.gates: dict[str, asyncio.Event] = {}
        """Batches that are not generated before their gate opens, and versions, as "load 0", that are not loaded."""
        self.errors: dict[str, Exception] = {}
        """What the engine raises instead of a batch."""

    def make(self, model: ModelSpec, *, deterministic: bool, context_tokens: int) -> FakeEngine:
        self.log.append(f"open {model.path}")
        self.rows.append(context_tokens)
        return LoggedEngine(model.path, self, run_root=self._run_root)


class LoggedEngine(FakeEngine):
    def __init__(self, name: str, shop: EngineShop, *, run_root: Path) -> None:
        super().__init__(run_root=run_root, tensor_names=FAKE_TENSORS)
        self._name = name
        self._shop = shop
        self._events = shop.log
        self._capacity = shop.capacity
        self._longest_row = shop.rows[-1]

    @property
    def max_concurrent_completions(self) -> int:
        return self._capacity

    def has_room_for(self, context_tokens: int) -> bool:
        return context_tokens <= self._longest_row

    async def load_weights(self, weights: WeightManifest | WeightShard) -> None:
        ahead = " ahead" if isinstance(weights, WeightShard) else ""
        self._events.append(f"load {weights.policy_version}{ahead}")
        if gate := self._shop.gates.get(f"load {weights.policy_version}"):
            await gate.wait()
        await super().load_weights(weights)

    async def receive_weights(
        self, announced: Sequence[WeightManifest], shards: Sequence[WeightShard] = (), *, num_versions: int
    ) -> bool:
        before = self.ready_versions
        try:
            return await super().receive_weights(announced, shards, num_versions=num_versions)
        finally:
            self._events += [f"receive {one.policy_version}" for one in self.ready_versions if one not in before]
            self._events += [f"let go {one.policy_version}" for one in before if one not in self.ready_versions]

    async def generate(self, batch: PromptBatch, turn: Turn | None = None) -> list[list[Completion]]:
        self._events.append(f"generate {batch.job_id} {batch.batch_id}")
        check_version(self.policy_version, batch)
        if error := self._shop.errors.get(batch.batch_id):
            raise error
        if gate := self._shop.gates.get(batch.batch_id):
            try:
                await gate.wait()
            except asyncio.CancelledError:
                self._events.append(f"drop {batch.job_id} {batch.batch_id}")
                raise
        return self._sampled(batch)

    async def difference(self) -> str:
        from producer.engine.batch_independence import difference

        return await difference(self)

    async def wake(self, *, num_threads: int | None) -> None:
        self._events.append("wake" if num_threads is None else f"wake with {num_threads} threads")

    async def sleep(self) -> None:
        self._events.append("sleep")

    async def aclose(self) -> None:
        self._events.append(f"close {self._name}")
        await super().aclose()
