"""The service's side of one scorer's cage: have imports done, ask the scorer process under a deadline, end it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from contracts.encoding.wire import decode, encode
from contracts.rewards import RewardComponent, RewardItem, Scored, Unscorable, breakdown_names, stated_scores
from onbeat.cage.cage import CageRules
from onbeat.cage.caged_process import CagedProcess, ChildDied
from reward_service.scorers import rubric
from reward_service.scoring.scorer_process import ScorerAnswer, ScorerTask, WarmedUp, WarmUp

MAX_ANSWER_BYTES = 64 * 1024
"""Many times what 32 components' scores need: whatever a scorer process makes up costs the service little to read."""


class ScorerCage(CagedProcess):
    """Its child is a scorer process. After ChildLate or ChildDied only `end` may follow, or `fresh_scorer`."""

    def __init__(
        self, rules: CageRules, *, start_timeout_s: float, on_empty: Callable[[], None] = lambda: None
    ) -> None:
        """Returns as soon as the process exists; the first warm-up waits for its start.

        on_empty: called by `end`, where nothing is left in the cage.
        """
        super().__init__(
            rules,
            module="reward_service.scoring.scorer_process",
            noun="the scorer",
            start_timeout_s=start_timeout_s,
            on_empty=on_empty,
        )
        self._warm: frozenset[str] = frozenset()

    def warm_up(self, components: tuple[RewardComponent, ...], *, keys: frozenset[str]) -> Unscorable | None:
        """Has the slow imports done in the nursery, once for each key; why no item can be scored, or None."""
        self.wait_for_start()
        if keys <= self._warm:
            return None
        report = self.prepare(encode(WarmUp(components=components)), deadline_s=self.start_ends_s())
        refusal = decode(report, WarmedUp).refusal
        if refusal is None:
            self._warm |= keys
        return refusal

    def fresh_scorer(self) -> None:
        """Ends the scorer process, if there is one, and has the next forked; `score` may follow at once."""
        self.fresh_child(max_bytes=MAX_ANSWER_BYTES)

    def warm_up_scorer(self, components: tuple[RewardComponent, ...]) -> Unscorable | None:
        """As `warm_up`, in the scorer process itself: for foreign code, which may start threads."""
        deadline_s = self.start_ends_s()
        self._send(ScorerTask(components=components, items=()), deadline_s, doing=self.importing)
        answer = self._receive(deadline_s, doing=self.importing)
        return answer if isinstance(answer, Unscorable) else None

    def score(
        self, components: tuple[RewardComponent, ...], items: Sequence[RewardItem], *, item_timeout_s: float
    ) -> Iterator[Scored | Unscorable]:
        """Results in order, as they come; each has the whole deadline from the one before it."""
        doing = f"scoring the item took more than {item_timeout_s:g} s"
        self._send(
            ScorerTask(components=components, items=tuple(items)), time.monotonic() + item_timeout_s, doing=doing
        )
        for _ in items:
            result = self._receive(time.monotonic() + item_timeout_s, doing=doing)
            if result is None:
                raise ChildDied("the scorer's process answered out of turn")
            if not _is_plausible(result, components):
                raise ChildDied("the scorer's process sent what is no answer")
            yield result

    def _send(self, task: ScorerTask, deadline_s: float, *, doing: str) -> None:
        assert self.child is not None
        with self.heard(doing):
            self.child.send(encode(task), deadline_s=deadline_s)

    def _receive(self, deadline_s: float, *, doing: str) -> Scored | Unscorable | None:
        assert self.child is not None
        with self.heard(doing):
            return decode(self.child.receive(deadline_s=deadline_s), ScorerAnswer).result


def _is_plausible(result: Scored | Unscorable, components: tuple[RewardComponent, ...]) -> bool:
    """Whether a sound scorer process may say so of this rubric: foreign code in it can write its answers."""
    names = breakdown_names(components)
    if isinstance(result, Unscorable):
        return len(result.detail) <= rubric.MAX_DETAIL_CHARS and result.component in ("", *names)
    return (
        set(result.breakdown) == set(names)
        and all(map(rubric.is_score, (result.reward, *result.breakdown.values())))
        and result.unscorable.keys() <= stated_scores(components).keys()
    )
