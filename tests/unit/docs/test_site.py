"""What `make site` builds from: every page at its path, and a reference that leaves out nothing of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

import onbeat
from broker import keys
from docs.make_site import LINK, ROOT, main, pages
from onbeat.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pages")
    main(made)
    return made


def test_each_page_of_the_navigation_is_there_and_each_of_docs_is_in_it(folder: Path) -> None:
    listed = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert [name for name in sorted(listed) if not (folder / name).is_file()] == []
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= listed


def test_each_file_that_a_page_links_to_is_there(folder: Path) -> None:
    for page in pages():
        copied = folder / page.relative_to(ROOT)
        assert copied.read_text() == page.read_text()
        assert [target for target in LINK.findall(page.read_text()) if not (copied.parent / target).exists()] == []


def test_the_reference_has_each_command_name_route_and_key(folder: Path) -> None:
    commands = (folder / "reference" / "commands.md").read_text()
    group: Any = typer.main.get_command(app)
    assert [name for name in group.commands if f"\n## {name}\n" not in commands] == []
    assert "`--iterations" in commands
    python = (folder / "reference" / "python.md").read_text()
    assert [name for name in onbeat.__all__ if f"\n## {name}\n" not in python] == []
    assert "### Run.verify" in python
    http = (folder / "reference" / "http.md").read_text()
    assert "\n## POST /v1/jobs\n" in http
    assert "\n## GET /v1/stack/report\n" in http
    table = (folder / "reference" / "redis-keys.md").read_text()
    assert table.count("| onbeat:") == len(re.findall(r"^\| onbeat:", keys.__doc__ or "", re.MULTILINE)) > 30
