"""The common part of the two engines that sample several batches at once, in another process.

PromptBatch ─ check_… ─▶ a request for each prompt, all_or_none ─▶ Answer ─▶ checked_group
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import UNSET, UnsetType

from contracts.encoding.arrays import pack_float32, pack_int32, unpack_int32
from contracts.engines import BatchingOptions
from contracts.errors import BatchFailed, EngineUnavailable, WeightsRejected, WeightsUnfit
from contracts.probes import LogProbs, ProbeRow
from contracts.rollouts import Completion, Prompt, PromptBatch, prompt_seed
from contracts.versions import WeightManifest, WeightShard
from onbeat.base.process.crash_points import reach
from producer.engine.base import (
    GenerationEngine,
    Turn,
    VerifiedWeights,
    all_or_none,
    check_fits,
    check_version,
    probe_batch,
)
from producer.engine.vllm_kept_sets import Likely, kept_sets, num_logprobs

FINISH_REASONS = ("stop", "length")
SCORED_MARK = "onbeat_scored"
"""Key of a request's extra arguments for a row of a probe: the number of its last tokens that are scored
(producer/engine/vllm/scored_prompts.py). A server without our worker extension ignores it, and scores all."""
LEAST_TEMPERATURE = 0.01
"""A lower one, above 0, vLLM would raise to this, with a line in its log."""


class BatchingEngine(GenerationEngine):
    """An engine that samples several batches at once; a load of weights waits for them. Subclasses add the calls."""

    def __init__(self, options: BatchingOptions) -> None:
        self._timeout_s = options.timeout_s
        self._max_sequences = options.max_sequences

    @property
    @abstractmethod
    def _context_tokens(self) -> int:
        """The longest prompt with its completion, in tokens."""

    @property
    @abstractmethod
    def _vocabulary_tokens(self) -> int: ...

    @abstractmethod
    async def _sample(self, batch: PromptBatch) -> list[list[Completion]]:
        """Completions [k][G] of a batch that fits the engine and its weights. Raises BatchFailed, EngineUnavailable."""

    @property
    def _num_copies(self) -> int:
        """Copies of the model that answer requests, each by itself."""
        return 1

    @abstractmethod
    async def _row_logprobs(self, tokens: Sequence[int], *, num_scored: int, copy: int) -> Sequence[float | None]:
        """Computes the log-probs of a row's last tokens by one copy of the model, at temperature 1.

        Args:
            tokens: [T] the row.
            num_scored: The number of last tokens whose log-probs are wanted, below T.
            copy: The number of the copy, below `_num_copies`.

        Returns:
            [num_scored]; None in the place of a token that the engine says nothing of.

        Raises:
            BatchFailed, EngineUnavailable.
        """

    async def _measure(
        self, rows: Sequence[Sequence[int]], *, num_scored: int, copy: int
    ) -> list[Sequence[float | None]]:
        """Computes `_row_logprobs` of rows. Raises BatchFailed, EngineUnavailable."""
        return await all_or_none([partial(self._row_logprobs, row, num_scored=num_scored, copy=copy) for row in rows])

    @abstractmethod
    async def _replace_weights(self, manifest: WeightManifest) -> VerifiedWeights:
        """Loads a version; answers what is held then, by the digest of what was loaded.

        Raises WeightsRejected, EngineUnavailable.
        """

    @abstractmethod
    def _not_done(self, problem: str) -> EngineUnavailable:
        """Makes the error of a call that outlasts its deadline."""

    @property
    def max_concurrent_completions(self) -> int:
        return self._max_sequences

    async def generate(self, batch: PromptBatch, turn: Turn | None = None) -> list[list[Completion]]:
        check_version(self._verified_weights, batch)
        check_fits(batch, context_tokens=self._context_tokens, vocabulary_tokens=self._vocabulary_tokens)
        if 0.0 < batch.sampling.temperature < LEAST_TEMPERATURE:
            raise BatchFailed(
                f"batch {batch.batch_id}: vLLM has no temperature between 0 and {LEAST_TEMPERATURE:g}",
                field="rollout.sampling.temperature",
                cure="raise rollout.sampling.temperature, or set evaluation.greedy",
            )
        truncation = batch.sampling.unbounded_truncation
        if batch.has_kept_sets and truncation:
            raise BatchFailed(
                f"batch {batch.batch_id}: vLLM doesn't report which tokens {truncation} keeps without a top_k",
                field="rollout.sampling.top_k",
                cure="set it, too, or take generators with transformers",
            )
        async with self._within(f"batch {batch.batch_id}"):
            return await self._sample(batch)

    async def logprobs(self, rows: Sequence[ProbeRow]) -> LogProbs:
        return await self._logprobs_of(rows, copy=0)

    async def logprobs_of_copies(self, rows: Sequence[ProbeRow]) -> list[LogProbs]:
        return [await self._logprobs_of(rows, copy=copy) for copy in range(self._num_copies)]

    async def _logprobs_of(self, rows: Sequence[ProbeRow], *, copy: int) -> LogProbs:
        """Computes `logprobs` with one copy of the model."""
        batch = probe_batch(self._verified_weights, rows)
        check_fits(batch, context_tokens=self._context_tokens, vocabulary_tokens=self._vocabulary_tokens)
        tokens = [unpack_int32(row.prompt + row.scored) for row in rows]
        longest = max(map(len, tokens))
        if longest >= self._context_tokens:
            # vLLM says the log-probs of a prompt along with a token that it samples behind it.
            raise BatchFailed(
                f"a probe needs {longest + 1} tokens of context, the engine has {self._context_tokens}",
                cure="lower rollout.probe.tokens, or give the engine a longer context",
            )
        num_scored = batch.sampling.max_new_tokens
        async with self._within("measuring a probe"):
            of_rows = await self._measure(tokens, num_scored=num_scored, copy=copy)
        scored = [logprob for of_row in of_rows for logprob in of_row]
        if len(scored) != len(rows) * num_scored:
            raise BatchFailed(f"the engine answered {len(scored)} log-probs of a probe of {len(rows) * num_scored}")
        # An absent log-prob is no number: the fence refuses it as one that isn't finite.
        return pack_float32([math.nan if logprob is None else logprob for logprob in scored])

    async def load_weights(self, weights: WeightManifest | WeightShard) -> None:
        if isinstance(weights, WeightShard):
            # Such a loader takes whole versions: the shard is read with the rest of its version.
            return
        self._verified_weights = None
        async with self._within(f"loading version {weights.policy_version}"):
            verified = await self._replace_weights(weights)
        reach("producer.loading_weights")
        self._verified_weights = verified

    @contextlib.asynccontextmanager
    async def _within(self, what: str) -> AsyncIterator[None]:
        """Sets a deadline over all that one call asks of the engine."""
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise  # the engine's own
            raise self._not_done(f"{what} is not done after {self._timeout_s:.0f} s") from error


def num_samples(batch: PromptBatch) -> int:
    """Returns the number of samples to request: 1 where they are greedy, and so equal; vLLM refuses several."""
    return 1 if batch.sampling.temperature == 0.0 else batch.group_size


def request_of(batch: PromptBatch, prompt: Prompt, end_ids: Sequence[int], *, vocabulary_tokens: int) -> dict[str, Any]:
    """Makes vLLM's parameters of a prompt's samples, by the names that its server knows, too.

    Args:
        batch: The batch.
        prompt: The prompt.
        end_ids: The model's own tokens that end a completion.
        vocabulary_tokens: The number of the model's tokens.
    """
    sampling = batch.sampling
    return {
        "n": num_samples(batch),
        "seed": prompt_seed(batch, prompt),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or 0.0,
        "repetition_penalty": sampling.repetition_penalty or 1.0,
        "logit_bias": {int(token): bias for token, bias in (sampling.logit_bias or {}).items()},
        "min_tokens": sampling.min_new_tokens or 0,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": [*end_ids, *(sampling.stop_token_ids or ())],
        "stop": list(sampling.stop or ()),
        "logprobs": num_logprobs(batch, vocabulary_tokens=vocabulary_tokens),
    }


def verified_by_all(answers: Sequence[Mapping[str, str]], *, num_workers: int | None = None) -> VerifiedWeights:
    """Returns the version that all workers of an engine hold.

    Args:
        answers: The answer of each to `load_version`.
        num_workers: The number of workers; None where it isn't known.

    Raises:
        WeightsRejected: A worker has refused the version.
        EngineUnavailable: A worker is missing, or two of them hold different weights.
    """
    for answer in answers:
        if "rejected" in answer:
            raise refusal_of(answer)
    digests = {(answer["policy_version"], answer["weights_digest"]) for answer in answers}
    if len(digests) != 1 or len(answers) != (num_workers or len(answers)):
        raise EngineUnavailable(
            f"{len(answers)} workers hold {len(digests)} different versions after a load",
            field="vllm",
            cure="the generator starts anew; if the error remains, see vLLM's log",
        )
    ((policy_version, weights_digest),) = digests
    return VerifiedWeights(policy_version=int(policy_version), weights_digest=weights_digest)


def refusal_of(answer: Mapping[str, str]) -> WeightsRejected:
    """Returns the error of a version that the worker extension has refused, from its answer."""
    kind = WeightsUnfit if "unfit" in answer else WeightsRejected
    return kind(answer["rejected"])


class Answer(NamedTuple):
    """A sample as vLLM gives it: tokens, their log-probs, the reason of its end, and the most likely tokens at each."""

    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    finish_reason: str | None
    likely: Sequence[Likely] = ()
    """The most likely tokens where each token was sampled; read where the batch has kept sets."""


def checked_group(batch: PromptBatch, answers: Sequence[Answer], *, vocabulary_tokens: int) -> list[Completion]:
    """Makes a prompt's G completions of its samples, in their order. Raises BatchFailed."""
    if len(answers) != num_samples(batch):
        raise BatchFailed(
            f"batch {batch.batch_id}: the engine answered {len(answers)} of {num_samples(batch)} samples of a prompt"
        )
    completions = [_completion(batch, answer, vocabulary_tokens=vocabulary_tokens) for answer in answers]
    # Greedy samples are equal: one was asked for, and stands for all G.
    return completions * (batch.group_size // len(answers))


def _completion(batch: PromptBatch, answer: Answer, *, vocabulary_tokens: int) -> Completion:
    """Raises BatchFailed unless it is a complete and finite sample (I1, I6)."""
    token_ids, logprobs, finish_reason, likely = answer
    if finish_reason not in FINISH_REASONS:
        raise BatchFailed(f"batch {batch.batch_id}: the engine ended a completion for the reason {finish_reason}")
    if not 0 < len(token_ids) <= batch.sampling.max_new_tokens or len(logprobs) != len(token_ids):
        raise BatchFailed(
            f"batch {batch.batch_id}: the engine answered {len(token_ids)} tokens and {len(logprobs)} log-probs, "
            f"asked for at most {batch.sampling.max_new_tokens}"
        )
    least = batch.sampling.min_new_tokens or 0
    if finish_reason == "stop" and len(token_ids) <= least:
        raise BatchFailed(
            f"batch {batch.batch_id}: the engine ended a completion after {len(token_ids)} tokens, and knows no "
            f"min_new_tokens = {least}",
            cure="take another release of the server",
        )
    # An absent log-prob is no number, and refused with those that aren't finite.
    values = [math.nan if value is None else value for value in logprobs]
    if not all(map(math.isfinite, values)):
        raise BatchFailed("the model's log-probs are not finite", cure="the weights of this version have diverged")
    sets: bytes | UnsetType = UNSET
    if batch.has_kept_sets:
        sets = kept_sets(batch, token_ids, likely, vocabulary_tokens=vocabulary_tokens)
    return Completion(
        token_ids=pack_int32(token_ids),
        generator_logprobs=pack_float32(values),
        finish_reason="stop" if finish_reason == "stop" else "length",
        kept_sets=sets,
    )
