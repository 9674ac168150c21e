"""Arbitrary interleavings of trainers and generators against a real server: I1-I5 hold after every step.

`tests/model/fence.py` says what each call must answer, and what the server must hold afterwards. Time is not slept:
leases are made to expire in the server. `SOAK_EXAMPLES=2000` (`make soak`) explores that many examples at random.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from broker.connection.client import connect
from broker.generator_side import PublishOutcome
from broker.keys import GENERATOR_GROUP
from contracts.jobs import JobState
from contracts.settings import StackSettings
from tests.every_key import every_key
from tests.integration.fence_generators import GENERATOR, GeneratorMoves
from tests.integration.fence_parts import StutteringBroker
from tests.integration.fence_trainers import CURRENT, NUM_BATCHES

pytestmark = pytest.mark.usefixtures("scripts_come_back")

SOAK = int(os.environ.get("SOAK_EXAMPLES", "0"))
"""Random examples to explore instead of the fixed few."""
PROFILE = hypothesis_settings(
    max_examples=SOAK or 80,
    stateful_step_count=100 if SOAK else 50,
    derandomize=not SOAK,
    phases=[Phase.generate, Phase.shrink] if SOAK else [Phase.generate],
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
REACHED = {"fenced off", "commit: committed", "commit: missing", "rewind: rewound", "rewind: broken_link"} | {
    "commit: divergent",
    "commit: broken_link",
    "fail: retried",
    "fail: dead",
    "reconcile: 1",
    "reclaimed",
    "hedged",
    "hedge: accepted",
    "hedge: duplicate",
    "renew: held",
    "renew: lost",
    "renew: settled",
}
"""Each must have happened in a run, beside every outcome of a publication."""
IN_A_WINDOW = {
    "open: opened",
    "open: out_of_order",
    "commit: committed",
    "commit: missing",
    "commit: wrong_iteration",
} | {
    *("dispatch: dispatched", "dispatch: no_manifest", "rewind: rewound", "reclaimed", "renew: held", "renew: settled"),
    *("publish: accepted", "publish: duplicate", "publish: unexpected", "publish: incomplete"),
    *("publish: stale", "publish: future", "publish: wrong_weights"),
}


class FenceMachine(GeneratorMoves):
    """Three trainers, three generators, one job, and a server that may forget its last writes."""

    def __init__(self) -> None:
        super().__init__()
        self.disk: tuple | None = None

    @rule()
    def the_next_answer_is_lost(self) -> None:
        self.broker.loses_next_answer = True

    @rule(pick=st.integers(0, 3), is_noticed=st.booleans())
    def a_prompt_is_lost(self, pick: int, is_noticed: bool) -> None:
        there = [place for place in self.entries if self._entry(place)]
        if there:
            place = there[pick % len(there)]
            ledger = self.server.slot_of(place[0]).batches[place[1]][0]
            self.server = self.server.with_batch(*place, (ledger, ()))
            prompts = self.keys.slot_of(place[0]).prompts
            self.broker.redis.xack(prompts, GENERATOR_GROUP, self.entries[place])
            self.broker.redis.xdel(prompts, self.entries[place])
        if is_noticed:
            self.reconcile(CURRENT, 0)

    @rule()
    def writes_reach_the_disk(self) -> None:
        known = (self.server, self.owner, self.lease_is_live, Counter(self.counters), set(self.expired))
        known = (*known, dict(self.hedgers), self.num_dead, dict(self.real.links), self.num_beginnings)
        self.disk = (self.real.dump(), known)

    @precondition(lambda self: self.disk)
    @rule()
    def the_last_writes_are_lost(self) -> None:
        """What clients were told stays told."""
        assert self.disk
        rows, known = self.disk
        self.real.restore(rows)
        self.server, self.owner, self.lease_is_live, counters, expired, hedgers, self.num_dead, links, begun = known
        self.counters, self.expired, self.hedgers = Counter(counters), set(expired), dict(hedgers)
        self.real.links = dict(links)
        if begun != self.num_beginnings:
            self.num_beginnings = begun
            self._restart_trainers()  # as each does that finds the fence at another iteration than its own

    @rule(before=st.integers(0, 2), after=st.integers(0, 2))
    def a_takeover_is_lost(self, before: int, after: int) -> None:
        """The next epoch must be newer than the one that the server has forgotten."""
        for who in (before, after):
            self.writes_reach_the_disk()
            self.trainer_lease(CURRENT, "release")
            self.acquire(who)
            self.the_last_writes_are_lost()
            self.trainer_lease(CURRENT, "expire")

    @rule(who=GENERATOR, variant=st.integers(0, 1), opens=st.booleans())
    def beat(self, who: int, variant: int, opens: bool) -> None:
        """The open iteration, or the next one, from its first claim to its commit, and a generator that comes late."""
        version = self.server.committed + 1
        wrong: list[Callable[[], None]] = [
            lambda: self.commit(CURRENT, "unlinked", opens, 0),
            lambda: self.commit(CURRENT, "divergent", opens, 0),
            lambda: self.commit(CURRENT, "missing", opens, 0),
            lambda: self.rewind(CURRENT, 0, is_linked=False),
        ]
        steps: list[Callable[[], None]] = [
            lambda: self.publish_weights(CURRENT, 0, variant),
            *[lambda: self.open(CURRENT, 1)] * (self.bounds.lag + 1),
            lambda: self.reconcile(CURRENT, 0),
            *[lambda: self.work(who)] * NUM_BATCHES,
            lambda: self.claim_rollouts(CURRENT, 2 * NUM_BATCHES, waits=variant == 1, is_lost=not opens),
            lambda: self.publish_weights(CURRENT, 1, variant),
            *([] if opens else wrong),
            lambda: self.commit(CURRENT, "right", opens, 0),
            lambda: self._publish(0, "resampled") if self.claims else None,
        ]
        for step in steps:
            step()
            self.the_server_holds_what_the_model_says()
        self.seen[f"beat: {'committed' if self.server.committed == version else 'stuck'}"] += 1

    def teardown(self) -> None:
        self.real.jobs.move(self.job_id, JobState.FAILED)
        self.broker.redis.delete(*every_key(self.keys))


class WindowMachine(FenceMachine):
    """The same with two open iterations, each of a batch that any version of its range samples and an evaluation."""

    bounds = FenceMachine.bounds._replace(lag=1, is_bounded=True, evaluations=1)


@pytest.mark.timeout(3600 if SOAK else 300)
@pytest.mark.parametrize("machine", [FenceMachine, WindowMachine])
def test_the_fence_keeps_its_invariants_whatever_the_order_of_calls(
    settings: StackSettings, machine: type[FenceMachine]
) -> None:
    machine.broker = StutteringBroker(connect(settings).redis)
    machine.seen = Counter()
    run_state_machine_as_test(machine, settings=PROFILE)
    # A job that ended has tests of its own, test_ended_jobs.py; so have stages, test_stages_faults.py,
    # and a server without room, test_memory_by_age.py.
    of_others = {PublishOutcome.ENDED, PublishOutcome.FULL, PublishOutcome.NO_ROOM, PublishOutcome.WRONG_ENGINE}
    of_an_active_job = {f"publish: {one.value}" for one in set(PublishOutcome) - of_others}
    reached = IN_A_WINDOW if machine.bounds.lag else REACHED | of_an_active_job
    assert reached - machine.seen.keys() == set()
