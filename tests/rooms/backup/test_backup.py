"""A backup from the middle of a job makes a stack that ends it with the same weights; a bad one is refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from contracts.encoding.digests import file_digest
from contracts.errors import Conflict, InvalidInput, Unavailable
from contracts.jobs import JobState, JobStatus
from contracts.run_folder import RunFolder
from onbeat.backup import copies
from onbeat.backup.folder import MARK, bring_back, make_backup, read_backup
from onbeat.cli import run
from onbeat.client.gateway import GatewayClient
from onbeat.stack.options import StackOptions
from onbeat.stack.redis import EmbeddedRedis
from onbeat.stack.stack import EmbeddedStack
from tests.chaos.short_job import short_job
from tests.forked import ForkedChild
from tests.until import until

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 400.0
ITERATIONS = 20
"""So many that a backup is done long before the last one."""


class Ticking:
    """A stack that is watched as `onbeat up` does."""

    def __init__(self, run_root: Path) -> None:
        self.stack = EmbeddedStack(
            StackOptions(run_root=run_root, model_root=REPOSITORY, threads=1, tasks=True), child=ForkedChild
        )
        self._open = contextlib.ExitStack()
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            self.stack.tick()

    def __enter__(self) -> GatewayClient:
        self.stack.__enter__()
        self._watcher.start()
        return self._open.enter_context(GatewayClient(self.stack.gateway_url, self.stack.api_key))

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._watcher.join()
        self._open.close()
        self.stack.stop()


def until_committed(client: GatewayClient, job_id: str, count: int) -> JobStatus:
    def there() -> JobStatus | None:
        status = client.job(job_id)
        return status if status.iterations_committed >= count or status.state.is_final else None

    found = until(there, f"{count} iterations of {job_id}", deadline_s=DEADLINE_S)
    assert found is not None
    return found


def until_over(client: GatewayClient, job_id: str) -> JobStatus:
    return until_committed(client, job_id, sys.maxsize)


def test_a_stack_of_a_backup_from_the_middle_of_a_job_ends_it_with_the_same_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = short_job(iterations=ITERATIONS, recording={"share": 1.0})
    with Ticking(tmp_path / "runs") as client:
        job_id = client.submit(spec, idempotency_key="one").job_id
        assert until_committed(client, job_id, 4).state is JobState.RUNNING
        assert run(["backup", str(tmp_path / "copy"), "--run-dir", str(tmp_path / "runs")]) == 0
        copied = len((tmp_path / "copy" / job_id / "chain.jsonl").read_bytes().splitlines())
        assert 4 <= copied < ITERATIONS, "it was taken in the middle"
        undisturbed = until_over(client, job_id)
    assert undisturbed.state is JobState.SUCCEEDED
    shutil.rmtree(tmp_path / "runs")
    assert run(["restore", str(tmp_path / "copy"), "--run-dir", str(tmp_path / "restored")]) == 0
    assert f"onbeat up --run-dir {tmp_path / 'restored'}" in capsys.readouterr().out
    with Ticking(tmp_path / "restored") as client:
        restored = until_over(client, job_id)
        verdict = client.verify(job_id, within_s=400.0)
    assert (restored.state, restored.weights_digest) == (JobState.SUCCEEDED, undisturbed.weights_digest)
    assert verdict.gaps == ()
    assert verdict.iterations == ITERATIONS


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The run root of a stack that was stopped, with a run beside its Redis."""
    root = tmp_path / "runs"
    with EmbeddedRedis(root / "redis") as server:
        server.child.stop(grace_s=10.0)
    folder = RunFolder(root, "job-0123456789ab")
    (folder.checkpoints / "i000003").mkdir(parents=True)
    (folder.checkpoints / "i000003" / "state.pt").write_bytes(b"state")
    (folder.checkpoints / ".i000004.abc").mkdir()
    folder.chain.write_text("{}\n")
    (folder.path / "escape").symlink_to("/etc/passwd")
    os.mkfifo(folder.path / "pipe")
    (root / "logs").mkdir()
    (root / "stack.json").write_text("a secret")
    return root


def test_a_backup_has_what_a_stack_goes_on_from_and_no_secret_of_the_running_one(stopped: Path, tmp_path: Path) -> None:
    made = make_backup(stopped, tmp_path / "copy")
    names = {name for name in made.files if not name.startswith("redis/appendonlydir/")}
    job = "job-0123456789ab"
    assert names == {"redis/seal", f"{job}/chain.jsonl", f"{job}/checkpoints/i000003/state.pt"}
    assert read_backup(tmp_path / "copy") == made
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "copy").rglob("*")} - {0o044} == {0}


