"""What the holder of a role's password may send to Redis: commands by hand that its rights allow, and function calls.

Half of it is nearly honest, so that it gets past the first check; the rest is what breaks counters, streams and loops,
or is large: `large_calls` has of each function what is at its bounds, and what is far beyond them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from broker.connection.bounds import BOUNDS, MIB
from broker.connection.roles import LOOK, RIGHTS, SCRIPT_ROLES, SEAL_MARK
from broker.connection.script_texts import argument_names, function_name
from contracts.encoding.wire import encode

LAST_ID = f"{2**64 - 1}-{2**64 - 1}"
VALUES: Sequence[Any] = (
    b"",
    b"x",
    b"\xff\xc1",
    "0/train/0",
    str(2**63 - 1),
    "-1",
    "nan",
    "9" * 400,
    encode({"state": "published", "digest": "a" * 64, "entry": "1-1", "generator": "g1", "attempt": 1}),
    encode([1, 2, 3]),
    b"\x91" * 2000,
    "x" * 70_000,
    b"x" * 3 * MIB,
)
FIELDS = (
    *("epoch", "owner", "lease_until", "committed", "num_slots", "window", "versions", "ledger_format"),
    *("state", "created_s", "reason", "published:0", "dead:0", "waiting:0", "engine", "recent_ms"),
    *("0/train/0", "b/0/train/0", "c/1/0/train/0/0", "l/0/0/train/0/0", "0", "accepted", "x"),
)
MEMBERS = ("0/0/train/0/0", "1/0/train/0/0", "1/9/train/9/9", "0/train/0", "x", b"\xff")
SCORES = ("0", "inf", "-inf", "1", str(2**52))
NUMBERS = (0, -1, 1, 2, 1.5, 2**40, 2**53, float("nan"), float("inf"), -float("inf"))

Draw = Callable[[Sequence[Any]], Any]


def by_hand(draw: Draw, role: str, *, job_id: str, seal: str) -> list[Any] | None:
    """A command of one line of the role's rights on one of its keys; None for one that only reads.

    seal: as the sender knows it. No command names another job than this one.
    """
    commands, names = draw([line for line in RIGHTS[role] if line[1]])
    writing = [word for word in commands.split() if word not in LOOK.split()]
    command = draw(writing) if writing else ""
    words = command.removeprefix("+").upper().replace("|", " ").split()
    pattern = draw(names.split())
    if not words or pattern.startswith("%R~"):
        return None
    key = pattern.lstrip("~&").replace(SEAL_MARK, seal).replace("{*}", f"{{{job_id}}}")
    key = re.sub(r"\*$", lambda _: draw(["", ":1", "x"]), key)
    arguments = _ARGUMENTS.get(" ".join(words))
    return None if arguments is None else [*words, *arguments(draw, key, job_id)]


def function_call(draw: Draw, role: str, *, job_id: str, honest: dict[str, Any]) -> list[Any]:
    """A call of one of the role's functions. honest: what such a call is told, by name."""
    name = draw(sorted(name for name, roles in SCRIPT_ROLES.items() if role in roles))
    anything = [
        *NUMBERS,
        "",
        "x" * 300,
        "0/train/0",
        [],
        {},
        None,
        True,
        [{}],
        [honest],
        [honest] * 300,
        [1] * 100_000,
        {"x": honest},
        *honest.values(),
    ]
    told = {
        word: honest[word] if word in honest and draw([True, True, True, False]) else draw(anything)
        for word in argument_names(name)
    }
    slots = draw(["", "", "1", "2", "64", "0", "-1", "nan", "1e9"])
    num_payloads = draw([min(number, BOUNDS[name].payloads) for number in (0, 1, 2, 4)] + [5])
    payloads = [draw(VALUES) for _ in range(num_payloads)]
    return ["FCALL", function_name(name), 0, draw([job_id, job_id, job_id, ""]), slots, encode(told), *payloads]


FAR_BEYOND = 300_000
"""Elements of a list, or payloads."""
FAR_BEYOND_BYTES = 72 * MIB


