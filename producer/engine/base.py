"""The seam between the generator and an inference engine: what a generator needs of one, and no more."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from contracts.encoding.arrays import ITEM_BYTES, unpack_int32
from contracts.engines import Engine
from contracts.errors import BatchFailed
from contracts.probes import LogProbs, ProbeRow
from contracts.rollouts import Completion, Prompt, PromptBatch
from contracts.sampling import SamplingParams
from contracts.spec.job import ModelSpec
from contracts.spec.root import SpecRoot
from contracts.versions import WeightManifest, WeightShard

if TYPE_CHECKING:
    from onbeat.weights.stores import Stores

T = TypeVar("T")
PROBE = "probe"
"""The batch that a probe's rows are measured as, in errors."""


@dataclass(frozen=True, kw_only=True)
class VerifiedWeights:
    """The version that an engine holds, whose digest it computed itself over the tensors it loaded (I2)."""

    policy_version: int
    weights_digest: str


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The inputs of every engine; its own options come separately. ServedModel creates it for the first batch of a
    model.
    """

    model: ModelSpec
    model_root: SpecRoot
    """Roots below which the model's folder may lie."""
    weight_root: Path
    """The folder of the published versions, for an engine that hands it on."""
    deterministic: bool = False
    context_tokens: int = 0
    """The longest prompt with its completion of the job that the engine is made for; 0: unknown."""
    device: str = "cpu"
    """cpu or cuda, for an engine that computes in this process."""
    stores: Stores
    """The published versions, by transport."""
    held_weights_bytes: int = 0
    """The most host memory for versions beside the one that samples, of an engine that holds several."""


@dataclass(eq=False, kw_only=True)
class Trajectories:
    """The trajectories of one batch while their turns are sampled, with what the engine keeps of them in between.

    The player of turns creates it; the engine puts pasts in and takes them out.
    """

    prompt_batch: PromptBatch
    """The batch of their first turn; row p·G + g of it is sample g of prompt p."""
    pasts: dict[int, Any] = field(default_factory=dict)
    """Row → its past, in the form of the engine that put it there; to other engines it means nothing."""


@dataclass(kw_only=True)
class Turn:
    """A turn of some trajectories; the prompts of its batch are all tokens before it."""

    trajectories: Trajectories
    rows: Sequence[int] | None = None
    """The row of each prompt, which has one completion then; None for the first turn, which has whole groups."""
    num_kept_tokens: int = 0
    """Tokens of those prompts that don't go through the model again."""


class GenerationEngine(ABC):
    """A model in memory that samples one batch at a time, or several.

    ServedModel creates it and calls it from the event loop. An engine has to sample, to load a version and to end; the
    other methods are for engines that can do more. Every implementation passes tests/contract/test_engines.py; its own
    options are a record in contracts/engines.py.
    """

    _verified_weights: VerifiedWeights | None = None
    """Set by the implementation: what `policy_version` answers."""

    @classmethod  # noqa: B027  (most run wherever torch does)
    def check_machine(cls, options: Engine) -> None:
        """Raises InvalidInput where this machine can't run what the options ask for."""

    @property
    def policy_version(self) -> VerifiedWeights | None:
        """The version that it holds; None before the first verified load, and after a load that failed."""
        return self._verified_weights

    @property
    @abstractmethod
    def max_concurrent_completions(self) -> int:
        """The number of completions below which another batch is claimed; 1 means one batch at a time."""

    def has_room_for(self, context_tokens: int) -> bool:
        """Returns True unless an engine that is made anew would sample longer rows than this one.

        context_tokens: the longest prompt with its completion of a job.
        """
        return True

    @abstractmethod
    async def generate(self, batch: PromptBatch, turn: Turn | None = None) -> list[list[Completion]]:
        """Samples the completions of a batch.

        The same batch under the same weights gives the same bytes, whatever ran before (I7), unless `is_reproducible`
        of its options is False. The bytes of a turn are a function of the prompt batch and of the rows' tokens,
        whatever an engine has kept of earlier turns. A call that is cancelled ends at its next token, and doesn't harm
        the next call.

        Args:
            batch: The batch.
            turn: The turn of trajectories that the batch is; None for a batch without an environment.

        Returns:
            Completions [k][G], in the order of the prompts and of the sample numbers.

        Raises:
            BatchFailed: The engine holds no verified weights or others than the batch asks for, a prompt doesn't fit
                the model's context or vocabulary, or logits are not finite.
            EngineUnavailable: The engine is gone.
        """

    @abstractmethod
    async def logprobs(self, rows: Sequence[ProbeRow]) -> LogProbs:
        """Computes what the engine has for given tokens, by the forward that it samples with (I11).

        Args:
            rows: Rows of one length.

        Returns:
            float32 [rows · scored tokens], row by row: the log-probs of each row's scored tokens under the weights that
            it holds, at temperature 1 over the whole vocabulary.

            An engine may answer numbers that are not finite, which the fence refuses.

        Raises:
            BatchFailed: It holds no verified weights, a row doesn't fit it, or a log-prob is not finite.
            EngineUnavailable: The engine is gone.
        """

    async def logprobs_of_copies(self, rows: Sequence[ProbeRow]) -> list[LogProbs]:
        """Computes `logprobs` with each copy of the model that samples by itself: each of them has to show a version.

        An engine with one copy needs no method of its own.
        """
        return [await self.logprobs(rows)]

    async def difference(self) -> str:
        """Says in which company a batch has other bytes than alone; "" for none. Asked of engines that have to prove it
        (contracts/engines.py); nothing else is sampled meanwhile."""
        return ""

    @abstractmethod
    async def load_weights(self, weights: WeightManifest | WeightShard) -> None:
        """Replaces the weights, and sets `policy_version` once their digest is the manifest's. Nothing is sampled then.

        A shard comes before its version is whole: an engine that can puts it in place, and holds no version until the
        rest is there.

        Raises WeightsRejected: a missing or shortened file, missing or unexpected tensors, another shape or
        dtype, another digest. Then `policy_version` is None, and nothing can be generated.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Stops a running generation at its next token and frees the model. Called once, last."""

    @property
    def ready_versions(self) -> tuple[VerifiedWeights, ...]:
        """The versions that `load_weights` has nothing to read for: each was read whole, and its digest computed over
        the memory that it is in (I2). An engine with memory for one version has no other.
        """
        return () if self._verified_weights is None else (self._verified_weights,)

    async def receive_weights(
        self, announced: Sequence[WeightManifest], shards: Sequence[WeightShard] = (), *, num_versions: int
    ) -> bool:
        """Reads the next version of a job with a lag into memory of its own, also while a batch is sampled.

        An engine with memory for one version does nothing: it reads the next one between two batches.

        Args:
            announced: All versions of the job that may be asked for; other versions are dropped, except for the one in
                use.
            shards: Files of the version after them, which may be read already.
            num_versions: The most versions in memory, the one in use included; 1 frees the memory of all others.

        Returns:
            True where a version was received, so that another may follow.

        Raises:
            WeightsRejected: As `load_weights` raises it; the weights that the engine samples with stay as they are.
        """
        return False

    async def wake(self, *, num_threads: int | None) -> None:  # noqa: B027  (not every engine has to)
        """Makes ready to compute with so many threads; None stands for as many as the process was started with.

        An engine that computes in another process leaves the threads there as they are. Nothing is sampled meanwhile.
        """

    async def sleep(self) -> None:  # noqa: B027
        """Gives back what memory it can spare until `wake`. Nothing is sampled meanwhile.

        Weights that are given back with it are held no longer: `policy_version` is None then.
        """


