"""Compares two trainers' runs of the same job: rates, times to a reward, processor time and memory."""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

Spread = dict[str, float]
"""min, median, max."""
WITHOUT_RATIO = frozenset({"last_rewards", "held_out_sampled", "held_out_greedy", "cores_of_others"})
"""Figures of which one side hasn't so many times more than the other."""


DOTS_PER_INCH = 110


@dataclass(frozen=True, kw_only=True)
class Step:
    """One iteration: its completions were sampled, and the policy that it made was there at `ended_s`."""

    ended_s: float
    """Unix time."""
    num_completions: int
    num_tokens: int
    """Sampled tokens."""
    reward_mean: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    """All processes of a run at one moment."""

    at_s: float
    """Unix time."""
    processor_s: float
    """User and system time so far."""
    machine_s: float
    """Processor time of the whole machine so far, that which its host took with it."""
    pss_bytes: int
    """Proportional set size: pages that several processes share count once."""
    rss_bytes: int
    """Resident set sizes, added up."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A command that trained one job."""

    command_s: float
    """Unix time at which the command was started."""
    first_s: float
    """Unix time at which the first iteration began."""
    ended_s: float
    """Unix time at which the command had ended."""
    steps: Sequence[Step]
    samples: Sequence[Sample]

    def figures(self, *, warm_up: int, level: float, window: int) -> dict[str, float | None]:
        """Returns what a comparison is made of; the first `warm_up` steps are in no rate.

        level, window: of `seconds_to`. cores_of_others: how many cores all other work on the machine had meanwhile.
        """
        from_s, counted = self.steps[warm_up - 1].ended_s, self.steps[warm_up:]
        elapsed_s, number = counted[-1].ended_s - from_s, sum(step.num_completions for step in counted)
        busy_s = self._spent_s(from_s, counted[-1].ended_s, lambda sample: sample.processor_s)
        machine_s = self._spent_s(from_s, counted[-1].ended_s, lambda sample: sample.machine_s)
        reached_s = seconds_to(self.steps, level, window=window)
        return {
            "completions_per_s": number / elapsed_s,
            "iteration_s": elapsed_s / len(counted),
            "core_s_per_iteration": busy_s / len(counted),
            "cores_of_others": (machine_s - busy_s) / elapsed_s,
            "tokens_per_completion": sum(step.num_tokens for step in counted) / number,
            "start_s": self.first_s - self.command_s,
            "to_reward_s": None if reached_s is None else reached_s - self.first_s,
            "last_rewards": statistics.fmean(step.reward_mean for step in self.steps[-window:]),
            "completions_per_s_of_command": sum(step.num_completions for step in self.steps)
            / (self.ended_s - self.command_s),
            "peak_pss_mb": max(sample.pss_bytes for sample in self.samples) / 1e6,
            "peak_rss_mb": max(sample.rss_bytes for sample in self.samples) / 1e6,
        }

    def rewards(self) -> list[tuple[float, float]]:
        """Returns the mean reward of each iteration, with the seconds from the first one's begin to its end."""
        return [(rounded(step.ended_s - self.first_s), rounded(step.reward_mean)) for step in self.steps]

    def _spent_s(self, from_s: float, to_s: float, of: Callable[[Sample], float]) -> float:
        return seconds_at(self.samples, to_s, of) - seconds_at(self.samples, from_s, of)


def seconds_to(steps: Sequence[Step], level: float, *, window: int) -> float | None:
    """Returns the Unix time at which the mean reward of `window` consecutive steps first is `level`; None: never."""
    for last in range(window - 1, len(steps)):
        if statistics.fmean(step.reward_mean for step in steps[last + 1 - window : last + 1]) >= level:
            return steps[last].ended_s
    return None


def seconds_at(samples: Sequence[Sample], at_s: float, of: Callable[[Sample], float]) -> float:
    """Returns a count of seconds at a moment: on the line between the samples beside it, and at the ends theirs."""
    for before, after in itertools.pairwise(samples):
        if before.at_s <= at_s <= after.at_s:
            return of(before) + (at_s - before.at_s) / (after.at_s - before.at_s) * (of(after) - of(before))
    return of(samples[0]) if at_s < samples[0].at_s else of(samples[-1])


def spread(values: Iterable[float | None]) -> Spread | None:
    """Returns None where one of them is None: a run that never got there has no place in an order."""
    numbers = list(values)
    if any(value is None for value in numbers):
        return None
    known = [value for value in numbers if value is not None]
    return {"min": rounded(min(known)), "median": rounded(statistics.median(known)), "max": rounded(max(known))}


def compared(
    ours: Sequence[Mapping[str, float | None]], theirs: Sequence[Mapping[str, float | None]]
) -> dict[str, dict[str, Spread | None]]:
    """Returns, for each figure, both sides' spread, and that of ours over theirs, neighbour by neighbour."""
    return {
        name: {
            "ours": spread(figures[name] for figures in ours),
            "trl": spread(figures[name] for figures in theirs),
            "ours_over_trl": spread(
                quotient(figures[name], other[name]) for figures, other in zip(ours, theirs, strict=True)
            ),
        }
        for name in ours[0]
    }


def quotient(over: float | None, under: float | None) -> float | None:
    """Returns None where there is none."""
    return over / under if over is not None and under else None


def rounded(value: float) -> float:
    """Returns it with four significant digits."""
    return float(f"{value:.4g}")


def draw_rewards(
    path: Path, runs: Mapping[str, Sequence[Sequence[tuple[float, float]]]], *, level: float, title: str
) -> None:
    """Draws reward against wall time: a line for each run, a colour for each side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.0, 4.0), layout="constrained")
    for (side, of_side), color in zip(runs.items(), ("#3b7dd8", "#c2554d"), strict=True):
        for number, of_run in enumerate(of_side):
            times, rewards = zip(*of_run, strict=True)
            axes.plot(times, rewards, "-o", color=color, markersize=3, label="" if number else side)
    axes.axhline(level, color="#888888", linewidth=0.8, linestyle="--")
    axes.set(xlabel="seconds since the first iteration began", ylabel="mean reward", title=title, ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)


class Watch:
    """A context manager that looks at all descendants of this process, every `every_s` seconds, by a thread."""

    def __init__(self, every_s: float = 2.0) -> None:
        self.samples: list[Sample] = []
        self._spent_s: dict[tuple[int, float], float] = {}
        """Process, by its id and start → its processor time when it was seen last: what has ended has spent it."""
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.is_set():
            self.samples.append(look(psutil.Process(os.getpid()).children(recursive=True), self._spent_s))
            self._stop.wait(self._every_s)


def look(
    processes: Iterable[psutil.Process], spent_s: dict[tuple[int, float], float], clock: Callable[[], float] = time.time
) -> Sample:
    """Adds up what processes take. spent_s: the processor time of all that were seen, which it brings up to now."""
    machine = psutil.cpu_times()
    machine_s = sum(getattr(machine, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
    at_s, pss, rss = clock(), 0, 0
    for process in processes:
        try:
            times, memory, began_s = process.cpu_times(), process.memory_full_info(), process.create_time()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        spent_s[process.pid, began_s] = times.user + times.system
        # Only Linux knows the share of a page that several processes have.
        pss, rss = pss + getattr(memory, "pss", memory.rss), rss + memory.rss
    busy_s = sum(spent_s.values())
    return Sample(at_s=at_s, processor_s=busy_s, machine_s=machine_s, pss_bytes=pss, rss_bytes=rss)
