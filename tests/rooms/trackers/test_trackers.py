"""Trackers, through their own libraries where those are installed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from consumer.trackers.background import tracker_makers
from consumer.trainer.report import RunLog
from contracts.errors import InvalidInput
from contracts.run_folder import RunFolder
from onbeat.recording.records import RecordedSample
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


def samples_of(iteration: int) -> list[RecordedSample]:
    """A trained completion and a held-out one."""
    sample = RecordedSample(
        iteration=iteration,
        batch_id=f"{iteration}/train/0",
        purpose="train",
        policy_version=iteration,
        prompt="12+34=",
        reference="46",
        sample=0,
        completion=f"64 of {iteration}\n# no heading",
        reward=0.5,
        reward_components={"right": 1.0},
        finish_reason="stop",
    )
    return [sample, replace(sample, batch_id=f"{iteration}/evaluation/0", purpose="evaluation")]


def run_a_job_with_samples(folder: RunFolder, *trackers: str) -> None:
    """Iterations 0 and 1; a second trainer resumes at 1 and goes on to 2."""
    spec = job_spec(trackers=list(trackers))
    for iterations in (range(2), range(1, 3)):
        run_log = RunLog(folder, spec)
        for iteration in iterations:
            run_log.metrics(metrics(iteration, reward=0.5))
            run_log.samples(iteration, samples_of(iteration))
        run_log.close()


def test_tensorboard_has_the_texts_of_each_iteration_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason='tensorboard is not installed: pip install "onbeat[tensorboard]"')
    from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

    folder = RunFolder(tmp_path, "job-1")
    run_a_job_with_samples(folder, "tensorboard")
    events = EventAccumulator(str(folder.path / "tensorboard"), size_guidance={TENSORS: 0})
    events.Reload()
    for purpose in ("train", "evaluation"):
        texts = {
            point.step: point.tensor_proto.string_val[0].decode()
            for point in events.Tensors(f"samples/{purpose}/text_summary")
        }
        assert sorted(texts) == [0, 1, 2]
        assert texts[1] == "reward 0.5, reference `46`\n\n    12+34=64 of 1\n    # no heading"


def test_wandb_has_a_table_of_completions_of_each_iteration_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason='wandb is not installed: pip install "onbeat[wandb]"')
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = RunFolder(tmp_path, "job-1")
    run_a_job_with_samples(folder, "wandb")
    wandb.teardown()
    tables = sorted(folder.path.glob("wandb/offline-run-*/files/media/table/samples/train_*.table.json"))
    assert len(tables) == 3
    table = json.loads(tables[0].read_text())
    assert table["columns"] == ["version", "prompt", "reference", "completion", "reward", "right"]
    assert table["data"] == [[0, "12+34=", "46", "64 of 0\n# no heading", 0.5, 1.0]]


def test_a_tracker_that_shows_no_samples_is_given_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "numbers_only", "[onbeat.trackers]\nnumbers = numbers_only:Drawing\n")
    (tmp_path / "numbers_only.py").write_text(
        "class Drawing:\n"
        "    def __init__(self, folder, spec): self.path = folder.path / 'steps'\n"
        "    def log(self, step, values): self.path.open('a').write(f'{step}\\n')\n"
        "    def close(self): self.path.open('a').write('closed\\n')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = RunFolder(tmp_path, "job-1")
    spec = job_spec(trackers=[{"type": "plugin", "entry_point": "numbers"}])
    run_log = RunLog(folder, spec)
    run_log.metrics(metrics(0, reward=0.5))
    run_log.samples(0, samples_of(0))
    run_log.close()
    assert (folder.path / "steps").read_text().splitlines() == ["0", "closed"]
