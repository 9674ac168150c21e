"""The trackers that a spec names, each in a thread of its own; no point is ever logged twice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module

from consumer.trackers.base import BackgroundTracker, Tracker, evaluation_values, iteration_values
from contracts.errors import InvalidInput
from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec

TRACKERS = {
    "tensorboard": "consumer.trackers.to_tensorboard:TensorBoardTracker",
    "wandb": "consumer.trackers.to_wandb:WandbTracker",
    "mlflow": "consumer.trackers.to_mlflow:MlflowTracker",
}
"""A line for each `TrackerName` of contracts/spec.py: its class, which is made of (run folder, spec).

Only what a spec names is imported: the libraries are extras, and slow to import.
"""


class Trackers:
    """The trackers of one job. A replayed iteration has its points already: it is passed over."""

    def __init__(
        self, makers: dict[str, Callable[[], Tracker]], *, last_iteration: int = -1, last_evaluation: int = -1
    ) -> None:
        """Starts them. last_iteration, last_evaluation: the newest that an earlier trainer reported."""
        self._trackers = [BackgroundTracker(name, make) for name, make in makers.items()]
        self._last_iteration = last_iteration
        self._last_evaluation = last_evaluation

    def iteration(self, metrics: IterationMetrics) -> None:
        if metrics.iteration > self._last_iteration:
            self._last_iteration = metrics.iteration
            self._log(metrics.iteration, iteration_values(metrics))

    def evaluation(self, score: EvaluationScore) -> None:
        if score.iteration > self._last_evaluation:
            self._last_evaluation = score.iteration
            self._log(score.iteration, evaluation_values(score))

    def close(self) -> None:
        """Ends each within its deadline."""
        for tracker in self._trackers:
            tracker.close()

    def _log(self, step: int, values: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, values)


def tracker_makers(spec: JobSpec, folder: RunFolder) -> dict[str, Callable[[], Tracker]]:
    """Imports the libraries that the spec names. Raises InvalidInput for one that is not installed."""
    makers: dict[str, Callable[[], Tracker]] = {}
    for name in spec.trackers:
        module, _, tracker = TRACKERS[name].partition(":")
        try:
            makers[name] = functools.partial(getattr(import_module(module), tracker), folder, spec)
        except ImportError as error:
            raise InvalidInput(
                f"`{name}` is not installed where the trainer runs: {error}",
                field="trackers",
                cure=f'pip install "onbeat[{name}]"',
            ) from error
    return makers
