"""A run folder is opened without its stack: the page's routes answer as they did, a look changes nothing."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from contracts.errors import InvalidInput, NotFound, OnbeatError
from contracts.jobs import JobState
from contracts.run_folder import RunFolder
from onbeat.cli import run
from onbeat.client.gateway import GatewayClient
from onbeat.stack.stack import EmbeddedStack
from onbeat.view.command import run_folders, viewed
from tests.chaos.short_job import short_job
from tests.pipeline import Pipeline


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    """A run folder, and the digest of its last version; its stack is gone."""
    with Pipeline(tmp_path_factory.mktemp("view")) as pipeline:
        pipeline.start_generators(1)
        job_id = pipeline.train(short_job(iterations=4, recording={"share": 1.0}))
        folder, digest = RunFolder(pipeline.settings.run_root_path, job_id), pipeline.final_digest(job_id)
    return folder, digest


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_a_run_is_shown_as_its_folder_has_it_and_only_to_be_looked_at(trained: tuple[RunFolder, str]) -> None:
    folder, digest = trained
    before = files_of(folder.path)
    with viewed(folder.path) as found, GatewayClient(found.url, found.key) as client:
        assert found.jobs == (folder.job_id,)
        (status,) = client.jobs()
        assert (status.job_id, status.state, status.weights_digest) == (folder.job_id, JobState.SUCCEEDED, digest)
        assert (status.iterations_committed, status.iterations) == (4, 4)
        assert status.evaluation_latest is not None
        assert len(client.metrics(folder.job_id)) == 4
        assert len(client.evaluations(folder.job_id)) == 2
        assert [record.record.iteration for record in client.audit(folder.job_id)][:4] == [0, 1, 2, 3]
        for refused in (partial(client.of_job, "DELETE"), client.cancel):
            with pytest.raises(OnbeatError, match="the key of view has the scope read"):
                refused(folder.job_id)
    assert files_of(folder.path) == before


def test_ctrl_c_is_the_end_of_a_view_and_no_failure(
    trained: tuple[RunFolder, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(_: EmbeddedStack) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(EmbeddedStack, "tick", pressed)
    assert run(["view", str(trained[0].path)]) == 0
    said = capsys.readouterr()
    assert "Ctrl-C ends the view" in said.out
    assert said.err == ""


def test_a_run_that_was_cut_off_says_so(trained: tuple[RunFolder, str], tmp_path: Path) -> None:
    folder, _ = trained
    other = RunFolder(tmp_path, folder.job_id)
    other.path.mkdir()
    for name in ("spec.json", "metrics.jsonl"):
        (other.path / name).write_bytes((folder.path / name).read_bytes())
    lines = folder.chain.read_bytes().splitlines(keepends=True)
    other.chain.write_bytes(b"".join(lines[:2]))
    damaged = RunFolder(tmp_path, "job-ffffffffffff")
    damaged.path.mkdir()
    damaged.spec.write_text("{")
    with viewed(tmp_path) as found, GatewayClient(found.url, found.key) as client:
        assert found.jobs == (folder.job_id,)
        status = client.job(folder.job_id)
        assert (status.state, status.iterations_committed) == (JobState.CANCELLED, 2)
        assert status.reason == "as its run folder has it: how it ended is not written there"


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="is no run folder, and has none"):
        run_folders(tmp_path)
    (tmp_path / "job-0123456789ab").mkdir()
    (tmp_path / "job-0123456789ab" / "spec.json").write_text("{}")
    assert [folder.job_id for folder in run_folders(tmp_path)] == ["job-0123456789ab"]
    with pytest.raises((NotFound, InvalidInput)), viewed(tmp_path):
        pass
