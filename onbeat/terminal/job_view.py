"""A job as lines of text: for files and pipes, and the parts that the live panel (panel.py) shares with them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from msgspec import UNSET
from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from contracts import events
from contracts.dead_letters import DeadLetter
from contracts.jobs import JobState, JobStatus, passes_in_words
from contracts.settings import OPERATOR
from onbeat.client.progress import JobProgress
from onbeat.terminal.words import count, duration, lags_of, number, one_line, plural, score, share, staleness

FRAMES_PER_S = 4
LASTING_S = {JobState.RUNNING: 1.5}
"""A wait that a line is worth, or one with a cure, behind a colon; else mostly a trainer starts or ends, in 4 s."""
STATE_STYLES = {
    JobState.QUEUED: "yellow",
    JobState.RUNNING: "cyan",
    JobState.CANCELLING: "yellow",
    JobState.SUCCEEDED: "bold green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "yellow",
}


class JobView(Protocol):
    """The display of a follower, which shows events and progress."""

    def event(self, event: events.JobEvent, progress: JobProgress) -> None: ...

    def refresh(self, progress: JobProgress) -> None: ...


class NoView:
    """Shows nothing: the log of the job is shown in its place."""

    def event(self, event: events.JobEvent, progress: JobProgress) -> None:
        pass

    def refresh(self, progress: JobProgress) -> None:
        pass


class PlainView:
    """A line an event, and one for what a job has waited for."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._reason = self._printed_reason = ""
        self._since_s = clock()

    def event(self, event: events.JobEvent, progress: JobProgress) -> None:
        if line := event_line(event, progress):
            self._console.print(one_line(line), soft_wrap=True)

    def refresh(self, progress: JobProgress) -> None:
        """Says once what the job waits for, where that has lasted."""
        status = progress.status
        if status.reason != self._reason:
            self._reason, self._since_s = status.reason, self._clock()
        lasting_s = LASTING_S.get(JobState.RUNNING if ": " in status.reason else status.state, 4.0)
        has_lasted = self._clock() - self._since_s >= lasting_s
        if has_lasted and self._reason != self._printed_reason and not status.state.is_final:
            self._printed_reason = self._reason
            if self._printed_reason:
                self._console.print(f"job {status.state.value}: {one_line(self._printed_reason)}", soft_wrap=True)


def health_lines(status: JobStatus) -> list[Text]:
    """A line for each thing that is wrong, with the cure."""
    return [Text(one_line(f"! {problem.in_words}; {problem.cure}"), "red") for problem in status.health]


def past_health_lines(status: JobStatus) -> list[Text]:
    """A line for each thing that was wrong for a time, with the cure: a job that ends well may have begun otherwise."""
    return [Text(one_line(f"! was {problem.in_words}; {problem.cure}"), "yellow") for problem in status.health_past]


