"""How much each function takes: of small arguments, of payloads, and of each list that its small arguments hold.

Any holder of a role's password calls its functions with what it likes, and the server does nothing else while one runs.
So the library compares each call with this table before it decodes anything (`begin` of scripts/prelude.lua), and our
own clients compare before they send (client.py): they cut what may be cut, and say by name what may not.

The numbers follow from what contracts allow; tests/unit/broker/test_bounds.py compares them with the contracts.
Imports the standard library only: the image of the Redis service is built with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

KIB, MIB = 2**10, 2**20

MAX_STAGES = 16
"""As contracts/spec/stages.py."""
MAX_LEASES = 256
"""Leases that one `renew` names: LeasedSide sends more of them in several calls."""
MAX_ITEMS = 256
"""Items that one `claim_rows` answers (scripts/stage.lua), and one `put_rows` takes: StageSide puts more in several."""
DISPATCHED_AT_ONCE = 256
"""Prompt batches that come with one call (broker/openings.py)."""
ASKED_AT_ONCE = 2048
"""Batch ids that one `reconcile` looks up."""
RESTORED_AT_ONCE = 16
"""Audit records that one `restore_chain` takes: one of a large iteration is nearly a megabyte."""
READ_AHEAD = 4
"""Batches that a trainer's waits may bring before it claims them (broker/batch_cache.py)."""
MAX_VERSIONS = 64
"""Versions that one opening names: the window has 17, and as many may be announced ahead of it."""
MAX_KEPT_VERSIONS = 10_000
"""Older versions whose chunks stay, one for each process that may be known (scripts/presence.lua)."""

SMALL_BYTES = 64 * KIB
"""Small arguments of a worker: names, digests, numbers, and lists of the lengths below."""
LARGE_BYTES = 4 * MIB
"""Large arguments, of a trainer: a commit names each of 10,000 batches with its digest."""
SAID_BYTES = 64 * KIB
"""A process's sign of life, and a report of spans."""
MESSAGE_BYTES = 4 * KIB
"""A message of Celery's, which names one task."""
RECORD_BYTES = 64 * MIB
"""A record of ours: a spec, a manifest, an event, the list of a run's files, or an audit record, which names each of
10,000 batches, and of a lost one its reason."""
CHUNK_BYTES = 4 * MIB
"""A part of a version's file (onbeat/weights/chunks.py)."""
BATCH_BYTES = 512 * MIB
"""The largest batch that a spec allows (limits.max_batch_bytes), which is also the largest value of Redis."""

SMALLER_BATCHES = "use smaller batches: lower rollout.prompts_per_batch or rollout.group_size"


class Bounds(NamedTuple):
    """How much one function takes in one call."""

    packed_bytes: int
    """The bytes of its small arguments, packed."""
    payloads: int = 0
    """How many follow them."""
    payload_bytes: int = 0
    """The bytes of all payloads together."""
    lists: Mapping[str, int] = {}
    """List among the small arguments → its most elements. `runs.items` is the list `items` in each element of `runs`,
    which stands before it in the table."""
    cure: str = "ask for less at once"
    """The cure: what a person can do about a call that is too large."""


STAGES = {"stages": MAX_STAGES, "stages.after": MAX_STAGES}

