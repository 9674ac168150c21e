"""What installed packages offer: one that can't be used is left out by its name, and takes no other along."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.base.process.entry_points import all_of
from onbeat.cli import COMMANDS
from tests.builders import install

GROUP = "onbeat.tried"


def offering(folder: Path, name: str, offers: dict[str, str], *, group: str = GROUP) -> None:
    install(folder, name, "\n".join([f"[{group}]", *(f"{offered} = {place}" for offered, place in offers.items()), ""]))


def test_what_cannot_be_used_is_left_out_by_its_name_and_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module, text in (("raises", "1 / 0"), ("exits", "raise SystemExit(3)"), ("needs", "import absent_library")):
        (tmp_path / f"{module}_at_import.py").write_text(text)
    (tmp_path / "well.py").write_text("THING = 7")
    places = {name: f"{name}_at_import:THING" for name in ("raises", "exits", "needs")}
    offering(
        tmp_path, "first", places | {"well": "well:THING", "gone": "removed_folder.module:THING", "both": "well:THING"}
    )
    offering(tmp_path, "second", {"both": "well:THING"})
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert all_of(GROUP) == {"well": 7}
        assert all_of(GROUP, distribution="second") == {"both": 7}
    assert [record.getMessage() for record in caplog.records] == [
        f"`both` in group {GROUP} is left out: several packages offer it: first 1.0, second 1.0",
        "`exits` of first 1.0 is left out: SystemExit: 3",
        "`needs` of first 1.0 is left out: ModuleNotFoundError: No module named 'absent_library'",
        "`raises` of first 1.0 is left out: ZeroDivisionError: division by zero",
    ]


HEAVY = ("httpx", "numpy", "redis", "torch")


def shown_by(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stdout


def test_a_package_s_command_stands_in_the_place_of_none_of_ours_and_is_imported_when_it_is_called(
    tmp_path: Path,
) -> None:
    (tmp_path / "theirs.py").write_text(
        'import absent_library\n\n\ndef submit():\n    """Theirs."""\n\n\ndef novel():\n    """Novel."""\n'
    )
    offering(tmp_path, "theirs", {"submit": "theirs:submit", "novel": "theirs:novel"}, group="onbeat.commands")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from onbeat.cli import run; run(['%s', '--json'])"
    shown = shown_by(program.replace(", '--json'", "") % "--help")
    assert "Novel." in shown
    assert "Theirs." not in shown
    problem = "`novel` of theirs 1.0 cannot be imported: ModuleNotFoundError: No module named 'absent_library'"
    assert problem in shown_by(program % "novel")


def test_the_help_waits_for_no_library_of_a_command() -> None:
    program = f"import sys; from onbeat.cli import run; run(['--help']); print(sys.modules.keys() & {set(HEAVY)})"
    assert shown_by(program).splitlines()[-1] == "set()"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_has_a_command_s_own_first_paragraph(name: str) -> None:
    command = COMMANDS[name]()
    assert command.__name__ == name
    first_paragraph = inspect.cleandoc(command.__doc__ or "").split("\n\n")[0]
    assert COMMANDS[name].__doc__ == first_paragraph.replace("\n", " ")


def test_there_are_at_most_21_commands_to_learn() -> None:
    assert len(COMMANDS) <= 21
