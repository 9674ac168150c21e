"""The demo: a stack, a job over HTTP, a live view, a verdict, pictures.

spec file + flags ──▶ EmbeddedStack ──▶ submit ──▶ follow ──▶ audit ──▶ stop ──▶ verify ──▶ figures, summary.json
"""

from __future__ import annotations

import logging
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from contracts.encoding.wire import Record, encode_json
from contracts.errors import DeadlineExceeded, InvalidInput, OnbeatError
from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore, JobState, JobStatus
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from onbeat.audit.chain import AuditEntry, Verdict, verify_run
from onbeat.audit.folder import write_audit
from onbeat.audit.weights import digests_on_disk
from onbeat.client.gateway import GatewayClient
from onbeat.client.progress import JobProgress
from onbeat.process.waiting import Waiting
from onbeat.stack.plan import StackPlan
from onbeat.stack.stack import EmbeddedStack
from onbeat.terminal.figures import draw_figures
from onbeat.terminal.follow import TICK_S, follow
from onbeat.terminal.job_view import view_for
from onbeat.terminal.output import tell_page

log = logging.getLogger(__name__)

CANCEL_DEADLINE_S = 20.0
SUMMARY = "summary.json"


class DemoSummary(Record, frozen=True, kw_only=True):
    """What `onbeat demo --json` prints, and summary.json of the run folder."""

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
    gaps: tuple[str, ...]
    """What verify found missing or changed."""
    run_dir: str
    figures: tuple[str, ...]

    @property
    def succeeded(self) -> bool:
        return self.status == JobState.SUCCEEDED.value and self.verified


@dataclass(frozen=True, kw_only=True)
class FinishedJob:
    """What the stack knew when it stopped."""

    status: JobStatus
    progress: JobProgress
    metrics: list[IterationMetrics]
    audit: list[AuditEntry]


def run_demo(spec: JobSpec, plan: StackPlan, console: Console) -> DemoSummary:
    """Runs one job on a private stack; nothing of the stack is left but the run folder.

    Raises OnbeatError where a service, the gateway or the run folder fails; KeyboardInterrupt after a clean stop.
    """
    finished = _run_on_stack(spec, plan, console)
    folder = RunFolder(plan.run_root.resolve(), finished.status.job_id)
    write_audit(folder, finished.status, finished.audit)
    is_complete = finished.status.state is JobState.SUCCEEDED
    verdict = verify_run(finished.audit, spec, complete=is_complete, digests_on_disk=digests_on_disk(folder))
    evaluations = list(finished.progress.evaluations.values())
    figures = draw_figures(folder, metrics=finished.metrics, evaluations=evaluations, title=spec.name)
    summary = summarise(spec, plan, finished, verdict, folder=folder, figures=figures)
    (folder.path / SUMMARY).write_bytes(encode_json(summary) + b"\n")
    return summary


def _run_on_stack(spec: JobSpec, plan: StackPlan, console: Console) -> FinishedJob:
    is_new = not plan.run_root.exists()
    stack = EmbeddedStack(plan)
    try:
        with console.status("starting redis and every other process"):
            stack.start()
        with GatewayClient(stack.gateway_url, stack.api_key) as client:
            return _run_job(stack, client, spec, console)
    except InvalidInput:
        # A refused spec leaves nothing behind; the logs of a service that broke are kept.
        with console.status("stopping every process"):
            stack.stop()
        if is_new:
            shutil.rmtree(plan.run_root, ignore_errors=True)
        raise
    finally:
        with console.status("stopping every process"):
            stack.stop()


def summarise(
    spec: JobSpec, plan: StackPlan, finished: FinishedJob, verdict: Verdict, *, folder: RunFolder, figures: list[Path]
) -> DemoSummary:
    status, metrics = finished.status, finished.metrics
    before, after = finished.progress.evaluation_before, finished.progress.evaluation_latest
    busy_s = sum(entry.wall_s for entry in metrics)
    return DemoSummary(
        job_id=status.job_id,
        status=status.state.value,
        reason=status.reason,
        schedule=spec.schedule,
        seed=spec.seed,
        generators=plan.generators,
        iterations=verdict.num_iterations,
        wall_s=round((status.ended_s or time.time()) - status.created_s, 3),
        eval_before=_sampled(before),
        eval_after=_sampled(after),
        eval_before_greedy=before.greedy if before else None,
        eval_after_greedy=after.greedy if after else None,
        eval_prompts=after.num_prompts if after else 0,
        reward_first=metrics[0].reward_mean if metrics else None,
        reward_last=metrics[-1].reward_mean if metrics else None,
        final_policy_version=status.policy_version,
        final_weights_digest=status.weights_digest,
        batches_trained=verdict.num_trained_batches,
        batches_rejected=status.batches_rejected,
        batches_reclaimed=status.batches_reclaimed,
        tokens_per_s=round(sum(entry.num_tokens for entry in metrics) / busy_s, 1) if busy_s else 0.0,
        verified=verdict.verified,
        gaps=verdict.gaps,
        run_dir=str(folder.path),
        figures=tuple(str(path) for path in figures),
    )


def _run_job(stack: EmbeddedStack, client: GatewayClient, spec: JobSpec, console: Console) -> FinishedJob:
    submitted = client.submit(spec, idempotency_key=uuid.uuid4().hex)
    tell_page(console, stack.gateway_url, stack.api_key, job_id=submitted.job_id)
    try:
        with view_for(console) as view:
            progress = follow(client, submitted.job_id, view=view, tick=stack.tick)
    except KeyboardInterrupt:
        _cancel(client, submitted.job_id, stack, console)
        raise
    return FinishedJob(
        status=progress.status,
        progress=progress,
        metrics=client.metrics(submitted.job_id),
        audit=client.audit(submitted.job_id),
    )


def _cancel(client: GatewayClient, job_id: str, stack: EmbeddedStack, console: Console) -> None:
    """Gives the trainer a moment to write its checkpoint; what fails here does not keep the stack from stopping."""
    waiting = Waiting(f"{job_id} to be cancelled", deadline_s=CANCEL_DEADLINE_S)
    try:
        with console.status("cancelling the job: the trainer finishes its micro-batch and writes a checkpoint"):
            client.cancel(job_id)
            while not client.job(job_id).state.is_final:
                waiting.poke()
                stack.tick()
                time.sleep(TICK_S)
    except DeadlineExceeded as error:
        log.warning("%s: stopping without it", error)
    except OnbeatError as error:
        log.warning("could not cancel: %s", error)


def _sampled(score: EvaluationScore | None) -> float | None:
    return score.sampled if score else None
