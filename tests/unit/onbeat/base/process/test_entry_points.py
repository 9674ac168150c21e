"""Entry points of installed packages, found without importing them."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.base.process.entry_points import offers_of
from onbeat.cli import COMMANDS
from tests.builders import install

GROUP = "onbeat.tried"


def offering(folder: Path, name: str, offers: dict[str, str], *, group: str = GROUP) -> None:
    install(folder, name, "\n".join([f"[{group}]", *(f"{offered} = {place}" for offered, place in offers.items()), ""]))


def test_a_name_that_several_packages_offer_is_left_out_and_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is imported for it: neither module is there."""
    offering(tmp_path, "first", {"well": "absent_module:THING", "both": "absent_module:THING"})
    offering(tmp_path, "second", {"both": "absent_module:THING"})
    monkeypatch.syspath_prepend(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert {name: offer.value for name, offer in offers_of(GROUP).items()} == {"well": "absent_module:THING"}
    assert [record.getMessage() for record in caplog.records] == [
        f"`both` in group {GROUP} is left out: several packages offer it: first 1.0, second 1.0",
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


def test_there_are_at_most_25_commands_to_learn() -> None:
    assert len(COMMANDS) <= 25
