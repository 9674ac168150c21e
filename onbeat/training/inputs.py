"""Rows and functions of a program as files that a spec names: below `<run_dir>/inputs`, each by its digest.

reward=my_function    ─▶ inputs/my_function-1f2e….py      { type = "plugin", entry_point = "my_function", file = … }
dataset=[{…}, {…}]    ─▶ inputs/train_path-9c0b….jsonl    { type = "jsonl", train_path = … }
environment=my_agent  ─▶ inputs/my_agent-3b07….py        { name = "agent", file = …, params = { agent = "my_agent" } }
environment=MyClass   ─▶ inputs/MyClass-77a0….py          { name = "MyClass", file = … }
tools=[my_function]   ─▶ inputs/tools-0d42….py            { name = "ToolsOfProgram", file = …, params = { tools = … } }
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from contracts.encoding.digests import content_digest
from contracts.encoding.wire import convert
from contracts.errors import InvalidInput
from contracts.hub_names import hub_cure, is_hub_name
from contracts.spec.datasets import JsonlDataset
from contracts.spec.environment import AGENT
from contracts.spec.root import DATASET_MB, SpecRoot
from onbeat.base.process.folders import make_private, written_whole
from onbeat.data.datasets.loading import load_dataset
from onbeat.data.prompts.file_rows import DatasetRoom
from onbeat.data.prompts.table_files import read_table
from onbeat.training.function_source import name_of, source_of

FILES = ("train_path", "evaluation_path")
NAMING = ("columns", "prompt_template", "metadata_columns", "curriculum")
Rows = Iterable[Mapping[str, Any]]
TOOLS_NAME = "ToolsOfProgram"
TOOLS = """

from onbeat.environments.adapters.tools import Tools


class ToolsOfProgram(Tools):
    functions = ({names})
"""
Put = Callable[[str, bytes], str]
"""(name with its suffix, content) → the path by which a spec names the file."""


def put_below(folder: Path) -> Put:
    """Writes into a folder of this user alone; the same content is written once."""

    def put(name: str, content: bytes) -> str:
        make_private(folder)
        stem, suffix = os.path.splitext(name)
        path = folder / f"{stem}-{content_digest(content)[:16]}{suffix}"
        if not path.exists():
            with written_whole(path, durable=False) as file:
                file.write(content)
        return str(path)

    return put


def put_nowhere(name: str, content: bytes) -> str:
    """Refuses, for a stack of which only the address is known."""
    raise InvalidInput(
        "this stack reads only files below its own model root",
        field=name,
        cure="put the file there and name it in the spec, or leave out the gateway: then a stack is started here",
    )


def reward_table(reward: Any, put: Put) -> Any:
    """Makes a spec's `reward` of a function, a component, or a list of these; its table is one already."""
    if isinstance(reward, Mapping) and "type" not in reward:
        return {key: _components(value, put) if key == "components" else value for key, value in reward.items()}
    return {"components": _components(reward if isinstance(reward, list | tuple) else [reward], put)}


def _components(components: Any, put: Put) -> Any:
    for component in components:
        if isinstance(component, str):
            built_in = f'{{"type": {json.dumps(component)}}}'
            raise InvalidInput(f"`{component}` is a string", field="reward", cure=f"give a function, or {built_in}")
    return [_component(component, put) if callable(component) else component for component in components]


def _component(function: Callable[..., Any], put: Put) -> dict[str, str]:
    name = name_of(function, "reward")
    source = source_of(function)
    return {"type": "plugin", "entry_point": name, "file": put(f"{name}.py", source.encode())}


def environment_table(environment: Any, put: Put) -> Any:
    """Makes a spec's `environment` of a class, of a function that makes an instance, or of an agent (a function whose
    first argument is `episode`). In a table it is the `name`."""
    if not isinstance(environment, Mapping):
        environment = {"name": environment}
    maker = environment.get("name")
    if maker is None or isinstance(maker, str):
        return environment
    name = name_of(maker, "environment")
    if _is_agent(maker):
        source = source_of(maker, field="environment")
        params = {**environment.get("params", {}), AGENT: name}
        return {**environment, "name": AGENT, "file": put(f"{name}.py", source.encode()), "params": params}
    lacking = [method for method in ("reset", "step") if isinstance(maker, type) and not hasattr(maker, method)]
    if lacking:
        raise InvalidInput(
            f"{name} has no `{lacking[0]}`", field="environment", cure="docs/environments.md has a class as an example"
        )
    source = source_of(maker, field="environment")
    return {**environment, "name": name, "file": put(f"{name}.py", source.encode())}