BOUNDS: Mapping[str, Bounds] = {
    "acquire_trainer": Bounds(SMALL_BYTES),
    "announce_shard": Bounds(SMALL_BYTES, 1, SMALL_BYTES),
    "beat": Bounds(SMALL_BYTES, 1, SAID_BYTES),
    "begin_task": Bounds(SMALL_BYTES),
    "cancel_task": Bounds(SMALL_BYTES, 1, SMALL_BYTES),
    "claim_prompt": Bounds(SMALL_BYTES),
    "claim_rollouts": Bounds(SMALL_BYTES, lists={"read_ahead": READ_AHEAD}),
    "claim_rows": Bounds(SMALL_BYTES, lists=STAGES),
    # The record and the event, and the first prompt batches of the iteration that follows.
    "commit_iteration": Bounds(
        LARGE_BYTES,
        2 + DISPATCHED_AT_ONCE,
        BATCH_BYTES + 2 * RECORD_BYTES,
        {"opening.batches": DISPATCHED_AT_ONCE},
        SMALLER_BATCHES,
    ),
    "create_job": Bounds(SMALL_BYTES, 2, 2 * RECORD_BYTES, cure="shorten the spec"),
    # What is asked, and an event.
    "create_task": Bounds(SMALL_BYTES, 2, SMALL_BYTES),
    "dispatch": Bounds(LARGE_BYTES, DISPATCHED_AT_ONCE, BATCH_BYTES, {"batches": DISPATCHED_AT_ONCE}, SMALLER_BATCHES),
    "drop_chunks": Bounds(LARGE_BYTES, lists={"kept": MAX_KEPT_VERSIONS}),
    "due_tasks": Bounds(SMALL_BYTES),
    # How far it came, what came of it, and an event.
    "end_task": Bounds(SMALL_BYTES, 3, 3 * SMALL_BYTES),
    "fail_batch": Bounds(SMALL_BYTES),
    "fail_rows": Bounds(SMALL_BYTES, lists=STAGES),
    "hold_clock": Bounds(SMALL_BYTES, 1, SMALL_BYTES),
    "hosts": Bounds(SMALL_BYTES),
    "open_iteration": Bounds(
        LARGE_BYTES,
        DISPATCHED_AT_ONCE,
        BATCH_BYTES,
        {"opening.batches": DISPATCHED_AT_ONCE, "versions": MAX_VERSIONS},
        SMALLER_BATCHES,
    ),
    "present": Bounds(SMALL_BYTES),
    # The log-probs of a probe: of 256 rows 4 tokens each at most.
    "prove_version": Bounds(SMALL_BYTES, 1, SMALL_BYTES),
    "publish_batch": Bounds(SMALL_BYTES, 1, BATCH_BYTES, STAGES, SMALLER_BATCHES),
    # The manifest, and what the fence knows of its probe.
    "publish_weights": Bounds(SMALL_BYTES, 4, RECORD_BYTES),
    "put_chunk": Bounds(SMALL_BYTES, 1, CHUNK_BYTES),
    # Of each item its columns, and the digests of what they were made of.
    "put_rows": Bounds(
        4 * SMALL_BYTES,
        2 * MAX_ITEMS,
        BATCH_BYTES,
        {"runs": MAX_ITEMS, "runs.items": MAX_ITEMS, "runs.digests": MAX_ITEMS, **STAGES},
        f"{SMALLER_BATCHES}, or give the stage a smaller unit",
    ),
    "read_batch": Bounds(SMALL_BYTES),
    "reconcile": Bounds(LARGE_BYTES, lists={"batch_ids": ASKED_AT_ONCE}),
    "record_files": Bounds(SMALL_BYTES, 1, RECORD_BYTES, cure="keep fewer versions and checkpoints"),
    "remove_job": Bounds(SMALL_BYTES, 1, SMALL_BYTES),
    "renew": Bounds(SMALL_BYTES, lists={"leases": MAX_LEASES}),
    "renew_task": Bounds(SMALL_BYTES, 1, SMALL_BYTES),
    "renew_trainer": Bounds(SMALL_BYTES),
    "report_spans": Bounds(SMALL_BYTES, 1, SAID_BYTES),
    # The spec before and after, horizons, an event.
    "resume_job": Bounds(SMALL_BYTES, 4, 4 * RECORD_BYTES, cure="shorten the spec"),
    "restore_chain": Bounds(LARGE_BYTES, RESTORED_AT_ONCE, BATCH_BYTES, {"digests": RESTORED_AT_ONCE}),
    "rewind": Bounds(SMALL_BYTES, 2, 2 * RECORD_BYTES),
    "seal": Bounds(SMALL_BYTES),
    "send_message": Bounds(SMALL_BYTES, 1, MESSAGE_BYTES),
    "set_state": Bounds(LARGE_BYTES, 1, RECORD_BYTES),
    "write": Bounds(SMALL_BYTES, 16, RECORD_BYTES),
}
"""Function → how much it takes."""


class Excess(NamedTuple):
    """A part of a call that is too large."""

    part: str
    """The argument's name, or `payloads`."""
    size: int
    most: int
    unit: str
    """`bytes`, or what is counted."""

    def __str__(self) -> str:
        return f"{self.size:,} {self.unit}, and at most {self.most:,} are taken"


def excess(function: str, arguments: Mapping[str, Any], packed: bytes, payloads: Sequence[Any]) -> Excess | None:
    """Returns the part of a call that its function would refuse as too large, or None.

    packed: the arguments as they are sent.
    """
    bounds = BOUNDS[function]
    for path, most in bounds.lists.items():
        for values in _lists_at(arguments, path.split(".")):
            if len(values) > most:
                return Excess(path, len(values), most, "elements")
    if len(packed) > bounds.packed_bytes:
        return Excess("arguments", len(packed), bounds.packed_bytes, "bytes")
    if len(payloads) > bounds.payloads:
        return Excess("payloads", len(payloads), bounds.payloads, "of them")
    num_bytes = sum(len(payload if isinstance(payload, bytes | bytearray) else str(payload)) for payload in payloads)
    if num_bytes > bounds.payload_bytes:
        return Excess("payloads", num_bytes, bounds.payload_bytes, "bytes")
    return None


def in_lua(function: str) -> str:
    """Writes the bounds of a function in Lua, as `begin` takes them."""
    bounds = BOUNDS[function]
    numbers = f"packed_bytes = {bounds.packed_bytes}, payloads = {bounds.payloads}"
    return f"{{ {numbers}, payload_bytes = {bounds.payload_bytes}, lists = {_lists_in_lua(bounds.lists)} }}"


def _lists_at(holder: Any, path: Sequence[str]) -> Iterator[Sequence[Any]]:
    """Yields the lists at a path of names, through each element of the lists before it. An absent one is none."""
    name, *rest = path
    value = holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)
    if not rest:
        if isinstance(value, Sequence):
            yield value
        return
    elements = value if isinstance(value, list | tuple) else [value]
    for element in elements:
        yield from _lists_at(element, rest)


def _lists_in_lua(lists: Mapping[str, int]) -> str:
    """Writes lists in Lua, nested by their paths: `{ { name = 'runs', most = 256, inside = { … } } }`.

    A record, which is no list, has no `most`.
    """
    nested: dict[str, dict[str, int]] = {}
    for path, most in lists.items():
        name, _, rest = path.partition(".")
        nested.setdefault(name, {})[rest] = most
    parts = []
    for name, inside in nested.items():
        most = f", most = {inside.pop('')}" if "" in inside else ""
        parts.append(f"{{ name = '{name}'{most}, inside = {_lists_in_lua(inside)} }}")
    return f"{{ {', '.join(parts)} }}" if parts else "{}"
