"""The command `onbeat`, and `python -m onbeat`."""

from __future__ import annotations

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from onbeat.cli import main

if __name__ == "__main__":
    main()
