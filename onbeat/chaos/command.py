"""`onbeat chaos`: proves on this machine, with a job of the user's own, that a run survives what it may meet."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from contracts.settings import engine_from
from contracts.spec.job import JobSpec
from onbeat.base.wrong_numbers import WrongEngines
from onbeat.chaos.campaign import ROUND_DEADLINE_S, Campaign, wrong_folder
from onbeat.chaos.circumstances import circumstances
from onbeat.chaos.result import CampaignResult, ResultFile, RoundResult
from onbeat.client.gateway import GatewayClient
from onbeat.client.spec_file import flag_settings, read_spec, read_toml
from onbeat.commands import options
from onbeat.stack.access import with_extra_roots
from onbeat.stack.options import StackOptions, stack_settings, stage_workers_for, threads_from
from onbeat.stack.stack import EmbeddedStack
from onbeat.stack.supervision import RestartPolicy
from onbeat.terminal.output import FAILED, console_for, emit
from onbeat.terminal.words import by_reason, duration, one_line, plural

CHAOS_SPEC = Path("configs/chaos.toml")
STAGE_WORKERS = 2
"""There are two, so that one may put columns late that the other has put already."""
IMPATIENT = RestartPolicy(first_pause_s=0.1, longest_pause_s=0.1, max_in_a_row=1_000_000)
"""The campaign kills on purpose: a service that died often is not broken."""


def chaos(
    spec: Annotated[Path | None, typer.Option("--spec", metavar="FILE", help="Job spec. [configs/chaos.toml]")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Disturbed runs.")] = 5,
    schedule: options.Schedule = None,
    max_policy_lag: options.MaxPolicyLag = None,
    correction: options.Correction = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the faults and their times. [random, printed]")] = None,
    max_faults: Annotated[int, typer.Option("--max-faults", min=1, help="Faults of a round, at most.")] = 10,
    window_s: Annotated[
        float | None,
        typer.Option("--window", min=0.1, help="Seconds in which a round's faults fall. [by the undisturbed run]"),
    ] = None,
    round_deadline_s: Annotated[
        float, typer.Option("--round-deadline", min=1.0, help="Seconds after which a run counts as stuck.")
    ] = ROUND_DEADLINE_S,
    generators: options.Generators = 2,
    stage_workers: Annotated[
        int | None,
        typer.Option("--stage-workers", help="Processes that serve stages of Onbeat's own. [2 where the job has any]"),
    ] = None,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="Verify and export each job meanwhile; kill what does it, and the clock.")
    ] = False,
    settings: options.Settings = None,
    json_output: options.Json = False,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of the campaign. [runs/chaos-<time>]")
    ] = None,
    model_root: options.ModelRoot = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="JSON of the campaign, written after each round.")
    ] = None,
) -> None:
    """Kill and pause processes at random; every run must end with the weights of the undisturbed one."""
    path = spec or CHAOS_SPEC
    flags = flag_settings(schedule=schedule, max_policy_lag=max_policy_lag, correction=correction)
    reading = read_spec(read_toml(path), [*flags, *(settings or [])])
    root = options.own_root_of(path, model_root)
    job_spec, extra_roots = options.placed(reading, [path.parent], model_root=root)
    if seed is None:
        seed = secrets.randbelow(2**31)
    stack_options = _options_of_stack(
        job_spec,
        options.model_root_for(path, model_root),
        extra_roots,
        run_dir=run_dir,
        generators=generators,
        stage_workers=stage_workers,
        tasks=tasks,
    )
    console = console_for(json_output=json_output)
    console.print(f"seed {seed}: {plural(rounds, 'round')} of up to {plural(max_faults, 'fault')}")
    result_file = None
    if out:
        result_file = ResultFile(out, circumstances(" ".join(["onbeat", *sys.argv[1:]])))
    with (
        EmbeddedStack(stack_options, restarts=IMPATIENT) as stack,
        GatewayClient(stack.gateway_url, stack.api_key) as client,
    ):
        campaign = Campaign(
            stack,
            client,
            job_spec,
            seed=seed,
            max_faults=max_faults,
            window_s=window_s,
            round_deadline_s=round_deadline_s,
        )
        result = campaign.run(rounds, lambda so_far: _report(so_far, console, result_file))
    if json_output:
        emit(result)
    else:
        show_result(console, result)
    if not result.passed:
        raise typer.Exit(FAILED)


def _report(so_far: CampaignResult, console: Console, result_file: ResultFile | None) -> None:
    """Writes and shows what a campaign has after the undisturbed run, and after each round."""
    if result_file:
        result_file.write(so_far)
    if so_far.results:
        show_round(console, so_far.results[-1])
    else:
        console.print(f"undisturbed: {duration(so_far.undisturbed_s)}, faults within {so_far.window_s:.1f} s")


def _options_of_stack(
    spec: JobSpec,
    model_root: Path,
    extra_roots: Sequence[Path],
    *,
    run_dir: Path | None,
    generators: int,
    stage_workers: int | None,
    tasks: bool,
) -> StackOptions:
    """Returns the options of the campaign's own stack, in a new folder.

    The job's files lie below the model root and the extra roots.
    """
    from_environment = with_extra_roots(stack_settings(os.environ), extra_roots)
    options = StackOptions(
        run_root=run_dir or Path(from_environment.run_root) / time.strftime("chaos-%Y%m%d-%H%M%S"),
        model_root=model_root,
        generators=generators,
        tasks=tasks,
        stage_workers=stage_workers_for(spec, stage_workers, from_environment, default=STAGE_WORKERS),
        threads=threads_from(os.environ, None) or 1,
        settings=from_environment,
        engine=engine_from(os.environ),
        fresh=True,
    )
    # A fault that the caller has named stays; the campaign draws none of its own then.
    wrong_numbers = from_environment.wrong_numbers or WrongEngines(wrong_folder(options)).setting
    return replace(options, settings=msgspec.structs.replace(from_environment, wrong_numbers=wrong_numbers))


def show_round(console: Console, result: RoundResult) -> None:
    verdict = Text("finding", "red") if result.problems else Text("as it should", "green")
    counts = Counter(fault.kind for fault in result.faults)
    kinds = ", ".join(f"{kind} {number}x" if number > 1 else kind for kind, number in counts.items())
    rest = f"  {result.wall_s:6.1f} s  {kinds or 'no fault in time'}"
    console.print(Text.assemble(f"round {result.number:3}  ", verdict, rest))
    for problem in result.problems:
        console.print(f"           {one_line(problem)}", style="red")


def show_result(console: Console, result: CampaignResult) -> None:
    kinds = by_reason(result.faults_by_kind)
    console.print(f"{plural(result.faults, 'fault')} in {duration(result.wall_s)}: {kinds}")
    console.print(
        f"trainers hit at work {result.trainers_hit_at_work} of {result.trainers_hit}; "
        f"rewinds {result.rewinds}; refused publications {by_reason(result.rejected)}"
    )
    if result.passed:
        ending = "every run is whole and verified"
        if result.digest:
            ending = f"every run ended with {result.digest}"
        console.print(ending, style="green")
    else:
        console.print(Text.assemble((plural(len(result.findings), "finding"), "red"), f", seed {result.seed}"))
