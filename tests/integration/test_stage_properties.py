"""Stage workers in any order on a real server, several items at a time: every answer is what a table of the items says.

The walks of tests/model do one item at a time, and lose writes; here claims and puts take many, of several batches and
stages, some of them twice, some late. `SOAK_EXAMPLES=2000` (`make soak`) explores that many examples at random.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from broker.generator_side import FailOutcome
from broker.stage_side import ClaimedItem, PutOutcome
from contracts.encoding.arrays import pack_float32
from contracts.rollouts import RolloutBatch
from onbeat.stack.redis import EmbeddedRedis
from tests.integration.stage_parts import GROUP_SIZE, NUM_GROUPS, NUM_ROWS, StagedJob, external
from tests.integration.test_fence_properties import PROFILE, SOAK

STAGES = (
    external("rows", max_attempts=100),
    external("groups", ["rows", "reward"], unit="group", max_attempts=100),
    external("whole", ["groups", "rows"], unit="batch", max_attempts=100),
    external("after", ["whole"], max_attempts=2),
)
READS = {"rows": (), "groups": ("rows",), "whole": ("groups", "rows"), "after": ("whole",)}
ROWS_OF = {"rows": 1, "groups": GROUP_SIZE, "whole": NUM_ROWS, "after": 1}
MORTAL = "after"
"""An item of this stage that fails twice takes its batch with it; no lease of it ends."""
NUM_BATCHES = 2
ANY = ""
"""Instead of a stage: the first one that has free items."""
STAGE = st.sampled_from([*sorted(READS), *[ANY] * 8])
WORKER = st.integers(0, 1)
REACHED = {"accepted", "again", "divergent", "settled", "retried", "dead", "taken over", "renewed", "lost", "over"}
Place = tuple[str, str, int]
"""(stage, batch id, item)."""


@dataclass
class Known:
    """What the table has of an item."""

    attempt: int = 0
    last: int | None = None
    """The worker of its last claim, until that fails it."""
    is_leased: bool = False
    add: float | None = None
    """What tells its columns from others; None before they are there."""


def parts_of(member: str) -> tuple[int, str, int]:
    """(index of the stage, batch id, item) of an item as the server has it in work."""
    stage, _, rest = member.partition("/")
    batch_id, _, item = rest.rpartition("/")
    return int(stage), batch_id, int(item)


def place_of(item: ClaimedItem) -> Place:
    return item.stage, item.batch_id, item.item


class StageMachine(RuleBasedStateMachine):
    """Two workers, two published batches, four stages."""

    def __init__(self, server: EmbeddedRedis, seen: Counter[str]) -> None:
        super().__init__()
        self.seen = seen
        self.job = StagedJob(server, STAGES)
        self.job.open(count=NUM_BATCHES)
        self.batches: dict[str, RolloutBatch] = {one.batch_id: one for one in self.job.publish_all(NUM_BATCHES)}
        self.sides = [self.job.stage(f"s{number}") for number in range(2)]
        self.held: list[list[ClaimedItem]] = [[], []]
        """[workers] All that each ever claimed, in order."""
        self.table = {
            (stage, batch_id, item): Known()
            for stage, size in ROWS_OF.items()
            for batch_id in self.batches
            for item in range(NUM_ROWS // size)
        }
        self.arrived: set[str] = set()

    @initialize(num_stages=st.sampled_from([0, 1, 2, 3, 3, 3]))
    def begin(self, num_stages: int) -> None:
        for _ in range(num_stages):
            self.work(0, 1)

    @rule(worker=WORKER, num_turns=st.integers(1, 3))
    def work(self, worker: int, num_turns: int) -> None:
        """Takes all that the first stage with free items has, and puts it."""
        for _ in range(num_turns):
            before = len(self.held[worker])
            self.claim(worker, ANY, 100)
            self.put(worker, [(at, 0.0) for at in range(len(self.held[worker]) - before)])

    def is_free(self, place: Place) -> bool:
        return self.is_in_work(place) and not self.table[place].is_leased

    def is_in_work(self, place: Place) -> bool:
        """Whether its inputs are there, and its columns are not."""
        stage, batch_id, item = place
        if self.table[place].add is not None:
            return False
        first, last = item * ROWS_OF[stage], (item + 1) * ROWS_OF[stage] - 1
        inputs = ((name, number) for name in READS[stage] for number in range(NUM_ROWS // ROWS_OF[name]))
        return all(
            self.table[name, batch_id, number].add is not None
            for name, number in inputs
            if number * ROWS_OF[name] <= last and first < (number + 1) * ROWS_OF[name]
        )

    def column(self, stage: str, batch_id: str, row: int) -> bytes:
        """What stands in a row of a stage's column."""
        add = self.table[stage, batch_id, row // ROWS_OF[stage]].add
        assert add is not None
        return pack_float32([1000.0 * float(batch_id.rpartition("/")[2]) + row + add])

    @rule(worker=WORKER, stage=STAGE, max_rows=st.sampled_from([1, 3, 5, NUM_ROWS, 100]))
    def claim(self, worker: int, stage: str, max_rows: int) -> None:
        free = {place for place in self.table if self.is_free(place)}
        stage = stage or next((name for name in READS if any(place[0] == name for place in free)), "rows")
        free = {place for place in free if place[0] == stage}
        items = self.sides[worker].claim(stage, max_rows)
        assert bool(items) == bool(free)
        assert len(items) == len({place_of(item) for item in items} & free), "each is free, and comes once"
        assert len(items) <= 1 or sum(len(item.rows) for item in items) <= max_rows
        for item in items:
            known = self.table[place_of(item)]
            self.seen["taken over"] += known.attempt > 0
            known.attempt, known.last, known.is_leased = known.attempt + 1, worker, True
            assert item.attempt == known.attempt
            for name in READS[stage]:
                assert item.inputs[name] == [self.column(name, item.batch_id, row) for row in item.rows]
        self.held[worker] += items

    @rule(worker=WORKER, picks=st.lists(st.tuples(st.integers(0, 40), st.sampled_from([0, 0, 0, 0.5])), max_size=24))
    def put(self, worker: int, picks: list[tuple[int, float]]) -> None:
        """Puts some of all that the worker ever claimed, the newest first, some twice or with other content."""
        newest = self.held[worker][::-1]
        chosen = [(newest[at % len(newest)], add) for at, add in picks if newest]
        outcomes = self.sides[worker].put([(item, self.job.made(item, add=add)) for item, add in chosen])
        assert outcomes == [self._put(place_of(item), add) for item, add in chosen]
        self.seen.update(outcome.value for outcome in outcomes)
        self._check()

    def _put(self, place: Place, add: float) -> PutOutcome:
        known = self.table.get(place)
        if known is None:
            return PutOutcome.SETTLED
        if known.add is not None:
            return PutOutcome.AGAIN if known.add == add else PutOutcome.DIVERGENT
        known.add = add
        return PutOutcome.ACCEPTED

    def _check(self) -> None:
        """A batch is with the trainer if, and only if, each of its items is there; in work is what the table says."""
        members: Any = self.job.operator.redis.zrange(self.job.keys.slots[0].work, 0, -1)
        in_work = {parts_of(member.decode()) for member in members}
        stages = list(READS)
        assert in_work == {(stages.index(place[0]), *place[1:]) for place in self.table if self.is_in_work(place)}, (
            "the items in work"
        )
        whole = {
            batch_id
            for batch_id in self.batches
            if all(known.add is not None for place, known in self.table.items() if place[1] == batch_id)
        }
        self.arrived |= set(self.job.arrived())
        assert self.arrived == whole & {place[1] for place in self.table}

    @rule(worker=WORKER, pick=st.integers(0, 20))
    def a_lease_ends(self, worker: int, pick: int) -> None:
        leased = [place for place, known in self.table.items() if known.is_leased and known.last == worker]
        places = [place for place in leased if self.is_in_work(place) and place[0] != MORTAL]
        if places:
            place = places[pick % len(places)]
            self.job.expire(next(item for item in self.held[worker][::-1] if place_of(item) == place))
            self.table[place].is_leased = False

    @rule(worker=WORKER, max_rows=st.sampled_from([3, 6, 12]), num_ends=st.integers(1, 2))
    def a_worker_sleeps_past_its_leases(self, worker: int, max_rows: int, num_ends: int) -> None:
        self.claim(worker, ANY, max_rows)
        for pick in range(num_ends):
            self.a_lease_ends(worker, pick)
        self.claim(1 - worker, ANY, max_rows)
        self.renew(worker)
        self.put(worker, [(0, 0.0), (1, 0.0)])

    @rule(worker=WORKER, pick=st.integers(0, 40), stage=st.sampled_from([ANY, MORTAL, MORTAL]), times=st.integers(1, 3))
    def fail(self, worker: int, pick: int, stage: str, times: int) -> None:
        for _ in range(times):
            self.claim(worker, stage, 1)
            self._fail(worker, 0)
        self._fail(worker, pick)

    def _fail(self, worker: int, pick: int) -> None:
        if not self.held[worker]:
            return
        item = self.held[worker][::-1][pick % len(self.held[worker])]
        known, outcome = self.table.get(place_of(item)), self.sides[worker].fail(item, "no number")
        if known is None or known.add is not None or (known.last, known.attempt) != (worker, item.attempt):
            assert outcome is FailOutcome.SETTLED
        elif item.stage == MORTAL and known.attempt == 2:
            assert outcome is FailOutcome.DEAD
            self.table = {place: one for place, one in self.table.items() if place[1] != item.batch_id}
        else:
            assert outcome is FailOutcome.RETRIED
            known.last, known.is_leased = None, False
        self.seen[outcome.value] += 1
        self._check()

    @rule(worker=WORKER)
    def renew(self, worker: int) -> None:
        """The ended leases, too, that nothing has taken since: the holder of the last claim has them again."""
        latest = {place_of(item): item for item in self.held[worker]}
        renewal = self.sides[worker].renew(list(latest.values()))
        for place, item in latest.items():
            known = self.table.get(place)
            is_over, is_lost = item in renewal.settled, item in renewal.lost
            if known is None or known.add is not None:
                assert is_over
            else:
                assert (is_over, is_lost) == (False, (known.last, known.attempt) != (worker, item.attempt))
                known.is_leased = known.is_leased or not is_lost
            self.seen["over" if is_over else "lost" if is_lost else "renewed"] += 1

    def teardown(self) -> None:
        """One worker ends what is left, and the trainer has the columns of the first puts."""
        for worker, held in enumerate(self.held):
            # An item of the mortal stage would not survive another lease that ends.
            mine = [item for item in held if item.stage == MORTAL]
            outcomes = self.sides[worker].put([(item, self.job.made(item)) for item in mine])
            assert outcomes == [self._put(place_of(item), 0.0) for item in mine]
            for _ in self.table:
                self.a_lease_ends(worker, 0)
        last = self.job.stage("last")
        for stage in READS:
            while items := last.claim(stage, 1000):
                for item in items:
                    assert last.put([(item, self.job.made(item))]) == [self._put(place_of(item), 0.0)]
        self._check()
        for batch_id in {place[1] for place in self.table}:
            columns = self.job.trainer.columns(self.batches[batch_id])
            assert columns == {
                stage: tuple(self.column(stage, batch_id, row) for row in range(NUM_ROWS)) for stage in READS
            }


@pytest.mark.timeout(0 if SOAK else 600)
def test_stage_workers_in_any_order_get_what_the_table_of_items_says(redis_server: EmbeddedRedis) -> None:
    seen: Counter[str] = Counter()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        cast(Any, lambda: StageMachine(redis_server, seen)), settings=PROFILE if SOAK else SHORT
    )
    assert {name for name, count in seen.items() if count} >= REACHED, seen


SHORT = type(PROFILE)(PROFILE, max_examples=13, stateful_step_count=30)
assert NUM_ROWS == NUM_GROUPS * GROUP_SIZE
