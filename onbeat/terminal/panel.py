"""The view of `onbeat watch` and of each wait for a job: a live panel on a terminal, lines in a file or a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import UNSET
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from contracts import events
from contracts.jobs import EvaluationScore, JobStatus, WindowIteration
from contracts.schedule import LAGGING, versions_in_words
from onbeat.base.telemetry.logs import shown
from onbeat.client.progress import JobProgress
from onbeat.terminal.job_view import FRAMES_PER_S, STATE_STYLES, JobView, PlainView, bar, curve_text, health_lines
from onbeat.terminal.words import (
    UNKNOWN,
    by_reason,
    count,
    duration,
    lag_in_words,
    lags_of,
    number,
    one_line,
    plural,
    score,
    share,
    short,
    sparkline,
    staleness,
)


@contextmanager
def view_for(console: Console) -> Iterator[JobView]:
    """Yields a panel that is drawn in place; where output is no terminal, a view that writes lines."""
    if not console.is_terminal:
        yield PlainView(console)
        return
    with Live(console=console, refresh_per_second=FRAMES_PER_S, transient=False) as live:
        yield LiveView(live)


class LiveView:
    """A panel that is drawn in place."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def event(self, event: events.JobEvent, progress: JobProgress) -> None:
        self._live.update(panel(progress))

    def refresh(self, progress: JobProgress) -> None:
        self._live.update(panel(progress))


def panel(progress: JobProgress) -> RenderableType:
    status = progress.status
    head = Text.assemble(
        (one_line(status.name), "bold"),
        f"  {status.job_id}  ",
        (status.state.value, STATE_STYLES[status.state]),
        f"  {one_line(status.reason)}",
    )
    return Panel(
        Group(bar(progress), Text(), *health_lines(status), _facts(progress)),
        title=head,
        subtitle=Text(kind_in_words(status), "dim"),
        title_align="left",
        subtitle_align="right",
        border_style=STATE_STYLES[status.state].removeprefix("bold "),
        padding=(1, 2),
    )


def kind_in_words(status: JobStatus) -> str:
    """`periodic · on-policy`, `delayed · lag 2`, or `bounded · lag 2 at most`."""
    if status.schedule not in LAGGING:
        return f"{status.schedule} · on-policy"
    most = " at most" if status.schedule == "bounded" else ""
    return f"{status.schedule} · lag {status.max_policy_lag}{most}"


def open_in_words(window: Sequence[WindowIteration]) -> list[str]:
    """`iteration 7 ← version 5 (lag 2)   3 of 8 in   1 dead` for each open iteration, the oldest first."""
    lines = []
    for opened in window:
        dead = f"   {opened.batches_dead} dead" if opened.batches_dead else ""
        lag = lag_in_words(opened.iteration, opened.oldest_version, opened.newest_version)
        sampled = f"{versions_in_words(opened.oldest_version, opened.newest_version)} (lag {lag})"
        backlog = f"{opened.batches_published} of {opened.batches_expected} in{dead}"
        lines.append(f"iteration {opened.iteration} ← {sampled}   {backlog}")
    return lines


