"""The records of a user's own generator: it claims the prompts of a batch, and answers with samples of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from msgspec import UNSET, UnsetType

from broker.generator_side import Claim
from contracts.encoding.arrays import ITEM_BYTES, unpack_int32
from contracts.errors import ContractViolation
from contracts.rollouts import (
    Completion,
    Prompt,
    PromptBatch,
    Trajectory,
    check_routes,
    completion_problem,
    prompt_seed,
)
from contracts.sampling import SamplingParams
from contracts.spec.limits import MAX_BATCH_TOKENS
from contracts.versions import WeightManifest
from onbeat.data.kept_sets import pack_kept_sets


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A completion of a prompt, as a generator sampled it."""

    token_ids: Sequence[int] | np.ndarray
    """[T] of the model's vocabulary, the end-of-sequence token included, 1 to max_new_tokens of them; of a trajectory
    those of its observations too."""
    logprobs: Sequence[float] | np.ndarray
    """[S] natural logarithms of the sampled ones, without an environment [T], under the distribution that `sampling`
    defines; of greedy ones at temperature 1."""
    text: str
    """The completion without special tokens, which the rewards see."""
    finish_reason: Literal["stop", "length"]
    """stop: it ended by itself; length: it was cut at max_new_tokens."""
    trajectory: Trajectory | UnsetType = UNSET
    """Its turns, where an environment opened the prompt (`Prompt.environment`); each has 1 to max_new_tokens tokens."""
    kept_sets: Sequence[Sequence[int] | np.ndarray] | UnsetType = UNSET
    """[S] the ids that each sampled token was drawn from, none for the whole vocabulary; where `batch.has_kept_sets`
    says so, as it does where `sampling` truncates what is trained."""
    routes: np.ndarray | UnsetType = UNSET
    """[T - 1, layers, k] the experts of each token but the last, which went through no model; in the order of the
    layers that have a router, and of the router's own choice. uint8, or uint16 where a layer has more than 256. Where
    `batch.has_routes`."""
    prompt_routes: np.ndarray | UnsetType = UNSET
    """[P, layers, k] those of the prompt's tokens, in the first sample of each prompt alone."""


@dataclass(frozen=True, kw_only=True)
class PromptClaim:
    """A prompt batch under this process's lease."""

    claim: Claim
    claimed_s: float
    """Unix time."""

    @property
    def batch(self) -> PromptBatch:
        return self.claim.prompt_batch

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """[k]; each is sampled `group_size` times."""
        return self.batch.prompts

    @property
    def group_size(self) -> int:
        """G; 1 for an evaluation."""
        return self.batch.group_size

    @property
    def sampling(self) -> SamplingParams:
        """How: of an evaluation its temperature may be 0, which is greedy."""
        return self.batch.sampling

    @property
    def manifest(self) -> WeightManifest:
        """The version that has to sample it."""
        return self.claim.manifest

    def prompt_ids(self, index: int) -> list[int]:
        """Returns the [P] token ids of a prompt; they are not tokenised again."""
        return unpack_int32(self.prompts[index].token_ids)

    def seed(self, index: int, sample: int = 0) -> int:
        """Returns a sample's own seed, the same whichever process draws it (I7)."""
        return prompt_seed(self.batch, self.prompts[index]) + sample


def completions_of(batch: PromptBatch, samples: Sequence[Sequence[Sample]]) -> list[Completion]:
    """[k][G] samples → [k·G] completions. Raises ContractViolation that names prompt and sample."""
    if [len(of_prompt) for of_prompt in samples] != [batch.group_size] * len(batch.prompts):
        raise ContractViolation(
            f"batch {batch.batch_id} needs {batch.group_size} samples of each of {len(batch.prompts)} prompts",
            field="samples",
        )
    completions: list[Completion] = []
    for place, (prompt, of_prompt) in enumerate(zip(batch.prompts, samples, strict=True)):
        group = [
            _completion(batch, prompt, sample, f"samples[{place}][{number}]") for number, sample in enumerate(of_prompt)
        ]
        check_routes(group, prompt.token_ids)
        completions += group
    return completions


def _completion(batch: PromptBatch, prompt: Prompt, sample: Sample, where: str) -> Completion:
    ids = np.asarray(sample.token_ids)
    logprobs = np.asarray(sample.logprobs, dtype=np.float64)
    turns = () if sample.trajectory is UNSET else sample.trajectory.turns
    longest = MAX_BATCH_TOKENS if turns else batch.sampling.max_new_tokens
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not 1 <= len(ids) <= longest:
        raise ContractViolation(f"{ids.dtype}{list(ids.shape)} is no list of 1 to {longest} token ids", field=where)
    num_sampled = sum(turn.end - turn.start for turn in turns) if turns else len(ids)
    if logprobs.shape != (num_sampled,) or not np.isfinite(logprobs).all():
        raise ContractViolation(f"needs a finite log-prob for each of its {num_sampled} tokens", field=where)
    if ids.min() < 0 or ids.max() >= 2**31:
        raise ContractViolation("a token id is no id of a vocabulary", field=where)
    sampled = ids
    if turns:
        sampled = np.concatenate([ids[turn.start : turn.end] for turn in turns])
    completion = Completion(
        token_ids=ids.astype("<i4").tobytes(),
        generator_logprobs=logprobs.astype("<f4").tobytes(),
        finish_reason=sample.finish_reason,
        trajectory=sample.trajectory,
        kept_sets=UNSET if sample.kept_sets is UNSET else _kept_sets(sample.kept_sets, sampled, where),
        routes=_routes(sample.routes, len(ids) - 1, f"{where}.routes"),
        prompt_routes=_routes(sample.prompt_routes, len(prompt.token_ids) // ITEM_BYTES, f"{where}.prompt_routes"),
    )
    if problem := completion_problem(completion, prompt, batch):
        raise ContractViolation(problem, field=where)
    return completion


def _routes(experts: np.ndarray | UnsetType, num_tokens: int, where: str) -> bytes | UnsetType:
    """Returns the experts of so many tokens as they are on the wire. Raises ContractViolation that names them."""
    if experts is UNSET:
        return UNSET
    if experts.ndim != 3 or len(experts) != num_tokens or experts.dtype not in (np.uint8, np.uint16):
        raise ContractViolation(
            f"{experts.dtype}{list(experts.shape)} are no experts, uint8 or uint16, of {num_tokens} tokens, layer by "
            "layer",
            field=where,
        )
    return experts.astype(experts.dtype.newbyteorder("<")).tobytes()


def _kept_sets(kept_ids: Sequence[Sequence[int] | np.ndarray], sampled: np.ndarray, where: str) -> bytes:
    sets = [np.unique(np.asarray(ids, dtype=np.int64)) for ids in kept_ids]
    if len(sets) != len(sampled):
        raise ContractViolation(f"needs the kept ids of each of its {len(sampled)} sampled tokens", field=where)
    for ids, token in zip(sets, sampled, strict=True):
        if len(ids) and (token not in ids or ids[0] < 0 or ids[-1] >= 2**31):
            raise ContractViolation(f"the kept ids of token {token} are of no vocabulary, or without it", field=where)
    return pack_kept_sets(sets)
