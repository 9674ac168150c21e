"""How a process of one's own finds its stack, and what it says where it can't."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from contracts.errors import ContractViolation, InvalidInput
from contracts.experience.columns import Column
from contracts.settings import StackSettings
from onbeat.client.connection import client_settings
from onbeat.client.rows import packed, unpacked
from onbeat.stack.access import StackFile, write_stack_file

WIDE = Column(name="c", type="float32", per="token", width=2)
OF_STAGE = {"ONBEAT_REDIS_URL": "redis://stage:s@127.0.0.1:1/0", "ONBEAT_RUN_ROOT": "there"}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("ONBEAT_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_an_address_in_the_program_counts_before_the_environment_and_that_before_a_stack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stack = StackFile(gateway_url="http://g", api_key="k", pid=os.getpid(), roles={"stage": OF_STAGE})
    (tmp_path / "runs").mkdir()
    write_stack_file(tmp_path / "runs", stack)
    assert client_settings("stage").redis_url == OF_STAGE["ONBEAT_REDIS_URL"]
    assert client_settings("stage").run_root == "there"
    monkeypatch.setenv("ONBEAT_REDIS_URL", "redis://of-the-environment/0")
    monkeypatch.setenv("ONBEAT_RUN_ROOT", "here")
    assert client_settings("stage").redis_url == "redis://of-the-environment/0"
    assert client_settings("stage", run_dir=tmp_path / "runs").run_root == "there"
    given = client_settings("stage", redis_url="redis://given/0")
    assert (given.redis_url, given.run_root) == ("redis://given/0", "here")
    assert client_settings("stage", settings=StackSettings(redis_url="redis://of-settings/0")).redis_url.endswith(
        "of-settings/0"
    )


def test_a_process_without_an_address_is_told_which_user_and_where_it_looked(tmp_path: Path) -> None:
    stack = StackFile(gateway_url="http://g", api_key="k", pid=os.getpid(), roles={"stage": OF_STAGE})
    write_stack_file(tmp_path, stack)
    words = r"ONBEAT_REDIS_URL: is not set, and no running stack in .* provides it .*user `generator`"
    with pytest.raises(InvalidInput, match=words):
        client_settings("generator", run_dir=tmp_path)
    with pytest.raises(InvalidInput, match=r"ONBEAT_REDIS_URL: is not set, and no running stack in runs provides it"):
        client_settings("stage")


@pytest.mark.parametrize(
    ("column", "values", "problem"),
    [
        (Column(name="c", type="text"), [1], "row 0 is a int, not a text"),
        (Column(name="c", type="text"), ["\ud800"], "row 0 is no text that can be sent"),
        (Column(name="c", type="text"), "abc", "is a str, where a list with one value a row is needed"),
        (Column(name="c", type="float32"), [True], "row 0 is bool, the column is float32"),
        (Column(name="c", type="float32"), [1e300], "row 0 has a number that is not finite"),
        (Column(name="c", type="int32"), [2**40], "row 0 has numbers outside int32"),
        (Column(name="c", type="int32"), [0, 1.5], "row 1 is float64, the column is int32"),
        (Column(name="c", type="float32", per="token"), [[[1.0]]], "row 0 has shape [1, 1], it needs 1 axes"),
        (Column(name="c", type="float32", per="token"), [[[1.0], [1.0, 2.0]]], "row 0 is no array"),
        (WIDE, [[1.0, 2.0]], "row 0 has shape [2], it needs 2 axes: 2 values a token"),
        (WIDE, [[[1.0]]], "row 0 has shape [1, 1], it needs 2 axes: 2 values a token"),
        (Column(name="c", type="float64"), [object()], "row 0 is object, the column is float64"),
    ],
)
def test_a_value_of_another_type_or_shape_is_refused_by_column_and_row(
    column: Column, values: list[object], problem: str
) -> None:
    with pytest.raises(ContractViolation, match=re.escape(f"stage s: column c: {problem}")):
        packed(column, values, of="stage s")


def test_what_was_packed_is_what_is_unpacked() -> None:
    text = Column(name="c", type="text")
    assert unpacked(text, packed(text, ["ä", ""], of="")) == ["ä", ""]
    number = Column(name="c", type="float32")
    assert list(unpacked(number, packed(number, [1, 2.5], of=""))) == [1.0, 2.5]
    tokens = Column(name="c", type="int32", per="token")
    assert [list(one) for one in unpacked(tokens, packed(tokens, [[1, 2], []], of=""))] == [[1, 2], []]
    assert [one.tolist() for one in unpacked(WIDE, packed(WIDE, [[[1, 2], [3, 4]]], of=""))] == [[[1, 2], [3, 4]]]