def _facts(progress: JobProgress) -> Table:
    status = progress.status
    latest = progress.latest
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row(progress.curve_name, _curve_row(progress))
    if latest is not None and latest.num_resamples:
        left = f"{share(latest.zero_advantage_share)} of the groups still of equal reward"
        table.add_row("resampled", f"{plural(latest.num_resamples, 'prompt')}   {left}")
    if latest is not None and latest.num_unscorable:
        what = f"{plural(latest.num_unscorable, 'completion')} of the last iteration"
        table.add_row("unscorable", f"{what} got the score that the spec states for that")
    if latest is not None and "kl_to_teacher" in latest.loss_metrics:
        table.add_row("teacher", f"KL {number(latest.loss_metrics['kl_to_teacher'])} a token")
    if latest is not None and latest.trajectories is not UNSET:
        table.add_row("environment", Text(environment_in_words(latest.trajectories)))
    table.add_row("held-out", _evaluation_row(progress.evaluation_before, progress.evaluation_latest))
    table.add_row("policy", f"version {status.policy_version}   digest {short(status.weights_digest)}")
    if status.max_policy_lag and status.window:
        table.add_row("window", Text("\n".join(open_in_words(status.window))))
    if latest is not None and latest.lag_counts:
        table.add_row("samples", f"{lags_of(latest)}   {staleness(latest)}")
    backlog = f"{status.batches_published} of {status.batches_expected} in"
    rejected = by_reason(status.batches_rejected)
    reclaimed = f"{status.batches_reclaimed} reclaimed   {status.batches_dead} dead"
    if status.leases_lost:
        reclaimed = f"{reclaimed}   {plural(status.leases_lost, 'lease')} of dead generators"
    table.add_row("batches", f"{backlog}   {status.batches_accepted} accepted   {rejected} rejected   {reclaimed}")
    dead = progress.newest_dead
    if dead is not None:
        table.add_row("given up", Text(one_line(f"batch {dead.batch_id}: {dead.reason}")))
    if status.batches_hedged:
        table.add_row("hedges", f"{plural(status.batches_hedged, 'copy')} of late batches   {status.hedges_won} won")
    table.add_row("speed", _speed_row(latest))
    starts = ""
    if progress.num_trainer_starts:
        starts = f"   trainer started {plural(progress.num_trainer_starts, 'time')}"
    table.add_row("processes", f"{plural(status.live_generators, 'generator')}{starts}")
    return table


def _curve_row(progress: JobProgress) -> RenderableType:
    iterations = progress.in_order
    if not iterations:
        return Text("waiting for the first iteration", "dim")
    return Text.assemble(
        (curve_text(progress, iterations[-1]), "bold green"),
        "  ",
        (sparkline(progress.curve), "green"),
        f"  first {curve_text(progress, iterations[0])}",
    )


def _evaluation_row(before: EvaluationScore | None, latest: EvaluationScore | None) -> RenderableType:
    if before is None or latest is None:
        return Text(UNKNOWN, "dim")
    parts = [f"sampled {score(before.sampled)}", f"greedy {score(before.greedy)}"]
    if latest.iteration != before.iteration:
        parts = [
            f"sampled {score(before.sampled)} → {score(latest.sampled)}",
            f"greedy {score(before.greedy)} → {score(latest.greedy)}",
        ]
    lines = [f"{'   '.join(parts)}   on {plural(latest.num_prompts, 'prompt')} that are never trained"]
    for name, now in (latest.sets or {}).items():
        first = (before.sets or {}).get(name)
        rose = ""
        if first and latest.iteration != before.iteration:
            rose = f"{score(first.sampled)} → "
        lines.append(f"{name}   sampled {rose}{score(now.sampled)}   greedy {score(now.greedy)}")
    return Text("\n".join(lines))


def environment_in_words(played: events.TrajectoryMetrics) -> str:
    """`reward 0.62   2.3 turns, 8 at most   84.0% done, 16.0% at max_turns   35 tokens of observations`"""
    shares = {
        "done": played.done_share,
        "at max_turns": played.max_turns_share,
        "at max_tokens": played.max_tokens_share,
        "at a failure": played.failed_share,
    }
    parts = [
        f"reward {score(played.environment_reward_mean)}",
        f"{number(played.turns_mean)} turns, {played.turns_max} at most",
        ", ".join(f"{share(part)} {what}" for what, part in shares.items() if part),
        f"{number(played.observation_tokens_mean)} tokens of observations",
    ]
    if played.num_begun_again:
        parts.append(f"{played.num_begun_again} begun again")
    # A metric's name comes from an environment, which is another's code.
    parts += [f"{shown(name)} {number(value)}" for name, value in played.environment.items()]
    return "   ".join(parts)


def _speed_row(latest: events.IterationMetrics | None) -> RenderableType:
    if latest is None:
        return Text(UNKNOWN, "dim")
    waited = share(latest.waiting_s / (latest.wall_s or 1.0))
    return Text(
        f"{count(latest.tokens_per_s)} tokens/s   {duration(latest.wall_s)} an iteration   trainer waited {waited}"
        f"   no generator sampled for {duration(latest.bubble_s)} before it"
    )