def dead_letter_table(letter: DeadLetter) -> Table:
    """Returns what is known of a batch that was given up: why, its prompts, and whether it can be sampled again."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.at_s))
    head = Text.assemble((one_line(letter.batch_id), "bold"), f"   {clock}   {plural(letter.attempts, 'attempt')}")
    table.add_row("batch", head)
    table.add_row("reason", Text(one_line(letter.reason)))
    for prompt in letter.prompts:
        table.add_row(Text(one_line(prompt.prompt_id)), Text(one_line(prompt.text)))
    again = "onbeat resume JOB samples it again" if letter.can_retry else letter.why_not
    table.add_row("again", Text(one_line(again)))
    table.add_row("", "")
    return table


def bar(progress: JobProgress) -> RenderableType:
    status = progress.status
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    row.add_row(
        # A job that only evaluates has no iteration.
        ProgressBar(total=status.iterations or 1, completed=progress.num_committed),
        Text(f"{progress.num_committed} of {status.iterations} iterations  {left_in_words(progress)}"),
    )
    return row


def left_in_words(progress: JobProgress) -> str:
    """Says how long the job will take; "" before the first iteration, and once it has ended."""
    if progress.left_s is None:
        return ""
    # The iterations say nothing of how long the last evaluation takes.
    if progress.num_committed >= progress.status.iterations:
        return "evaluates the last version"
    return f"{duration(progress.left_s)} left"


def event_line(event: events.JobEvent, progress: JobProgress) -> str:
    """Returns an event in one line; "" for one that a reader of lines need not see."""
    if isinstance(event, events.IterationCommitted):
        return iteration_line(event.metrics, progress)
    if isinstance(event, events.EvaluationFinished):
        evaluation = event.score
        greedy = ""
        if evaluation.greedy is not None:
            greedy = f", greedy {score(evaluation.greedy)}"
        return (
            f"held-out reward under version {evaluation.policy_version}: sampled {score(evaluation.sampled)}{greedy}"
            f"{passes_in_words(evaluation)} ({plural(evaluation.num_prompts, 'prompt')})"
        )
    if isinstance(event, events.StateChanged):
        # The stack's own key has no name: what it did needs none.
        by = f" by {event.by}" if event.by not in (UNSET, OPERATOR) else ""
        reason = f": {event.reason}" if event.reason else ""
        changes = f" ({'; '.join(event.changes)})" if event.changes else ""
        return f"job {event.state.value}{by}{reason}{changes}"
    if isinstance(event, events.TrainerStarted):
        how = "resumes" if event.resumed else "starts"
        passes = f"; {event.passes}" if event.passes else ""
        return f"a trainer {how} at iteration {event.next_iteration}{passes}"
    if isinstance(event, events.MemoryMeasured):
        return event.in_words
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
        return f"rewound to iteration {event.iteration}: {again}"
    if isinstance(event, events.GeneratorsChanged):
        changes = [f"{change}: {', '.join(ids)}" for change, ids in (("came", event.came), ("gone", event.gone)) if ids]
        return f"generators {'; '.join(changes)} ({event.num_live} live)"
    if isinstance(event, events.TaskChanged):
        by = f" by {event.by}" if event.by != OPERATOR else ""
        reason = f": {event.reason}" if event.reason else ""
        return f"task {event.kind.value} {event.task_id} {event.state.value}{by}{reason}"
    assert isinstance(event, events.BatchDead)
    return f"batch {event.batch_id} was given up: {event.reason}"


def curve_text(progress: JobProgress, metrics: events.IterationMetrics) -> str:
    """Returns the number by which the job is judged first: a reward as a score, a loss with its digits."""
    value = progress.curve_value(metrics)
    return number(value) if progress.status.learns_given else score(value)


def iteration_line(metrics: events.IterationMetrics, progress: JobProgress) -> str:
    total = progress.status.iterations
    left = f"  {duration(progress.left_s)} left" if progress.left_s else ""
    unscorable = ""
    if metrics.num_unscorable:
        unscorable = f"  {metrics.num_unscorable} unscorable"
    teacher = ""
    if "kl_to_teacher" in metrics.loss_metrics:
        teacher = f"  KL to teacher {number(metrics.loss_metrics['kl_to_teacher'])}"
    lag = ""
    if metrics.lag_counts:
        lag = f"  {lags_of(metrics)}  {staleness(metrics).replace('   ', '  ')}"
    played = ""
    if metrics.trajectories is not UNSET:
        played = f"  {number(metrics.trajectories.turns_mean)} turns, {share(metrics.trajectories.done_share)} done"
        again = metrics.trajectories.num_begun_again
        played += f", {again} begun again" if again else ""
    return (
        f"iteration {metrics.iteration:>{len(str(total - 1))}}  {progress.curve_name} {curve_text(progress, metrics)}"
        f"  version {metrics.policy_version} → {metrics.policy_version + 1}  {plural(metrics.num_batches, 'batch')}"
        f"  {duration(metrics.wall_s)}  {count(metrics.tokens_per_s)} tokens/s{played}{teacher}{lag}{unscorable}"
        f"  {metrics.iteration + 1} of {total}{left}"
    )
