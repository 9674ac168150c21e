"""What a script says that it is told, what it reads, and what its record sends: three lists that must be one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import pytest

from broker.connection.roles import SCRIPT_ROLES
from broker.connection.script_texts import PRELUDE, SCRIPTS
from broker.script_calls import HeldClaim, NewBatch, NextIteration, ScriptCall, TrainerCall, script_of

KEYS = re.compile(r"\{([\w, ]*)\}")
READ = re.compile(r"\b(?<!\.)a\.(\w+)")
COPIED = re.compile(r"payload\(\)\s*\.\.|\.\.\s*payload\(\)|pack\([^)]*payload\(\)")


def kinds(of: type[ScriptCall] = ScriptCall) -> Iterator[type[ScriptCall]]:
    for kind in of.__subclasses__():
        if kind is not TrainerCall:
            yield kind
        yield from kinds(kind)


CALLS = {script_of(kind): kind for kind in kinds()}


def fields(record: type[msgspec.Struct]) -> set[str]:
    return set(record.__struct_fields__)


def script(name: str) -> tuple[str, str]:
    """(its head, the rest)"""
    lines = (SCRIPTS / f"{name}.lua").read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("--"))
    return " ".join(line.removeprefix("--").strip() for line in lines[:end]), "\n".join(lines[end:])


def test_every_script_has_its_record_and_its_roles() -> None:
    files = {path.stem for path in SCRIPTS.glob("*.lua")} - {"prelude"}
    assert files == set(CALLS) == set(SCRIPT_ROLES)


@pytest.mark.parametrize("name", CALLS)
def test_a_script_reads_what_its_head_names_and_its_record_sends_it(name: str) -> None:
    head, body = script(name)
    assert head.startswith(f"{name}: ")
    told = KEYS.search(head)
    assert told is not None
    documented = set(told[1].split(", "))
    read = set(READ.findall(body)) | ({"epoch"} if "is_trainer(" in body else set())
    assert documented == read == fields(CALLS[name])


def test_the_parts_of_a_call_are_read_by_their_names() -> None:
    expects = PRELUDE[PRELUDE.index("local function expect(") : PRELUDE.index("-- Whether a batch is neither")]
    for text, word, record in (
        (PRELUDE, "opening", NextIteration),
        (script("dispatch")[1] + expects, "batch", NewBatch),
        (script("renew_prompts")[1], "claim", HeldClaim),
    ):
        assert set(re.findall(rf"\b{word}\.(\w+)", text)) >= fields(record), word


@pytest.mark.parametrize("name", [*CALLS, "prelude"])
def test_no_script_counts_its_arguments_or_copies_a_payload(name: str) -> None:
    text = re.sub(r"--.*", "", PRELUDE if name == "prelude" else script(name)[1])
    places = re.findall(r"ARGV\[(\w+)\]", text)
    assert places == (["1", "num_taken"] if name == "prelude" else [])
    assert " unpack(ARGV" not in text or name == "write"
    assert COPIED.findall(text) == []
