"""`onbeat bench NAME`: the scripts of benchmarks/, one for each number in the README."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import InvalidInput
from onbeat.commands import options
from onbeat.commands.options import REPOSITORY
from onbeat.terminal.output import emit

FOLDER = REPOSITORY / "benchmarks"


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A script of benchmarks/, without .py, with - for _.")],
    json_output: options.Json = False,
) -> None:
    """Run a benchmark; further flags go to its script (try --help after the name).

    With --json its text goes to stderr, and the object holds the result files that it wrote.
    """
    scripts = sorted(path.stem.replace("_", "-") for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
    if name in ("-h", "--help"):
        if json_output:
            emit({"benchmarks": scripts})
        else:
            sys.stdout.write(f"onbeat bench NAME [FLAGS]: {', '.join(scripts)}\n")
        return
    if name not in scripts:
        known = f"known: {', '.join(scripts)}" if scripts else "benchmarks/ comes with a clone of the repository"
        raise InvalidInput(f"there is no benchmark `{name}`", field="NAME", cure=known)
    module = name.replace("-", "_")
    before = _results()
    finished = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *context.args],
        cwd=REPOSITORY,
        stdout=sys.stderr if json_output else None,
        check=False,
    )
    if json_output:
        written = sorted(path for path, changed in _results().items() if before.get(path) != changed)
        results = {path.name: json.loads(path.read_bytes()) for path in written}
        emit({"benchmark": name, "exit_code": finished.returncode, "results": results})
    raise typer.Exit(finished.returncode)


# The arguments of a benchmark are its own, `--help` with them.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
bench.__dict__["context_settings"] = CONTEXT


def _results() -> dict[Path, int]:
    """File → when it was written, in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in (FOLDER / "results").glob("*.json")}
