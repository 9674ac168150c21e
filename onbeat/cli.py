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

import typer
from typer.exceptions import TyperException

from contracts.errors import InvalidInput, OnbeatError
from contracts.settings import PREFIX, StackSettings
from onbeat.commands import export, jobs, look, stack
from onbeat.process.entry_points import all_of
from onbeat.process.signals import end_on_signals
from onbeat.telemetry import logs
from onbeat.terminal.output import BAD_INPUT, INTERRUPTED, emit_error

app = typer.Typer(
    name="onbeat",
    help="On-policy reinforcement learning of language models while generation and training overlap.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = (
    stack.up,
    jobs.submit,
    jobs.jobs,
    jobs.watch,
    jobs.cancel,
    jobs.resume,
    jobs.delete,
    look.streams,
    look.logs,
    look.dead,
    jobs.verify,
    export.export,
)
"""In the order of `onbeat --help`: a new command is a function of onbeat/commands/ and a name here."""
EXTRAS = "onbeat.commands"
"""The group of entry points whose commands come after ours, and stand in the place of none; they may have
`context_settings`."""
for command in COMMANDS:
    app.command()(command)
for name, command in all_of(EXTRAS).items():
    if name not in {ours.__name__ for ours in COMMANDS}:
        app.command(name, context_settings=getattr(command, "context_settings", None))(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and ends the process."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Runs a command and returns its exit code; an error is one line, never a traceback."""
    json_output = "--json" in arguments
    try:
        end_on_signals()
        logs.configure(_log_settings(), service="onbeat")
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


def _log_settings() -> StackSettings:
    """Reads the log format alone: a wrong variable is reported by the command that reads them all."""
    json_lines = os.environ.get(f"{PREFIX}LOG_FORMAT") == "json"
    return StackSettings(log_format="json" if json_lines else "human")


if __name__ == "__main__":
    main()
