"""Trackers: through their own libraries where those are installed, and what holds for every one of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest

from consumer.trackers.base import BackgroundTracker, iteration_values
from consumer.trackers.family import Trackers, tracker_makers
from consumer.trainer.report import RunLog
from contracts.errors import InvalidInput
from contracts.events import IterationMetrics
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder
from tests.builders import job_spec
from tests.contract.make_golden import iteration_metrics


class Remembering:
    """A tracker that keeps what it is given."""

    def __init__(self) -> None:
        self.points: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.points.append((step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


class Failing(Remembering):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("the server is away")


def metrics(iteration: int, *, reward: float = 0.5) -> IterationMetrics:
    return msgspec.structs.replace(iteration_metrics(), iteration=iteration, reward_mean=reward)


def score(iteration: int) -> EvaluationScore:
    return EvaluationScore(iteration=iteration, policy_version=iteration, sampled=0.25, greedy=0.75, num_prompts=8)


def run_a_job_that_is_replayed(folder: RunFolder, *trackers: str) -> None:
    """Iterations 0 to 2, then a second trainer that resumes at 1 and ends with 3; held-out scores under 0 and 4."""
    spec = job_spec(trackers=list(trackers))
    first = RunLog(folder, spec)
    for iteration in range(3):
        first.metrics(metrics(iteration, reward=0.25 * iteration))
        if iteration == 0:
            first.evaluation(score(0))
    first.close()
    second = RunLog(folder, spec)
    for iteration in range(1, 4):
        second.metrics(metrics(iteration, reward=0.25 * iteration))
    second.evaluation(score(4))
    second.close()


def test_every_number_of_an_iteration_is_a_value() -> None:
    values = iteration_values(metrics(3))
    assert values["reward_components/exact"] == 0.5
    assert (values["reward_mean"], values["response_tokens_max"], values["entropy"]) == (0.5, 6.0, 0.0)
    assert all(isinstance(value, float) for value in values.values())
    assert not {"iteration", "trainer_epoch", "updates", "mfu"} & set(values)
    assert iteration_values(msgspec.structs.replace(metrics(3), mfu=0.5))["mfu"] == 0.5


def test_a_lag_is_a_mean_and_a_count_for_each_step_of_it_and_a_job_without_one_has_none() -> None:
    lagging = iteration_values(msgspec.structs.replace(metrics(3), lag_counts=(1, 3, 0), lag_mean=0.75))
    of_lag = {"lag_mean": 0.75, "lag_counts/0": 1.0, "lag_counts/1": 3.0, "lag_counts/2": 0.0}
    assert lagging == iteration_values(metrics(3)) | of_lag
    assert not any(name.startswith("lag") for name in iteration_values(metrics(3)))


def test_a_replayed_iteration_is_logged_once() -> None:
    tracker = Remembering()
    trackers = Trackers({"fake": lambda: tracker}, last_iteration=1, last_evaluation=0)
    for iteration in (1, 2, 2, 3):
        trackers.iteration(metrics(iteration))
    trackers.evaluation(score(0))
    trackers.evaluation(score(4))
    trackers.close()
    assert [step for step, _ in tracker.points] == [2, 3, 4]
    assert tracker.points[-1][1] == {"evaluation/sampled": 0.25, "evaluation/greedy": 0.75}
    assert tracker.is_closed


def test_a_tracker_that_fails_is_one_warning_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Remembering()
    trackers = Trackers({"broken": Failing, "fake": lambda: tracker})
    with caplog.at_level(logging.WARNING):
        for iteration in range(3):
            trackers.iteration(metrics(iteration))
        trackers.close()
    assert [record.getMessage() for record in caplog.records] == [
        "tracker broken fails and is off: ConnectionError: the server is away"
    ]
    assert [step for step, _ in tracker.points] == [0, 1, 2]


def test_a_tracker_that_cannot_start_is_a_warning_too(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Remembering:
        raise OSError("no space left")

    with caplog.at_level(logging.WARNING):
        tracker = BackgroundTracker("broken", make)
        tracker.close()
    assert "tracker broken fails and is off: OSError: no space left" in caplog.text


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_whose_library_is_missing_is_refused_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    library = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"consumer.trackers.to_{name}", raising=False)
    with pytest.raises(InvalidInput, match=rf'^trackers: `{name}` is not installed .*pip install "onbeat\[{name}\]"'):
        tracker_makers(job_spec(trackers=[name]), RunFolder(tmp_path, "job-1"))


def test_a_tracker_is_named_once() -> None:
    with pytest.raises(InvalidInput, match="trackers names one twice"):
        job_spec(trackers=["wandb", "wandb"])
    with pytest.raises(InvalidInput, match="trackers"):
        job_spec(trackers=["comet"])


def test_tensorboard_holds_each_point_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason='tensorboard is not installed: pip install "onbeat[tensorboard]"')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RunFolder(tmp_path, "job-1")
    run_a_job_that_is_replayed(folder, "tensorboard")
    events = EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("reward_mean")] == [
        (0, 0.0),
        (1, 0.25),
        (2, 0.5),
        (3, 0.75),
    ]
    assert [(point.step, point.value) for point in events.Scalars("evaluation/greedy")] == [(0, 0.75), (4, 0.75)]


def test_mlflow_holds_each_point_once_in_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow.store.db", reason='mlflow is not installed: pip install "onbeat[mlflow]"')
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = RunFolder(tmp_path, "job-1")
    run_a_job_that_is_replayed(folder, "mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{folder.path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("onbeat")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(run.info.run_id, "reward_mean")
    assert sorted((point.step, point.value) for point in points) == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]


def test_wandb_offline_holds_each_point_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason='wandb is not installed: pip install "onbeat[wandb]"')
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = RunFolder(tmp_path, "job-1")
    run_a_job_that_is_replayed(folder, "wandb")
    # Its service writes the files: they are whole when it has ended.
    wandb.teardown()
    points = [(int(row["_step"]), float(row["reward_mean"])) for row in wandb_rows(folder.path) if "reward_mean" in row]
    assert sorted(points) == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]


def wandb_rows(folder: Path) -> list[dict[str, str]]:
    """Name → JSON of each row that offline runs would send, in the order of their files."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): item.value_json for item in items})
    return rows


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log: blocks of 32 KiB, pieces of (checksum 4, length 2, kind 1), after wandb's 7 bytes."""
    start, joined = 7, b""
    while start + 7 <= len(data):
        if 32768 - start % 32768 < 7:
            start += 32768 - start % 32768
            continue
        length, kind = int.from_bytes(data[start + 4 : start + 6], "little"), data[start + 6]
        joined += data[start + 7 : start + 7 + length]
        start += 7 + length
        if kind in (1, 4):
            yield joined
            joined = b""
