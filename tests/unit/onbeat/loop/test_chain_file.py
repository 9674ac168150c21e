"""The audit chain in the run folder: what follows from a record, whatever has become of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.encoding.wire import encode_json
from contracts.errors import OnbeatError
from contracts.events import AuditRecord, record_digest
from contracts.run_folder import RunFolder
from onbeat.loop.chain_file import ChainFile, RunChain
from tests.builders import commit_record


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path, "job-1")
    folder.path.mkdir()
    return folder


def record(iteration: int, previous: str = "", **changes: Any) -> AuditRecord:
    digests = {"weights_digest": f"{iteration:064x}", "next_weights_digest": f"{iteration + 1:064x}"}
    return commit_record(iteration, {f"{iteration}/train/0": "d" * 64}, previous=previous, **(digests | changes))


def linked(*records: AuditRecord, previous: str = "") -> list[AuditRecord]:
    """The records, each naming the one before."""
    made = []
    for one in records:
        made.append(replace(one, previous=previous))
        previous = record_digest(made[-1])
    return made


def write(folder: RunFolder, *records: AuditRecord) -> None:
    file = ChainFile(folder)
    for one in records:
        file.append(one)
    file.sync()


CHAIN = linked(*(record(number) for number in range(4)))


def test_what_follows_from_a_record_comes_back_whole_and_in_order(folder: RunFolder) -> None:
    assert ChainFile(folder).after("") == []
    ChainFile(folder).sync()
    write(folder, *CHAIN[:2])
    write(folder, *CHAIN)  # a trainer that starts has seen them all in Redis
    file = ChainFile(folder)
    assert folder.chain.read_bytes().count(b"\n") == 4
    assert file.after("") == CHAIN
    assert file.after(record_digest(CHAIN[1])) == CHAIN[2:]
    assert file.after(record_digest(CHAIN[3])) == []
    assert file.after("f" * 64) == [], "of a chain that is not this one nothing follows"


@pytest.mark.parametrize("damage", ["torn", "foreign", "changed", "gone"])
def test_behind_a_line_that_is_damaged_nothing_follows(folder: RunFolder, damage: str) -> None:
    lines = [encode_json(one) + b"\n" for one in CHAIN]
    lines[2] = {
        "torn": lines[2][:40] + b"\n",
        "foreign": b'{"kind": "commit"}\n',
        "changed": encode_json(replace(CHAIN[2], loss=1.0)) + b"\n",
        "gone": b"",
    }[damage]
    folder.chain.write_bytes(b"".join(lines))
    assert [one.iteration for one in ChainFile(folder).after("")][:2] == [0, 1]
    assert CHAIN[3] not in ChainFile(folder).after("")


def test_of_two_futures_the_one_that_was_written_last_follows(folder: RunFolder) -> None:
    """A server lost records 2 and 3, and their replay made others."""
    again = linked(
        record(2, kind="rewind", next_weights_digest="", trainer_epoch=2),
        record(2, next_weights_digest="e" * 64, trainer_epoch=2),
        previous=record_digest(CHAIN[1]),
    )
    write(folder, *CHAIN, *again)
    file = ChainFile(folder)
    assert file.after("") == [*CHAIN[:2], *again]
    assert file.after(record_digest(CHAIN[2])) == CHAIN[3:], "a server that has the first future goes on with that"


def test_a_link_in_its_place_is_an_error_that_names_the_file(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("")
    folder.chain.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OnbeatError, match=r"chain\.jsonl: cannot be read"):
        ChainFile(folder)


def known(*, in_redis: int) -> RunChain:
    records = CHAIN[:in_redis]
    return RunChain(records=records, last_link=record_digest(records[-1]) if records else "", lost=CHAIN[in_redis:])


def test_the_versions_of_both_may_be_gone_on_with_and_what_leads_to_one_goes_back() -> None:
    chain = known(in_redis=2)
    assert sorted(chain.versions(1, iterations=10)) == [0, 1, 2, 3, 4]
    assert sorted(chain.versions(1, iterations=2)) == [0, 1, 2, 3], "no further than the job's iterations reach"
    assert chain.to_restore(3, CHAIN[2].next_weights_digest) == CHAIN[2:3]
    assert chain.to_restore(4, CHAIN[3].next_weights_digest) == CHAIN[2:]
    assert chain.to_restore(2, CHAIN[1].next_weights_digest) == [], "Redis knows it"
    assert chain.to_restore(4, "f" * 64) == []
    assert sorted(known(in_redis=4).versions(3, iterations=10)) == [0, 1, 2, 3, 4]


def test_a_rewind_among_the_lost_records_takes_back_what_came_before_it() -> None:
    rewind, other = linked(
        record(1, kind="rewind", next_weights_digest=""),
        record(1, next_weights_digest="e" * 64),
        previous=record_digest(CHAIN[3]),
    )
    chain = RunChain(records=CHAIN[:1], last_link=record_digest(CHAIN[0]), lost=[*CHAIN[1:], rewind, other])
    versions = chain.versions(0, iterations=10)
    assert versions == {0: CHAIN[0].weights_digest, 1: CHAIN[0].next_weights_digest, 2: "e" * 64}
    assert chain.to_restore(2, "e" * 64) == [*CHAIN[1:], rewind, other]
