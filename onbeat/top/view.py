"""A look of `onbeat top` as one screen: jobs, generators, the streams of the chosen job. Pure, but for the time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from contracts.jobs import JobState, JobStatus
from contracts.monitor import GeneratorSeen
from onbeat.terminal.job_view import STATE_STYLES, health_lines
from onbeat.terminal.words import UNKNOWN, ago, by_reason, count, duration, one_line, plural, score, size, sparkline
from onbeat.top.look import Curves, Look

SPARK_WIDTH = 10
ID_WIDTH = len("job-0123456789ab")
STALE_S = 3.0
"""A look that is older says so."""
KEYS = "q quit   ↑ ↓ choose the job whose streams are shown"


def screen(look: Look, *, chosen: int, now_s: float, url: str, away: str = "", keys: str = "") -> RenderableType:
    """chosen: the place of a job in the list. away: why the gateway has not answered since."""
    parts: list[RenderableType] = [_head(look, url)]
    if now_s - look.at_s > STALE_S or away:
        old = f"no answer for {duration(max(0.0, now_s - look.at_s))}; what stands here is from before"
        parts.append(Text(f"{old}{f': {one_line(away)}' if away else ''}", "bold red"))
    parts += [Text(f"! {one_line(alert)}", "red") for alert in look.alerts]
    parts += [Text(), _jobs(look, chosen)]
    if look.generators:
        parts += [Text(), _generators(look.generators)]
    if look.jobs:
        job = look.jobs[min(chosen, len(look.jobs) - 1)]
        parts += [Text(), *_chosen(job, look.curves.get(job.job_id, Curves()), look.streams.get(job.job_id))]
    if keys:
        parts += [Text(), Text(keys, "dim")]
    return Group(*parts)


def _head(look: Look, url: str) -> Text:
    stack = look.stack
    num_active = sum(not job.state.is_final for job in look.jobs)
    limit = f" of {size(stack.redis_max_bytes)}" if stack.redis_max_bytes else ""
    workers = f", {plural(stack.live_stage_workers, 'stage worker')}" if stack.live_stage_workers else ""
    if stack.live_task_workers:
        workers += f", {plural(stack.live_task_workers, 'worker')} of tasks"
    return Text.assemble(
        ("onbeat", "bold"),
        f"  {url}  {plural(num_active, 'active job')}, {plural(stack.live_generators, 'generator')}{workers}",
        f"  Redis {size(stack.redis_used_bytes)}{limit}",
    )


def _table(*columns: str, stretched: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False, expand=True)
    for column in columns:
        ratio, width = 1 if column == stretched else None, ID_WIDTH if column == "job" else None
        table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=ratio, min_width=width)
    return table


def _jobs(look: Look, chosen: int) -> RenderableType:
    if not look.jobs:
        return Text("no jobs yet: onbeat submit SPEC", "dim")
    table = _table("job", "state", "iterations", "reward", "", "held-out", "name", stretched="name")
    for place, job in enumerate(look.jobs):
        curves = look.curves.get(job.job_id, Curves())
        table.add_row(
            Text(job.job_id, "reverse" if place == chosen else ""),
            _state(job),
            f"{job.iterations_committed}/{job.iterations}",
            score(curves.rewards[-1] if curves.rewards else None),
            Text(sparkline(curves.rewards, width=SPARK_WIDTH), "green"),
            _held_out(curves),
            one_line(job.name),
        )
    return table


def _state(job: JobStatus) -> Text:
    """With a mark, and no longer in green, where something is or was wrong with the job."""
    if not job.health:
        return Text(job.state.value, STATE_STYLES[job.state])
    return Text(f"{job.state.value} !", "yellow" if job.state is JobState.SUCCEEDED else STATE_STYLES[job.state])


def _held_out(curves: Curves) -> Text:
    scores = list(curves.held_out)
    if not scores:
        return Text(UNKNOWN, "dim")
    line = sparkline(scores, width=6) if len(scores) > 1 else ""
    return Text.assemble(score(scores[-1]), " ", (line, "green"))


def _generators(generators: tuple[GeneratorSeen, ...]) -> Table:
    table = _table("generator", "version", "tokens/s", "seen", "doing", stretched="doing")
    for one in generators:
        table.add_row(
            one_line(one.worker_id)[:28],
            UNKNOWN if one.policy_version is None else str(one.policy_version),
            count(one.tokens_per_s),
            duration(one.seen_s),
            one_line(one.doing) or UNKNOWN,
        )
    return table


def _chosen(job: JobStatus, curves: Curves, report: Mapping[str, Any] | None) -> list[RenderableType]:
    speed = "" if curves.wall_s is None else f"   {duration(curves.wall_s)} an iteration"
    tokens = "" if curves.tokens_per_s is None else f"   {count(curves.tokens_per_s)} tokens/s"
    head = Text.assemble(
        (job.job_id, "bold"), f"  {one_line(job.name)}{speed}{tokens}", overflow="ellipsis", no_wrap=True
    )
    if report is None:
        when = f"{job.state.value} {ago(job.ended_s)}" if job.ended_s else job.state.value
        return [head, _line(f"{when}  {one_line(job.reason)}".rstrip()), *health_lines(job)]
    has_trainer = report.get("trainer_lease_s") is not None
    opened = "no iteration is open yet"
    if report.get("fence_state"):
        published, expected = report.get("batches_published"), report.get("batches_expected")
        opened = f"iteration {report.get('iteration')} {report.get('fence_state')}   {published} of {expected} in"
    trainer = "its trainer lives" if has_trainer else "no trainer"
    fence = one_line(f"{opened}   version {report.get('policy_version')}   {trainer}")
    counts = (
        f"accepted {report.get('batches_accepted')}   rejected {by_reason(dict(report.get('batches_rejected') or {}))}"
        f"   reclaimed {report.get('batches_reclaimed')}   lost {report.get('leases_lost')}"
        f"   dead {report.get('batches_dead')}   rewinds {report.get('rewinds')}"
    )
    return [head, _line(fence), _line(_backlog(report)), _line(one_line(counts))]


def _line(text: str) -> Text:
    return Text(text, no_wrap=True, overflow="ellipsis")


def _backlog(report: Mapping[str, Any]) -> str:
    """`prompts 3 waiting, 2 in work   rollouts 1 waiting   stage teacher 4 waiting   12.1 KB`"""
    parts = []
    total = 0
    for stream in report.get("streams", ()):
        total += stream.get("memory_bytes", 0)
        if stream.get("name") in ("prompts", "rollouts"):
            work = f", {stream['num_pending']} in work" if stream.get("num_pending") else ""
            parts.append(f"{stream['name']} {stream.get('num_waiting', 0)} waiting{work}")
    parts += [
        f"stage {one_line(str(stage.get('stage')))} {stage.get('num_free')} waiting, {stage.get('num_leased')} in work"
        for stage in report.get("stages") or ()
    ]
    return "   ".join([*parts, f"{size(total)} in Redis"])
