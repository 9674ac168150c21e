"""The thread that scores turn by turn, in cages that it owns.

A completion may meet a hole in a scorer, and change the process that it is scored in. So no scorer process sees
completions of two jobs, and one that parses answers (math_verify, reasoning_gym) is replaced after a few hundred items:
by a fork of a process that has imported what is slow. Patterns can't be broken into, and plug-ins may load a model, or
start threads, which no fork survives: their scorer processes last for the job.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Literal, TypeVar

from contracts import rewards
from contracts.rewards import Outcome, Result, RewardComponent, RewardItem, Unscorable
from onbeat.base.cage.caged_process import ChildDied, ChildLate
from onbeat.base.cage.printed import PrintLog
from reward_service.cages import Asked, Cages, CageThread
from reward_service.scorers import rubric
from reward_service.scoring.scorer_cage import ScorerCage

Results = tuple[Result, ...]

TURN_S = 0.5
"""How long a thread stays with one request while others wait."""
QUICK_S = 0.01
"""Items that took no longer together are sent twice as many at a time."""
MAX_ITEMS_AT_ONCE = 32
MAX_BYTES_AT_ONCE = 48 * 1024
"""Fits a socket's buffer, so that sending several items never waits for the scoring of one."""
MAX_ITEMS_OF_PROCESS = 256
"""Completions that a scorer process parses before a fresh one takes its place: a fork costs as much as some of them."""
MAX_CAGES = 4
"""A thread has one for each kind of built-in scorers, and for each job with plug-ins; the one unused longest goes."""

MAX_STARTERS = 256
"""Jobs of which a thread remembers what their first calls were like."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class _GivenUp(Exception):
    """The turn was taken back while it lasted."""


class _Starter(Enum):
    """The record of what the first calls of a job's plug-ins in fresh processes are like."""

    UNKNOWN = "unknown"
    QUICK = "quick"
    SLOW = "slow"
    """It took more than half of an item's deadline: it loads something."""
    TOO_SLOW = "too slow"
    """It took longer than a first call may: the next ones have an item's deadline."""


@dataclass(kw_only=True)
class _Scorer:
    """The owner and the number of the items that the scorer process of a cage has met."""

    owner: str
    num_items: int = 0


@dataclass(kw_only=True, eq=False)
class Work(Asked[RewardItem, Result]):
    """A request with the items that it asks for: a pool creates it, and its threads score it."""

    request: rewards.RewardRequest
    owner: str
    """The job, or the request, whose completions the scorer process of these may have met."""
    group_outcomes: list[dict[str, Outcome]]
    """Outcomes of each of the request's items, by breakdown name, from plug-ins that see whole groups."""
    sight: Literal["due", "begun", "done"] = "done"
    """The state of the calls of plug-ins that see whole groups: due, begun by a thread, or done. No other thread begins
    items before they are done. Guarded by the pool's condition, too."""
    waiting: deque[int] = field(default_factory=deque)
    """Places, among `asks`, of the items that no thread has begun. Guarded by the pool's condition, as is the rest."""
    num_at_once: int = 1
    waits_since_s: float = 0.0
    refusal: Unscorable | None = None
    """Why the rubric cannot be warmed up: the remaining items get it too, instead of waiting for it again."""

    def __post_init__(self) -> None:
        """Built-in scorers of one kind share a cage, and each request has a scorer process of its own in it."""
        self.waiting.extend(range(len(self.asks)))
        kinds = " ".join(sorted(rubric.warm_up_keys(self.components)))
        self.cage_key = kinds
        if rewards.imports_plugins(self.components):
            self.cage_key = f"{self.owner}: {kinds}"
            self.sight = "due"

    @property
    def components(self) -> tuple[RewardComponent, ...]:
        return self.request.components

    @property
    def has_plugins(self) -> bool:
        return rewards.imports_plugins(self.components)

    @property
    def item_s(self) -> float:
        """The deadline of an item. Patterns have less than a plug-in may have: none needs minutes for a completion."""
        return rubric.deadline_s(self.components, self.request.item_timeout_s)

    @property
    def is_over(self) -> bool:
        return self.future.done()

    @property
    def is_open(self) -> bool:
        """Returns whether a thread may have a turn with it."""
        return self.sight != "begun"

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def take(self, most: int) -> Sequence[int]:
        """Takes the next items, and returns their places: few enough for what they took so far, and at least one.

        It takes none where plug-ins are to see whole groups first.
        """
        if self.sight == "due":
            self.sight = "begun"
            return ()
        taken: list[int] = []
        num_bytes = 0
        while self.waiting and len(taken) < min(self.num_at_once, max(1, most)):
            item = self.asks[self.waiting[0]]
            texts = (item.prompt, item.completion, item.reference, item.task_entry, item.metadata or "")
            num_bytes += 4 * sum(map(len, texts))
            if num_bytes > MAX_BYTES_AT_ONCE and taken:
                break
            taken.append(self.waiting.popleft())
        return taken

    def outcomes_of(self, place: int) -> dict[str, Outcome]:
        """Returns the outcomes of an item that are there already. place: among `asks`."""
        return self.group_outcomes[self.request.places[place]]

    def pace(self, elapsed_s: float) -> None:
        self.num_at_once = min(2 * self.num_at_once, MAX_ITEMS_AT_ONCE) if elapsed_s < QUICK_S else 1


