"""docs/extend.md is true: what it names is there, and what it says to add works where it says to add it.

The packages are copied, one of each kind is added to the copy at the places that the page names, and a process that
runs in the copy uses them all.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onbeat.stack.redis import EmbeddedRedis
from tests.unit.docs.additions import ADDITIONS, Edit

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "extend.md"
COPIED = (
    "broker",
    "consumer",
    "contracts",
    "docs",
    "gateway",
    "onbeat",
    "onbeat_extras",
    "producer",
    "reward_service",
)
PATH = re.compile(r"`((?:[\w.<>-]+/)+[\w.<>-]+)`")
PLACE = re.compile(r"`([\w.]+)`(?: and `([\w.]+)`)? in `((?:[\w.-]+/)+[\w.-]+)`")
NAME, NEW = "<name>", "novel"
"""What the page writes for the name of a new kind, and what the new kinds are called here."""


def rows(heading: str) -> dict[str, tuple[str, ...]]:
    """First cell → the others, of the first table under a heading."""
    section = re.split(rf"^#+ {heading}\n", PAGE.read_text(), flags=re.MULTILINE)[1]
    table = re.search(r"^---\|.*\n((?:.+\n)+)", section, re.MULTILINE)
    assert table, heading
    cells = [re.split(r"\s*\|\s*", line.strip()) for line in table[1].splitlines()]
    return {first: tuple(rest) for first, *rest in cells}


def places(text: str) -> list[tuple[str, str]]:
    """(symbol, path) of every "`SYMBOL` in `path`"; two symbols may share a path."""
    return [(symbol, match[3]) for match in PLACE.finditer(text) for symbol in match.groups()[:2] if symbol]


def node_of(tree: ast.Module, symbol: str) -> ast.stmt | None:
    """What defines a name at the top of a module, or in a class as `Class.method`."""
    first, _, rest = symbol.partition(".")
    for node in tree.body:
        match node:
            case ast.ClassDef(name=name) if name == first:
                return node_of(ast.Module(node.body, []), rest) if rest else node
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name == first:
                return node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)) if name == first:
                return node
    return None


def edited(source: str, symbol: str, edit: Edit) -> str:
    """The file with the line in the symbol's table, union, names, class or call, and its type above."""
    node = node_of(ast.parse(source), symbol)
    assert node is not None, symbol
    lines = source.splitlines(keepends=True)

    def insert(line: int, column: int, text: str) -> None:
        """Columns of an ast are bytes."""
        data = lines[line - 1].encode()
        lines[line - 1] = (data[:column] + text.encode() + data[column:]).decode()

    match node:
        case ast.ClassDef() if not edit.line:  # a record of its own beside that one
            lines.append(f"\n\n{edit.above}")
            return "".join(lines)
        case ast.FunctionDef(body=[*_, ast.Return(value=ast.Call() as call)]):  # another argument of what it returns
            insert(call.lineno, call.func.end_col_offset + 1, edit.line)  # type: ignore[operator]
        case ast.ClassDef(body=[docstring, *_]):
            assert docstring.end_lineno is not None
            insert(docstring.end_lineno + 1, 0, f"    {edit.line}")
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            assert value.end_lineno is not None
            assert value.end_col_offset is not None
            if isinstance(value, ast.Dict | ast.Tuple):
                insert(value.lineno, value.col_offset + 1, edit.line)
            elif isinstance(value, ast.Subscript):
                insert(value.end_lineno, value.end_col_offset - 1, edit.line)
            else:
                insert(value.end_lineno, value.end_col_offset, edit.line)
        case _:
            raise AssertionError(f"{symbol} is neither a table nor a record")
    if edit.above:
        insert(node.lineno, 0, f"{edit.above}\n\n")
    return "".join(lines).replace(
        "from __future__ import annotations\n", f"from __future__ import annotations\n\n{edit.imports}\n", 1
    )


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis) -> dict[str, Any]:
    """Kind → what the process in the copy says of it."""
    copy = tmp_path_factory.mktemp("copy")
    for package in COPIED:
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    for kind, (files, *tables) in rows("A new kind").items():
        addition = ADDITIONS[kind]
        for path, text in zip([path for path in PATH.findall(files) if NAME in path], addition.files, strict=True):
            file = copy / path.replace(NAME, NEW)
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        found = places(" ".join(tables))
        assert len(found) == len(addition.edits), f"{kind}: {found}"
        for (symbol, path), edit in zip(found, addition.edits, strict=True):
            (copy / path).write_text(edited((copy / path).read_text(), symbol, edit))
    shutil.copy(Path(__file__).parent / "use_additions.py", copy)
    environment = {**os.environ, "PYTHONPATH": str(copy), "REDIS": redis_server.url, "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(
        [sys.executable, "use_additions.py"], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_every_kind_of_the_page_is_added_here() -> None:
    assert rows("A new kind").keys() == ADDITIONS.keys()


@pytest.mark.parametrize("kind", ADDITIONS)
def test_a_new_kind_works_once_it_is_added_where_the_page_says(said: dict[str, Any], kind: str) -> None:
    assert said[kind] == ADDITIONS[kind].says


def test_every_path_of_the_page_exists() -> None:
    for path in PATH.findall(PAGE.read_text()):
        folder, placeholder, end = path.partition(NAME)
        assert (ROOT / folder).exists(), path
        if placeholder:
            assert list((ROOT / folder).glob(f"*{end}")), f"{path}: there is none yet"


def test_every_symbol_of_the_page_is_defined_where_it_says() -> None:
    found = places(PAGE.read_text())
    assert len(found) > 40
    for symbol, path in found:
        text = (ROOT / path).read_text()
        if path.endswith(".lua"):
            assert re.search(rf"^(?:local )?function {symbol}\b", text, re.MULTILINE), (symbol, path)
        else:
            assert node_of(ast.parse(text), symbol) is not None, (symbol, path)


def test_the_page_answers_the_questions_of_a_new_engineer() -> None:
    questions = rows("Questions")
    for words in (
        "clip of GRPO",
        "lease of a trainer",
        "Redis goes away",
        "delta is applied",
        "`onbeat verify` checks",
    ):
        assert any(words in question for question in questions), words
    assert all(places(first) and places(second) for first, second in questions.values())
