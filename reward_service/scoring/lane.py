"""One lane: a thread that scores turn by turn, in cages that it owns.

A completion may meet a hole in a scorer, and change the process that it is scored in. So no scorer process sees
completions of two jobs, and one that parses answers (math_verify, reasoning_gym) is replaced after a few hundred items:
by a fork of a process that has imported what is slow. Patterns can't be broken into, and plug-ins may load a model, or
start threads, which no fork survives: their scorer processes last for the job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Literal, TypeVar

from contracts import rewards
from contracts.rewards import Outcome, Result, RewardComponent, RewardItem, Unscorable
from onbeat.cage.caged_process import ChildDied, ChildLate
from reward_service.cages import Asked, CagedLane, Cages
from reward_service.scorers import rubric
from reward_service.scoring.scorer_cage import ScorerCage

Results = tuple[Result, ...]

TURN_S = 0.5
"""How long a lane stays with one request while others wait."""
QUICK_S = 0.01
"""Items that took no longer together are sent twice as many at a time."""
MAX_ITEMS_AT_ONCE = 32
MAX_BYTES_AT_ONCE = 48 * 1024
"""Fits a socket's buffer, so that sending several items never waits for the scoring of one."""
MAX_ITEMS_OF_PROCESS = 256
"""Completions that a scorer process parses before a fresh one takes its place: a fork costs as much as some of them."""
MAX_CAGES = 4
"""A lane has one for each kind of built-in scorers, and for each job with plug-ins; the one unused longest goes."""

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Scorer:
    """What the scorer process of a cage has met."""

    owner: str
    num_items: int = 0


@dataclass(kw_only=True, eq=False)
class Work(Asked[RewardItem, Result]):
    """One request: the items that it asks for."""

    request: rewards.RewardRequest
    owner: str
    """The job, or the request, whose completions the scorer process of these may have met."""
    given: list[dict[str, Outcome]]
    """What plug-ins that see whole groups made of each of the request's items, by breakdown name."""
    sight: Literal["due", "begun", "done"] = "done"
    """Whether a lane has had them called; no other lane begins items before. Guarded by the pool's condition, too."""
    num_begun: int = 0
    """Guarded by the pool's condition, as is the next."""
    num_at_once: int = 1
    refusal: Unscorable | None = None
    """Why the rubric cannot be warmed up: the remaining items get it too, instead of waiting for it again."""

    def __post_init__(self) -> None:
        """Built-in scorers of one kind share a cage, and each request has a scorer process of its own in it."""
        kinds = " ".join(sorted(rubric.warm_up_keys(self.components)))
        self.cage_key = kinds
        if rewards.imports_plugins(self.components):
            self.cage_key, self.sight = f"{self.owner}: {kinds}", "due"

    @property
    def components(self) -> tuple[RewardComponent, ...]:
        return self.request.components

    @property
    def is_open(self) -> bool:
        """Whether a lane may have a turn with it."""
        return self.sight != "begun" or self.future.done()

    @property
    def num_waiting(self) -> int:
        return len(self.asks) - self.num_begun

    def take(self, most: int) -> Sequence[int]:
        """Takes the next items, and returns their places: few enough for what they took so far, and at least one."""
        start = self.num_begun
        num_bytes = 0
        while self.num_begun < len(self.asks) and self.num_begun - start < min(self.num_at_once, max(1, most)):
            item = self.asks[self.num_begun]
            texts = (item.prompt, item.completion, item.reference, item.task_entry, item.metadata or "")
            num_bytes += 4 * sum(map(len, texts))
            if num_bytes > MAX_BYTES_AT_ONCE and self.num_begun > start:
                break
            self.num_begun += 1
        return range(start, self.num_begun)

    def given_of(self, place: int) -> dict[str, Outcome]:
        """place: among `asks`."""
        return self.given[self.request.places[place]]

    def pace(self, elapsed_s: float) -> None:
        self.num_at_once = min(2 * self.num_at_once, MAX_ITEMS_AT_ONCE) if elapsed_s < QUICK_S else 1