class ScoringThread(CageThread[Work, ScorerCage]):
    """It stays with one request for a while, where others wait."""

    def __init__(
        self,
        *,
        name: str,
        cages: Cages,
        new_cage: Callable[[], ScorerCage],
        next_turn: Callable[[ScoringThread, Work | None], tuple[Work, Sequence[int]] | None],
        put_back: Callable[..., None],
        on_loss: Callable[[str, Unscorable], None],
        first_call_s: float,
    ) -> None:
        """next_turn: with the request to stay with, if any. put_back: of items that were begun (`ScorerPool.put_back`).

        on_loss: told of each scorer process that was lost: its job, and what its item is answered. first_call_s: the
        longest first call of a job's plug-ins in a fresh process.
        """
        super().__init__(name=name, cages=cages, new_cage=new_cage)
        self._next_turn = next_turn
        self._put_back = put_back
        self._on_loss = on_loss
        self._first_call_s = first_call_s
        self._print_log = PrintLog()
        self._starters: OrderedDict[str, _Starter] = OrderedDict()
        """Job → what its first calls were like; of the jobs that came last."""
        self._work: Work | None = None
        """The request of this turn. Guarded by _guards_cages, as is the next."""
        self._gives_up = False
        """True where the turn was taken back, and its cage killed."""
        self._stays_with: Work | None = None
        self._since_s = 0.0
        self._scorers: dict[str, _Scorer] = {}
        """Cage → its scorer process; none where there is none, or it was lost."""

    def _next(self) -> tuple[Work, Sequence[int]] | None:
        return self._next_turn(self, self._stays_with)

    def give_up(self, work: Work) -> None:
        """Ends this thread's turn with a request, if it still has it: its items wait again. Other threads call it."""
        with self._guards_cages:
            if self._work is not work:
                return
            self._gives_up = True
            cage = self._cages.get(work.cage_key)
            if cage is not None:
                cage.kill()

    def _answer(self, work: Work, places: Sequence[int]) -> None:
        with self._guards_cages:
            self._work = work
        started_s = time.monotonic()
        if work is not self._stays_with:
            self._stays_with = work
            self._since_s = started_s
        left = list(places)
        try:
            if places:
                self._score(work, left)
            else:
                self._see_groups(work)
        except _GivenUp:
            log.info("%s: a turn of %.0f s ends, since another job waits", work.owner, time.monotonic() - started_s)
            self._put_back(work, left, sees_groups=not places)
        finally:
            with self._guards_cages:
                is_killed = self._gives_up
                self._gives_up = False
                self._work = None
            if is_killed:
                self._end(work.cage_key)
                self._stays_with = None
        if not places:
            return
        now_s = time.monotonic()
        work.pace(now_s - started_s)
        if now_s - self._since_s > TURN_S:
            self._stays_with = None

    def _see_groups(self, work: Work) -> None:
        """Has each plug-in that sees whole groups called once, for all of the request's: its outcomes are given then.

        A failure is that of each item, so that no other component is to blame for it.
        """
        names = self._answer_of(work, work.components, lambda cage: cage.warm_up_scorer(work.components))
        if isinstance(names, Unscorable):
            work.refusal = names
            return
        for name, component in rewards.named(work.components):
            items = enumerate(work.request.items)
            places = [place for place, item in items if name in names and component.scores(item.source)]
            if places:
                answer = self._answer_of(work, (component,), partial(self._groups_scored, work, component, places))
                if isinstance(answer, Unscorable):
                    answer = [answer] * len(places)
                for place, score in zip(places, answer, strict=False):
                    work.group_outcomes[place][name] = rubric.outcome_of(name, score)

    def _groups_scored(
        self, work: Work, component: RewardComponent, places: Sequence[int], cage: ScorerCage
    ) -> Sequence[float] | Unscorable:
        with self._call(work) as (first_s, scorer):
            started_s = time.monotonic()
            scores = cage.score_groups(component, work.request, places, first_s=first_s)
            if not scorer.num_items:
                self._first_call_ended(work, time.monotonic() - started_s)
            scorer.num_items += 1
            return scores

    @contextmanager
    def _call(self, work: Work) -> Iterator[tuple[float | None, _Scorer]]:
        """Yields the deadline of the first call of a job's plug-ins in a fresh process, None for any other call.

        A job whose first call was quick has no longer one afterwards: only a completion may hang it then. Neither has
        one whose first call took longer than that.
        """
        self._check_turn()
        scorer = self._scorers[work.cage_key]
        starter = self._starters.setdefault(work.owner, _Starter.UNKNOWN)
        self._starters.move_to_end(work.owner)
        while len(self._starters) > MAX_STARTERS:
            self._starters.popitem(last=False)
        may_be_slow = work.has_plugins and bool(work.request.job_id) and starter in (_Starter.UNKNOWN, _Starter.SLOW)
        first_s = None
        if may_be_slow and not scorer.num_items and work.item_s < self._first_call_s:
            first_s = self._first_call_s
        started_s = time.monotonic()
        try:
            yield first_s, scorer
        except ChildLate:
            if first_s is not None and time.monotonic() - started_s >= first_s:
                self._starters[work.owner] = _Starter.TOO_SLOW
            raise

    def _answer_of(
        self, work: Work, components: tuple[RewardComponent, ...], ask: Callable[[ScorerCage], T]
    ) -> T | Unscorable:
        """Returns the answer of the request's scorer process for the whole request, or why there is none."""
        refusal = self._prepare(work)
        if refusal is not None:
            return refusal
        try:
            return ask(self._cages[work.cage_key])
        except (ChildLate, ChildDied) as error:
            return self._lost(work, components, error)

    def _score(self, work: Work, places: list[int]) -> None:
        """Delivers a result for each place, which it takes out of `places` then. Raises _GivenUp."""
        unsettled: list[tuple[int, Unscorable]] = []
        try:
            self._score_all(work, places, unsettled)
            while unsettled:
                place, result = unsettled[0]
                work.deliver(place, self._settled(work, place, result))
                unsettled.pop(0)
        except _GivenUp:
            places.extend(place for place, _ in unsettled)
            raise

    def _score_all(self, work: Work, places: list[int], unsettled: list[tuple[int, Unscorable]]) -> None:
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

    def _results(self, work: Work, components: tuple[RewardComponent, ...], places: Sequence[int]) -> Sequence[Result]:
        """Returns results of the first items, up to one that ended the scorer process; a fresh one is due after it."""
        results: list[Result] = []
        cage = self._cages[work.cage_key]
        items = [work.asks[place] for place in places]
        outcomes = [work.outcomes_of(place) for place in places]
        try:
            with self._call(work) as (first_s, scorer):
                started_s = time.monotonic()
                for result in cage.score(
                    components, items, group_outcomes=outcomes, item_s=work.item_s, first_s=first_s
                ):
                    if not scorer.num_items and work.has_plugins:
                        self._first_call_ended(work, time.monotonic() - started_s)
                    scorer.num_items += 1
                    results.append(result)
        except (ChildLate, ChildDied) as error:
            results.append(self._lost(work, components, error))
        return results

    def _first_call_ended(self, work: Work, seconds: float) -> None:
        if self._starters[work.owner] is not _Starter.TOO_SLOW:
            self._starters[work.owner] = _Starter.SLOW if seconds > work.item_s / 2 else _Starter.QUICK

    def _settled(self, work: Work, place: int, result: Unscorable) -> Result:
        """Scores each component under the whole deadline, so that it shows which of them can't score it."""
        if not any(rubric.score_in_place(c, result.reason, settles=True) is not None for c in work.components):
            return result
        item = work.asks[place]
        scoring = rubric.scoring_of(work.components, item)
        outcomes: list[Outcome] = []
        for name, component in scoring:
            if name in work.outcomes_of(place):
                outcome = work.outcomes_of(place)[name]
            elif rubric.needs_isolation((component,)):
                outcome = rubric.outcome_of(name, self._component_outcome(work, component, place))
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
            cage.on_printed = None
            if work.has_plugins:
                cage.on_printed = partial(self._print_log.write, work.owner)
            self._check_turn()
            built_in = rubric.without_plugins(work.components)
            refusal = cage.warm_up(built_in, keys=rubric.warm_up_keys(built_in))
            self._of_pool.say_what_is_missing(cage.missing or ())
            if refusal is not None or self._may_go_on(work):
                return refusal
            cage.fresh_scorer()
            warm = None
            if work.has_plugins:
                warm = cage.warm_up_scorer(work.components)
            if isinstance(warm, Unscorable):
                return warm
            self._scorers[key] = _Scorer(owner=work.owner)
            return None
        except (ChildLate, ChildDied) as error:
            return self._lost(work, work.components, error)

    def _may_go_on(self, work: Work) -> bool:
        """Returns whether the scorer process that is there may score this request, too."""
        scorer = self._scorers.get(work.cage_key)
        if scorer is None or scorer.owner != work.owner:
            return False
        # One process scores all of a job: plug-ins, whose imports may take minutes, and what parses nothing.
        keeps_its_process = work.has_plugins or not rubric.warm_up_keys(work.components)
        return scorer.num_items < MAX_ITEMS_OF_PROCESS or keeps_its_process

    def _check_turn(self) -> None:
        """Raises _GivenUp where the turn was taken back. Where that comes later, it kills the cage that there is."""
        with self._guards_cages:
            if self._gives_up and not self._stopped:
                raise _GivenUp

    def _lost(self, work: Work, components: tuple[RewardComponent, ...], error: ChildLate | ChildDied) -> Unscorable:
        """Returns the result of an item whose scorer process was lost; that process is ended, with whatever it started.

        Raises _GivenUp where it was lost since the turn was taken back: that is no fault of the item.
        """
        self._check_turn()
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
        result = Unscorable(reason=reason, detail=str(error), component=component)
        self._on_loss(work.owner, result)
        return result

    def _cage(self, key: str) -> ScorerCage:
        while len(self._cages) >= MAX_CAGES and key not in self._cages:
            self._end(next(iter(self._cages)))
        return super()._cage(key)

    def _end(self, key: str) -> None:
        self._scorers.pop(key, None)
        super()._end(key)
