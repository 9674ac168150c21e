"""The entry point `onbeat`: which commands there are, and how an error leaves the process.

exit 0    done (`demo`: succeeded and verified)
exit 1    the job failed, was cancelled, or did not verify
exit 2    bad input, a refused request, or a service that cannot be reached: one line that names field and cure
exit 130  Ctrl-C or SIGTERM, after a clean stop
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from contracts.errors import InvalidInput, OnbeatError
from contracts.settings import PREFIX, StackSettings
from onbeat.base.process.entry_points import docstring_of, load, offers_of
from onbeat.base.process.signals import end_on_signals
from onbeat.base.telemetry import logs
from onbeat.terminal.output import BAD_INPUT, INTERRUPTED, emit_error

HELP_FLAGS = {"help_option_names": ["-h", "--help"]}
COMMANDS = {"up": "stack", "submit": "jobs", "watch": "jobs", "cancel": "jobs", "resume": "jobs"}
"""Command → its module of onbeat/commands/, where it is the function of its name; in the order of `onbeat --help`."""
EXTRAS = "onbeat.commands"
"""The group of entry points whose commands come after ours, and stand in the place of none; they may have
`context_settings`."""


class Commands(TyperGroup):
    """Imports a command when it is called: what it needs, another one doesn't wait for."""

    def __init__(self, **settings: Any) -> None:
        ours = {name: EntryPoint(name, f"onbeat.commands.{at}:{name}", EXTRAS) for name, at in COMMANDS.items()}
        self.offers = {**ours, **{name: offer for name, offer in offers_of(EXTRAS).items() if name not in ours}}
        docstrings = {name: docstring_of(offer) for name, offer in self.offers.items()}
        listed = {name: TyperCommand(name, help=text) for name, text in docstrings.items() if text is not None}
        super().__init__(**{**settings, "commands": listed})

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and self.imported(name), rest

    def imported(self, name: str) -> Any:
        """The command with its flags. Raises UnknownEntryPoint where its package can't be imported."""
        function = load(self.offers[name], field="COMMAND", where="command")
        single = typer.Typer(add_completion=False)
        single.command(name, context_settings={**HELP_FLAGS, **getattr(function, "context_settings", {})})(function)
        return typer.main.get_command(single)


app = typer.Typer(
    cls=Commands,
    name="onbeat",
    help="On-policy reinforcement learning of language models while generation and training overlap.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP_FLAGS,
)


@app.callback()
def _app() -> None:
    """A group has commands of its own even where it is given none here."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and ends the process."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Runs a command and returns its exit code; an error is one line, never a traceback."""
    json_output = "--json" in arguments
    try:
        end_on_signals()
        # The log's format alone: a wrong variable is reported by the command that reads them all.
        log_format = "json" if os.environ.get(f"{PREFIX}LOG_FORMAT") == "json" else "human"
        logs.configure(StackSettings(log_format=log_format), service="onbeat")
        code = app(arguments, standalone_mode=False) or 0
        if code != INTERRUPTED:
            return code
        raise KeyboardInterrupt
    except TyperException as error:
        if message := error.format_message():
            emit_error(InvalidInput(message, cure="onbeat --help"), json_output=json_output)
        return BAD_INPUT
    except OnbeatError as error:
        emit_error(error, json_output=json_output)
        return BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("onbeat: interrupted\n")
        return INTERRUPTED


if __name__ == "__main__":
    main()
