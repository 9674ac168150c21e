"""Lines that were torn when their writer died, and what is read and written around them."""

from __future__ import annotations

import errno
import os
import re
import tracemalloc
from pathlib import Path

import pytest

from contracts.encoding.json_lines import (
    append_json_lines,
    json_line,
    json_lines,
    last_json_lines,
    open_plain,
    read_json_lines,
    read_plain,
)
from contracts.encoding.wire import encode_json
from contracts.jobs import EvaluationScore


def score(version: int) -> EvaluationScore:
    return EvaluationScore(iteration=version, policy_version=version, sampled=0.5, num_prompts=8)


def test_an_unfinished_last_line_is_dropped_and_a_damaged_one_before_it_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "timeline.jsonl"
    good = encode_json(score(1))
    path.write_bytes(good + b"\n" + good[:10])
    assert read_json_lines(path, EvaluationScore) == [score(1)]
    assert not caplog.records
    path.write_bytes(good[:10] + b"\n" + good + b"\n")
    assert read_json_lines(path, EvaluationScore) == [score(1)]
    assert f"line 1 of {path} is left out" in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[" * 100_000,
        b'{"iteration": "\xff"}',
        b"\x00" * 99,
        b'{"iteration": 1e999, "policy_version": 1}',
        b"null",
    ],
    ids=["another record", "deep", "no UTF-8", "zeros", "a huge number", "null"],
)
def test_a_line_that_is_no_record_costs_no_other_line(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    path.write_bytes(b"\n".join([encode_json(score(1)), line, encode_json(score(2)), b""]))
    assert read_json_lines(path, EvaluationScore) == [score(1), score(2)]


def test_what_is_written_behind_a_torn_line_is_read(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    append_json_lines(path, [score(1)])
    with path.open("ab") as file:
        file.write(encode_json(score(2))[:10])
    append_json_lines(path, [score(2), score(3)])
    append_json_lines(path, [score(4)])
    assert read_json_lines(path, EvaluationScore) == [score(1), score(2), score(3), score(4)]
    assert path.read_bytes().endswith(encode_json(score(3)) + b"\n" + encode_json(score(4)) + b"\n")


@pytest.mark.parametrize("tail_bytes", [80, 150, 10_000])
def test_the_last_record_is_found_from_the_end(
    tail_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    max_bytes = tail_bytes + len(encode_json(score(9)))
    path = tmp_path / "evaluations.jsonl"
    assert last_json_lines(path, EvaluationScore, max_bytes=max_bytes) == ([], True)
    append_json_lines(path, map(score, range(9)))
    with path.open("ab") as file:
        file.write(encode_json(score(9))[:-5])
    assert last_json_lines(path, EvaluationScore, max_bytes=max_bytes)[0][-1] == score(8)
    assert not caplog.records, "where the reading begins, no line is torn"


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    for path, number in ((pipe, errno.EINVAL), (link, errno.ELOOP)):
        with pytest.raises(OSError, match=re.escape(str(path))) as raised:
            read_json_lines(path, EvaluationScore)
        assert raised.value.errno == number
    with pytest.raises(OSError, match="no plain file"):
        last_json_lines(pipe, EvaluationScore, max_bytes=100)


def test_a_file_that_is_one_record_has_a_bound(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_bytes(b"0123456789")
    assert read_plain(tmp_path / "spec.json", max_bytes=10) == b"0123456789"
    with pytest.raises(OSError, match="is over 9 bytes") as raised:
        read_plain(tmp_path / "spec.json", max_bytes=9)
    assert raised.value.errno == errno.EFBIG


def test_of_a_file_that_is_too_long_for_a_list_the_end_is_read_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "evaluations.jsonl"
    append_json_lines(path, map(score, range(9)))
    line_bytes = len(encode_json(score(1))) + 1
    assert read_json_lines(path, EvaluationScore, max_bytes=9 * line_bytes) == list(map(score, range(9)))
    assert not caplog.records
    assert read_json_lines(path, EvaluationScore, max_bytes=3 * line_bytes) == [score(6), score(7), score(8)]
    assert read_json_lines(path, EvaluationScore, max_bytes=3 * line_bytes - 1) == [score(7), score(8)]
    assert f"{path} has {9 * line_bytes} bytes, of which the last {3 * line_bytes} are read" in caplog.text


def test_each_record_has_its_place_in_the_file_and_is_found_there_again(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    lines = [encode_json(score(1)), b"", b"torn", encode_json(score(2))]
    path.write_bytes(b"\n".join(lines))
    placed = list(json_lines(path, EvaluationScore))
    assert [path.read_bytes()[place.start :][: place.num_bytes].strip() for place, _ in placed] == [lines[0], lines[3]]
    with open_plain(path) as file:
        assert [json_line(file, EvaluationScore, place) for place, _ in reversed(placed)] == [score(2), score(1)]
        assert json_line(file, EvaluationScore, placed[0][0]._replace(start=1)) is None
    assert list(json_lines(tmp_path / "missing", EvaluationScore)) == []


@pytest.mark.parametrize("length", [98, 99, 100, 101, 199, 200, 201, 1000])
def test_a_line_that_is_too_long_costs_no_other_line_and_no_memory(tmp_path: Path, length: int) -> None:
    path = tmp_path / "evaluations.jsonl"
    good = encode_json(score(1)) + b"\n"
    path.write_bytes(good + b"x" * length + b"\n" + good)
    found = [record for _, record in json_lines(path, EvaluationScore, max_line_bytes=100)]
    assert found == [score(1), score(1)]


def test_memory_does_not_grow_with_a_file_that_has_no_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    append_json_lines(path, [score(1)])
    with path.open("r+b") as file:
        file.truncate(2**30)  # sparse: it takes no room on the disk
    append_json_lines(path, [score(2)])
    tracemalloc.start()
    try:
        assert read_json_lines(path, EvaluationScore, max_bytes=2**31) == [score(1), score(2)]
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
