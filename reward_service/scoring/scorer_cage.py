"""The service's side of one scorer's cage: have imports done, ask the scorer process under a deadline, end it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from contracts import rewards
from contracts.encoding.wire import decode, encode
from contracts.rewards import Outcome, Result, RewardComponent, RewardItem, Unscorable
from onbeat.base.cage.caged_process import CagedProcess, ChildDied
from reward_service.scorers import rubric
from reward_service.scoring.scorer_process import ScorerAnswer, ScorerTask

MAX_ANSWER_BYTES = 64 * 1024
"""Many times what 32 components' scores need: whatever a scorer process makes up costs the service little to read."""


class ScorerCage(CagedProcess):
    """Its child is a scorer process. After ChildLate or ChildDied only `end` may follow, or `fresh_scorer`."""

    module = "reward_service.scoring.scorer_process"
    noun = "the scorer"
    on_printed: Callable[[str], None] | None = None
    """Takes what the scorer process prints; the scoring thread sets it. None drops it."""
    _warm: frozenset[str] = frozenset()

    def warm_up(self, components: tuple[RewardComponent, ...], *, keys: frozenset[str]) -> Unscorable | None:
        """Has the slow imports done in the nursery, once for each key; why no item can be scored, or None."""
        self.wait_for_start()
        if keys <= self._warm:
            return None
        report = self.prepare(encode(ScorerTask(components=components)), deadline_s=self.start_ends_s())
        refusal = decode(report, ScorerAnswer).result
        if isinstance(refusal, Unscorable):
            return refusal
        self._warm |= keys
        return None

    def fresh_scorer(self) -> None:
        """Ends the scorer process, if there is one, and has the next forked; `score` may follow at once."""
        self.fresh_child(max_bytes=MAX_ANSWER_BYTES)

    def warm_up_scorer(self, components: tuple[RewardComponent, ...]) -> Unscorable | frozenset[str]:
        """As `warm_up`, in the scorer process itself: for foreign code, which may start threads.

        Returns breakdown names of the plug-ins that are called for whole groups.
        """
        deadline_s = self.start_ends_s()
        self._send(ScorerTask(components=components), deadline_s, doing=self.importing)
        answer = self._receive(deadline_s, doing=self.importing)
        if isinstance(answer.result, Unscorable):
            return answer.result
        return frozenset(answer.see_groups)

    def score_groups(
        self,
        component: RewardComponent,
        request: rewards.RewardRequest,
        places: Sequence[int],
        *,
        first_s: float | None,
    ) -> Sequence[float] | Unscorable:
        """Returns the scores of one call of a plug-in, for the items at these places of a request: whole groups.

        first_s: the deadline of a first call in a fresh process; None of any other.
        """
        call_s = request.item_timeout_s if first_s is None else first_s
        doing = f"scoring {len(places)} items in one call took more than {_deadline_in_words(call_s, first_s)}"
        items = tuple(request.items[place] for place in places)
        deadline_s = time.monotonic() + call_s
        self._send(
            ScorerTask(components=(component,), items=items, group_size=request.group_size), deadline_s, doing=doing
        )
        answer = self._receive(deadline_s, doing=doing)
        if isinstance(answer.result, Unscorable) and _is_plausible(answer.result, (component,), items[0]):
            return answer.result
        if answer.result is not None or len(answer.scores) != len(items):
            raise ChildDied("the scorer's process sent what is no answer")
        return answer.scores

    def score(
        self,
        components: tuple[RewardComponent, ...],
        items: Sequence[RewardItem],
        *,
        group_outcomes: Sequence[Mapping[str, Outcome]],
        item_s: float,
        first_s: float | None,
    ) -> Iterator[Result]:
        """Yields results in order, as they come; each has the whole deadline of item_s from the one before it.

        group_outcomes: outcomes of each item that are there already, by breakdown name. first_s: the deadline of the
        first item in a fresh process; None where it has no other.
        """
        limit_s = item_s if first_s is None else first_s
        doing = f"scoring the item took more than {_deadline_in_words(limit_s, first_s)}"
        task = ScorerTask(components=components, items=tuple(items), group_outcomes=tuple(map(dict, group_outcomes)))
        self._send(task, time.monotonic() + limit_s, doing=doing)
        for item in items:
            result = self._receive(time.monotonic() + limit_s, doing=doing).result
            if result is None:
                raise ChildDied("the scorer's process answered out of turn")
            if not _is_plausible(result, components, item):
                raise ChildDied("the scorer's process sent what is no answer")
            yield result
            limit_s = item_s
            doing = f"scoring the item took more than {item_s:g} s"

    def _send(self, task: ScorerTask, deadline_s: float, *, doing: str) -> None:
        assert self.child is not None
        with self.heard(doing):
            self.child.send(encode(task), deadline_s=deadline_s)

    def _receive(self, deadline_s: float, *, doing: str) -> ScorerAnswer:
        assert self.child is not None
        with self.heard(doing):
            answer = decode(self.child.receive(deadline_s=deadline_s), ScorerAnswer)
        if self.on_printed is not None:
            self.on_printed(answer.printed)
        return answer


def _deadline_in_words(limit_s: float, first_s: float | None) -> str:
    if first_s is None:
        return f"{limit_s:g} s"
    return f"the {limit_s:g} s of a first call"


def _is_plausible(result: Result, components: tuple[RewardComponent, ...], item: RewardItem) -> bool:
    """Returns whether a sound scorer process may say so of this rubric: foreign code in it can write its answers."""
    names = [name for name, component in rewards.named(components) if component.scores(item.source)]
    if isinstance(result, Unscorable):
        return len(result.detail) <= rubric.MAX_DETAIL_CHARS and result.component in ("", *names)
    return (
        set(result.breakdown) == set(names)
        and all(map(rubric.is_score, (result.reward, *result.breakdown.values())))
        and result.unscorable.keys() <= rewards.stated_scores(components).keys()
    )
