"""The command `onbeat`, and `python -m onbeat`."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs a command and ends the process; Ctrl-C while it is imported is no traceback either."""
    try:
        import onbeat.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
        from onbeat import cli
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
