"""A batch whose rounds are in the engine, or with the scorers: one that was claimed, or a recorded one.

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a prompt that teaches nothing gives its place to another.

    prompts ─ sample, score ─▶ k groups ─┬─ rewards differ ───────────────────▶ kept in their places
       ▲                                 ├─ equal, a reserve is left ─┐
       └── the next reserves of those ───│◀───────────────────────────┘
                                         └─ equal, none is left ──────────────▶ kept: zero advantage costs no training

All of it is one batch under one lease and one version. What a round samples is a function of the batch and of the
rewards in the rounds before, so two generators go the same way (I7): no generator's speed decides what is trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass

from msgspec import UNSET
from msgspec.structs import replace

from contracts.rollouts import BatchTimings, Completion, Prompt, PromptBatch, RolloutGroup
from contracts.spec.job import JobSpec
from producer.engine.base import VerifiedWeights
from producer.served_model import LoadedModel

Play = Callable[[PromptBatch], Awaitable[list[list[Completion]]]]
"""Samples completions [k][G] in as many calls of the engine as they have turns."""


class Places:
    """The k places of a prompt batch, filled round by round: `take_round`, `fill`, until none is open."""

    def __init__(self, batch: PromptBatch) -> None:
        self._batch = batch
        self._groups: dict[int, RolloutGroup] = {}
        self._open = list(range(len(batch.prompts)))
        self._num_rounds = 0

    @property
    def is_open(self) -> bool:
        """True while there is another round to sample."""
        return bool(self._open)

    @property
    def may_go_on(self) -> bool:
        """True while the rewards of the round that was taken last can make another one necessary."""
        return self.is_open and self._num_rounds <= len(self._batch.reserves)

    @property
    def groups(self) -> tuple[RolloutGroup, ...]:
        """The groups [k] in the order of the batch, once no place is open."""
        return tuple(self._groups[place] for place in range(len(self._batch.prompts)))

    def take_round(self) -> PromptBatch:
        """Returns the batch to sample now: the prompts of the open places."""
        prompts = [self._batch.prompts, *self._batch.reserves][self._num_rounds]
        self._num_rounds += 1
        return replace(self._batch, prompts=tuple(prompts[place] for place in self._open), reserves=())

    def fill(self, groups: Sequence[RolloutGroup]) -> None:
        """Takes the round's groups, in its order. Those of equal reward leave their places open while a reserve is
        left.
        """
        filled = list(zip(self._open, groups, strict=True))
        still_open: list[int] = []
        if self.may_go_on:
            still_open = [place for place, group in filled if group.has_equal_rewards]
        self._open = still_open
        self._groups |= {place: group for place, group in filled if place not in self._open}


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A round of a batch in the engine. SampledBatch creates it when the engine is called."""

    sub_batch: PromptBatch
    started_s: float
    """Unix time."""
    answer: asyncio.Future[list[list[Completion]]]


def given_completion(prompt: Prompt) -> Completion:
    """Returns the completion that the data set gives. No engine drew it: its log-probs are those of what is certain."""
    assert prompt.dataset_completion is not UNSET
    return Completion(
        token_ids=prompt.dataset_completion,
        generator_logprobs=bytes(len(prompt.dataset_completion)),  # float32 0.0 for each int32
        finish_reason="stop",
    )


@dataclass(eq=False)
class SampledBatch:
    """A batch that is sampled and scored, and both again for the prompts that are resampled."""

    prompt_batch: PromptBatch
    _: KW_ONLY
    attempt: int
    spec: JobSpec
    loaded: LoadedModel
    weights: VerifiedWeights
    """The version that the engine holds now, under which all of the batch is sampled."""
    play: Play | None = None
    """How a round is sampled where an environment answers; None: by one call of the engine."""

    def __post_init__(self) -> None:
        self.places = Places(self.prompt_batch)
        self.rounds: list[BatchTimings] = []
        self.generation: Generation | None = None
        """Its round in the engine; None while there is none."""
        self.is_settled = False
        """True: another generator published the batch, or its iteration is over. It is not needed any more."""

    @property
    def num_sampling(self) -> int:
        """Completions that are in the engine."""
        if self.generation:
            return self.generation.sub_batch.num_completions
        return 0

    def sample(self, *, started_s: float) -> None:
        """Hands the next round to the engine."""
        prompts = self.places.take_round()
        completions = self._generate(prompts) if self.play is None else self.play(prompts)
        answer = asyncio.ensure_future(completions)
        self.generation = Generation(sub_batch=prompts, started_s=started_s, answer=answer)

    async def _generate(self, prompts: PromptBatch) -> list[list[Completion]]:
        if prompts.is_given:
            return [[given_completion(prompt)] * prompts.group_size for prompt in prompts.prompts]
        return await self.loaded.generate(prompts, deadline_s=self.spec.timeouts.generation_s)

    def settle(self) -> None:
        """Drops what is in the engine; a round that is out of it may still be scored."""
        self.is_settled = True
        if self.generation is not None:
            self.generation.answer.cancel()
