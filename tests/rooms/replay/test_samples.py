"""`onbeat samples` and `run.samples()`: the newest recorded completions, of a run folder or of a gateway's answers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import to_builtins

from contracts.errors import NotFound
from contracts.run_folder import RunFolder
from gateway.views.batch_view import batch_view
from onbeat.cli import run
from onbeat.recording.files import INDEX, RecordedFiles, write_record
from onbeat.recording.records import IterationView, RecordedIteration, RecordedList
from onbeat.recording.samples import FolderSamples, GatewaySamples, SampleSource, read_samples
from tests.builders import job_spec
from tests.recorded import record_of, summary_of

JOB = "job-1"
BATCHES = {2: ["2/train/1"], 5: ["5/train/0", "5/train/3", "5/evaluation/0"], 6: ["6/evaluation/0"]}
"""Iteration → its recorded batches; the last one only evaluated."""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path, JOB)
    files = RecordedFiles(folder)
    for iteration, batch_ids in BATCHES.items():
        records = [record_of(JOB, batch_id, text=f"of {batch_id}") for batch_id in batch_ids]
        for record in records:
            path = files.path_of(record.batch.batch_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_record(path, record)
        index = RecordedIteration(iteration=iteration, batches=tuple(map(summary_of, records)), versions={})
        write_record(files.folder_of(iteration) / INDEX, index)
    return folder


def answers(folder: RunFolder, path: str, params: dict[str, Any] | None = None) -> Any:
    """Answers as the gateway's routes do."""
    files = RecordedFiles(folder)
    if path == "/rollouts":
        assert params == {"limit": 1000}
        numbers = reversed(files.iterations())
        views = tuple(IterationView(iteration=number, batches=files.index(number).batches) for number in numbers)
        return to_builtins(RecordedList(recording=None, bytes=0, iterations=views))
    record = files.read(path.removeprefix("/rollouts/"))
    view = batch_view(record, files.index(record.batch.iteration), job_spec(), why_not="")
    return to_builtins(view)


@pytest.fixture(params=["folder", "gateway"])
def source(request: pytest.FixtureRequest, folder: RunFolder) -> SampleSource:
    if request.param == "folder":
        return FolderSamples(folder)
    return GatewaySamples(partial(answers, folder))


def texts(source: SampleSource, **chosen: Any) -> list[tuple[str, float]]:
    return [(sample.completion, sample.reward) for sample in read_samples(source, **chosen)]


def test_without_a_word_they_are_the_newest_that_were_trained(source: SampleSource) -> None:
    samples = read_samples(source)
    assert [(sample.batch_id, sample.completion, sample.reward) for sample in samples] == [
        ("5/train/0", "of 5/train/0", 1.0),
        ("5/train/0", "x", 0.0),
        ("5/train/3", "of 5/train/3", 1.0),
        ("5/train/3", "x", 0.0),
    ]
    first = samples[0]
    assert first.prompt.startswith("12+34=")
    assert (first.reference, first.iteration, first.purpose, first.sample) == ("46", 5, "train", 0)
    assert first.reward_components == {"exact": 1.0}


def test_the_worst_come_first_and_a_limit_holds(source: SampleSource) -> None:
    assert texts(source, worst=True, limit=3) == [("x", 0.0), ("x", 0.0), ("of 5/train/0", 1.0)]
    assert texts(source, limit=1) == [("of 5/train/0", 1.0)]


def test_an_iteration_and_a_batch_can_be_named(source: SampleSource) -> None:
    assert texts(source, iteration=2) == [("of 2/train/1", 1.0), ("x", 0.0)]
    assert texts(source, batch=3) == [("of 5/train/3", 1.0), ("x", 0.0)]
    assert texts(source, held_out=True)[0] == ("of 6/evaluation/0", 1.0)
    assert texts(source, held_out=True, iteration=5)[0] == ("of 5/evaluation/0", 1.0)


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ({"iteration": 4}, "iteration: no completions of iteration 4 are recorded (take 5, 2)"),
        ({"iteration": 6}, "iteration: no completions of iteration 6 are recorded (take 5, 2)"),
        ({"batch": 7}, "batch: batch 7 of iteration 5 isn't recorded (recorded are 0, 3)"),
        (
            {"held_out": True, "iteration": 2},
            "iteration: no held-out completions of iteration 2 are recorded (take 6, 5)",
        ),
    ],
)
def test_what_is_not_recorded_is_refused_with_what_is(
    source: SampleSource, chosen: dict[str, Any], problem: str
) -> None:
    with pytest.raises(NotFound) as refused:
        read_samples(source, **chosen)
    assert str(refused.value) == problem


def test_a_job_that_only_evaluates_shows_what_it_sampled(tmp_path: Path, folder: RunFolder) -> None:
    for iteration in (2, 5):
        for path in RecordedFiles(folder).folder_of(iteration).iterdir():
            path.unlink()
    assert texts(FolderSamples(folder)) == [("of 6/evaluation/0", 1.0), ("x", 0.0)]
    with pytest.raises(NotFound, match="no completions are recorded"):
        read_samples(FolderSamples(RunFolder(tmp_path, "job-2")))


@pytest.mark.usefixtures("restored_process")
def test_the_command_reads_a_folder_without_a_stack_and_shows_text_as_text(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.spec.write_text("{}")
    assert run(["samples", JOB, "--run-dir", str(folder.run_root), "--worst", "-n", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("batch 5/train/") == 3
    assert "reference  46" in shown
    assert "\x1b[31m" not in shown, "a prompt of a data set is no control of a terminal"
    assert run(["samples", JOB, "--run-dir", str(folder.run_root), "--iteration", "3"]) == 2
    assert "no completions of iteration 3 are recorded (take 5, 2)" in capsys.readouterr().err
