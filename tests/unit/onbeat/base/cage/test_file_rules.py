"""What a cage may read: places that code needs and that the operator adds, and no home folder by the import path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from onbeat.base.cage.file_rules import READ_FILE, readable_places


def may_read(path: Path, *, added: tuple[str, ...] = (), closed: tuple[Path, ...] = (), home: str = "") -> bool:
    places = readable_places(added, closed, home=home)
    return any(path.is_relative_to(place) for place, access in places if access & READ_FILE)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path with a module, a file of secrets, and the stack's run folder."""
    folder = tmp_path / "home" / "project"
    (folder / "runs").mkdir(parents=True)
    for name in ("module.py", ".env", "runs/stack.json"):
        (folder / name).write_text("text")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_project_on_the_import_path_is_read_but_for_hidden_names_and_the_stacks_own_folders(project: Path) -> None:
    closed = (project / "runs",)
    home = str(project.parent)
    assert may_read(project / "module.py", closed=closed, home=home)
    assert not may_read(project / ".env", closed=closed, home=home)
    assert not may_read(project / "runs" / "stack.json", closed=closed, home=home)


def test_a_home_folder_on_the_import_path_opens_nothing_and_the_operator_may_add_a_folder_of_it(project: Path) -> None:
    home = str(project)
    assert not may_read(project / "module.py", home=home)
    assert may_read(project / "module.py", home=home, added=(str(project),))


def test_the_interpreter_and_its_packages_are_read(project: Path) -> None:
    assert may_read(Path(pytest.__file__).resolve())
    assert may_read(Path(sys.base_prefix).resolve() / "lib")
    assert not may_read(project.parent / "neighbor.txt")
