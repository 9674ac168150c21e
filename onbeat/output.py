"""What a command prints: one JSON object on stdout, or text; errors as one line on stderr."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console

from contracts.errors import OnbeatError
from contracts.wire import encode_json

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130


def console_for(*, json_output: bool) -> Console:
    """Text for people goes to stdout; with --json to stderr, because stdout belongs to the one object."""
    return Console(stderr=json_output, highlight=False)


def emit(value: Any) -> None:
    """The one JSON object."""
    sys.stdout.write(encode_json(value).decode() + "\n")
    sys.stdout.flush()


def emit_error(error: OnbeatError, *, json_output: bool) -> None:
    """`onbeat: <field>: <problem> (<cure>)`, or `{"error": {...}}`."""
    if json_output:
        emit(
            {
                "error": {
                    "type": type(error).__name__,
                    "field": error.field,
                    "problem": error.problem,
                    "cure": error.cure,
                }
            }
        )
    else:
        sys.stderr.write(f"onbeat: {error}\n")
