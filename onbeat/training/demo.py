"""The demo: a stack, a job over HTTP, a live view, a verdict, pictures.

spec file + flags ──▶ Run on a stack of its own ──▶ follow ──▶ verify ──▶ figures, summary.json
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console

from contracts.answers import AuditVerdict
from contracts.encoding.wire import Record, encode_json
from contracts.errors import first_line
from contracts.jobs import HealthProblem, JobState
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.client.progress import JobProgress
from onbeat.stack.options import StackOptions
from onbeat.terminal.output import tell_page, tell_problem
from onbeat.terminal.panel import view_for
from onbeat.training.figures import draw_figures
from onbeat.training.start import on_own_stack

SUMMARY = "summary.json"
NO_FIGURES = (
    "the reward curve and the timeline are not drawn: {problem} (`pip install matplotlib` draws them next time)"
)


class DemoSummary(Record, frozen=True, kw_only=True):
    """The summary of a demo: `onbeat demo --json` prints it, and summary.json of the run folder has it."""

    job_id: str
    status: str
    reason: str
    schedule: str
    seed: int
    generators: int
    iterations: int
    """Committed training iterations."""
    wall_s: float
    """From submission to the final state."""
    eval_before: float | None
    """Mean reward over the held-out prompts, one sample each, under version 0; null where evaluation is off."""
    eval_after: float | None
    """The same under the final version."""
    eval_before_greedy: float | None
    eval_after_greedy: float | None
    eval_prompts: int
    reward_first: float | None
    """Mean reward of the first iteration's rollouts."""
    reward_last: float | None
    final_policy_version: int
    final_weights_digest: str
    batches_trained: int
    batches_rejected: dict[str, int]
    """Refused publications by reason."""
    batches_reclaimed: int
    tokens_per_s: float
    """Sampled tokens of all iterations over their wall time."""
    verified: bool
    health: tuple[HealthProblem, ...] = ()
    """Problems that the numbers of the run show."""
    health_past: tuple[HealthProblem, ...] = ()
    """Problems that they showed for a time."""
    gaps: tuple[str, ...]
    """Faults that verify found: things that are missing or changed."""
    run_dir: str
    figures: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        return self.status == JobState.SUCCEEDED.value and self.verified


def run_demo(spec: JobSpec, options: StackOptions, console: Console) -> DemoSummary:
    """Runs one job on a private stack; nothing of the stack is left but the run folder.

    Raises OnbeatError where a service, the gateway or the run folder fails; KeyboardInterrupt after a clean stop.
    """
    with console.status("starting redis and every other process"):
        run = on_own_stack(spec, options)
    try:
        if (gateway := run.gateway) is not None:
            tell_page(console, gateway.url, gateway.key, job_id=run.id)
        with view_for(console) as view:
            progress = run.follow(view)
    finally:
        with console.status("stopping every process"):  # an unfinished job's trainer writes a checkpoint first
            run.close()
    evaluations = list(progress.evaluations.values())
    try:
        figures = draw_figures(run.folder, metrics=progress.in_order, evaluations=evaluations, title=spec.name)
    except ImportError as error:
        # The job has ended, and a picture of it is no reason to end in an error.
        figures = []
        tell_problem(NO_FIGURES.format(problem=first_line(error)))
    summary = summarise(spec, options, progress, run.verify(), folder=run.folder, figures=figures)
    (run.folder.path / SUMMARY).write_bytes(encode_json(summary) + b"\n")
    return summary


def summarise(
    spec: JobSpec,
    options: StackOptions,
    progress: JobProgress,
    verdict: AuditVerdict,
    *,
    folder: RunFolder,
    figures: list[Path],
) -> DemoSummary:
    status = progress.status
    metrics = progress.in_order
    before = progress.evaluation_before
    after = progress.evaluation_latest
    busy_s = sum(entry.wall_s for entry in metrics)
    return DemoSummary(
        job_id=status.job_id,
        status=status.state.value,
        reason=status.reason,
        schedule=spec.schedule,
        seed=spec.seed,
        generators=options.generators,
        iterations=verdict.iterations,
        wall_s=round((status.ended_s or time.time()) - status.created_s, 3),
        eval_before=before.sampled if before else None,
        eval_after=after.sampled if after else None,
        eval_before_greedy=before.greedy if before else None,
        eval_after_greedy=after.greedy if after else None,
        eval_prompts=after.num_prompts if after else 0,
        reward_first=metrics[0].reward_mean if metrics else None,
        reward_last=metrics[-1].reward_mean if metrics else None,
        final_policy_version=status.policy_version,
        final_weights_digest=status.weights_digest,
        batches_trained=verdict.batches_trained,
        batches_rejected=status.batches_rejected,
        batches_reclaimed=status.batches_reclaimed,
        tokens_per_s=round(sum(entry.num_tokens for entry in metrics) / busy_s, 1) if busy_s else 0.0,
        verified=verdict.verified,
        health=status.health,
        health_past=status.health_past,
        gaps=verdict.gaps,
        run_dir=str(folder.path),
        figures=tuple(str(path) for path in figures),
    )
