"""`onbeat replay`: has a generator sample a recorded batch again, and compares the digests.

The generator is one of a running stack, or, offline, one that is started for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from contracts.errors import InvalidInput
from contracts.replays import Replay, ReplayState
from contracts.settings import engine_from
from onbeat.client.gateway import GatewayClient
from onbeat.commands import options
from onbeat.offline_replay import replay_offline
from onbeat.stack.plan import StackPlan, stack_settings, threads_from
from onbeat.terminal.output import FAILED, tell
from onbeat.terminal.words import one_line
from process.waiting import Waiting

ASK_EVERY_S = 0.5


def replay(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job id; `onbeat jobs` lists them.")],
    iteration: Annotated[int, typer.Option("--iteration", metavar="T", min=0, help="Iteration of the batch.")],
    batch: Annotated[int, typer.Option("--batch", metavar="B", min=0, help="Number of the batch in it.")],
    evaluation: Annotated[bool, typer.Option("--evaluation", help="A batch of its evaluation.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", metavar="S", min=1.0, help="Longest wait.")] = 600.0,
    offline: Annotated[
        bool, typer.Option("--offline", help="Ask no stack: start a generator, and read the run folder alone.")
    ] = False,
    threads: options.Threads = None,
    model_root: options.ModelRoot = None,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Sample a recorded batch again; exit code 1 unless its digest is the same. Nothing is published or trained."""
    batch_id = f"{iteration}/{'evaluation' if evaluation else 'train'}/{batch}"
    if offline:
        _refuse({"--gateway": gateway, "--api-key": api_key}, "asks no gateway, offline")
        found = _offline(job, batch_id, run_dir, threads=threads, model_root=model_root, timeout_s=timeout_s)
    else:
        _refuse({"--threads": threads, "--model-root": model_root}, "is of a generator that --offline starts")
        with options.client_for(options.access_from(gateway, api_key, run_dir, job=job)) as client:
            found = _wait(client, client.sample_again(job, batch_id), timeout_s=timeout_s)
    tell(found, _words(found), json_output=json_output)
    if not found.equal:
        raise typer.Exit(FAILED)


def _refuse(flags: Mapping[str, object], problem: str) -> None:
    """Raises InvalidInput for a flag that would be ignored."""
    for flag, value in flags.items():
        if value is not None:
            raise InvalidInput(problem, field=flag, cure="leave it out")


def _offline(
    job: str, batch_id: str, run_dir: Path | None, *, threads: int | None, model_root: Path | None, timeout_s: float
) -> Replay:
    settings = stack_settings(os.environ)
    plan = StackPlan(
        run_root=(run_dir or Path(settings.run_root)).resolve(),
        model_root=options.model_root_or_default(model_root),
        threads=threads_from(os.environ, threads),
        settings=settings,
        engine=engine_from(os.environ),
    )
    return replay_offline(plan, job, batch_id, timeout_s=timeout_s)


def _wait(client: GatewayClient, asked: Replay, *, timeout_s: float) -> Replay:
    """Raises DeadlineExceeded where no generator has answered by then."""
    what = f"a generator to sample {asked.batch_id} again"
    waiting = Waiting(what, deadline_s=timeout_s, cure="is a generator alive that is not at work all the time?")
    while asked.state in (ReplayState.QUEUED, ReplayState.SAMPLING):
        waiting.poke(f"{what}: {asked.reason or asked.state.value}")
        time.sleep(min(ASK_EVERY_S, waiting.left_s))
        asked = client.replay(asked.job_id, asked.replay_id)
    return asked


def _words(found: Replay) -> Text:
    if found.equal:
        return Text(f"{found.batch_id}  the same, sampled again by {found.generator_id}\n{found.digest}", style="green")
    if found.state is ReplayState.FAILED:
        return Text(f"{found.batch_id}  was not sampled again: {one_line(found.reason)}", style="red")
    lines = (
        f"{found.batch_id}  differs, sampled again by {found.generator_id}: {one_line(found.reason)}",
        f"recorded {found.recorded_digest}",
        f"now      {found.digest}",
    )
    return Text("\n".join(lines), style="red")