def _is_agent(maker: Any) -> bool:
    """Returns True for a function whose first argument is `episode`, also for an asynchronous one."""
    if not inspect.isfunction(maker):
        return False
    return next(iter(inspect.signature(maker).parameters), "") == "episode"


def tools_table(tools: Sequence[Callable[..., Any] | str], put: Put) -> dict[str, Any]:
    """Makes a spec's `environment` of functions, and of names of built-in tools."""
    if not tools:
        raise InvalidInput("is empty", field="tools", cure="give functions, or names of built-in tools")
    functions = {name_of(tool, "tools"): tool for tool in tools if not isinstance(tool, str)}
    named = [tool if isinstance(tool, str) else name_of(tool, "tools") for tool in tools]
    table = {"name": "tools", "params": {"tools": ",".join(named)}}
    if not functions:
        return table
    source = source_of(*functions.values(), field="tools") + TOOLS.format(
        names="".join(f"{name}, " for name in functions)
    )
    return table | {"name": TOOLS_NAME, "file": put("tools.py", source.encode())}


def dataset_table(dataset: Any, put: Put) -> Any:
    """Makes a spec's `dataset` of rows, of a file of rows or of a name of the hub; in a table, of the rows that
    `train_path` and `evaluation_path` have in place of a path."""
    if isinstance(dataset, str) and is_hub_name(dataset):
        return {"type": "huggingface", "path": dataset}
    if isinstance(dataset, Mapping):
        named = {key: value for key, value in dataset.items() if key in NAMING}
        files = {key: _file(_rows_of(value), key, put, named) for key, value in dataset.items() if key in FILES}
        return {**dataset, **files}
    rows = Path(dataset) if isinstance(dataset, str | os.PathLike) else _rows_of(dataset)
    return {"type": "jsonl", "train_path": _file(rows, "train_path", put, {})}


def _rows_of(dataset: Any) -> Any:
    """The rows that a function returns, or yields; it is called here, not in a cage."""
    return dataset() if inspect.isroutine(dataset) else dataset


def _file(rows: str | Path | Rows, key: str, put: Put, named: Mapping[str, Any]) -> str:
    """A `str` is a path below the model root, as in a file. named: what the table says of columns."""
    if isinstance(rows, str):
        return rows
    if isinstance(rows, Path) and rows.suffix != ".parquet":
        return put(f"{key}.jsonl", _bytes_of(rows))
    lines = _table_lines(rows, f"dataset.{key}") if isinstance(rows, Path) else list(_lines(rows))
    if not lines:
        raise InvalidInput("has no rows", field=f"dataset.{key}", cure="give one row or more")
    path = put(f"{key}.jsonl", b"\n".join(lines) + b"\n")
    # What a trainer would refuse of the file, here.
    table = convert({"type": "jsonl", "train_path": path, **named}, JsonlDataset)
    load_dataset(
        table,
        num_evaluation=0,
        seed=0,
        model_root=SpecRoot(Path(path).parent),
        learns_given=True,
        reads_references=False,  # the gateway knows the rewards, and refuses rows that lack what these read
    )
    return path


def _lines(rows: Rows) -> Iterable[bytes]:
    """Rows of a list, of a Hugging Face `Dataset`, of whatever else goes through mappings."""
    for number, row in enumerate(rows):
        try:
            yield msgspec.json.encode(dict(row))
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"row {number}: {error}", field="dataset", cure='a row is like {"prompt": "2+2=", "reference": "4"}'
            ) from error


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        cure = hub_cure(str(path)) or "name a file of JSON lines or a parquet file"
        raise InvalidInput(f"{path}: {error.strerror}", field="dataset", cure=cure) from error


def _table_lines(path: Path, field: str) -> list[bytes]:
    """Reads all columns of the caller's parquet file. Raises InvalidInput where its rows take too much memory."""
    room = DatasetRoom(DATASET_MB)
    lines: list[bytes] = []
    for row in read_table(path, field):
        (line,) = _lines([row.row])
        room.take(len(line), origin=f"{path}:{row.place}", field=field)
        lines.append(line)
    return lines
