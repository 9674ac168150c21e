"""Trackers, through their own libraries where those are installed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from consumer.trackers.background import tracker_makers
from consumer.trainer.report import RunLog
from contracts.errors import InvalidInput
from contracts.run_folder import RunFolder
from tests.builders import install, job_spec
from tests.rooms.trackers.test_background import metrics, score

ROOT = Path(__file__).parents[3]


def run_a_job_that_is_replayed(folder: RunFolder, *trackers: str | Mapping[str, str]) -> None:
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


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_whose_library_is_missing_is_refused_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    library = {"tensorboard": "torch.utils.tensorboard"}.get(name, name)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"consumer.trackers.to_{name}", raising=False)
    with pytest.raises(InvalidInput, match=rf'^trackers: `{name}` is not installed .*pip install "onbeat\[{name}\]"'):
        tracker_makers(job_spec(trackers=[name]), RunFolder(tmp_path, "job-1"))


def test_the_tracker_of_the_page_is_a_package_s_and_gets_each_point_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/extend.md has the class: it writes a line for each number."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL)
    (source,) = [block for block in blocks if "class Drawing" in block]
    install(tmp_path, "drawing", "[onbeat.trackers]\nwandb = drawing:Drawing\n")
    (tmp_path / "drawing.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = RunFolder(tmp_path, "job-1")
    run_a_job_that_is_replayed(folder, {"type": "plugin", "entry_point": "wandb"})
    rows = [line.split(",") for line in (folder.path / "drawing.csv").read_text().splitlines()]
    rewards = [(int(step), float(value)) for step, name, value in rows if name == "reward_mean"]
    assert rewards == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]


def test_a_tracker_that_no_package_offers_is_refused(tmp_path: Path) -> None:
    spec = job_spec(trackers=[{"type": "plugin", "entry_point": "drawing"}])
    with pytest.raises(InvalidInput, match=r"^trackers: no package offers `drawing` in group onbeat\.trackers"):
        tracker_makers(spec, RunFolder(tmp_path, "job-1"))


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
