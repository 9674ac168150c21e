"""`onbeat samples`: what the model wrote, as it was recorded."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from contracts.run_folder import RunFolder
from onbeat.commands import options
from onbeat.recording.records import RecordedSample
from onbeat.recording.samples import FolderSamples, GatewaySamples, read_samples
from onbeat.stack.access import run_root_from
from onbeat.terminal.output import console_for, emit
from onbeat.terminal.words import one_line, score


def samples(
    job: options.Job,
    iteration: Annotated[
        int | None, typer.Option("--iteration", metavar="T", min=0, help="Of this iteration. [the newest]")
    ] = None,
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="B", min=0, help="Of this batch of the iteration alone. [any]")
    ] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Held-out prompts, in place of those that were trained.")
    ] = False,
    worst: Annotated[bool, typer.Option("--worst", help="The lowest rewards first.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many.")] = 8,
    json_output: options.Json = False,
    gateway: options.Gateway = None,
    api_key: options.ApiKey = None,
    run_dir: options.RunDir = None,
) -> None:
    """Show completions of a job with their prompts and rewards: the newest that are recorded, or those you ask for."""
    choose = partial(read_samples, iteration=iteration, batch=batch, held_out=held_out, worst=worst, limit=limit)
    folder = RunFolder(run_root_from(os.environ, run_dir).resolve(), job)
    if gateway is None and folder.spec.exists():
        # A folder of this machine can be read without a stack.
        recorded = choose(FolderSamples(folder))
    else:
        with options.client_for(options.access_from(gateway, api_key, run_dir, job=job)) as client:
            recorded = choose(GatewaySamples(partial(client.of_job, "GET", job)))
    if json_output:
        emit({"job_id": job, "samples": recorded})
        return
    show_samples(recorded, console_for(json_output=False))


def show_samples(samples: list[RecordedSample], console: Console) -> None:
    """Prints a head for each prompt, and below it its completions, each with its reward."""
    before: tuple[str, str] | None = None
    for sample in samples:
        if before != (sample.batch_id, sample.prompt):
            before = (sample.batch_id, sample.prompt)
            head = f"\nbatch {sample.batch_id}, version {sample.policy_version}"
            console.print(Text(head, "dim"), soft_wrap=True)
            console.print(Text.assemble(("prompt     ", "dim"), sample.prompt), soft_wrap=True)
            if sample.reference:
                console.print(Text.assemble(("reference  ", "dim"), sample.reference), soft_wrap=True)
        console.print(_reward_line(sample), soft_wrap=True)
        console.print(Text(sample.completion), soft_wrap=True)


def _reward_line(sample: RecordedSample) -> Text:
    """Returns `reward 0.5  right 0, brief 1  cut at its longest`; a single component says no more than the reward."""
    notes: list[str] = []
    if len(sample.reward_components) > 1:
        notes.append(", ".join(f"{one_line(name)} {score(value)}" for name, value in sample.reward_components.items()))
    if sample.finish_reason == "length":
        notes.append("cut at its longest")
    return Text.assemble(
        ("reward ", "dim"), (score(sample.reward), "bold"), ("".join(f"  {note}" for note in notes), "dim")
    )
