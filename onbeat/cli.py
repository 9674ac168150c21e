"""The program `onbeat`: the table of its commands, and how an error leaves the process.

exit 0    done (`demo`: succeeded and verified)
exit 1    the job failed, was cancelled, or did not verify
exit 2    bad input, a refused request, or a service that cannot be reached: one line that names field and cure
exit 130  Ctrl-C or SIGTERM, after a clean stop
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
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
GROUP = "onbeat.commands"
"""The group of entry points by which other packages add commands. They are listed after ours and replace none."""
Command = Callable[..., None]
"""A command: a function whose parameters are its arguments and flags."""


def _up() -> Command:
    """Run the embedded stack in the foreground until Ctrl-C; its jobs go on at the next start."""
    from onbeat.commands.stacks.up import up

    return up


def _submit() -> Command:
    """Submit a job."""
    from onbeat.commands.jobs import submit

    return submit


def _watch() -> Command:
    """Follow a job to its end, and show the batches that were given up; exit code 1 unless the job succeeds."""
    from onbeat.commands.jobs import watch

    return watch


def _cancel() -> Command:
    """Cancel a job: its trainer writes a checkpoint and ends."""
    from onbeat.commands.jobs import cancel

    return cancel


def _resume() -> Command:
    """Queue a failed or cancelled job again, or give a job more iterations: it goes on from its newest checkpoint."""
    from onbeat.commands.jobs import resume

    return resume


def _backup() -> Command:
    """Copy a stack's Redis and run folders, also while jobs run: `onbeat restore` makes a stack of it that goes on."""
    from onbeat.commands.stacks.backup import backup

    return backup


def _chaos() -> Command:
    """Kill and pause processes at random; every run must end with the weights of the undisturbed one."""
    from onbeat.chaos.command import chaos

    return chaos


def _delete() -> Command:
    """Delete ended jobs for good: status, audit chain, run folder with the trained weights."""
    from onbeat.commands.delete import delete

    return delete


def _demo() -> Command:
    """Start a private stack, train a job on it, and show it live."""
    from onbeat.training.command import demo

    return demo


def _doctor() -> Command:
    """Say what of this machine, or of a model's folder, would hurt a job; exit code 1 where it would make one fail."""
    from onbeat.commands.doctor import doctor

    return doctor


def _down() -> Command:
    """End the stack of a run folder, as Ctrl-C does; its jobs go on at the next start. Nothing to end is no error."""
    from onbeat.commands.stacks.down import down

    return down


def _export() -> Command:
    """Write the trained model as a Hugging Face folder; its digest is the version's."""
    from onbeat.commands.exports.command import export

    return export


def _fetch() -> Command:
    """Fetch models and data sets of the Hugging Face hub: jobs of this host then find them without a network."""
    from onbeat.commands.fetch import fetch

    return fetch


def _init() -> Command:
    """Write a project that runs: spec, reward with its test, ten rows, a small model, a program."""
    from onbeat.projects.command import init

    return init


def _jobs() -> Command:
    """List the jobs, newest first, with times, results, and why one waits or has failed; --tasks lists tasks."""
    from onbeat.commands.job_list import jobs

    return jobs


def _key() -> Command:
    """Make a key of the gateway with a scope, or revoke one; a running gateway knows it with its next request."""
    from onbeat.commands.keys import key

    return key


def _plan() -> Command:
    """Predict a job's seconds an iteration under each schedule, from a finished job's times; nothing is started."""
    from onbeat.planning.command import plan

    return plan


def _replay() -> Command:
    """Sample a recorded batch again; exit code 1 unless its digest is the same. The run folder is only read."""
    from onbeat.commands.exports.replay import replay

    return replay


def _restore() -> Command:
    """Make a run folder of a backup; `onbeat up` there goes on with its jobs. It replaces nothing."""
    from onbeat.commands.stacks.backup import restore

    return restore


def _setup() -> Command:
    """Make an environment in which generators sample with vLLM, and prove it by a short job."""
    from onbeat.installing.command import setup

    return setup


def _streams() -> Command:
    """Show a job's batches and streams in Redis: lengths, ages, leases, rejections, bytes, and names of their keys."""
    from onbeat.commands.streams import streams

    return streams


def _evaluate() -> Command:
    """Score a model on the held-out prompts of a spec, and train nothing; exit code 1 unless it comes to its end."""
    from onbeat.commands.derived.evaluate import evaluate

    return evaluate


def _samples() -> Command:
    """Show completions of a job with their prompts and rewards: the newest that are recorded, or those you ask for."""
    from onbeat.commands.exports.samples import samples

    return samples


def _sweep() -> Command:
    """Submit a job for each combination of some values, and compare them; exit code 1 unless all succeed."""
    from onbeat.commands.derived.sweep import sweep

    return sweep


def _verify() -> Command:
    """Re-check a job's audit chain and the weights on disk; exit code 1 on any gap."""
    from onbeat.commands.exports.verify_command import verify

    return verify


COMMANDS: dict[str, Callable[[], Command]] = {
    "up": _up,
    "submit": _submit,
    "watch": _watch,
    "samples": _samples,
    "evaluate": _evaluate,
    "sweep": _sweep,
    "cancel": _cancel,
    "resume": _resume,
    "backup": _backup,
    "chaos": _chaos,
    "delete": _delete,
    "demo": _demo,
    "doctor": _doctor,
    "down": _down,
    "export": _export,
    "fetch": _fetch,
    "init": _init,
    "jobs": _jobs,
    "key": _key,
    "plan": _plan,
    "replay": _replay,
    "restore": _restore,
    "setup": _setup,
    "streams": _streams,
    "verify": _verify,
}
"""Name → the function that imports our command, with the line of `onbeat --help` as its docstring; in its order."""


class Commands(TyperGroup):
    """Lists the commands, and imports one when it is called: it doesn't wait for what another one needs."""

    def __init__(self, **settings: Any) -> None:
        self.offers = {name: offer for name, offer in offers_of(GROUP).items() if name not in COMMANDS}
        help_texts = {name: load_command.__doc__ for name, load_command in COMMANDS.items()}
        help_texts |= {name: docstring_of(offer) for name, offer in self.offers.items()}
        # None is of a package whose module is gone.
        listed = {name: TyperCommand(name, help=text) for name, text in help_texts.items() if text is not None}
        super().__init__(**{**settings, "commands": listed})

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and self.imported(name), rest

    def imported(self, name: str) -> Any:
        """Returns the command with its flags. Raises UnknownEntryPoint where another package's can't be imported."""
        if name in COMMANDS:
            return with_flags(name, COMMANDS[name]())
        return with_flags(name, load(self.offers[name], field="COMMAND", where="command"))


def with_flags(name: str, command: Command) -> Any:
    """Returns what reads a command's flags and calls it."""
    single = typer.Typer(add_completion=False)
    single.command(name, context_settings=HELP_FLAGS)(command)
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
    """Makes the app a group: the commands are those of `Commands`, none is registered here."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command and ends the process."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Runs a command and returns its exit code; an error is one line, or one for each refusal of a spec, never a
    traceback."""
    json_output = "--json" in arguments
    try:
        end_on_signals()
        # The log's format alone: a wrong variable is reported by the command that reads them all.
        log_format = "human"
        if os.environ.get(f"{PREFIX}LOG_FORMAT") == "json":
            log_format = "json"
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
