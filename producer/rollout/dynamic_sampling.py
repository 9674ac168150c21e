"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a prompt that teaches nothing gives its place to another.

    prompts ─ sample, score ─▶ k groups ─┬─ rewards differ ───────────────────▶ kept in their places
       ▲                                 ├─ equal, a reserve is left ─┐
       └── the next reserves of those ───│◀───────────────────────────┘
                                         └─ equal, none is left ──────────────▶ kept: zero advantage costs no training

All of it is one batch under one lease and one version. What a round samples is a function of the batch and of the
rewards in the rounds before, so two generators go the same way (I7): no generator's speed decides what is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from contracts.rollouts import PromptBatch, RolloutGroup


class Places:
    """The k places of a prompt batch, filled round by round: `take_round`, `fill`, until none is open."""

    def __init__(self, batch: PromptBatch) -> None:
        self._batch = batch
        self._groups: dict[int, RolloutGroup] = {}
        self._open = list(range(len(batch.prompts)))
        self._num_rounds = 0

    @property
    def is_open(self) -> bool:
        """Whether there is another round to sample."""
        return bool(self._open)

    @property
    def may_go_on(self) -> bool:
        """Whether the rewards of the round that was taken last can make another one necessary."""
        return self.is_open and self._num_rounds <= len(self._batch.reserves)

    @property
    def groups(self) -> tuple[RolloutGroup, ...]:
        """[k], in the order of the batch, once no place is open."""
        return tuple(self._groups[place] for place in range(len(self._batch.prompts)))

    def take_round(self) -> PromptBatch:
        """The batch to sample now: the prompts of the open places."""
        prompts = [self._batch.prompts, *self._batch.reserves][self._num_rounds]
        self._num_rounds += 1
        return replace(self._batch, prompts=tuple(prompts[place] for place in self._open), reserves=())

    def fill(self, groups: Sequence[RolloutGroup]) -> None:
        """The round's groups, in its order. Those of equal reward leave their places open while a reserve is left."""
        found = list(zip(self._open, groups, strict=True))
        self._open = [place for place, group in found if group.has_equal_rewards] if self.may_go_on else []
        self._groups |= {place: group for place, group in found if place not in self._open}
