"""A job on the terminal: a live panel for people, plain lines where output is a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from msgspec import UNSET
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from contracts import events
from contracts.jobs import EvaluationScore, JobState, JobStatus, passes_in_words
from onbeat.client.progress import JobProgress
from onbeat.telemetry.logs import shown
from onbeat.terminal.words import (
    UNKNOWN,
    by_reason,
    count,
    duration,
    kind_in_words,
    lags_of,
    number,
    one_line,
    open_in_words,
    plural,
    score,
    share,
    short,
    sparkline,
    staleness,
)

FRAMES_PER_S = 4
LASTING_S = {JobState.RUNNING: 1.5}
"""A wait that a line is worth; of a job in another state, which mostly waits for a trainer to start or end, 4 s."""
STATE_STYLES = {
    JobState.QUEUED: "yellow",
    JobState.RUNNING: "cyan",
    JobState.CANCELLING: "yellow",
    JobState.SUCCEEDED: "bold green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "yellow",
}


class JobView(Protocol):
    """What a follower shows."""

    def event(self, event: events.JobEvent, progress: JobProgress) -> None: ...

    def refresh(self, progress: JobProgress) -> None: ...


@contextmanager
def view_for(console: Console) -> Iterator[JobView]:
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


class PlainView:
    """A line an event, and one for what a job has waited for."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._reason = self._told = ""
        self._since_s = clock()

    def event(self, event: events.JobEvent, progress: JobProgress) -> None:
        if line := event_line(event, progress):
            self._console.print(one_line(line), soft_wrap=True)

    def refresh(self, progress: JobProgress) -> None:
        """Says once what the job waits for, where that has lasted."""
        status = progress.status
        if status.reason != self._reason:
            self._reason, self._since_s = status.reason, self._clock()
        has_lasted = self._clock() - self._since_s >= LASTING_S.get(status.state, 4.0)
        if has_lasted and self._reason != self._told and not status.state.is_final:
            self._told = self._reason
            if self._told:
                self._console.print(f"job {status.state.value}: {one_line(self._told)}", soft_wrap=True)


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


def health_lines(status: JobStatus) -> list[Text]:
    """A line for each thing that is wrong, with the cure."""
    return [Text(one_line(f"! {problem.in_words}; {problem.cure}"), "red") for problem in status.health]


def bar(progress: JobProgress) -> RenderableType:
    status = progress.status
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    left = f"{duration(progress.left_s)} left" if progress.left_s is not None else ""
    row.add_row(
        ProgressBar(total=status.iterations, completed=progress.num_committed),
        Text(f"{progress.num_committed} of {status.iterations} iterations  {left}"),
    )
    return row


def _facts(progress: JobProgress) -> Table:
    status, latest = progress.status, progress.latest
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("reward", _reward_row(progress))
    if latest is not None and latest.num_resamples:
        left = f"{share(latest.zero_advantage_share)} of the groups still of equal reward"
        table.add_row("resampled", f"{plural(latest.num_resamples, 'prompt')}   {left}")
    if latest is not None and latest.num_unscorable:
        what = f"{plural(latest.num_unscorable, 'completion')} of the last iteration"
        table.add_row("unscorable", f"{what} got the score that the spec states for that")
    if latest is not None and latest.kl_to_teacher is not UNSET:
        table.add_row("teacher", f"KL {number(latest.kl_to_teacher)} a token")
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
    table.add_row("batches", f"{backlog}   {status.batches_accepted} accepted   {rejected} rejected   {reclaimed}")
    if status.batches_hedged:
        table.add_row("hedges", f"{plural(status.batches_hedged, 'copy')} of late batches   {status.hedges_won} won")
    table.add_row("speed", _speed_row(latest))
    starts = f"   trainer started {plural(progress.num_trainer_starts, 'time')}" if progress.num_trainer_starts else ""
    table.add_row("processes", f"{plural(status.live_generators, 'generator')}{starts}")
    return table


