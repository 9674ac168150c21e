"""How much a function takes: as much as any spec allows, and no more; a client of ours says what is too much."""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

import pytest
import redis

from broker import presence
from broker.batch_cache import CACHED_BATCHES, READ_AHEAD
from broker.connection import bounds
from broker.connection.bounds import BOUNDS, excess
from broker.connection.client import Broker
from broker.connection.roles import SCRIPT_ROLES
from broker.connection.script_texts import PRELUDE, scripts
from broker.fence import KnownVersion
from broker.keys import MAX_SLOTS, batch_shape
from broker.leases import Lease, LeasedSide
from broker.openings import CHUNK_BATCHES, NewBatch
from broker.stage_side import PUT_BYTES, PackedItem, puts_at_once
from contracts.encoding.wire import MAX_ATTEMPTS, MAX_BATCHES, MAX_ITERATIONS, encode
from contracts.errors import InvalidInput
from contracts.spec import stages
from contracts.spec.limits import MAX_BATCH_COMPLETIONS, LimitSpec
from onbeat.weights.chunks import CHUNK_BYTES

DIGEST = "f" * 64
LONGEST_ID = f"{MAX_ITERATIONS}/evaluation/{MAX_BATCHES}"
LARGEST = 2**53
"""The number of a claim."""
GRAPH = [{"unit": "batch", "after": list(range(1, bounds.MAX_STAGES))} for _ in range(bounds.MAX_STAGES)]
LEASE = Lease(stage=bounds.MAX_STAGES, iteration=MAX_ITERATIONS, batch_id=LONGEST_ID, item=2**14, claim=LARGEST)
NEW = NewBatch(id=LONGEST_ID, shape=batch_shape(4096, 4096), version=MAX_ITERATIONS)
OPENING = {"iteration": MAX_ITERATIONS, "batches": [NEW] * bounds.DISPATCHED_AT_ONCE}
RUN = {
    **{"stage": bounds.MAX_STAGES, "iteration": MAX_ITERATIONS, "batch_id": LONGEST_ID, "of": DIGEST},
    **{"items": [2**14], "has_inputs": True, "digests": [DIGEST]},
}
WHO = "w" * presence.MAX_WORKER_ID
LARGEST_CALLS: dict[str, dict[str, Any]] = {
    "renew": {"leases": [LEASE] * bounds.MAX_LEASES},
    "put_rows": {"stages": GRAPH, "runs": [RUN] * bounds.MAX_ITEMS},
    "claim_rows": {
        "worker": WHO,
        "stages": GRAPH,
        "held": {f"{i}{LONGEST_ID}": DIGEST for i in range(CACHED_BATCHES)},
    },
    "fail_rows": {"lease": LEASE, "stages": GRAPH, "reason": "r" * 2000},
    "publish_batch": {"batch_id": LONGEST_ID, "generator": WHO, "engine": "e" * 1000, "stages": GRAPH},
    "commit_iteration": {"trained": {f"{i}{LONGEST_ID}": DIGEST for i in range(MAX_BATCHES)}, "opening": OPENING},
    "open_iteration": {
        "opening": OPENING,
        "versions": [KnownVersion(version=MAX_ITERATIONS, digest=DIGEST)] * bounds.MAX_VERSIONS,
    },
    "dispatch": {"iteration": MAX_ITERATIONS, "batches": [NEW] * bounds.DISPATCHED_AT_ONCE},
    "reconcile": {"batch_ids": [LONGEST_ID] * bounds.ASKED_AT_ONCE},
    "restore_chain": {"digests": [DIGEST] * bounds.RESTORED_AT_ONCE},
    "drop_chunks": {"kept": [MAX_ITERATIONS] * bounds.MAX_KEPT_VERSIONS},
    "claim_rollouts": {"read_ahead": [f"{2**64}-{2**64}"] * bounds.READ_AHEAD},
    "set_state": {"reason": "\u20ac" * 2**16},
}


def test_every_function_has_its_bounds() -> None:
    assert sorted(BOUNDS) == sorted(SCRIPT_ROLES)


