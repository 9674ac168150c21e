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
from contracts.rollouts import Completion, PromptBatch
from contracts.spec.job import ModelSpec
from contracts.spec.root import SpecRoot
from contracts.versions import WeightManifest, WeightShard

if TYPE_CHECKING:
    from onbeat.weights.stores import Stores

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class VerifiedWeights:
    """The version that an engine holds, whose digest it computed itself over the tensors it loaded (I2)."""

    policy_version: int
    weights_digest: str


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What every engine is made from; its own options come beside it."""

    model: ModelSpec
    model_root: SpecRoot
    """Roots below which the model's folder may lie."""
    weight_root: Path
    """The folder of the published versions, for an engine that hands it on."""
    deterministic: bool = False
    device: str = "cpu"
    """cpu or cuda, for an engine that computes in this process."""
    stores: Stores
    """The published versions, by transport."""
    held_weights_bytes: int = 0
    """The most host memory for versions beside the one that samples, of an engine that holds several."""


@dataclass(eq=False, kw_only=True)
class Trajectories:
    """The trajectories of one batch while their turns are sampled, with what the engine keeps of them in between."""

    opening: PromptBatch
    """The batch of their first turn; row p·G + g of it is sample g of prompt p."""
    kept: dict[int, Any] = field(default_factory=dict)
    """Row → what the engine makes of it; to other engines it means nothing."""


@dataclass(kw_only=True)
class Turn:
    """A turn of some trajectories; the prompts of its batch are all tokens before it."""

    trajectories: Trajectories
    rows: Sequence[int] | None = None
    """The row of each prompt, which has one completion then; None for the first turn, whose batch is the opening."""
    num_kept_tokens: int = 0
    """Tokens of those prompts that don't go through the model again."""


class GenerationEngine(ABC):
    """One model in memory, which samples one batch at a time, or several.

    An engine has to sample, to load a version and to end; the rest is for those that can more. Every implementation
    passes tests/contract/test_engines.py; its own options are a record in contracts/engines.py.
    """

    _held: VerifiedWeights | None = None
    """Set by the implementation: what `policy_version` answers."""

    @classmethod  # noqa: B027  (most run wherever torch does)
    def check_machine(cls, options: Engine) -> None:
        """Raises InvalidInput where this machine can't run what the options ask for."""

    @property
    def policy_version(self) -> VerifiedWeights | None:
        """The version that it holds; None before the first verified load, and after a load that failed."""
        return self._held

    @property
    @abstractmethod
    def max_concurrent_completions(self) -> int:
        """Number of completions below which another batch is claimed; 1 is one batch at a time."""

    @abstractmethod
    async def generate(self, batch: PromptBatch, turn: Turn | None = None) -> list[list[Completion]]:
        """Samples completions [k][G], in the order of the prompts and of the sample numbers.

        The same batch under the same weights gives the same bytes, whatever ran before (I7), unless
        `is_reproducible` of its options says otherwise. turn: the turn that the batch is, if it is one. Its bytes are a
        function of the opening and of the rows' tokens, whatever an engine that keeps something has kept.
        A call that is cancelled ends at its next token, and the next one is as good as ever.
        Raises BatchFailed: no verified weights or others than the batch asks for, a prompt that does not fit
        the model's context or vocabulary, logits that are not finite. EngineUnavailable where the engine is gone.
        """

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
        the memory that it is in (I2). An engine that holds one version has no other."""
        return () if self._held is None else (self._held,)

    async def receive_weights(
        self, announced: Sequence[WeightManifest], shards: Sequence[WeightShard] = (), *, num_versions: int
    ) -> bool:
        """Reads the next version of a job with a lag into memory of its own, also while a batch is sampled.

        announced: all versions of the job that may be asked for; others that are held beside the one in use are let go.
        shards: files of the version after them, which may be read already.
        num_versions: the most to hold, the one in use among them; 1 gives the memory of all others back.
        Answers whether a version was received, and another may follow. An engine that holds one version does nothing:
        it reads the next one between two batches.

        Raises WeightsRejected as `load_weights` does; what the engine samples with stays as it is.
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


def check_fits(batch: PromptBatch, *, context_tokens: float, vocabulary_tokens: int) -> None:
    """Raises BatchFailed unless the longest prompt and its completion fit the model's context, and for a token that the
    model lacks: a GPU is lost to the process that looks one up."""
    longest = max(len(prompt.token_ids) for prompt in batch.prompts) // ITEM_BYTES
    needed = longest + batch.sampling.max_new_tokens
    if needed > context_tokens:
        raise BatchFailed(
            f"batch {batch.batch_id} needs {needed} tokens of context, the model has {context_tokens}",
            cure="lower rollout.max_prompt_tokens or rollout.sampling.max_new_tokens",
        )
    if unknown := batch.sampling.unknown_token(vocabulary_tokens):
        raise BatchFailed(f"batch {batch.batch_id}: {unknown[1]}", cure=f"correct rollout.sampling.{unknown[0]}")
    for prompt in batch.prompts:
        tokens = unpack_int32(prompt.token_ids)
        if not 0 <= min(tokens) <= max(tokens) < vocabulary_tokens:
            raise BatchFailed(
                f"batch {batch.batch_id}: {prompt.prompt_id} has a token outside the vocabulary of {vocabulary_tokens}"
            )


def check_version(held: VerifiedWeights | None, batch: PromptBatch) -> None:
    """Raises BatchFailed unless the engine holds exactly the weights that the batch asks for (I2)."""
    asked = VerifiedWeights(policy_version=batch.policy_version, weights_digest=batch.weights_digest)
    if held != asked:
        has = "no verified weights" if held is None else f"version {held.policy_version} ({held.weights_digest})"
        raise BatchFailed(
            f"batch {batch.batch_id} asks for version {asked.policy_version} ({asked.weights_digest}), "
            f"the engine has {has}"
        )
