"""The command `onbeat`, and `python -m onbeat`."""

from __future__ import annotations

import runpy
from pathlib import Path


def main() -> None:
    """Runs a command and ends the process."""
    # By its path: the check of who has our packages' names comes before any import by name.
    runpy.run_path(str(Path(__file__).resolve().parents[1] / "process" / "own_packages.py"))
    from onbeat import cli

    cli.main()


if __name__ == "__main__":
    main()
