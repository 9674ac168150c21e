"""Lines that were torn when their writer died, and what is read and written around them."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from contracts.encoding import json_lines
from contracts.encoding.json_lines import append_json_lines, last_json_lines, read_json_lines
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


def test_what_is_no_plain_file_or_larger_than_any_run_writes_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, link, large = tmp_path / "pipe", tmp_path / "link", tmp_path / "large"
    os.mkfifo(pipe)
    link.symlink_to("/dev/zero")
    large.write_bytes(encode_json(score(1)))
    monkeypatch.setattr(json_lines, "MAX_BYTES", 10)
    for path, number in ((pipe, errno.EINVAL), (link, errno.ELOOP), (large, errno.EFBIG)):
        with pytest.raises(OSError, match=re.escape(str(path))) as raised:
            read_json_lines(path, EvaluationScore)
        assert raised.value.errno == number
    with pytest.raises(OSError, match="no plain file"):
        last_json_lines(pipe, EvaluationScore, max_bytes=100)
