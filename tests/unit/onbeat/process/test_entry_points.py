"""What installed packages offer: one that can't be used is left out by its name, and takes no other along."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.process.entry_points import all_of

GROUP = "onbeat.tried"


def installed(folder: Path, name: str, offers: dict[str, str], *, group: str = GROUP) -> None:
    """As pip leaves a package's metadata."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{offered} = {place}" for offered, place in offers.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


def test_what_cannot_be_used_is_left_out_by_its_name_and_the_rest_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module, text in (("raises", "1 / 0"), ("exits", "raise SystemExit(3)"), ("needs", "import absent_library")):
        (tmp_path / f"{module}_at_import.py").write_text(text)
    (tmp_path / "well.py").write_text("THING = 7")
    places = {name: f"{name}_at_import:THING" for name in ("raises", "exits", "needs")}
    installed(
        tmp_path, "first", places | {"well": "well:THING", "gone": "removed_folder.module:THING", "both": "well:THING"}
    )
    installed(tmp_path, "second", {"both": "well:THING"})
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


def test_a_package_s_command_stands_in_the_place_of_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text('def submit():\n    """Theirs."""\n\n\ndef novel():\n    """Novel."""\n')
    installed(tmp_path, "theirs", {"submit": "theirs:submit", "novel": "theirs:novel"}, group="onbeat.commands")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from onbeat.cli import run; run(['--help'])"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "Novel." in shown
    assert "Theirs." not in shown
