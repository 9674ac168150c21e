"""What a program gives to `train` becomes a spec, and files that it names; what can't is refused by its field."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.encoding.wire import encode_json
from contracts.environments.messages import Message, ToolCall
from contracts.errors import InvalidInput
from contracts.rewards import ExactReward, LengthReward, MathVerifyReward, PluginReward
from contracts.spec.datasets import AdditionDataset, JsonlDataset
from contracts.spec.job import JobSpec
from contracts.spec.rules import judged
from onbeat.base.process.entry_points import defined_in
from onbeat.environments.author import Episode
from onbeat.training.inputs import put_below, put_nowhere
from onbeat.training.start import reading_of
from tests.builders import job_spec

ROWS = [{"prompt": "1+1=", "reference": "2"}, {"prompt": "2+2=", "reference": "4", "task_entry": "{}"}]


def short(completion: str) -> float:
    return 1.0 / (1 + len(completion))


class Table:
    """What a Hugging Face `Dataset` is to its reader: it goes through mappings."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


class Echo:
    def __init__(self, *, turns: int = 2) -> None:
        self.turns = turns

    def reset(self, task: dict[str, Any], seed: int) -> str:
        return str(ROWS[seed % len(ROWS)]["prompt"])

    def step(self, message: Any, turn: int) -> Any: ...


def look_up(name: str) -> str:
    """Tells what is known of a name."""
    return str(ROWS[0].get(name))


TASK = {"question": "1+1?", "reference": "2"}


def input_spec(tmp_path: Path, base: Any = None, *, reward: Any = None, dataset: Any = None, **tables: Any) -> JobSpec:
    put = put_below(tmp_path / "inputs")
    parts = tables | {"reward": reward, "dataset": dataset}
    return judged(reading_of(job_spec() if base is None else base, parts, put=put))


def lines_of(path: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def test_tables_change_the_keys_that_they_name_and_another_type_takes_the_whole_place(tmp_path: Path) -> None:
    made = input_spec(
        tmp_path, iterations=9, rollout={"group_size": 2}, model="models/other", dataset={"type": "addition"}
    )
    assert (made.iterations, made.rollout.group_size, made.rollout.prompts_per_batch) == (9, 2, 2)
    assert made.model.path == "models/other"
    of_rows = input_spec(tmp_path, dataset=ROWS)
    again = input_spec(tmp_path, of_rows, dataset={"chat": {"system_prompt": "Be brief."}})
    assert isinstance(again.dataset, JsonlDataset)
    assert isinstance(of_rows.dataset, JsonlDataset)
    assert again.dataset.train_path == of_rows.dataset.train_path
    assert input_spec(tmp_path, of_rows, dataset={"type": "addition"}).dataset == AdditionDataset()


@pytest.mark.parametrize("kind", ["toml", "JobSpec", "keys"])
def test_a_spec_may_be_a_file_a_record_or_its_keys(tmp_path: Path, kind: str) -> None:
    keys = json.loads(encode_json(job_spec()))
    (tmp_path / "job.toml").write_text(
        'name = "x"\niterations = 3\n[model]\npath = "m"\n[dataset]\ntype = "addition"\n'
    )
    base = {"toml": tmp_path / "job.toml", "JobSpec": job_spec(), "keys": keys}[kind]
    assert input_spec(tmp_path, base, reward=[{"type": "exact"}]).reward.components == (ExactReward(),)
    assert keys == json.loads(encode_json(job_spec()))


def test_rows_of_any_kind_are_lines_of_one_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    paths = set()
    for rows in (ROWS, tuple(ROWS), Table(), (row for row in ROWS), ROWS.copy):
        dataset = input_spec(tmp_path, dataset=rows).dataset
        assert isinstance(dataset, JsonlDataset)
        assert lines_of(dataset.train_path) == ROWS
        paths.add(dataset.train_path)
    assert len(paths) == 1
    for path in (tmp_path / "rows.jsonl", str(tmp_path / "rows.jsonl")):
        dataset = input_spec(tmp_path, dataset=path).dataset
        assert isinstance(dataset, JsonlDataset)
        assert lines_of(dataset.train_path) == ROWS
    both = input_spec(tmp_path, dataset={"type": "jsonl", "train_path": ROWS.copy, "evaluation_path": ROWS[:1]}).dataset
    assert isinstance(both, JsonlDataset)
    assert lines_of(both.evaluation_path) == ROWS[:1]
    assert (tmp_path / "inputs").stat().st_mode & 0o077 == 0


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="no package of ours needs pyarrow")
def test_a_parquet_file_is_read_where_pyarrow_is_there(tmp_path: Path) -> None:
    import pyarrow  # pyright: ignore[reportMissingImports]
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]), tmp_path / "rows.parquet")
    dataset = input_spec(tmp_path, dataset=tmp_path / "rows.parquet").dataset
    assert isinstance(dataset, JsonlDataset)
    assert lines_of(dataset.train_path) == ROWS[:1]


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="no package of ours needs datasets")
def test_a_dataset_of_hugging_face_is_rows(tmp_path: Path) -> None:
    import datasets  # pyright: ignore[reportMissingImports]

    dataset = input_spec(tmp_path, dataset=datasets.Dataset.from_list(ROWS[:1])).dataset
    assert isinstance(dataset, JsonlDataset)
    assert lines_of(dataset.train_path) == ROWS[:1]


