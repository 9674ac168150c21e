"""`python -m tests.unit.benchmarks.collecting FLAGS`: `python -m pytest FLAGS`, in a process that may be forked."""

from __future__ import annotations

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
