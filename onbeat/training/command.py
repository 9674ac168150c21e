"""`onbeat demo`: one job on a private stack, shown live."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from onbeat.client.spec_file import flag_settings, read_spec, read_toml
from onbeat.commands import options
from onbeat.commands.stacks.up import DEMO_SPEC
from onbeat.stack.access import run_dir_flag
from onbeat.terminal.output import FAILED, console_for, tell
from onbeat.terminal.words import by_reason, count, duration, one_line, plural, score
from onbeat.training.demo import DemoSummary, run_demo
from onbeat.training.private_stack import new_run_root, options_of_job


def demo(
    spec: Annotated[Path | None, typer.Option("--spec", metavar="FILE", help="Job spec. [configs/demo.toml]")] = None,
    schedule: options.Schedule = None,
    max_policy_lag: options.MaxPolicyLag = None,
    correction: options.Correction = None,
    generators: options.GeneratorCount = None,
    stage_workers: options.StageWorkers = None,
    profile: options.Profile = None,
    iterations: options.Iterations = None,
    seed: options.Seed = None,
    settings: options.Settings = None,
    json_output: options.Json = False,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="Folder of this run. [runs/demo-<time>]")
    ] = None,
    threads: options.Threads = None,
    model_root: options.ModelRoot = None,
) -> None:
    """Start a private stack, train a job on it, and show it live."""
    flags = flag_settings(
        schedule=schedule, max_policy_lag=max_policy_lag, correction=correction, iterations=iterations, seed=seed
    )
    path = spec or DEMO_SPEC
    reading = read_spec(read_toml(path), [*flags, *(settings or [])])
    root = options.own_root_of(path, model_root)
    job_spec, extra_roots = options.placed(reading, [path.parent], model_root=root)
    stack_profile, num_generators = options.profile_and_count(profile, generators)
    stack_options = options_of_job(
        job_spec,
        run_root=run_dir or new_run_root("demo"),
        model_root=root,
        extra_roots=extra_roots,
        generators=num_generators,
        stage_workers=stage_workers,
        profile=stack_profile,
        threads=threads,
    )
    console = console_for(json_output=json_output)
    summary = run_demo(job_spec, stack_options, console)
    tell(summary, summary_panel(summary), json_output=json_output)
    if not summary.succeeded:
        raise typer.Exit(FAILED)


def summary_panel(summary: DemoSummary) -> Panel:
    good = summary.succeeded
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(
        "job", Text.assemble(f"{summary.job_id}   ", (summary.status, "bold"), f"   {one_line(summary.reason)}")
    )
    if summary.eval_after is not None:
        greedy = f"greedy {score(summary.eval_before_greedy)} → {score(summary.eval_after_greedy)}"
        rest = f"   {greedy}   on {plural(summary.eval_prompts, 'prompt')}"
        sampled = f"sampled {score(summary.eval_before)} → "
        table.add_row("held-out reward", Text.assemble(sampled, (score(summary.eval_after), "bold"), rest))
    table.add_row("reward", f"{score(summary.reward_first)} → {score(summary.reward_last)}")
    for problem in summary.health:
        table.add_row("health", Text(f"{problem.in_words}; {problem.cure}", "red"))
    for problem in summary.health_past:
        table.add_row("health was", Text(f"{problem.in_words}; {problem.cure}", "yellow"))
    table.add_row("policy", f"version {summary.final_policy_version}")
    table.add_row("weights digest", summary.final_weights_digest)
    batches = f"{summary.batches_trained} trained   {by_reason(summary.batches_rejected)} rejected"
    table.add_row("batches", f"{batches}   {summary.batches_reclaimed} reclaimed")
    pace = f"{plural(summary.iterations, 'iteration')} in {duration(summary.wall_s)}"
    table.add_row("speed", f"{pace}   {count(summary.tokens_per_s)} tokens/s   {summary.schedule}")
    verdict = Text("passed", "green") if summary.verified else Text(f"{len(summary.gaps)} gaps", "red")
    table.add_row("verify", verdict)
    for gap in summary.gaps:
        table.add_row("", Text(gap, "red"))
    table.add_row("run folder", Text(summary.run_dir))
    for figure in summary.figures:
        table.add_row("figure", Text(figure))
    if good:
        flag = run_dir_flag(os.environ, Path(summary.run_dir).parent)
        table.add_row("try", Text(f"onbeat export {summary.job_id} my-model{flag}"))
    title = "not succeeded"
    style = "red"
    if good:
        title = "succeeded and verified"
        style = "green"
        if summary.health:
            style = "yellow"
    return Panel(table, title=title, title_align="left", border_style=style, padding=(1, 2))
