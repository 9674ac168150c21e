"""`onbeat bench NAME`: the scripts of benchmarks/, one for each number in the README."""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from contracts.errors import InvalidInput
from onbeat.commands.options import REPOSITORY

FOLDER = REPOSITORY / "benchmarks"


def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A script of benchmarks/, without .py, with - for _.")],
) -> None:
    """Run a benchmark; further flags go to its script (try --help after the name)."""
    scripts = sorted(path.stem.replace("_", "-") for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
    if name in ("-h", "--help"):
        sys.stdout.write(f"onbeat bench NAME [FLAGS]: {', '.join(scripts)}\n")
        return
    if name not in scripts:
        known = f"known: {', '.join(scripts)}" if scripts else "benchmarks/ comes with a clone of the repository"
        raise InvalidInput(f"there is no benchmark `{name}`", field="NAME", cure=known)
    module = name.replace("-", "_")
    finished = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *context.args], cwd=REPOSITORY, check=False
    )
    raise typer.Exit(finished.returncode)
