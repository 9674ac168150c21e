"""Names and docstrings that say what a thing is: refused are those that name nothing, file by file.

`tests/unit/not_yet_named.txt` lists the files that still have some, each with the number of its places. It may only get
shorter: a file that is better than its row fails until the row says so, and one that is worse fails at its places.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from tests.unit.test_house import ROOT, package_files, tracked

VAGUE_NAMES = {"one", "found", "some", "told", "asked", "made", "said", "held", "given", "kept"}
"""Words that stand for a noun and are none: a reader who greps for one of them finds everything."""
VAGUE_STARTS = ("What", "Whether", "Those", "One", "Which", "That")
"""Beginnings of a docstring that introduce no subject."""
FIRST_WORD = re.compile(r"\w+")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
NOT_YET = Path(__file__).parent / "not_yet_named.txt"


def bound_names(node: ast.AST) -> Iterator[str]:
    """Yields the names that a node binds: targets of assignments and loops, attributes, parameters and functions."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, FUNCTION):
        yield node.name


def docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, docstring) of a module, class or function, and of each assignment that a string stands under."""
    if isinstance(node, FUNCTION | ast.ClassDef | ast.Module):
        yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
        for statement, below in pairwise(node.body):
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or not isinstance(below, ast.Expr):
                continue
            if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
                yield below.lineno, below.value.value


def vague_places(path: Path) -> list[str]:
    """Returns `line: what` of each vague name that a module binds, and of each docstring with a vague beginning."""
    places: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        for name in bound_names(node):
            if name.strip("_") in VAGUE_NAMES:
                places.append((node.lineno, f"the name `{name}`"))  # pyright: ignore[reportAttributeAccessIssue]
        for line, docstring in docstrings(node):
            first_word = FIRST_WORD.match(docstring)
            if first_word and first_word[0] in VAGUE_STARTS:
                places.append((line, f"a docstring that begins with {first_word[0]}"))
    return [f"{line}: {problem}" for line, problem in sorted(places)]


def not_yet() -> dict[str, int]:
    """Returns the number of vague places that a file may still have, by its path."""
    rows = [line.split() for line in NOT_YET.read_text().splitlines() if not line.startswith("#")]
    return {name: int(number) for number, name in rows}


def test_a_name_is_a_noun_and_a_docstring_introduces_its_subject() -> None:
    allowed = not_yet()
    for path in package_files():
        name = str(path.relative_to(ROOT))
        places = vague_places(path)
        assert len(places) <= allowed.get(name, 0), f"{name}: {places}"


def test_a_function_of_the_tests_that_builds_a_spec_says_which() -> None:
    """A fake's method is named as the real one, and a fixture that tests take as `job` says so in its decorator."""
    for path in tracked("tests/*.py"):
        scopes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, FUNCTION | ast.Module)]
        functions = [child for scope in scopes for child in scope.body if isinstance(child, FUNCTION)]
        vague = [function.lineno for function in functions if function.name.strip("_") in {"spec", "job"}]
        assert not vague, f"{path.relative_to(ROOT)}: {vague}: take a builder of tests/building/specs.py"


def test_the_list_of_files_with_vague_names_only_gets_shorter() -> None:
    """Each row is as small as its file allows, so that what is better stays so."""
    numbers = {str(path.relative_to(ROOT)): len(vague_places(path)) for path in package_files()}
    present = {name: number for name, number in numbers.items() if number}
    assert not_yet() == {name: number for name, number in present.items() if name in not_yet()}, (
        "write it anew: python -m tests.unit.test_language"
    )


if __name__ == "__main__":
    header = (
        "# Files with names and docstrings that say nothing yet: their number, and the path. It only gets shorter.\n"
    )
    counts = {str(path.relative_to(ROOT)): len(vague_places(path)) for path in package_files()}
    NOT_YET.write_text(header + "".join(f"{number:3} {name}\n" for name, number in sorted(counts.items()) if number))