def _reward_row(progress: JobProgress) -> RenderableType:
    rewards = progress.rewards
    if not rewards:
        return Text("waiting for the first iteration", "dim")
    return Text.assemble(
        (score(rewards[-1]), "bold green"), "  ", (sparkline(rewards), "green"), f"  first {score(rewards[0])}"
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
    return Text(f"{'   '.join(parts)}   on {plural(latest.num_prompts, 'prompt')} that are never trained")


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


def event_line(event: events.JobEvent, progress: JobProgress) -> str:
    """One line, "" for an event that a reader of lines need not see."""
    if isinstance(event, events.IterationCommitted):
        return iteration_line(event.metrics, progress)
    if isinstance(event, events.EvaluationFinished):
        found = event.score
        greedy = f", greedy {score(found.greedy)}" if found.greedy is not None else ""
        return (
            f"held-out accuracy under version {found.policy_version}: sampled {score(found.sampled)}{greedy}"
            f"{passes_in_words(found)} ({plural(found.num_prompts, 'prompt')})"
        )
    if isinstance(event, events.StateChanged):
        return f"job {event.state.value}{f': {event.reason}' if event.reason else ''}"
    if isinstance(event, events.TrainerStarted):
        how = "resumes" if event.resumed else "starts"
        return f"a trainer {how} at iteration {event.next_iteration} (epoch {event.trainer_epoch})"
    if isinstance(event, events.CheckpointWritten):
        return f"checkpoint after iteration {event.iteration}: {event.directory}"
    if isinstance(event, events.HealthChanged):
        problems = [
            f"{problem.in_words} ({problem.cure})" if problem.since == event.iteration else f"still {problem.name}"
            for problem in event.problems
        ]
        return f"health: {'; '.join(problems) or f'well again after iteration {event.iteration}'}"
    if isinstance(event, events.MismatchAlarm):
        return (
            f"iteration {event.iteration}: trainer and generator log-probs differ by a mean K3 of "
            f"{number(event.mismatch_k3)} (alarm above {event.threshold:g}), at most by {number(event.mismatch_max)}"
        )
    if isinstance(event, events.Rewound):
        again = "what was in work is sampled anew"
        if event.committed >= event.iteration:
            again = f"{plural(event.committed - event.iteration + 1, 'committed iteration')} to be done again"
        return f"rewound to iteration {event.iteration}: {again} (epoch {event.trainer_epoch})"
    if isinstance(event, events.GeneratorsChanged):
        said = [f"{what}: {', '.join(ids)}" for what, ids in (("came", event.came), ("gone", event.gone)) if ids]
        return f"generators {'; '.join(said)} ({event.num_live} live)"
    assert isinstance(event, events.BatchDead)
    return f"batch {event.batch_id} was given up: {event.reason}"


def iteration_line(metrics: events.IterationMetrics, progress: JobProgress) -> str:
    total = progress.status.iterations
    left = f"  {duration(progress.left_s)} left" if progress.left_s else ""
    unscorable = f"  {metrics.num_unscorable} unscorable" if metrics.num_unscorable else ""
    teacher = f"  KL to teacher {number(metrics.kl_to_teacher)}" if metrics.kl_to_teacher is not UNSET else ""
    lag = f"  {lags_of(metrics)}  {staleness(metrics).replace('   ', '  ')}" if metrics.lag_counts else ""
    played = ""
    if metrics.trajectories is not UNSET:
        played = f"  {number(metrics.trajectories.turns_mean)} turns, {share(metrics.trajectories.done_share)} done"
        again = metrics.trajectories.num_begun_again
        played += f", {again} begun again" if again else ""
    return (
        f"iteration {metrics.iteration:>{len(str(total - 1))}}  reward {score(metrics.reward_mean)}"
        f"  version {metrics.policy_version} → {metrics.policy_version + 1}  {metrics.num_batches} batches"
        f"  {duration(metrics.wall_s)}  {count(metrics.tokens_per_s)} tokens/s{played}{teacher}{lag}{unscorable}"
        f"  {metrics.iteration + 1} of {total}{left}"
    )