def large_calls(name: str, *, job_id: str, honest: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """(in words, call) of a function: each list of its arguments at its bound, then each thing that a call has far
    beyond its bound. honest: as of `function_call`."""
    bounds, told = BOUNDS[name], {word: honest.get(word) for word in argument_names(name)}
    head = ["FCALL", function_name(name), 0, job_id, ""]
    for path, most in bounds.lists.items():
        for number in (most, FAR_BEYOND):
            yield f"{number} {path}", [*head, encode(told | _grown(path.split("."), number, honest)), b""]
    yield "arguments", [*head, encode(told | {"x": [1] * FAR_BEYOND_BYTES})]
    yield "payloads", [*head, encode(told), *[b"x"] * FAR_BEYOND]
    yield "a payload", [*head, encode(told), b"x" * FAR_BEYOND_BYTES]


def _grown(path: Sequence[str], number: int, honest: dict[str, Any]) -> dict[str, Any]:
    """The list at the path with so many elements; the lists that it lies in have one."""
    name, *rest = path
    if rest:
        return {name: [honest | _grown(rest, number, honest)]}
    element = {"stage": 1, "iteration": 0, "batch_id": "0/train/0", "item": 0, "claim": 1, "unit": "row", "after": []}
    return {name: [element | {"items": [0], "of": "", "digests": [], "has_inputs": False}] * number}


def drawing(seed: str) -> Draw:
    """The same draws for the same seed."""
    source = random.Random(seed)
    return lambda choices: choices[source.randrange(len(choices))]


def _member(draw: Draw, job_id: str) -> Any:
    return draw([*MEMBERS, job_id, "../escape"])


_ARGUMENTS: dict[str, Callable[[Draw, str, str], list[Any]]] = {
    "SET": lambda draw, key, _: [key, draw(VALUES)],
    "DEL": lambda _, key, __: [key],
    "UNLINK": lambda _, key, __: [key],
    "PEXPIRE": lambda draw, key, _: [key, draw([1, 10_000])],
    "HSET": lambda draw, key, _: [key, draw(FIELDS), draw(VALUES)],
    "HSETNX": lambda draw, key, _: [key, draw(FIELDS), draw(VALUES)],
    "HINCRBY": lambda draw, key, _: [key, draw(FIELDS), draw([1, -1, 2**63 - 1, -(2**63)])],
    "HDEL": lambda draw, key, _: [key, draw(FIELDS)],
    "PUBLISH": lambda draw, key, _: [key, draw(VALUES)],
    "SADD": lambda draw, key, job_id: [key, _member(draw, job_id)],
    "SREM": lambda draw, key, job_id: [key, _member(draw, job_id)],
    "ZADD": lambda draw, key, job_id: [key, draw(SCORES), _member(draw, job_id)],
    "ZREM": lambda draw, key, job_id: [key, _member(draw, job_id)],
    "XADD": lambda draw, key, _: [key, draw(["*", LAST_ID]), draw(["batch", "record", "x"]), draw(VALUES)],
    "XDEL": lambda draw, key, _: [key, draw(["1-1", LAST_ID])],
    "XACK": lambda draw, key, _: [key, draw(["generators", "trainers"]), draw(["1-1", LAST_ID])],
    "XTRIM": lambda _, key, __: [key, "MAXLEN", 0],
    "XGROUP CREATE": lambda draw, key, _: [key, draw(["generators", "trainers", "x"]), "0", "MKSTREAM"],
    "XGROUP DESTROY": lambda draw, key, _: [key, draw(["generators", "trainers"])],
    "XREADGROUP": lambda draw, key, _: ["GROUP", draw(["generators", "trainers"]), "c", "STREAMS", key, ">"],
    "XCLAIM": lambda draw, key, _: [key, draw(["generators", "trainers"]), "c", 0, "1-1", "FORCE"],
    "XAUTOCLAIM": lambda draw, key, _: [key, draw(["generators", "trainers"]), "c", 0, "0"],
    "LPUSH": lambda draw, key, _: [key, draw(VALUES)],
    "RPUSH": lambda draw, key, _: [key, draw(VALUES)],
    "RPOP": lambda _, key, __: [key],
    "LREM": lambda draw, key, _: [key, 0, draw(VALUES)],
}
