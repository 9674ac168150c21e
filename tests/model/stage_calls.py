"""What a walk's stage workers do beside its moves: late and wrong calls, and calls of several items at once.

The model's stage workers hold one item. A claim of several is the same as many claims of one, and so is a put: here the
real call is one, and the model's function is applied to each of its items in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from broker.stage_side import ClaimedItem, StageSide
from tests.model import table
from tests.model.invariants import opening_of
from tests.model.move import wrote
from tests.model.real import RealFence
from tests.model.server import FREE, NONE, Claim, Server
from tests.model.stage_names import NAMES, NUM_ROWS, column_values
from tests.model.state import Bounds, State
from tests.model.wrong_calls import OFF, WrongCall

OTHER_VARIANT = 9
"""Makes other columns than any stage worker."""
NUM_LATE = 24


class LateItem(NamedTuple):
    """An item that was claimed; its stage worker may come back with it at any time."""

    who: int
    item: ClaimedItem
    model: Claim


class StageCalls:
    """All items that were ever claimed in a walk, and what is called with them."""

    def __init__(self, real: RealFence, bounds: Bounds, sides: dict[int, StageSide], random: Random) -> None:
        self._real, self._bounds, self._sides, self._random = real, bounds, sides, random
        self._items: list[LateItem] = []

    def note(self, who: int, item: ClaimedItem, model: Claim) -> None:
        self._items.append(LateItem(who, item, model))

    def wrong_call(self, state: State) -> WrongCall | None:
        if not self._items:
            return None
        late = self._random.choice(self._items[-NUM_LATE:])
        makes: tuple[Callable[[State, LateItem], WrongCall | None], ...]
        makes = (self._puts, self._puts, self._puts_early, self._gives_back, self._renews)
        return self._random.choice(makes)(state, late)

    def _puts(self, state: State, late: LateItem) -> WrongCall:
        """Several of the items that its stage worker ever claimed, some of them twice, some with other content."""
        mine = [one for one in self._items[-NUM_LATE:] if one.who == late.who]
        made = [(one, self._variant(one.who)) for one in self._random.choices(mine, k=self._random.randint(1, 4))]
        outcomes, after = self._put_in_model(state, made)
        if after != state.server:  # some of them count: the others alone
            made = [one for one, outcome in zip(made, outcomes, strict=True) if outcome != "accepted"]
        return WrongCall(
            "puts late",
            lambda server: self._words(self._put_in_model(state._replace(server=server), made)),
            lambda: " ".join(self._put(late.who, made)),
        )

    def _words(self, answer: tuple[list[str], Server]) -> tuple[str, Server]:
        return " ".join(answer[0]), answer[1]

    def _variant(self, who: int) -> int:
        own = who if self._bounds.stages_vary else 0
        return self._random.choice((own, own, OTHER_VARIANT))

    def _put_in_model(self, state: State, made: Sequence[tuple[LateItem, int]]) -> tuple[list[str], Server]:
        outcomes, server = [], state.server
        for one, variant in made:
            rollout_id = 16 * state.era + len(server.slot_of(one.item.iteration).rollouts) + 1
            claim, value = self._in_model(server, one), (one.model[5], variant)
            outcome, server = table.put(server, self._bounds.stages, claim, value, rollout_id=rollout_id, off=OFF)
            outcomes.append(outcome)
        return outcomes, server

    def _in_model(self, server: Server, late: LateItem) -> Claim:
        """Names no copy that stands where another version has sampled the same completions: their digests differ."""
        iteration, batch, *_, attempt, source, number = late.model
        there = server.slot_of(iteration).batches[batch]
        if there and there.made:
            _, of, digest, content, *_ = there.made[3]
            if late.item.digest != self._real.digest_of(of, batch, content=content, digest=digest):
                return (*late.model[:4], attempt, (NONE, *source[1:]), number)
        return late.model

    def _put(self, who: int, made: Sequence[tuple[LateItem, int]]) -> list[str]:
        values = [
            (one.item, column_values(one.model[2], (one.model[5], variant), len(one.item.rows)))
            for one, variant in made
        ]
        return [outcome.value for outcome in self._sides[who].put(values)]

    def _puts_early(self, state: State, late: LateItem) -> WrongCall | None:
        """An item of a stage that reads the late one's column, made of nothing."""
        iteration, batch, stage, _, attempt, source, number = late.model
        readers = [later for later, (_, after) in enumerate(self._bounds.stages, start=1) if stage in after]
        if not readers:
            return None
        later = self._random.choice(readers)
        num_rows = NUM_ROWS // self._bounds.stages[later - 1][0]
        item = replace(late.item, stage=NAMES[later], item=0, rows=range(num_rows), input_digests=())
        early = LateItem(late.who, item, (iteration, batch, later, 0, attempt, (source[0],), number))
        made = [(early, OTHER_VARIANT)]
        return WrongCall(
            "puts before its inputs",
            lambda server: self._words(self._put_in_model(state._replace(server=server), made)),
            lambda: " ".join(self._put(late.who, made)),
        )

    def _gives_back(self, _state: State, late: LateItem) -> WrongCall:
        is_released, attempts = self._random.random() < 0.5, self._bounds.item_attempts
        return WrongCall(
            "gives back its item late" if is_released else "fails its item late",
            lambda server: table.fail(server, late.model, late.who, attempts, OFF, is_released=is_released),
            lambda: self._sides[late.who].fail(late.item, "too late", is_released=is_released).value,
        )

    def _renews(self, state: State, late: LateItem) -> WrongCall:
        mine = [one for one in self._items[-NUM_LATE:] if one.who == late.who]
        states = [table.renew(state.server, one.model, late.who, OFF)[0] for one in mine]

        def real() -> str:
            renewal = self._sides[late.who].renew([one.item for one in mine])
            return " ".join(
                "lost" if one.item in renewal.lost else "settled" if one.item in renewal.settled else "held"
                for one in mine
            )

        return WrongCall("renews its items", lambda server: (" ".join(states), server), real)

    # Several at once

    def works(self, state: State, who: int) -> State:
        """Claims what a stage has free, up to some rows, and puts most of it in one call; what is not put is left."""
        server, random = state.server, self._random
        free = [
            (opened.iteration, batch, stage, item)
            for opened in server.window
            for batch, there in enumerate(server.slot_of(opened.iteration).batches)
            for stage, items in enumerate(there.items if there else ())
            for item, one in enumerate(items)
            if stage and one[:1] == (FREE,)
        ]
        stage = random.choice(free)[2] if free else 1
        max_rows = random.choice((1, 3, 4, 6, 100))
        claimed = self._sides[who].claim(NAMES[stage], max_rows)
        of_stage = [place for place in free if place[2] == stage]
        state, mine = self._claimed(state, who, of_stage, claimed)
        num_rows = [len(one.item.rows) for one in mine]
        assert bool(claimed) == bool(of_stage)
        assert len(claimed) <= 1 or sum(num_rows) <= max_rows, "there is room for one at least, and no more than asked"
        left = set(of_stage) - {one.model[:4] for one in mine}
        assert not left or sum(num_rows) + num_rows[0] > max_rows, "what there is room for is taken"
        assert all(place[0] >= mine[-1].model[0] for place in left), "the oldest iteration comes first"
        made = [(one, self._variant(one.who)) for one in mine if random.random() < 0.8]
        made += [(one, self._variant(one.who)) for one in random.choices(mine, k=2 if mine else 0)]
        if not made:
            return state
        outcomes, after = self._put_in_model(state, made)
        assert self._put(who, made) == outcomes
        return wrote(state, after, self._bounds)

    def _claimed(
        self, state: State, who: int, free: list[tuple[int, ...]], claimed: list[ClaimedItem]
    ) -> tuple[State, list[LateItem]]:
        mine = []
        for item in claimed:
            places = [one for one in free if self.is_at(one, item)]
            assert len(places) == 1, f"{item} is not free"
            place: Any = places[0]
            opened = state.server.open_at(item.iteration)
            assert opened is not None
            outcome, server, model = table.claim(
                state.server,
                self._bounds.stages,
                place,
                who,
                opening=opening_of(state, opened),
                max_attempts=self._bounds.item_attempts,
                off=OFF,
            )
            assert (outcome, item.attempt) == ("claimed", model[4])
            self.check_inputs(item, model)
            state = wrote(state, server, self._bounds)
            mine.append(LateItem(who, item, model))
        assert len({one.model[:4] for one in mine}) == len(mine), "each comes once"
        self._items += mine
        return state, mine

    def is_at(self, place: Sequence[Any], item: ClaimedItem) -> bool:
        named = (item.iteration, item.batch_id, item.stage, item.item)
        return named == (place[0], self._real.batch_id(*place[:2]), NAMES[place[2]], place[3])

    def check_inputs(self, item: ClaimedItem, model: Claim) -> None:
        """It came with what the model says that it is made of."""
        _, _, stage, number, _, (_, *values), _ = model
        for before in self._bounds.stages[stage - 1][1]:
            size = NUM_ROWS // self._bounds.stages[before - 1][0]
            parts = table.covering(self._bounds.stages, before, stage, number)
            name = f"{NAMES[before]}_column"
            made = [one for _ in parts for one in column_values(before, values.pop(0), size)[name]]
            first = parts.start * size
            assert item.inputs[name] == made[item.rows.start - first : item.rows.stop - first]