class Lane(CagedLane[Work, ScorerCage]):
    """It stays with one request for a while, where others wait."""

    def __init__(
        self,
        *,
        name: str,
        cages: Cages,
        new_cage: Callable[[], ScorerCage],
        next_turn: Callable[[Work | None], tuple[Work, Sequence[int]] | None],
    ) -> None:
        """next_turn: with the request to stay with, if any."""
        super().__init__(name=name, cages=cages, new_cage=new_cage)
        self._next_turn = next_turn
        self._stays_with: Work | None = None
        self._since_s = 0.0
        self._scorers: dict[str, _Scorer] = {}
        """Cage → its scorer process; none where there is none, or it was lost."""

    def _next(self) -> tuple[Work, Sequence[int]] | None:
        return self._next_turn(self._stays_with)

    def _answer(self, work: Work, places: Sequence[int]) -> None:
        started_s = time.monotonic()
        if work is not self._stays_with:
            self._stays_with, self._since_s = work, started_s
        if not places:
            self._see_groups(work)
            return
        self._score(work, list(places))
        now_s = time.monotonic()
        work.pace(now_s - started_s)
        if now_s - self._since_s > TURN_S:
            self._stays_with = None

    def _see_groups(self, work: Work) -> None:
        """Has each plug-in that sees whole groups called once, for all of the request's: its outcomes are given then.

        A failure is that of each item, so that no other component is to blame for it.
        """
        names = self._said(work, work.components, lambda cage: cage.warm_up_scorer(work.components))
        if isinstance(names, Unscorable):
            work.refusal = names
            return
        for name, component in rewards.named(work.components):
            items = enumerate(work.request.items)
            places = [place for place, item in items if name in names and component.scores(item.source)]
            if places:
                call = partial(ScorerCage.score_groups, component=component, request=work.request, places=places)
                said = self._said(work, (component,), call)
                for place, score in zip(places, repeat(said) if isinstance(said, Unscorable) else said, strict=False):
                    work.given[place][name] = rubric.outcome_of(name, score)

    def _said(
        self, work: Work, components: tuple[RewardComponent, ...], ask: Callable[[ScorerCage], T]
    ) -> T | Unscorable:
        """What the request's scorer process says for the whole request, or why it says nothing."""
        refusal = self._prepare(work)
        if refusal is not None:
            return refusal
        try:
            return ask(self._cages[work.cage_key])
        except (ChildLate, ChildDied) as error:
            return self._lost(work, components, error)

    def _score(self, work: Work, places: list[int]) -> None:
        unsettled: list[tuple[int, Unscorable]] = []
        while places:
            if work.future.done():
                return
            refusal = work.refusal or self._prepare(work)
            if refusal is not None:
                work.refusal = refusal
                for place in places:
                    work.deliver(place, refusal)
                break
            for result in self._results(work, work.components, places):
                place = places.pop(0)
                if isinstance(result, Unscorable) and work.request.settles:
                    unsettled.append((place, result))
                else:
                    work.deliver(place, result)
        for place, result in unsettled:
            work.deliver(place, self._settled(work, place, result))

    def _results(self, work: Work, components: tuple[RewardComponent, ...], places: Sequence[int]) -> Sequence[Result]:
        """Results of the first items, up to one that cost the scorer process its life; a fresh one is due after it."""
        results: list[Result] = []
        cage = self._cages[work.cage_key]
        self._scorers[work.cage_key].num_items += len(places)
        items, given = [work.asks[place] for place in places], list(map(work.given_of, places))
        try:
            for result in cage.score(components, items, given=given, item_timeout_s=work.request.item_timeout_s):
                results.append(result)
        except (ChildLate, ChildDied) as error:
            results.append(self._lost(work, components, error))
        return results

    def _settled(self, work: Work, place: int, result: Unscorable) -> Result:
        """Scores each component under the whole deadline, so that it shows which of them can't score it."""
        if not any(rubric.score_in_place(c, result.reason, settles=True) is not None for c in work.components):
            return result
        item = work.asks[place]
        scoring = rubric.scoring_of(work.components, item)
        outcomes: list[Outcome] = []
        for name, component in scoring:
            if name in work.given_of(place):
                outcome = work.given_of(place)[name]
            elif rubric.needs_isolation((component,)):
                outcome = self._component_outcome(work, component, place)
            else:
                outcome = rubric.score_component(name, component, item)
            outcomes.append(outcome)
        return rubric.weighted_sum(scoring, outcomes, settles=True)

    def _component_outcome(self, work: Work, component: RewardComponent, place: int) -> Outcome:
        refusal = self._prepare(work)
        if refusal is not None:
            return refusal
        (result,) = self._results(work, (component,), [place])
        if isinstance(result, Unscorable):
            return result
        for reason in result.unscorable.values():
            return Unscorable(reason=reason, detail="", component=component.name)
        return next(iter(result.breakdown.values()))

    def _prepare(self, work: Work) -> Unscorable | None:
        """Has a cage and a scorer process ready for this request; why no item of it can be scored, or None."""
        key = work.cage_key
        try:
            cage = self._cage(key)
            built_in = rubric.without_plugins(work.components)
            refusal = cage.warm_up(built_in, keys=rubric.warm_up_keys(built_in))
            self._of_pool.say_what_is_missing(cage.missing or ())
            if refusal is not None or self._may_go_on(work):
                return refusal
            cage.fresh_scorer()
            warm = cage.warm_up_scorer(work.components) if rewards.imports_plugins(work.components) else None
            if isinstance(warm, Unscorable):
                return warm
            self._scorers[key] = _Scorer(owner=work.owner)
            return None
        except (ChildLate, ChildDied) as error:
            return self._lost(work, work.components, error)

    def _may_go_on(self, work: Work) -> bool:
        """Whether the scorer process that is there may score this request, too."""
        scorer = self._scorers.get(work.cage_key)
        if scorer is None or scorer.owner != work.owner:
            return False
        # One process scores all of a job: plug-ins, whose imports may take minutes, and what parses nothing.
        keeps_its_process = rewards.imports_plugins(work.components) or not rubric.warm_up_keys(work.components)
        return scorer.num_items < MAX_ITEMS_OF_PROCESS or keeps_its_process

    def _lost(self, work: Work, components: tuple[RewardComponent, ...], error: ChildLate | ChildDied) -> Unscorable:
        """The result of an item whose scorer process was lost; that process is ended, with whatever it started."""
        reason: rewards.UnscorableReason = "timeout" if isinstance(error, ChildLate) else "crashed"
        component = rubric.only_isolated_name(components)
        log.warning("%s%s; another process takes its place", f"{component}: " if component else "", error)
        key = work.cage_key
        self._scorers.pop(key, None)
        cage = self._cages.get(key)
        if cage is not None and cage.is_alive:
            cage.end_child()
        if cage is not None and not cage.is_alive:
            self._end(key)
        if not self._stopped:
            self._of_pool.on_restart()
        return Unscorable(reason=reason, detail=str(error), component=component)

    def _cage(self, key: str) -> ScorerCage:
        while len(self._cages) >= MAX_CAGES and key not in self._cages:
            self._end(next(iter(self._cages)))
        return super()._cage(key)

    def _end(self, key: str) -> None:
        self._scorers.pop(key, None)
        super()._end(key)
