"""docs/change.md is true: each file and symbol that it names is there."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

from onbeat.environments.built_in import BUILT_IN

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "change.md"
PATH = re.compile(r"`((?:[\w.<>-]+/)+[\w.<>-]+)`")
PLACE = re.compile(r"`([\w.]+)`(?: and `([\w.]+)`)? in `((?:[\w.-]+/)+[\w.-]+)`")
EXCERPT = re.compile(r"^```python (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = "<name>"
"""What the page writes for the name of a new kind."""


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


def test_every_path_of_the_page_exists() -> None:
    for path in PATH.findall(PAGE.read_text()):
        folder, placeholder, end = path.partition(NAME)
        assert (ROOT / folder).exists(), path
        if placeholder:
            assert list((ROOT / folder).glob(f"*{end}")), f"{path}: there is none yet"


def test_each_file_with_routes_is_kept_apart_from_the_others() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    independent = next(each for each in contracts if each["name"] == "gateway: the endpoints are independent")
    files = (ROOT / "gateway" / "api").glob("*.py")
    assert set(independent["modules"]) == {f"gateway.api.{file.stem}" for file in files if file.stem != "__init__"}


def test_each_built_in_environment_has_a_row_in_their_table() -> None:
    section = (ROOT / "docs" / "environments.md").read_text().split("\n## Built in")[1].split("\n## ")[0]
    for name in BUILT_IN:
        assert re.search(rf"^`{name}`", section, re.MULTILINE), name


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
        "term is added to the loss",
        "clip of GRPO",
        "lease of a trainer",
        "generator that was killed",
        "Redis goes away",
        "delta is applied",
        "`onbeat verify` checks",
    ):
        assert any(words in question for question in questions), words
    assert all(places(answer) for (answer,) in questions.values())


def test_each_excerpt_of_the_page_stands_in_its_file() -> None:
    def lines(text: str) -> str:
        return "\n".join(line.strip() for line in text.strip().splitlines())

    excerpts = EXCERPT.findall(PAGE.read_text())
    assert len(excerpts) == 2
    for path, text in excerpts:
        assert lines(text) in lines((ROOT / path).read_text()), path