def test_a_file_that_redis_replaces_meanwhile_begins_the_copy_again(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = stopped / "redis" / copies.APPEND_ONLY
    (first,) = [line.split()[1] for line in (data / copies.MANIFEST).read_text().splitlines() if "incr" in line]
    copy, rewrites = copies._copy_file, iter(["rewritten.aof"])

    def copy_and_rewrite(source: Path, target: Path) -> None:
        copy(source, target)
        if source.name == first and (name := next(rewrites, None)):
            (data / name).write_bytes(source.read_bytes())
            text = (data / copies.MANIFEST).read_text().replace(first, name)
            (data / copies.MANIFEST).write_text(text)
            source.unlink()

    monkeypatch.setattr(copies, "_copy_file", copy_and_rewrite)
    copies.copy_redis(stopped / "redis", tmp_path / "copy")
    copied = tmp_path / "copy" / copies.APPEND_ONLY
    assert "rewritten.aof" in (copied / copies.MANIFEST).read_text()
    assert (copied / "rewritten.aof").exists()
    assert not (copied / first).exists()


def test_a_checkpoint_that_goes_while_it_is_copied_is_left_out_and_its_successor_is_taken(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(stopped, "job-0123456789ab")
    copy = copies._copy_file

    def copy_and_replace(source: Path, target: Path) -> None:
        if source.parent.name == "i000003":
            (folder.checkpoints / "i000009").mkdir()
            (folder.checkpoints / "i000009" / "state.pt").write_bytes(b"newer")
            shutil.rmtree(source.parent)
        copy(source, target)

    monkeypatch.setattr(copies, "_copy_file", copy_and_replace)
    copies.copy_run(folder, tmp_path / "copy")
    assert sorted(path.name for path in (tmp_path / "copy" / "checkpoints").iterdir()) == ["i000009"]
    assert (tmp_path / "copy" / "checkpoints" / "i000009" / "state.pt").read_bytes() == b"newer"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda copy: (copy / MARK).unlink(), "is no backup, or one that was not finished"),
        (lambda copy: (copy / "redis" / "seal").unlink(), "redis/seal is missing, or was added"),
        (lambda copy: (copy / "redis" / "more").write_text(""), "redis/more is missing, or was added"),
        (lambda copy: (copy / "redis" / "seal").write_text("other"), "redis/seal is damaged"),
    ],
)
def test_what_is_no_whole_backup_is_refused(stopped: Path, tmp_path: Path, harm: object, said: str) -> None:
    make_backup(stopped, tmp_path / "copy")
    assert callable(harm)
    harm(tmp_path / "copy")
    with pytest.raises(InvalidInput, match=said):
        read_backup(tmp_path / "copy")


def names_another_job(copy: Path, name: str) -> None:
    """Has the record of a backup name a job whose folder lies there, as a hostile hand would write it."""
    record = json.loads((copy / MARK).read_bytes())
    (copy / MARK).write_text(json.dumps(record | {"jobs": [name]}))


@pytest.mark.parametrize(
    "name", ["../outside", "job-0123456789ab/../../outside", "/tmp/outside", "..", "", "redis", "job-0123456789AB"]
)
def test_a_foreign_backup_writes_nothing_outside_the_run_folder(
    stopped: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, root = tmp_path / "here" / "copy", tmp_path / "there" / "runs"
    copy.parent.mkdir()
    make_backup(stopped, copy)
    (tmp_path / "here" / "outside").mkdir()
    (tmp_path / "here" / "outside" / "file").write_text("written by a stranger")
    names_another_job(copy, name)
    assert run(["restore", str(copy), "--run-dir", str(root)]) == 2
    assert f"{MARK} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "there" / "outside").exists()
    assert not (root / "redis").exists()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("inputs", lambda path: path.symlink_to("/etc")),
        ("redis/pipe", os.mkfifo),
        ("redis/seal", lambda path: path.symlink_to("/dev/zero")),
    ],
)
def test_a_link_or_a_pipe_of_a_foreign_backup_is_refused_before_it_is_opened(
    stopped: Path, tmp_path: Path, name: str, make: Callable[[Path], object]
) -> None:
    make_backup(stopped, tmp_path / "copy")
    path = tmp_path / "copy" / name
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(InvalidInput, match=f"{name} is no plain file"):
        read_backup(tmp_path / "copy")


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "..", "a/b", "a\x1b[31m"])
def test_a_manifest_of_redis_names_files_and_no_paths(stopped: Path, tmp_path: Path, name: str) -> None:
    make_backup(stopped, tmp_path / "copy")
    manifest = stopped / "redis" / copies.APPEND_ONLY / copies.MANIFEST
    manifest.write_text(f"file {name} seq 1 type i\n")
    with pytest.raises(InvalidInput, match="is no name of a file"):
        make_backup(stopped, tmp_path / "other")
    foreign = tmp_path / "copy" / "redis" / copies.APPEND_ONLY / copies.MANIFEST
    foreign.write_bytes(manifest.read_bytes())
    record = json.loads((tmp_path / "copy" / MARK).read_bytes())
    record["files"][foreign.relative_to(tmp_path / "copy").as_posix()] = file_digest(foreign)
    (tmp_path / "copy" / MARK).write_text(json.dumps(record))
    with pytest.raises(InvalidInput, match="is no name of a file"):
        read_backup(tmp_path / "copy")


def test_nothing_that_is_there_is_replaced(stopped: Path, tmp_path: Path) -> None:
    made = make_backup(stopped, tmp_path / "copy")
    with pytest.raises(Conflict, match="is there already"):
        bring_back(tmp_path / "copy", made, stopped)
    assert run(["backup", str(tmp_path / "copy"), "--run-dir", str(stopped)]) == 2
    assert run(["backup", str(tmp_path / "other"), "--run-dir", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "other").exists()


def test_a_server_of_ones_own_is_backed_up_by_its_own_means_first(
    stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(stopped / "redis")
    assert run(["backup", str(tmp_path / "copy"), "--run-dir", str(stopped)]) == 2
    assert "--without-redis" in capsys.readouterr().err
    assert run(["backup", str(tmp_path / "copy"), "--run-dir", str(stopped), "--without-redis"]) == 0
    made = read_backup(tmp_path / "copy")
    assert (made.has_redis, made.jobs) == (False, ("job-0123456789ab",))
    with pytest.raises(Unavailable, match="holds no server's data"):
        copies.copy_redis(stopped / "redis", tmp_path / "empty")