def test_the_bounds_are_those_of_the_contracts() -> None:
    assert stages.MAX_STAGES == bounds.MAX_STAGES
    annotated = get_type_hints(LimitSpec, include_extras=True)["max_batch_bytes"]
    assert get_args(annotated)[1].le == bounds.BATCH_BYTES
    assert CHUNK_BYTES == bounds.CHUNK_BYTES
    assert (READ_AHEAD, CHUNK_BATCHES) == (bounds.READ_AHEAD, bounds.DISPATCHED_AT_ONCE)
    assert MAX_SLOTS < bounds.MAX_VERSIONS
    assert re.findall(r"local MAX_ROWS = 2 \^ (\d+)", PRELUDE) == [str(MAX_BATCH_COMPLETIONS.bit_length() - 1)]
    assert f"local MAX_ITEMS = {bounds.MAX_ITEMS}\nlocal MAX_BYTES = 2 ^ 25\n" in scripts()["claim_rows"]
    assert PUT_BYTES == 2**25
    beat = scripts()["beat"]
    assert f"local MAX_ID = {presence.MAX_WORKER_ID}\n" in beat
    assert f"local MAX_KNOWN = {bounds.MAX_KEPT_VERSIONS}\n" in beat
    assert f"local MAX_BYTES = {bounds.SAID_BYTES}\n" in beat
    assert MAX_ATTEMPTS <= LARGEST


@pytest.mark.parametrize("function", LARGEST_CALLS)
def test_the_largest_call_that_a_spec_allows_is_taken(function: str) -> None:
    told = LARGEST_CALLS[function]
    assert excess(function, told, encode(told), ()) is None


@pytest.mark.parametrize("function", sorted(BOUNDS))
def test_each_list_that_a_function_walks_through_has_a_bound(function: str) -> None:
    walked = re.findall(r"(?:ipairs\(|unpack\()a\.(\w+)(?:\.(\w+))?", scripts()[function])
    assert {".".join(filter(None, names)) for names in walked} <= BOUNDS[function].lists.keys()


def test_the_largest_batch_of_all_may_be_published_and_a_larger_one_has_its_cure() -> None:
    payload = bytes(bounds.BATCH_BYTES)
    assert excess("publish_batch", {}, b"", [payload]) is None
    too_large = excess("publish_batch", {}, b"", [payload, b"x"])
    assert str(too_large) == "2 of them, and at most 1 are taken"


@pytest.mark.parametrize(
    ("function", "payloads", "told", "problem"),
    [
        ("renew", (), {"leases": [1] * 257}, "renew.leases: a call of renew has 257 elements, and at most 256"),
        ("renew", (), {"leases": ["x" * 70_000]}, "renew.arguments: a call of renew has 70,014 bytes"),
        ("report_spans", (b"x" * 65537,), {"max_reports": 1}, "report_spans.payloads: .* 65,537 bytes"),
        ("report_spans", (b"x", 1), {"max_reports": 1}, "report_spans.payloads: .* 2 of them, and at most 1"),
        (
            "open_iteration",
            (),
            {"epoch": 1, "opening": {"batches": [1] * 257}, "versions": []},
            "open_iteration.opening.batches: .* 257 elements.*use smaller batches",
        ),
        (
            "put_rows",
            (),
            {"stages": [], "runs": [{"items": []}, {"items": [1] * 257}]},
            "put_rows.runs.items: .*or give the stage a smaller unit",
        ),
    ],
)
def test_a_client_that_would_exceed_a_bound_says_which_and_sends_nothing(
    function: str, payloads: tuple[Any, ...], told: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        Broker(redis.Redis(port=1)).run(function, *payloads, **told)


def test_more_leases_than_one_call_takes_are_renewed_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    class Side(LeasedSide[int]):
        def _lease_of(self, claim: int) -> Lease:
            return LEASE

        def _run(self, function: str, *payloads: bytes, **told: Any) -> list[Any]:
            sent.append(len(told["leases"]))
            return [b"renewed", *[b"held"] * (len(told["leases"]) - 1), b"lost"]

    renewal = Side(Broker(redis.Redis(port=1)), "job", "w").renew(range(600))
    assert sent == [256, 256, 88]
    assert renewal.lost == (255, 511, 599)


def test_items_are_put_together_up_to_their_number_and_their_bytes() -> None:
    small = [PackedItem(None, b"x")] * 600  # type: ignore[arg-type]
    assert [len(several) for several in puts_at_once(small)] == [256, 256, 88]
    large = [PackedItem(None, bytes(PUT_BYTES // 2 + extra)) for extra in (0, 0, 1, PUT_BYTES, 0)]  # type: ignore[arg-type]
    assert [len(several) for several in puts_at_once(large)] == [2, 1, 1, 1]
    assert list(puts_at_once([])) == []
