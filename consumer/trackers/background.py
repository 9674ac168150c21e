"""The trackers that a spec names, each in a thread of its own: no delay or failure of theirs reaches training.

Consumes:     iteration metrics, evaluation scores and some completions of one job.
Waits for:    the tracker's library, in a thread of its own; at the job's end, with a deadline.
Unblocked by: nothing; a tracker that fails is turned off.
Produces:     one point a step in the tracker, and none twice.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from contracts.errors import InvalidInput, kind_and_text
from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec, TrackerName
from contracts.spec.trainer import PluginTracker
from onbeat.base.process.entry_points import load_entry_point
from onbeat.recording.records import RecordedSample

log = logging.getLogger(__name__)

GROUP = "onbeat.trackers"
"""A group of entry points: a package's classes, made of (run folder, spec)."""
CLOSE_TIMEOUT_S = 30.0
"""The time that each tracker has at the job's end."""


class Tracker(Protocol):
    """A place that draws the numbers of a job, over its library."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Takes one point of each name. Steps never go back; a step may come twice, with other names."""
        ...

    def close(self) -> None:
        """Sends what is left, at the job's end."""
        ...


@runtime_checkable
class ShowsSamples(Protocol):
    """A tracker that shows completions, too."""

    def log_samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        """Takes completions of an iteration, after its numbers: those that were trained, and held-out ones."""
        ...


Point = tuple[int, Mapping[str, float] | Sequence[RecordedSample]]
"""A step, and its numbers by name or its completions."""


class BackgroundTracker:
    """Logs in a thread: neither a slow server nor an error of the library may hold up or end a job."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        self._name = name
        self._make = make
        self._points: queue.SimpleQueue[Point | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float] | Sequence[RecordedSample]) -> None:
        """Hands the point to the thread, without waiting; does nothing once the tracker is off."""
        if self._thread.is_alive():
            self._points.put((step, values))

    def close(self) -> None:
        """Waits for what was logged, up to a deadline."""
        self._points.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("tracker %s did not end within %g s: its last points may be lost", self._name, CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        """Runs the library. Whatever foreign code raises has the same answer: the tracker is off, training goes on."""
        try:
            tracker = self._make()
            while (point := self._points.get()) is not None:
                step, values = point
                if isinstance(values, Mapping):
                    tracker.log(step, values)
                elif isinstance(tracker, ShowsSamples):
                    tracker.log_samples(step, values)
            tracker.close()
        except BaseException as error:  # SystemExit, too, which would end this thread without a word
            log.warning("tracker %s has failed, and gets no more numbers: %s", self._name, kind_and_text(error))


def iteration_values(metrics: IterationMetrics) -> dict[str, float]:
    """Returns the numbers by field name; those of several values as `reward_components/NAME`, `source_rewards/NAME`,
    `lag_counts/LAG` and `environment/NAME`.
    """
    labelled = metrics.labelled().items()
    return metrics.numbers() | {f"{of}/{name}": value for of, values in labelled for name, value in values.items()}


def evaluation_values(score: EvaluationScore) -> dict[str, float]:
    """Returns `evaluation/sampled`, and `evaluation/greedy`, `evaluation/pass_at_K`, `evaluation/source/NAME` and
    `evaluation/set/NAME/sampled`, `greedy`, `pass_at_K` where there are."""
    values = {"evaluation/sampled": score.sampled}
    values |= {f"evaluation/pass_at_{passes.k}": passes.share for passes in score.pass_at or ()}
    values |= {f"evaluation/source/{name}": mean for name, mean in (score.by_source or {}).items()}
    for name, set_score in (score.sets or {}).items():
        of_set = {"sampled": set_score.sampled, "greedy": set_score.greedy}
        of_set |= {f"pass_at_{passes.k}": passes.share for passes in set_score.pass_at or ()}
        values |= {f"evaluation/set/{name}/{key}": value for key, value in of_set.items() if value is not None}
    if score.greedy is None:
        return values
    return values | {"evaluation/greedy": score.greedy}


class Trackers:
    """The trackers of one job, which its run log makes and feeds.

    A replayed iteration has its points already: it is passed over.
    """

    def __init__(
        self, makers: dict[str, Callable[[], Tracker]], *, last_iteration: int = -1, last_evaluation: int = -1
    ) -> None:
        """Starts them. last_iteration, last_evaluation: the newest that an earlier trainer reported."""
        self._trackers = [BackgroundTracker(name, make) for name, make in makers.items()]
        self._last_iteration = last_iteration
        self._last_evaluation = last_evaluation
        # Completions come last, when an iteration is committed with its numbers.
        self._last_samples = max(last_iteration, last_evaluation)

    def iteration(self, metrics: IterationMetrics) -> None:
        """Takes the numbers of an iteration, which a replay may have given before."""
        if metrics.iteration > self._last_iteration:
            self._last_iteration = metrics.iteration
            self._log(metrics.iteration, iteration_values(metrics))

    def evaluation(self, score: EvaluationScore) -> None:
        """Takes a held-out score, which a replay may have given before."""
        if score.iteration > self._last_evaluation:
            self._last_evaluation = score.iteration
            self._log(score.iteration, evaluation_values(score))

    def samples(self, iteration: int, samples: Sequence[RecordedSample]) -> None:
        """Takes completions of an iteration, which a replay may have given before."""
        if iteration > self._last_samples:
            self._last_samples = iteration
            for tracker in self._trackers:
                tracker.log(iteration, samples)

    def close(self) -> None:
        """Waits for each tracker, up to its deadline."""
        for tracker in self._trackers:
            tracker.close()

    def _log(self, step: int, values: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)


def tracker_makers(spec: JobSpec, folder: RunFolder) -> dict[str, Callable[[], Tracker]]:
    """Imports the libraries of the trackers that the spec names.

    Returns:
        Name for the log → makes the tracker.

    Raises:
        InvalidInput: A tracker is not installed where the trainer runs.
    """
    makers: dict[str, Callable[[], Tracker]] = {}
    for tracker in spec.trackers:
        if isinstance(tracker, PluginTracker):
            offered = load_entry_point(GROUP, tracker.entry_point, field="trackers")
            # A package may call its tracker as one of ours is called.
            makers[f"plug-in {tracker.entry_point}"] = functools.partial(offered, folder, spec)
            continue
        try:
            makers[tracker] = functools.partial(_tracker_class(tracker), folder, spec)
        except ImportError as error:
            raise InvalidInput(
                f"`{tracker}` is not installed where the trainer runs: {error}",
                field="trackers",
                cure=f'pip install "onbeat[{tracker}]"',
            ) from error
    return makers


def _tracker_class(name: TrackerName) -> Callable[[RunFolder, JobSpec], Tracker]:
    """Imports one of Onbeat's trackers alone: the libraries are extras, and slow to import. Raises ImportError."""
    match name:
        case "mlflow":
            from consumer.trackers.to_mlflow import MlflowTracker

            return MlflowTracker
        case "tensorboard":
            from consumer.trackers.to_tensorboard import TensorBoardTracker

            return TensorBoardTracker
        case "wandb":
            from consumer.trackers.to_wandb import WandbTracker

            return WandbTracker
