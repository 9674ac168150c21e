"""`onbeat replay`: has a process of its own sample a recorded batch again, and compares the digests.

The run folder is only read; the services' logs and the answer are in a scratch folder that goes at the end.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace
from rich.text import Text

from contracts.encoding.wire import decode_json
from contracts.errors import Unavailable
from contracts.run_folder import RunFolder
from contracts.settings import engine_from
from onbeat.base.process.waiting import Waiting
from onbeat.commands import options
from onbeat.replay.recorded import Replay, read_from
from onbeat.run_folder.run_files import bring_files
from onbeat.stack.options import StackOptions, stack_settings, threads_from
from onbeat.stack.stack import MODULES, EmbeddedStack
from onbeat.stack.supervision import describe_exit
from onbeat.terminal.output import FAILED, tell
from onbeat.terminal.words import one_line

POLL_S = 0.1


def replay(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job id; `onbeat jobs` lists them.")],
    iteration: Annotated[int, typer.Option("--iteration", metavar="T", min=0, help="Iteration of the batch.")],
    batch: Annotated[int, typer.Option("--batch", metavar="B", min=0, help="Number of the batch in it.")],
    evaluation: Annotated[bool, typer.Option("--evaluation", help="A batch of its evaluation.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="S", min=1.0, help="Longest wait.")] = 600.0,
    threads: options.Threads = None,
    model_root: options.ModelRoot = None,
    json_output: options.Json = False,
    run_dir: options.RunDir = None,
) -> None:
    """Sample a recorded batch again; exit code 1 unless its digest is the same. The run folder is only read."""
    settings = stack_settings(os.environ)
    run_root = (run_dir or Path(settings.run_root)).resolve()
    settings = options.with_run_roots(settings, run_root, model_root)
    stack_options = StackOptions(
        run_root=run_root,
        model_root=Path(settings.model_root),
        threads=threads_from(os.environ, threads),
        settings=settings,
        engine=engine_from(os.environ),
    )
    batch_id = f"{iteration}/{'evaluation' if evaluation else 'train'}/{batch}"
    answer = sample_again(stack_options, job, batch_id, timeout_s=timeout_s)
    tell(answer, _words(answer), json_output=json_output)
    if not answer.equal:
        raise typer.Exit(FAILED)


def sample_again(stack_options: StackOptions, job_id: str, batch_id: str, *, timeout_s: float) -> Replay:
    """Returns how it ended. stack_options: with the run root that has the job's folder.

    Raises what `read_from` does, DeadlineExceeded, and Unavailable for a process that doesn't start, or dies.
    """
    settings = replace(stack_options.settings, run_root=str(stack_options.run_root), redis_url="")
    folder = RunFolder(stack_options.run_root, job_id, weight_root=settings.weight_root_path)
    bring_files(settings, folder, deadline_s=timeout_s)
    read_from(folder, batch_id)
    stack_options = dataclasses.replace(stack_options, settings=settings)
    # What scores and plays; a generator's place is this program's.
    modules = {"reward_service": MODULES["reward_service"]}
    with (
        tempfile.TemporaryDirectory(prefix="onbeat-replay-", ignore_cleanup_errors=True) as scratch,
        EmbeddedStack(stack_options, modules=modules, folder=Path(scratch)) as stack,
    ):
        return _answer_of(stack, job_id, batch_id, Path(scratch) / "answer.json", timeout_s=timeout_s)


def _answer_of(stack: EmbeddedStack, job_id: str, batch_id: str, path: Path, *, timeout_s: float) -> Replay:
    """Has a process sample the batch beside the stack's services."""
    sampler = stack.program_as("generator-1", "-m", "onbeat.replay", job_id, batch_id, str(path))
    waiting = Waiting(f"{batch_id} to be sampled again", deadline_s=timeout_s, cure="raise --timeout")
    sampler.start()
    try:
        # An engine that hangs keeps its process from its end, and not from its answer.
        while (exit_code := sampler.exit_code) is None and not path.exists():
            waiting.poke()
            stack.tick()
            sampler.wait(POLL_S)
        if not path.exists():
            raise Unavailable(
                f"{describe_exit(exit_code or 0)} without an answer; the end of its log:\n{sampler.tail()}",
                field="the process that samples",
            )
        return decode_json(path.read_bytes(), Replay)
    finally:
        sampler.stop(grace_s=0.0)


def _words(answer: Replay) -> Text:
    if answer.equal is None:
        return Text(f"{answer.batch_id}  was not sampled again: {one_line(answer.reason)}", style="red")
    if answer.equal:
        return Text(f"{answer.batch_id}  the same\n{answer.digest}", style="green")
    lines = (
        f"{answer.batch_id}  differs: {one_line(answer.reason)}",
        f"recorded {answer.recorded_digest}",
        f"now      {answer.digest}",
    )
    return Text("\n".join(lines), style="red")
