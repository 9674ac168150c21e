"""The model of the fence says what the scripts do: random walks through it, each move done on a real server as well."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from broker.connection.client import connect
from broker.stage_side import PutOutcome
from contracts.settings import StackSettings
from tests.integration.fence_parts import AnswerLosingBroker
from tests.model.replay import BOUNDS, Walk
from tests.model.stage_replay import STAGES

NUM_WALKS = int(os.environ.get("MODEL_WALKS", "120"))
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
    "fails its batch: retried",
    "gives back its batch: released",
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
IN_A_WINDOW = REACHED - {"fails the job: fenced", "ends the job: fenced"} | {
    "claims rollouts: wrong_iteration",
    "dispatches: dispatched",
    "dispatches: no_manifest",
    "opens: out_of_order",
    "publishes: future",
    "the newest checkpoint is damaged",
}
LAGGING = BOUNDS._replace(lag=1, iterations=4, evaluations=1)

STAGED = BOUNDS._replace(
    stages=STAGES, workers=2, stages_vary=True, item_attempts=3, may_remove=False, may_damage=False, faults=36
)
OF_STAGES = {f"puts: {one.value}" for one in PutOutcome} | {
    *("claims an item: claimed", "claims an item from a dead one: claimed", "claims an item from a slow one: claimed"),
    *("claims an item, answer lost", "claims an item again"),
    *("puts, answer lost", "fails its item: retried", "fails its item: dead", "stage worker dies"),
    "gives back its item: released",
    *("reads columns: read", "reads columns: missing", "commits: committed", "rewind: rewound"),
    *("the last writes are lost", "publishes: accepted", "ends the job: set"),
}


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
    for seed in range(NUM_WALKS):
        Walk(broker, seed, seen).run(NUM_MOVES)
    assert REACHED - seen.keys() == set()


def test_every_move_of_a_window_has_the_same_outcome_on_a_real_server(broker: AnswerLosingBroker) -> None:
    seen: Counter[str] = Counter()
    for bounds in (
        LAGGING,
        LAGGING._replace(is_bounded=True),
        LAGGING._replace(lag=2, iterations=5, checkpoint_every=2),
    ):
        for seed in range(NUM_WALKS // 4):
            Walk(broker, seed, seen, bounds).run(2 * NUM_MOVES)
    assert IN_A_WINDOW - seen.keys() == set()


def test_every_move_of_two_kinds_of_engines_has_the_same_outcome_on_a_real_server(broker: AnswerLosingBroker) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS // 10):
        Walk(broker, seed, seen, BOUNDS._replace(kinds=2)).run(NUM_MOVES)
    of_kinds = {"asks for work: wrong_engine", "publishes: accepted", "commits: committed", "the last writes are lost"}
    assert of_kinds - seen.keys() == set()


def test_every_move_of_a_job_with_stages_has_the_same_outcome_on_a_real_server(broker: AnswerLosingBroker) -> None:
    seen: Counter[str] = Counter()
    for bounds in (STAGED, STAGED._replace(lag=1, iterations=3, evaluations=1)):
        for seed in range(NUM_WALKS // 5):
            Walk(broker, seed, seen, bounds).run(2 * NUM_MOVES)
    assert OF_STAGES - seen.keys() == set()
