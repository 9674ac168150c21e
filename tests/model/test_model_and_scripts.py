"""The model of the fence says what the scripts do: random walks through it, each move done on a real server as well."""

from __future__ import annotations

import os
from collections import Counter

from broker.connection.client import connect
from contracts.settings import StackSettings
from tests.model.replay import Walk

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
    "claims from a dead one: claimed",
    "fails its batch: retried",
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


def test_every_move_of_the_model_has_the_same_outcome_on_a_real_server(settings: StackSettings) -> None:
    broker = connect(settings)
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        Walk(broker, seed, seen).run(NUM_MOVES)
    assert REACHED - seen.keys() == set()
