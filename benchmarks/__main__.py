"""Lists the benchmarks, or runs one of them.

    python -m benchmarks                        lists each benchmark with the first sentence of its docstring
    python -m benchmarks NAME [FLAGS]           runs benchmarks/NAME.py, with its own flags
    python -m benchmarks NAME --help            prints those flags

A benchmark is a file of this folder whose name doesn't begin with an underscore. `-` stands for `_` in its name.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
HELP_FLAGS = ("-h", "--help")
USAGE_ERROR = 2
"""The exit code of argparse, and of every `onbeat` command, for a wrong argument."""


def benchmark_files() -> dict[str, Path]:
    """Returns each benchmark's name with its script, in alphabetical order."""
    scripts = sorted(path for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))
    return {path.stem.replace("_", "-"): path for path in scripts}


def summary_of(script: Path) -> str:
    """Returns the first sentence of a script's docstring, without importing the script."""
    docstring = ast.get_docstring(ast.parse(script.read_text())) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")


def listing() -> str:
    """Returns one line for each benchmark: its name and what it measures."""
    scripts = benchmark_files()
    width = max(len(name) for name in scripts)
    lines = [f"{name:{width}}  {summary_of(script)}" for name, script in scripts.items()]
    return "\n".join(["python -m benchmarks NAME [FLAGS]", "", *lines])


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns its exit code."""
    if not arguments or arguments[0] in HELP_FLAGS:
        print(listing())
        return 0
    name = arguments[0]
    scripts = benchmark_files()
    if name not in scripts:
        print(f"there is no benchmark `{name}`; `python -m benchmarks` lists them", file=sys.stderr)
        return USAGE_ERROR
    # The script reads its flags from sys.argv. `alter_sys` puts the script's path into sys.argv[0], from which
    # `_results.write_result` takes the name for the recorded command.
    sys.argv = [name, *arguments[1:]]
    runpy.run_module(f"benchmarks.{scripts[name].stem}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
