"""What a script says that it is told, and what it reads: two lists that must be one. A caller is held to the first."""

from __future__ import annotations

import re

import pytest
import redis

from broker.connection.client import Broker
from broker.connection.roles import SCRIPT_ROLES, SEAL_MARK, TRAINER
from broker.connection.script_texts import PRELUDE, argument_names, library_name, library_text, scripts
from broker.fence import LEDGER_FORMAT
from broker.keys import MAX_SLOTS, num_open_of
from broker.leases import Lease
from broker.openings import DispatchChunk, IterationOpening, NewBatch, opening_arguments
from contracts.encoding.wire import encode
from tests.builders import job_spec

READ = re.compile(r"\b(?<!\.)a\.(\w+)")
COPIED = re.compile(r"payload\(\)\s*\.\.|\.\.\s*payload\(\)|pack\([^)]*payload\(\)")
NAMES = sorted(scripts())


def script(name: str) -> tuple[str, str]:
    """(its head, the rest)"""
    lines = scripts()[name].splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("--"))
    return " ".join(line.removeprefix("--").strip() for line in lines[:end]), "\n".join(lines[end:])


def test_every_script_has_its_roles() -> None:
    assert sorted(SCRIPT_ROLES) == NAMES


def is_behind_an_epoch(name: str) -> bool:
    return script(name)[0].startswith(f"{name}: {{epoch")


@pytest.mark.parametrize("name", NAMES)
def test_a_script_reads_what_its_head_names(name: str) -> None:
    head, body = script(name)
    assert head.startswith(f"{name}: ")
    assert argument_names(name) == set(READ.findall(body)) | ({"epoch"} if is_behind_an_epoch(name) else set())


def test_every_function_of_a_trainer_but_those_before_its_epoch_is_behind_the_epoch() -> None:
    of_trainers = [name for name in NAMES if SCRIPT_ROLES[name] == (TRAINER,)]
    assert {name for name in of_trainers if not is_behind_an_epoch(name)} == {"acquire_trainer", "hosts"}
    assert library_text().count("return as_trainer(moved)") == len(of_trainers) - 2


def test_a_caller_that_tells_a_script_less_or_more_than_its_head_names_is_refused() -> None:
    broker = Broker(redis.Redis(port=1))
    for told in ({"epoch": 1}, {"epoch": 1, "lease_ms": 5, "lease_s": 5}):
        with pytest.raises(TypeError, match=r"renew_trainer is told \['epoch', 'lease_ms'\], not"):
            broker.run("renew_trainer", **told)


def test_the_parts_of_a_call_are_read_by_their_names() -> None:
    expects = PRELUDE[PRELUDE.index("local function expect(") : PRELUDE.index("-- Whether a batch is neither")]
    opening = IterationOpening(iteration=0, oldest_version=0, newest_version=0, batches=())
    for text, word, sent in (
        (PRELUDE, "opening", set(opening_arguments(opening, iter([DispatchChunk([], [])]))[0])),
        (script("dispatch")[1] + expects, "batch", set(NewBatch.__struct_fields__)),
        (script("renew")[1], "lease", set(Lease.__struct_fields__)),
    ):
        assert set(re.findall(rf"\b{word}\.(\w+)", text)) >= sent, word


def test_every_function_of_the_head_is_called_and_every_one_that_is_called_is_there() -> None:
    text = library_text()
    for function in re.findall(r"^local function (\w+)", PRELUDE, re.MULTILINE):
        assert len(re.findall(rf"\b{function}\(", text)) > 1, f"{function} is defined and never called"


def test_the_secret_is_no_part_of_the_librarys_name() -> None:
    assert SEAL_MARK in library_text()
    assert library_text().startswith(f"#!lua name={library_name()}\n")
    assert SEAL_MARK not in library_text().replace(SEAL_MARK, "ab" * 16)


@pytest.mark.parametrize("name", [*NAMES, "prelude"])
def test_no_script_counts_its_arguments_or_copies_a_payload(name: str) -> None:
    text = re.sub(r"--.*", "", PRELUDE if name == "prelude" else script(name)[1])
    assert "KEYS" not in text.replace("HKEYS", "")
    assert "ARGUMENTS" not in text or name in ("prelude", "write")
    assert COPIED.findall(text) == []


def test_the_format_that_the_scripts_write_is_the_one_that_is_read() -> None:
    assert re.findall(r"local LEDGER_FORMAT = (\d+)", PRELUDE) == [LEDGER_FORMAT.decode()]


def test_a_spec_that_no_onbeat_reads_still_says_how_long_its_window_is() -> None:
    """A job whose spec can't be decoded has to end, with all that it has in work."""
    for spec, num_open in (
        (encode(job_spec()), 1),
        (encode({"max_policy_lag": 3, "algorithm": "a word of another Onbeat"}), 4),
        (encode({"max_policy_lag": 10**9}), MAX_SLOTS),
        (encode({"max_policy_lag": -1}), 1),
        (encode({"max_policy_lag": "two"}), 1),
        (b"", 1),
        (b"\xc1", 1),
        (encode([1, 2]), 1),
    ):
        assert num_open_of(spec) == num_open
