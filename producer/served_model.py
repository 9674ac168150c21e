"""The one model that a generator has in memory: an engine and the tokenizer that reads its answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Protocol

from msgspec import UNSET

from broker.presence import RELOAD_PAUSES_S
from contracts.encoding.arrays import ITEM_BYTES
from contracts.errors import (
    BatchFailed,
    BrokerUnavailable,
    EngineUnavailable,
    ObjectsUnavailable,
    OnbeatError,
    WeightsRejected,
    WeightsUnfit,
)
from contracts.probes import LogProbs, ProofVerdict
from contracts.rollouts import Completion, PromptBatch
from contracts.spec.job import JobSpec, ModelSpec
from contracts.versions import WeightManifest, WeightShard
from onbeat.base.process.waiting import tried_again
from onbeat.work.declined_work import MAX_WHY
from onbeat.work.failures import by_name, ends_caller, named_failure
from producer.detokenizer import Detokenizer
from producer.engine.base import GenerationEngine, Turn, VerifiedWeights

log = logging.getLogger(__name__)


class MakeEngine(Protocol):
    """Makes an engine. It blocks while it loads, and raises InvalidInput that names model.path."""

    def __call__(self, model: ModelSpec, *, deterministic: bool, context_tokens: int) -> GenerationEngine: ...


class Prove(Protocol):
    """Has the fence judge an engine's log-probs of a version's probe."""

    async def __call__(self, manifest: WeightManifest, logprobs: LogProbs, *, kind: str) -> ProofVerdict: ...


@dataclass(kw_only=True)
class LoadedModel:
    model: ModelSpec
    deterministic: bool
    engine: GenerationEngine
    detokenizer: Detokenizer
    num_threads: int | None = None
    """The number of threads that its engine was given at its last waking; None at first."""
    is_awake: bool = True
    is_proven: bool = False
    """True: a self-test has shown that its bytes don't depend on what it samples next to a batch."""
    shown: tuple[str, VerifiedWeights] | None = None
    """The job and the version whose probe the engine has shown since it was last loaded or woken; None: no version's.
    """
    hangs: bool = False
    """True: a call of the engine let its deadline pass. The thread that is in it would keep it from being closed."""
    context_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens before later turns that are not booked yet: kept since the turn before, or fed to the model."""

    @property
    def verified(self) -> VerifiedWeights:
        """The version that the engine holds, once `ServedModel.ready_for` has returned."""
        weights = self.engine.policy_version
        if weights is None:
            raise AssertionError("an engine without verified weights is not ready")
        return weights

    async def generate(
        self, batch: PromptBatch, turn: Turn | None = None, *, deadline_s: float
    ) -> list[list[Completion]]:
        """Raises what the engine raises, and EngineUnavailable past the deadline."""
        async with self.within(deadline_s, f"batch {batch.batch_id}"):
            completions = await self.engine.generate(batch, turn)
        if turn is not None and turn.rows is not None:
            num_tokens = sum(len(prompt.token_ids) for prompt in batch.prompts) // ITEM_BYTES
            self.context_tokens.update(kept=turn.num_kept_tokens, fed=num_tokens - turn.num_kept_tokens)
        return completions

    @contextlib.asynccontextmanager
    async def within(self, deadline_s: float, what: str) -> AsyncIterator[None]:
        """Sets a job's deadline for a call of any engine, also of one that computes in this process; see `hangs`.

        Whatever the engine raises leaves as an OnbeatError (onbeat/work/failures.py); a cancellation stays one.
        """
        caller = asyncio.current_task()
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                yield
        except OnbeatError:
            raise
        except BaseException as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                self.hangs = True
                raise EngineUnavailable(
                    f"{what} is not done after {deadline_s:g} s", field="timeouts.generation_s", cure="raise it"
                ) from error
            if ends_caller(error, caller):
                raise
            raise named_failure(error, what=what) from error


@dataclass(eq=False)
class ServedModel:
    """The model in memory, and its engine. `wiring.served_model` creates it.

    The serve loop alone loads; `receive` and `let_go` may run meanwhile, and while batches are sampled.
    """

    make_engine: MakeEngine
    make_detokenizer: Callable[[ModelSpec], Detokenizer]
    _: KW_ONLY
    threads_for: Callable[[JobSpec], int | None] = lambda _spec: None
    """Compute threads of a job's engine; None for as many as this process was started with."""
    engine_kind: str = "an engine"
    """Names the engine, and what it rounds by besides the model's dtype."""
    has_to_prove: bool = False
    """True: an engine serves deterministic jobs only after a self-test."""
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep

    def __post_init__(self) -> None:
        self._proven: list[ModelSpec] = []
        """Models whose engines have shown it in this process."""
        self.not_reproducible = ""
        """The computation that a self-test has shown to depend on company, in words; "" while there is none."""
        self.loaded: LoadedModel | None = None
        self.rejected_weights = ""
        """Folder of the version that was refused last, until a version loads; "" while there is none."""
        self.unfit_weights = ""
        """Why no copy of the version that was refused last would do; "" where one may."""
        self.loading_weights: tuple[str, ...] = ()
        """Folders of the version that is being loaded, or will be when its model is."""
        self.awake_for = ""
        """Id of the colocated job for which the engine is awake; "" for none, which another schedule's job is, too."""
        self.receiving_weights: tuple[str, ...] = ()
        """Folders of the versions that may be read beside a batch now."""
        self._held_job = ""
        """Id of the job whose version the engine holds, or held before `load_ahead`; "" for none."""
        self._awaited_version: int | None = None
        """Number of the version whose shards are put in place; the engine holds none meanwhile."""
        self._deadline_s = math.inf
        """Deadline of the held job for a load."""

    def holds(self, spec: JobSpec, manifest: WeightManifest) -> bool:
        """Returns True where `ready_for` has nothing to load: only then may it be called while the engine generates."""
        return self._has_model(spec) and self._has_weights(manifest) and self._is_awake(spec)

    async def ready_for(
        self, spec: JobSpec, manifest: WeightManifest, *, still_needed: Callable[[], bool] = lambda: True
    ) -> LoadedModel:
        """Returns the job's model with the manifest's weights in it; replaces either where it holds another.

        Args:
            spec: The job.
            manifest: The version.
            still_needed: Returns True while a version that is refused is worth another load.

        Raises:
            InvalidInput: The model's folder is bad.
            WeightsRejected: The weights stay bad for a while.
            BatchFailed: The self-test of a deterministic job fails, or anything else that this process can't load.
            EngineUnavailable: timeouts.generation_s is over, or the engine has ended.
        """
        self.loading_weights = tuple(step.directory for step in manifest.steps)
        try:
            loaded = self.loaded if self._has_model(spec) else None
            if loaded is None:
                loaded = await self._replace(spec)
            await self._wake(loaded, spec, manifest.job_id)
            if not self._has_weights(manifest):
                self._awaited_version = None
                loaded.shown = None
                async with loaded.within(spec.timeouts.generation_s, f"loading {manifest.directory}"):
                    await self._load(loaded.engine, manifest, still_needed)
                log.info("holds version %d (%s)", manifest.policy_version, manifest.weights_digest[:12])
            if self.has_to_prove and spec.deterministic and not loaded.is_proven:
                await self._prove(loaded, spec)
        finally:
            self.loading_weights = ()
        self._held_job = manifest.job_id
        self._deadline_s = spec.timeouts.generation_s
        return loaded

    def has_shown(self, loaded: LoadedModel, manifest: WeightManifest) -> bool:
        """Returns True where the fence has nothing more to be shown of the version that the engine holds (I11)."""
        return manifest.probe is UNSET or loaded.shown == (manifest.job_id, loaded.verified)

    def show_again(self) -> None:
        """Has the engine show its version once more, whose proof the fence doesn't have."""
        if self.loaded is not None:
            self.loaded.shown = None

    async def show(self, loaded: LoadedModel, spec: JobSpec, manifest: WeightManifest, prove: Prove) -> ProofVerdict:
        """Shows the fence what the engine computes with the version that it holds (I11).

        Args:
            loaded: The model, as `ready_for` has returned it.
            spec: The job.
            manifest: The version, with a probe.
            prove: `GeneratorSide.prove` of the job.

        Returns:
            The fence's verdict; where it isn't `is_proved`, nothing of the version may be claimed.

        Raises:
            BatchFailed: The engine can't compute the probe.
            EngineUnavailable: timeouts.generation_s is over, or the engine has ended.
        """
        probe = manifest.probe
        if probe is UNSET:
            raise AssertionError("a version without a probe has nothing to be shown")
        loaded.shown = None
        async with loaded.within(spec.timeouts.generation_s, f"the probe of version {manifest.policy_version}"):
            of_copies = await loaded.engine.logprobs_of_copies(probe.rows)
        verdict = ProofVerdict(outcome="unknown")
        for copy, logprobs in enumerate(of_copies):
            verdict = await prove(manifest, logprobs, kind=f"{self.engine_kind} {spec.model.dtype}")
            if not verdict.is_proved:
                if len(of_copies) > 1:
                    log.warning("copy %d of the engine's %d has not shown its version", copy, len(of_copies))
                return verdict
        loaded.shown = (manifest.job_id, loaded.verified)
        return verdict

    async def begin_anew(self) -> None:
        """Lets the engine go, with all that it has kept: the next one reads the whole version from its store."""
        await self.aclose()

    def must_prove(self, spec: JobSpec) -> bool:
        """Returns True where nothing of this job may be claimed before `ready_for` has shown that its engine is
        reproducible.
        """
        return self.has_to_prove and spec.deterministic and spec.model not in self._proven

    async def _prove(self, loaded: LoadedModel, spec: JobSpec) -> None:
        """Raises BatchFailed where the engine's bytes depend on what it samples beside a batch."""
        async with loaded.within(spec.timeouts.generation_s, "the self-test"):
            difference = await loaded.engine.difference()
        if difference:
            self.not_reproducible = f"a batch has other bytes {difference} than alone"
            raise BatchFailed(f"this engine serves no deterministic job: {self.not_reproducible}")
        loaded.is_proven = True
        self._proven.append(spec.model)
        log.info("a batch of %s has the same bytes alone and together with others", spec.model.path)

    def newest_ready(self, spec: JobSpec) -> tuple[int, str] | None:
        """Returns version and digest of the newest version that a batch could be sampled with at once.

        Returns:
            The version; None without a lag, where the iteration alone says which version samples it.
        """
        if self.loaded is None or not self._has_model(spec) or not spec.schedule_rule.lags:
            return None
        ready = [(version.policy_version, version.weights_digest) for version in self.loaded.engine.ready_versions]
        return max(ready, default=None)

    async def receive(self, spec: JobSpec, announced: Sequence[WeightManifest], shards: Sequence[WeightShard]) -> bool:
        """Reads the next of a lagging job's announced versions into memory next to the version that samples.

        Args:
            spec: The job.
            announced: Its versions, oldest first.
            shards: Files of the version after them.

        Returns:
            True where there was a version to read.

        Raises:
            WeightsRejected: The version is damaged.
            BatchFailed: The engine raised something else.
            EngineUnavailable: timeouts.generation_s is over.
        """
        if not announced or self.loaded is None or self._held_job != announced[0].job_id:
            return False
        num_versions = spec.num_open
        if spec.schedule == "bounded":
            # A batch takes the newest version that is ready: any between that one and the one in use is of no use.
            announced = announced[-1:]
            num_versions = 2
        ready = {(version.policy_version, version.weights_digest) for version in self.loaded.engine.ready_versions}
        missing = [version for version in announced if (version.policy_version, version.weights_digest) not in ready]
        self.receiving_weights = tuple(step.directory for version in missing for step in version.steps)
        try:
            async with self.loaded.within(spec.timeouts.generation_s, "receiving a version"):
                return await self.loaded.engine.receive_weights(announced, shards, num_versions=num_versions)
        finally:
            self.receiving_weights = ()

    async def let_go(self) -> None:
        """Gives back the memory of all versions but the one in use. Raises as `receive` does."""
        if self.loaded is not None and not self.loaded.hangs:
            async with self.loaded.within(self._deadline_s, "letting versions go"):
                await self.loaded.engine.receive_weights((), num_versions=1)

    async def load_ahead(self, shard: WeightShard) -> None:
        """Lets the engine read a file of the version after the one that it holds; any other is of no use here."""
        if self.loaded is None or not self.loaded.is_awake or self._held_job != shard.job_id:
            return
        version = self.loaded.engine.policy_version
        if version is not None and version.policy_version + 1 == shard.policy_version:
            self._awaited_version = shard.policy_version
        if version is None and self._awaited_version != shard.policy_version:
            return
        async with self.loaded.within(self._deadline_s, f"loading {shard.path}"):
            await self.loaded.engine.load_weights(shard)

    async def sleep(self) -> None:
        """Ends the turn of a colocated job: its trainer has the machine until the next claim."""
        loaded = self.loaded
        self.awake_for = ""
        if loaded is not None and loaded.is_awake:
            loaded.is_awake = False
            async with loaded.within(self._deadline_s, "giving memory back"):
                await loaded.engine.sleep()

    async def _wake(self, loaded: LoadedModel, spec: JobSpec, job_id: str) -> None:
        self.awake_for = job_id if spec.schedule_rule.takes_turns else ""
        if not self._is_awake(spec):
            loaded.num_threads = self.threads_for(spec)
            # What it held before it slept may have changed meanwhile.
            loaded.shown = None
            async with loaded.within(spec.timeouts.generation_s, "waking up"):
                await loaded.engine.wake(num_threads=loaded.num_threads)
            loaded.is_awake = True

    def _is_awake(self, spec: JobSpec) -> bool:
        loaded = self.loaded
        return loaded is not None and loaded.is_awake and loaded.num_threads == self.threads_for(spec)

    def _has_model(self, spec: JobSpec) -> bool:
        loaded = self.loaded
        if loaded is None or (loaded.model, loaded.deterministic) != (spec.model, spec.deterministic):
            return False
        return loaded.engine.has_room_for(spec.longest_row)

    def _has_weights(self, manifest: WeightManifest) -> bool:
        weights = VerifiedWeights(policy_version=manifest.policy_version, weights_digest=manifest.weights_digest)
        return self.loaded is not None and self.loaded.engine.policy_version == weights

    async def aclose(self) -> None:
        loaded = self.loaded
        self.loaded = None
        if loaded is not None and not loaded.hangs:
            await loaded.engine.aclose()

    async def _load(self, engine: GenerationEngine, manifest: WeightManifest, still_needed: Callable[[], bool]) -> None:
        def helps(error: Exception, _: float) -> bool:
            if not isinstance(error, (WeightsRejected, BrokerUnavailable, ObjectsUnavailable)) or not still_needed():
                return False
            self._note_refusal(manifest, error)
            return True

        load = partial(engine.load_weights, manifest)
        what = f"loading {manifest.directory}"
        try:
            await tried_again(what, load, pauses=RELOAD_PAUSES_S, helps=helps, sleep=self.wait)
        except WeightsRejected as error:
            self._note_refusal(manifest, error)
            raise
        self.rejected_weights = self.unfit_weights = ""

    def _note_refusal(self, manifest: WeightManifest, error: Exception) -> None:
        # A store that is away, from which the engine reads the version, says nothing about it.
        self.rejected_weights = manifest.directory if isinstance(error, WeightsRejected) else ""
        self.unfit_weights = str(error)[:MAX_WHY] if isinstance(error, WeightsUnfit) else ""

    async def _replace(self, spec: JobSpec) -> LoadedModel:
        log.info("loading model %s", spec.model.path)
        # A folder that isn't there costs a model that serves other jobs nothing.
        what = f"loading model {spec.model.path}"
        make_detokenizer = partial(self.make_detokenizer, spec.model)
        detokenizer = await asyncio.to_thread(by_name, make_detokenizer, what=what)
        # The old model is freed before the next is built: two may not fit.
        await self.aclose()
        make_engine = partial(
            self.make_engine, spec.model, deterministic=spec.deterministic, context_tokens=spec.longest_row
        )
        engine = await asyncio.to_thread(by_name, make_engine, what=what)
        self.loaded = LoadedModel(
            model=spec.model, deterministic=spec.deterministic, engine=engine, detokenizer=detokenizer
        )
        return self.loaded
