"""The model of the fence says what the scripts do: random walks through it, each move done on a real server as well."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from broker.connection.client import connect
from broker.stage_side import PutOutcome
from contracts.settings import StackSettings
from tests.integration.fence_parts import AnswerLosingBroker
from tests.model.replay import BOUNDS, Walk
from tests.model.stage_names import CHAIN, PAIR
from tests.model.state import Bounds

SOAK = int(os.environ.get("SOAK_EXAMPLES", "0"))
"""So many new walks, instead of the fixed ones (`make soak`)."""
NUM_WALKS = SOAK or 80
FIRST_SEED = time.time_ns() if SOAK else 0
NUM_MOVES = 80
REACHED = {
    "rewind: rewound",
    "opens: opened",
    "opens: already_open",
    "claims rollouts: fenced",
    "commits: committed",
    "commits, answer lost",
    "publishes: accepted",
    "publishes: duplicate",
    "publishes: stale",
    "takes a copy",
    "claims, answer lost",
    "claims again",
    "claims from a dead one: claimed",
    "fails its item: retried",
    "fails its item by the same words: dead",
    "gives back its item: released",
    "the last writes are lost",
    "finds its commit lost",
    "writes the last checkpoint",
    "ends the job: set",
    "ends the job: fenced",
    "fails the job: set",
    "fails the job: fenced",
    "the job is given up",
    "the job is resumed",
    "the job is removed",
}
"""Each must have happened: walks that never get there show nothing about it."""
UNCHANGED = {
    "acquires a held job": ("refused",),
    "renews": ("fenced", "granted"),
    "announces": ("fenced", "divergent", "published"),
    "opens": ("fenced", "already_open", "out_of_order", "no_manifest"),
    "claims rollouts": ("fenced", "wrong_iteration"),
    "reconciles": ("fenced", "wrong_iteration", "dispatched"),
    "rewinds": ("fenced", "out_of_order", "broken_link"),
    "commits, right": ("fenced", "missing", "wrong_iteration"),
    "commits, lacks one": ("missing",),
    "commits, of other content": ("divergent",),
    "commits, of one more": ("divergent",),
    "commits, after another record": ("broken_link",),
    "commits, opens too far": ("out_of_order",),
    "commits, of other weights": ("no_manifest",),
    "publishes again": ("accepted", "duplicate", "ended", "stale"),
    "publishes anew": ("duplicate",),
    "publishes an older version's": ("stale",),
    "publishes a newer version's": ("future",),
    "publishes other weights'": ("wrong_weights",),
    "publishes into the iteration before": ("stale",),
    "publishes into the iteration after": ("future",),
    "publishes a part": ("incomplete",),
    "publishes other groups": ("incomplete",),
    "publishes a batch that is none": ("unexpected",),
    "publishes too much": ("oversize",),
    "fails": ("settled",),
    "gives back": ("settled",),
    "renews its leases": ("held", "lost", "settled"),
    "asks in vain": ("nothing",),
}
"""What is called beside the moves → the answers that must have come."""
BESIDE = {f"{name}: {word}, and nothing changes" for name, words in UNCHANGED.items() for word in words} | {
    "a prompt is lost"
}
OF_A_WINDOW = {f"dispatches: {word}, and nothing changes" for word in ("fenced", "no_manifest", "wrong_iteration")}
OF_LATE_STAGES = {
    *(f"puts late: {word}, and nothing changes" for word in ("again", "divergent", "not_ready", "settled")),
    *(f"renews its items: {word}, and nothing changes" for word in ("held", "lost", "settled")),
    *("puts before its inputs: not_ready, and nothing changes", "fails its item late: settled, and nothing changes"),
    *("gives back its item late: settled, and nothing changes", "works on several items"),
}
IN_A_WINDOW = REACHED - {"fails the job: fenced", "ends the job: fenced"} | {
    "claims rollouts: wrong_iteration, and nothing changes",
    "dispatches: dispatched",
    "dispatches: no_manifest",
    "opens: out_of_order",
    "publishes: future",
    "the newest checkpoint is damaged",
}
DEAD = {"fails its item: dead", "claims from a dead one: buried", "publishes: unexpected"}
MORTAL = BOUNDS._replace(max_attempts=2)
"""A batch that fails twice is dead."""
LAGGING = BOUNDS._replace(lag=1, iterations=4, evaluations=1)

STAGED = BOUNDS._replace(
    stages=PAIR, stage_workers=2, stages_vary=True, item_attempts=3, may_remove=False, may_damage=False, faults=36
)
PROVING = BOUNDS._replace(proves=True, faults=30)
OF_PROOFS = {
    *("proves: proved", "proves: refused", "its engine goes wrong", "makes its engine anew"),
    *("claims: claimed", "claims: unproved", "claims from a dead one: unproved"),
    *("publishes: accepted", "publishes: unproved", "proves other weights: unknown, and nothing changes"),
    *("the last writes are lost", "rewind: rewound", "commits: committed"),
}

OF_ITEMS = {
    *(f"puts: {one.value}" for one in PutOutcome),
    *("claims: claimed", "claims from a dead one: claimed", "claims from a slow one: claimed"),
    *("claims, answer lost", "claims again"),
    *("puts, answer lost", "fails its item: retried", "fails its item: dead", "gives back its item: released"),
}
OF_STAGES = {f"{name} (of a stage)" for name in OF_ITEMS} | {
    "worker dies",
    *("reads columns: read", "reads columns: missing", "commits: committed", "rewind: rewound"),
    *("the last writes are lost", "publishes: accepted", "ends the job: set"),
}


def walk(
    broker: AnswerLosingBroker, seen: Counter[str], bounds: Bounds, *, num_walks: int, num_moves: int = NUM_MOVES
) -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + num_walks):
        try:
            Walk(broker, seed, seen, bounds).run(num_moves)
        except BaseException as error:
            error.add_note(f"seed {seed}, after {seen.total()} moves and calls, {bounds}")
            raise


def missing(seen: Counter[str], reached: set[str]) -> set[str]:
    """What was never reached; a short search may miss something."""
    return reached - seen.keys() if NUM_WALKS >= 80 else set()


@pytest.fixture
def broker(settings: StackSettings) -> Iterator[AnswerLosingBroker]:
    """Its server has each write on its disk before it answers: a walk asks that before each of its checkpoints."""
    connected = connect(settings)
    before: Any = connected.redis.config_get("appendfsync")
    connected.redis.config_set("appendfsync", "always")
    yield AnswerLosingBroker(connected.redis, connected.patience)
    connected.redis.config_set("appendfsync", before["appendfsync"])


def test_every_move_of_the_model_has_the_same_outcome_on_a_real_server(broker: AnswerLosingBroker) -> None:
    seen: Counter[str] = Counter()
    walk(broker, seen, BOUNDS, num_walks=NUM_WALKS * 3 // 4)
    walk(broker, seen, MORTAL, num_walks=NUM_WALKS // 4)
    assert missing(seen, REACHED | BESIDE | DEAD) == set()


def test_every_move_of_a_window_has_the_same_outcome_on_a_real_server(broker: AnswerLosingBroker) -> None:
    seen: Counter[str] = Counter()
    for bounds in (
        LAGGING,
        LAGGING._replace(is_bounded=True),
        LAGGING._replace(lag=2, iterations=5, checkpoint_every=2, max_attempts=2),
    ):
        walk(broker, seen, bounds, num_walks=NUM_WALKS // 4, num_moves=2 * NUM_MOVES)
    assert missing(seen, IN_A_WINDOW | BESIDE | OF_A_WINDOW | {"fails its item: dead"}) == set()


def test_every_move_of_two_kinds_of_engines_has_the_same_outcome_on_a_real_server(broker: AnswerLosingBroker) -> None:
    seen: Counter[str] = Counter()
    walk(broker, seen, BOUNDS._replace(kinds=2), num_walks=NUM_WALKS // 10)
    of_kinds = {"asks for work: wrong_engine", "publishes: accepted", "commits: committed", "the last writes are lost"}
    assert missing(seen, of_kinds) == set()


def test_every_move_of_engines_that_show_what_they_compute_has_the_same_outcome_on_a_real_server(
    broker: AnswerLosingBroker,
) -> None:
    seen: Counter[str] = Counter()
    for bounds in (PROVING, PROVING._replace(lag=1, iterations=4, evaluations=1, is_bounded=True)):
        walk(broker, seen, bounds, num_walks=NUM_WALKS // 8, num_moves=2 * NUM_MOVES)
    assert missing(seen, OF_PROOFS) == set()


def test_every_move_of_a_job_with_stages_has_the_same_outcome_on_a_real_server(broker: AnswerLosingBroker) -> None:
    seen: Counter[str] = Counter()
    for bounds in (STAGED, STAGED._replace(lag=1, iterations=3, evaluations=1), STAGED._replace(stages=CHAIN)):
        walk(broker, seen, bounds, num_walks=NUM_WALKS // 5, num_moves=2 * NUM_MOVES)
    assert missing(seen, OF_STAGES | OF_LATE_STAGES) == set()
