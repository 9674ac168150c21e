"""`onbeat bench` runs a script of benchmarks/, and answers what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from onbeat.bench import command as bench
from onbeat.cli import app


def test_a_benchmark_answers_one_object_with_the_results_that_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scripts = tmp_path / "benchmarks"
    (scripts / "results").mkdir(parents=True)
    (scripts / "__init__.py").write_text("")
    (scripts / "results" / "old.json").write_text("{}")
    (scripts / "one_number.py").write_text(
        "import pathlib, sys\n"
        "print('for people', sys.argv[1:])\n"
        "pathlib.Path('benchmarks/results/new.json').write_text('{\"number\": 3}')\n"
        "sys.exit(1)\n"
    )
    monkeypatch.setattr(bench, "REPOSITORY", tmp_path)
    monkeypatch.setattr(bench, "FOLDER", scripts)
    assert app(["bench", "one-number", "--json", "--fast"], standalone_mode=False) == 1
    out, err = capfd.readouterr()
    assert json.loads(out) == {"benchmark": "one-number", "exit_code": 1, "results": {"new.json": {"number": 3}}}
    assert "for people ['--fast']" in err
