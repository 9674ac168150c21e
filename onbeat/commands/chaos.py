"""`onbeat chaos`: proves on this machine, with a job of the user's own, that a run survives what it may meet."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from contracts.wire import encode_json
from onbeat.chaos import Campaign, CampaignResult, RoundResult
from onbeat.commands import options
from onbeat.gateway_client import GatewayClient
from onbeat.output import FAILED, console_for, emit
from onbeat.spec_file import load_spec
from onbeat.stack import EmbeddedStack, StackPlan
from onbeat.stack_file import DEFAULT_RUN_DIR
from onbeat.supervision import RestartPolicy
from onbeat.words import by_reason, duration, plural

CHAOS_SPEC = Path("configs/chaos.toml")
IMPATIENT = RestartPolicy(first_pause_s=0.1, longest_pause_s=0.1, max_in_a_row=1_000_000)
"""The campaign kills on purpose: a service that died often is not broken."""


def chaos(
    spec: Annotated[Path | None, typer.Option("--spec", metavar="FILE", help="Job spec. [configs/chaos.toml]")] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Disturbed runs.")] = 5,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the faults and their times. [random, printed]")] = None,
    max_faults: Annotated[int, typer.Option("--max-faults", min=1, help="Faults of a round, at most.")] = 10,
    window_s: Annotated[float, typer.Option("--window", min=0.1, help="Seconds in which a round's faults fall.")] = 8.0,
    generators: options.Generators = 2,
    settings: options.Settings = None,
    json_output: options.Json = False,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of the campaign. [runs/chaos-<time>]")
    ] = None,
    model_root: options.ModelRoot = None,
) -> None:
    """Kill and pause processes at random; every run must end with the weights of the undisturbed one."""
    root = options.model_root_or_default(model_root)
    job_spec = load_spec(spec or root / CHAOS_SPEC, settings or [])
    seed = secrets.randbelow(2**31) if seed is None else seed
    plan = StackPlan(
        run_root=run_dir or Path(DEFAULT_RUN_DIR) / time.strftime("chaos-%Y%m%d-%H%M%S"),
        model_root=root,
        generators=generators,
        threads=1,
        fresh=True,
    )
    console = console_for(json_output=json_output)
    console.print(f"seed {seed}: {plural(rounds, 'round')} of up to {plural(max_faults, 'fault')}")
    with EmbeddedStack(plan, restarts=IMPATIENT) as stack, GatewayClient(stack.gateway_url, stack.api_key) as client:
        campaign = Campaign(stack, client, job_spec, seed=seed, max_faults=max_faults, window_s=window_s)
        with (plan.run_root / "rounds.jsonl").open("ab") as log_file:

            def on_round(result: RoundResult) -> None:
                log_file.write(encode_json(result) + b"\n")
                log_file.flush()
                show_round(console, result)

            result = campaign.run(rounds, on_round)
    if json_output:
        emit(result)
    else:
        show_result(console, result)
    if not result.passed:
        raise typer.Exit(FAILED)


def show_round(console: Console, result: RoundResult) -> None:
    verdict = "[red]finding[/red]" if result.problems else "[green]same weights[/green]"
    counts: dict[str, int] = {}
    for fault in result.faults:
        counts[fault.kind] = counts.get(fault.kind, 0) + 1
    kinds = ", ".join(f"{kind} {number}x" if number > 1 else kind for kind, number in counts.items())
    console.print(f"round {result.number:3}  {verdict}  {result.wall_s:6.1f} s  {kinds or 'no fault in time'}")
    for problem in result.problems:
        console.print(f"           {problem}", style="red", markup=False)


def show_result(console: Console, result: CampaignResult) -> None:
    kinds = by_reason(result.faults_by_kind)
    console.print(f"{plural(result.faults, 'fault')} in {duration(result.wall_s)}: {kinds}")
    if result.passed:
        console.print(f"[green]every run ended with {result.digest}[/green]")
    else:
        console.print(f"[red]{plural(len(result.findings), 'finding')}[/red], seed {result.seed}")