async def all_or_none(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Results in order. Once one fails, or this is cancelled, the others are cancelled: their tokens are of no use."""
    tasks = [asyncio.ensure_future(call()) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def probe_batch(version: VerifiedWeights | None, rows: Sequence[ProbeRow]) -> PromptBatch:
    """Returns a probe's rows as a batch that gives its completions: an engine measures them, and draws nothing.

    Raises BatchFailed without verified weights.
    """
    if version is None:
        raise BatchFailed("an engine without verified weights has no log-probs to show")
    return PromptBatch(
        job_id=PROBE,
        batch_id=PROBE,
        iteration=0,
        purpose="evaluation",
        policy_version=version.policy_version,
        weights_digest=version.weights_digest,
        group_size=1,
        sampling=SamplingParams(max_new_tokens=len(rows[0].scored) // ITEM_BYTES),
        seed=0,
        prompts=tuple(
            Prompt(
                prompt_id=f"{PROBE}/{number}",
                index=number,
                token_ids=row.prompt,
                text="",
                reference="",
                dataset_completion=row.scored,
            )
            for number, row in enumerate(rows)
        ),
    )


def check_fits(batch: PromptBatch, *, context_tokens: float, vocabulary_tokens: int) -> None:
    """Checks that a batch fits the model.

    Args:
        batch: The batch.
        context_tokens: The longest prompt with its completion, in tokens.
        vocabulary_tokens: The number of the model's tokens.

    Raises:
        BatchFailed: The longest prompt and its completion are longer than the context, or a token isn't in the
            vocabulary. A process that looks such a token up on a GPU can't use the GPU any more.
    """
    longest = max(len(prompt.token_ids) for prompt in batch.prompts) // ITEM_BYTES
    needed = longest + batch.sampling.max_new_tokens
    if needed > context_tokens:
        raise BatchFailed(
            f"batch {batch.batch_id} needs {needed} tokens of context, the model has {context_tokens}",
            cure="lower rollout.max_prompt_tokens or rollout.sampling.max_new_tokens",
        )
    unknown = batch.sampling.unknown_token(vocabulary_tokens)
    if unknown:
        setting, problem = unknown
        raise BatchFailed(f"batch {batch.batch_id}: {problem}", cure=f"correct rollout.sampling.{setting}")
    for prompt in batch.prompts:
        tokens = unpack_int32(prompt.token_ids)
        if not 0 <= min(tokens) <= max(tokens) < vocabulary_tokens:
            raise BatchFailed(
                f"batch {batch.batch_id}: {prompt.prompt_id} has a token outside the vocabulary of {vocabulary_tokens}"
            )


def check_version(loaded: VerifiedWeights | None, batch: PromptBatch) -> None:
    """Raises BatchFailed unless the engine has loaded exactly the weights that the batch asks for (I2)."""
    needed = VerifiedWeights(policy_version=batch.policy_version, weights_digest=batch.weights_digest)
    if loaded != needed:
        has = "no verified weights" if loaded is None else f"version {loaded.policy_version} ({loaded.weights_digest})"
        raise BatchFailed(
            f"batch {batch.batch_id} asks for version {needed.policy_version} ({needed.weights_digest}), "
            f"the engine has {has}"
        )