def test_a_parquet_file_names_pyarrow_where_it_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(InvalidInput, match=r"rows\.parquet is read by pyarrow, which is not installed"):
        input_spec(tmp_path, dataset=tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], r"dataset\.train_path: has no rows"),
        ([{"prompt": "3+3=", "reference": ["6"]}], "jsonl:1: `reference` is a list of 1"),
        ([{"prompt": "3+3=", "reference": object()}], "row 0: .*object"),
        (["3+3=6"], "row 0: "),
        ("absent.jsonl", "absent.jsonl: No such file"),
    ],
)
def test_rows_that_are_none_are_refused_by_their_number(tmp_path: Path, rows: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        input_spec(tmp_path, dataset=rows)


def test_functions_and_components_stand_side_by_side(tmp_path: Path) -> None:
    length = {"type": "length", "target_chars": 4, "max_chars": 8}
    made = input_spec(tmp_path, reward=[short, length]).reward.components
    assert made[1] == LengthReward(target_chars=4, max_chars=8)
    assert isinstance(made[0], PluginReward)
    assert made[0].entry_point == "short"
    assert "def short" in Path(made[0].file).read_text()
    in_table = input_spec(tmp_path, reward={"components": [short], "item_timeout_s": 3.0}).reward
    assert (in_table.components, in_table.item_timeout_s) == (made[:1], 3.0)
    assert input_spec(tmp_path, reward=short).reward.components == made[:1]


def test_an_environment_is_a_class_of_the_program_with_what_it_uses(tmp_path: Path) -> None:
    base = job_spec(environment={"name": "echo", "file": "echo.py", "params": {"turns": 3}, "max_turns": 2})
    made = input_spec(tmp_path, base, environment=Echo).environment
    assert made is not None
    assert (made.name, made.params, made.max_turns, made.source) == ("Echo", {}, 2, "")
    assert "class Echo" in Path(made.file).read_text()
    in_table = input_spec(tmp_path, base, environment={"name": Echo, "params": {"turns": 4}}).environment
    assert in_table == replace(made, params={"turns": 4})
    kept = input_spec(tmp_path, base, environment={"max_turns": 5}).environment
    assert kept == replace(base.environment, max_turns=5)
    named = input_spec(tmp_path, base, environment={"name": "secret_table"}).environment
    assert named is not None
    assert (named.file, named.params) == ("", {})


def guess(episode: Episode, *, tries: int = 3) -> float:
    return float(episode.seed % tries)


async def guess_later(episode: Episode) -> float:
    return float(episode.seed)


def test_a_function_whose_first_argument_is_an_episode_is_an_agent(tmp_path: Path) -> None:
    base = job_spec(environment={"name": "echo", "file": "echo.py", "params": {"turns": 3}, "max_turns": 2})
    made = input_spec(tmp_path, base, environment=guess).environment
    assert made is not None
    assert (made.name, made.params, made.max_turns) == ("agent", {"agent": "guess"}, 2)
    assert "def guess" in Path(made.file).read_text()
    in_table = input_spec(tmp_path, base, environment={"name": guess, "params": {"tries": 2}}).environment
    assert in_table == replace(made, params={"tries": 2, "agent": "guess"})
    later = input_spec(tmp_path, base, environment=guess_later).environment
    assert later is not None
    assert later.params == {"agent": "guess_later"}


def test_tools_are_functions_of_the_program_beside_built_in_ones(tmp_path: Path) -> None:
    made = input_spec(tmp_path, tools=[look_up, "calculator"], environment={"params": {"answer": "tag"}}).environment
    assert made is not None
    assert made.params == {"tools": "look_up,calculator", "answer": "tag"}
    tools = defined_in(Path(made.file).read_text(), made.name, file=made.file)
    assert [tool.name for tool in tools(tools="look_up,calculator").reset(TASK, 0).tools] == ["look_up", "calculate"]
    session = tools()
    assert [tool.name for tool in session.reset(TASK, 0).tools] == ["look_up"]
    call = ToolCall(name="look_up", arguments='{"name": "prompt"}')
    (answer,) = session.step(Message(role="assistant", tool_calls=(call,)), 0).messages
    assert answer.content == "1+1="
    built_in = input_spec(tmp_path, job_spec(environment=made), tools=["python"]).environment
    assert built_in is not None
    assert (built_in.name, built_in.file, built_in.params["tools"]) == ("tools", "", "python")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"environment": Table}, "environment: Table has no `reset`"),
        ({"environment": Table()}, "environment Table: is no function with a name"),
        (
            {"tools": [short, short], "environment": {"name": "echo"}},
            "tools: have no effect: they belong to the built-in environment",
        ),
        ({"tools": [len]}, "tools len: is no function with a name"),
        ({"tools": []}, "tools: is empty"),
        ({"reward": "exact"}, r'reward: `exact` is a string \(give a function, or {"type": "exact"}'),
    ],
)
def test_what_is_no_environment_tool_or_reward_is_refused(tmp_path: Path, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        input_spec(tmp_path, **given)


def test_the_cure_for_a_reward_that_is_a_text_is_taken(tmp_path: Path) -> None:
    assert input_spec(tmp_path, reward={"type": "math_verify"}).reward.components == (MathVerifyReward(),)


def test_a_key_that_is_none_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"rollout\.colour: unknown key"):
        input_spec(tmp_path, rollout={"colour": "red"})


def test_a_stack_elsewhere_gets_no_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="reads only files below its own model root"):
        reading_of(job_spec(), {"reward": short}, put=put_nowhere)
