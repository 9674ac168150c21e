"""Bytes by content in a real S3 server, as it is and as it fails, and in a folder."""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from contracts.encoding.digests import content_digest
from contracts.errors import ContractViolation, InvalidInput, NotFound, ObjectsUnavailable
from contracts.settings import StackSettings
from onbeat.base.metrics.wrong_reads import WRONG_READS
from onbeat.stack.ports import free_port
from onbeat.weights.objects import blobs as blobs_module
from onbeat.weights.objects import bucket as bucket_module
from onbeat.weights.objects.blobs import Blobs, Piece, open_blobs
from onbeat.weights.objects.bucket import PART_BYTES
from tests.rooms.objects.conftest import OpenBlobs, has
from tests.rooms.objects.s3_server import BUCKET, FaultyProxy, S3Server, never, true

LARGE = bytes(range(256)) * (PART_BYTES // 256) * 2 + b"the rest"
"""It goes in three parts."""
ABSENT = content_digest(b"never put")


@pytest.fixture(params=["s3", "file"])
def blobs(request: pytest.FixtureRequest, open_area: OpenBlobs, tmp_path: Path) -> Blobs:
    if request.param == "s3":
        return open_area()
    return open_blobs(StackSettings(objects=f"file://{tmp_path}/store"), "job-1", "weights", deadline_s=120.0)


@pytest.mark.parametrize("data", [b"", b"some bytes", LARGE], ids=["none", "a part", "three parts"])
def test_what_was_put_comes_back_as_bytes_and_as_a_private_file(blobs: Blobs, tmp_path: Path, data: bytes) -> None:
    digest = blobs.put(memoryview(data))
    assert digest == content_digest(data)
    assert blobs.get(digest, num_bytes=len(data)) == data
    target = tmp_path / "fetched"
    blobs.fetch(digest, target, num_bytes=len(data))
    assert target.read_bytes() == data
    assert target.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_is_there_is_not_sent_again_but_when_it_is_old_or_asked_for(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest, traffic = blobs.put(b"bytes"), blobs.bucket.traffic
    sent = traffic["sent"]
    assert blobs.put(b"bytes") == digest
    assert traffic["sent"] == sent
    blobs.put(b"bytes", again=True)
    assert traffic["sent"] == sent + 5
    monkeypatch.setattr(blobs_module, "REFRESHED_S", -3600.0)
    blobs.put(b"bytes")
    assert traffic["sent"] == sent + 10


def test_a_file_is_put_in_parts_and_only_as_it_was_hashed(
    blobs: Blobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows"
    path.write_bytes(LARGE)
    assert blobs.put_file(path) == Piece(digest=content_digest(LARGE), num_bytes=len(LARGE))
    assert blobs.get(content_digest(LARGE), num_bytes=len(LARGE)) == LARGE
    monkeypatch.setattr(blobs_module, "file_digest", lambda _: ABSENT)
    with pytest.raises(ContractViolation, match="changed while it was stored"):
        blobs.put_file(path)
    assert has(blobs, [ABSENT]) == set()


def test_a_sweep_takes_what_is_old_and_not_kept_by_the_clock_of_the_store(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, old = blobs.put(b"kept"), blobs.put(b"old")
    blobs.sweep([kept], older_than_s=60.0)
    assert has(blobs, [kept, old]) == {kept, old}
    now = blobs.bucket.now
    monkeypatch.setattr(blobs.bucket, "now", lambda prefix: now(prefix) + timedelta(seconds=120))
    blobs.sweep([kept], older_than_s=60.0)
    assert has(blobs, [kept, old]) == {kept}
    assert len(blobs.bucket.objects("job-1/weights")) == 1, "the object that told the time stays"


def test_versions_that_go_leave_the_run_and_another_job_alone(open_area: OpenBlobs, settings: StackSettings) -> None:
    run, weights = open_area("run"), open_area("weights")
    other = open_blobs(settings, "job-10", "weights", deadline_s=120.0)
    digests = [one.put(b"bytes") for one in (run, weights, other)]
    assert run.put_pointer("i000010", b"there")
    run.drop_versions()
    assert [has(one, digests) for one in (run, weights, other)] == [{digests[0]}, set(), {digests[2]}]
    assert run.pointers() == ["i000010"]


def test_a_pointer_is_given_once(blobs: Blobs) -> None:
    assert blobs.pointers() == []
    assert blobs.put_pointer("i000010", b"first")
    assert not blobs.put_pointer("i000010", b"second")
    assert blobs.put_pointer("i000002", b"other")
    assert blobs.pointers() == ["i000002", "i000010"]
    assert blobs.get_pointer("i000010") == b"first"
    with pytest.raises(NotFound, match="not in the object store"):
        blobs.get_pointer("i000003")


def test_a_pointer_whose_answer_was_lost_is_given_and_another_writers_is_not(
    open_area: OpenBlobs, proxy: FaultyProxy
) -> None:
    blobs, lost = open_area(), [1]

    def loses_an_answer(method: str, path: str, body: bytes) -> bytes | None:
        return None if method == "PUT" and lost and lost.pop() else body

    proxy.spoil = loses_an_answer
    assert blobs.put_pointer("i000010", b"ours")
    assert not lost
    lost.append(1)
    assert not blobs.put_pointer("i000010", b"another's")
    assert blobs.get_pointer("i000010") == b"ours"


def test_a_name_that_would_be_another_key_is_refused(blobs: Blobs, tmp_path: Path) -> None:
    for bad in ("../" * 3 + "x", "A" * 64, "ab"):
        with pytest.raises(ContractViolation, match="no name of an object"):
            blobs.get(bad, num_bytes=1)
        with pytest.raises(ContractViolation, match="no name of an object"):
            blobs.fetch(bad, tmp_path / "x", num_bytes=1)
    with pytest.raises(ContractViolation, match="no name of an object"):
        blobs.put_pointer("a/b", b"")
    with pytest.raises(NotFound, match="is not a job id"):
        open_blobs(StackSettings(objects="file:///tmp"), "../x", "run", deadline_s=1.0)


def test_what_no_layer_has_is_said(blobs: Blobs, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=ABSENT):
        blobs.get(ABSENT, num_bytes=1)
    with pytest.raises(NotFound, match=ABSENT):
        blobs.fetch(ABSENT, tmp_path / "x", num_bytes=1)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith((".x", "x"))]


def test_errors_of_the_server_and_broken_off_bodies_are_asked_for_again(
    open_area: OpenBlobs, proxy: FaultyProxy, tmp_path: Path
) -> None:
    blobs, left = open_area(), [503, 500, 503]
    proxy.refuse = lambda method, path: left.pop() if left else 0
    digest = blobs.put(LARGE)
    assert not left
    broken: list[str] = []

    def breaks_off_twice(method: str, path: str, body: bytes) -> bytes | None:
        if method == "GET" and len(broken) < 2:
            broken.append(path)
            return None
        return body

    proxy.spoil = breaks_off_twice
    before = blobs.bucket.traffic["received"]
    assert blobs.get(digest, num_bytes=len(LARGE)) == LARGE
    assert len(broken) == 2
    received = blobs.bucket.traffic["received"] - before
    assert received == len(LARGE), "what had come was read again"


def test_bytes_that_were_spoilt_on_their_way_are_read_again_and_the_object_stays(
    open_area: OpenBlobs, proxy: FaultyProxy
) -> None:
    blobs = open_area()
    digest, left = blobs.put(b"some bytes"), [b"some bytez", b"some"]
    proxy.spoil = lambda method, path, body: left.pop() if left and method == "GET" else body
    assert blobs.get(digest, num_bytes=10) == b"some bytes"
    assert not left
    left += [b"some bytez", b"some", b"other byte"]
    with pytest.raises(NotFound, match="has the right bytes"):
        blobs.get(digest, num_bytes=10)
    assert has(blobs, [digest]) == {digest}


def test_a_damaged_object_is_deleted_counted_and_can_be_put_again(open_area: OpenBlobs, tmp_path: Path) -> None:
    blobs, before = open_area(), WRONG_READS["store"]
    digest = blobs.put(b"some bytes")
    key = f"job-1/weights/{digest}"
    for read in (
        lambda: blobs.get(digest, num_bytes=10),
        lambda: blobs.fetch(digest, tmp_path / "target", num_bytes=10),
    ):
        blobs.bucket.put(key, b"some bytez")
        with pytest.raises(NotFound, match="has the right bytes"):
            read()
        assert has(blobs, [digest]) == set()
        assert blobs.put(b"some bytes") == digest
    assert not (tmp_path / "target").exists()
    assert WRONG_READS["store"] == before + 4, "each is read twice before it is deleted"


def test_an_object_that_is_larger_than_it_may_be_is_neither_read_nor_deleted(open_area: OpenBlobs) -> None:
    blobs = open_area()
    digest = blobs.put(b"some bytes")
    with pytest.raises(NotFound, match="has the right bytes"):
        blobs.get(digest, num_bytes=4)
    assert blobs.get(digest, num_bytes=10) == b"some bytes"


def test_a_damaged_object_stays_where_the_account_may_not_delete(open_area: OpenBlobs, proxy: FaultyProxy) -> None:
    blobs = open_area()
    digest = blobs.put(b"some bytes")
    blobs.bucket.put(f"job-1/weights/{digest}", b"some bytez")
    proxy.refuse = lambda method, path: 403 if "delete" in path else 0
    with pytest.raises(NotFound, match="has the right bytes"):
        blobs.get(digest, num_bytes=10)
    assert has(blobs, [digest]) == {digest}


PAGE = b"<p>Sign in to use this network"


@pytest.mark.parametrize("num_bytes", [100, 4])
def test_a_proxy_that_answers_one_page_for_everything_has_no_object_deleted_and_none_called_damaged(
    open_area: OpenBlobs, proxy: FaultyProxy, num_bytes: int
) -> None:
    blobs = open_area()
    digest = blobs.put(data := b"x" * num_bytes)
    proxy.spoil = lambda method, path, body: PAGE if method == "GET" and "list-type" not in path else body
    with pytest.raises(ObjectsUnavailable, match="returns other bytes than were stored"):
        blobs.get(digest, num_bytes=num_bytes)
    assert proxy.num_of("DELETE") + sum("delete" in path for _, path in proxy.requests) == 2, "its own two, unread"
    proxy.spoil = true
    assert blobs.get(digest, num_bytes=num_bytes) == data


def test_what_is_spoilt_once_on_its_way_is_taken_for_no_proxy(open_area: OpenBlobs, proxy: FaultyProxy) -> None:
    left = [PAGE, PAGE]
    proxy.spoil = lambda method, path, body: left.pop() if left and method == "GET" else body
    open_area().check_writable()
    assert not left


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits half a second for a byte."""
    monkeypatch.setattr(bucket_module, "STILL_S", 0.5)


@pytest.mark.usefixtures("hasty")
def test_a_store_that_hangs_for_a_while_is_waited_for(open_area: OpenBlobs, s3_server: S3Server) -> None:
    blobs = open_area(deadline_s=60.0)
    digest = blobs.put(b"before")
    asked = blobs.bucket.traffic["requests"]
    s3_server.pause()
    threading.Timer(1.5, s3_server.go_on).start()
    assert blobs.get(digest, num_bytes=6) == b"before"
    assert blobs.bucket.traffic["requests"] > asked + 1


def impatient(settings: StackSettings) -> Blobs:
    """An area whose calls end soon: only those do that are to fail."""
    return open_blobs(settings, "job-1", "weights", deadline_s=0.5)


def test_a_store_that_stays_away_is_named_with_the_time_whatever_was_asked(
    open_area: OpenBlobs, settings: StackSettings, s3_server: S3Server
) -> None:
    patient, blobs = open_area(), impatient(settings)
    digest = patient.put(LARGE)
    s3_server.pause()
    try:
        for ask in (
            lambda: blobs.put(b"more", again=True),
            lambda: blobs.put(LARGE, again=True),
            lambda: blobs.get(digest, num_bytes=len(LARGE)),
            lambda: has(blobs, [digest]),
            lambda: blobs.pointers(),
            lambda: blobs.drop([ABSENT]),
        ):
            with pytest.raises(ObjectsUnavailable, match=r"ONBEAT_OBJECTS: waited \d+ s for the object store to \w+"):
                ask()
    finally:
        s3_server.go_on()
    assert patient.get(digest, num_bytes=len(LARGE)) == LARGE


def test_a_store_that_refuses_connections_or_answers_503_is_away(
    open_area: OpenBlobs, settings: StackSettings, proxy: FaultyProxy
) -> None:
    blobs = impatient(settings)
    proxy.refuse = lambda method, path: 503
    with pytest.raises(ObjectsUnavailable, match="for the object store to"):
        blobs.put(b"bytes")
    proxy.__exit__()
    with pytest.raises(ObjectsUnavailable):
        blobs.put(b"bytes")
    with pytest.raises(ObjectsUnavailable):
        open_area(deadline_s=0.5)


def test_a_wait_for_the_store_ends_where_the_caller_says_so(
    proxy: FaultyProxy, settings: StackSettings, open_area: OpenBlobs
) -> None:
    class Stopped(Exception):
        pass

    def stop(_: float) -> None:
        raise Stopped

    blobs = open_blobs(settings, "job-1", "run", deadline_s=60.0, sleep=stop)
    proxy.refuse = lambda method, path: 503
    with pytest.raises(Stopped):
        blobs.put(b"bytes")


@pytest.mark.parametrize(
    ("objects", "problem"),
    [
        ("", "no object store is named"),
        ("no URL", "names no object store"),
        ("s3://", "names no object store"),
        ("memory:///", "names no object store"),
        ("http://127.0.0.1:1/x", "names no object store"),
        ("file://folder", "names no object store"),
        ("file:///dev/null/folder", "can't be opened"),
        ("s3://no-such-bucket/x", "a bucket that isn't there"),
    ],
)
@pytest.mark.usefixtures("proxy")
def test_what_is_no_store_is_refused_by_the_name_of_the_setting(objects: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"ONBEAT_OBJECTS: .*{problem}"):
        open_blobs(StackSettings(objects=objects), "job-1", "run", deadline_s=120.0).check_writable()


def test_a_bucket_that_may_not_be_written_is_refused_at_once(
    settings: StackSettings, proxy: FaultyProxy, open_area: OpenBlobs
) -> None:
    proxy.refuse = lambda method, path: 403 if method == "PUT" else 0
    with pytest.raises(InvalidInput, match=r"ONBEAT_OBJECTS: the store refuses to take [0-9]+ bytes"):
        open_area(deadline_s=60.0)
    proxy.refuse = never
    assert open_blobs(settings, "job-1", "weights", deadline_s=120.0).bucket.objects("") == {}, "something half-started"


def test_a_process_that_was_given_no_account_is_told_so_and_does_not_wait_for_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(bucket_module, "ACCOUNT_S", 0.2)
    blobs = open_blobs(StackSettings(objects="s3://bucket/x"), "job-1", "run", deadline_s=600.0)
    with pytest.raises(InvalidInput, match=r"the store refuses to take [0-9]+ bytes: .*\(set an account that may"):
        blobs.check_writable()
    had_one = open_blobs(StackSettings(objects="s3://bucket/x"), "job-1", "run", deadline_s=2.0)
    had_one.bucket.traffic["requests"] += 1  # that was answered
    with pytest.raises(ObjectsUnavailable):
        had_one.check_writable()


def test_a_bucket_that_goes_away_meanwhile_is_named(open_area: OpenBlobs, proxy: FaultyProxy) -> None:
    blobs = open_area()
    proxy.refuse = lambda method, path: 404 if method == "PUT" else 0
    with pytest.raises(InvalidInput, match=r"ONBEAT_OBJECTS: `s3://.*` names a bucket that isn't there"):
        blobs.put(b"bytes")


def test_a_process_without_the_library_is_told_which_extra_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(InvalidInput, match=r'needs obstore \(pip install "onbeat\[objects\]"\)'):
        open_blobs(StackSettings(objects="s3://bucket"), "job-1", "run", deadline_s=120.0)


def test_an_upload_that_was_broken_off_leaves_no_object_and_is_whole_the_next_time(
    open_area: OpenBlobs, settings: StackSettings, proxy: FaultyProxy
) -> None:
    blobs = open_area()
    proxy.refuse = lambda method, path: 503 if "partNumber=2" in path else 0
    with pytest.raises(ObjectsUnavailable):
        impatient(settings).put(LARGE)
    proxy.refuse = never
    assert has(blobs, [content_digest(LARGE)]) == set()
    assert blobs.get(blobs.put(LARGE), num_bytes=len(LARGE)) == LARGE


def test_what_goes_through_the_proxy_is_what_the_server_has(open_area: OpenBlobs, proxy: FaultyProxy) -> None:
    open_area().put(b"bytes")
    assert any(path.startswith(f"/{BUCKET}/") for _, path in proxy.requests)


def test_folders_of_a_store_are_the_jobs_that_have_objects_and_their_sizes_are_known(
    open_area: OpenBlobs, settings: StackSettings
) -> None:
    bucket = open_area().bucket
    assert bucket.folders() == []
    for key in ("job-b/run/x", "job-a/run/x", "job-a/weights/y", "at the top"):
        bucket.put(key, b"12345")
    assert bucket.folders() == ["job-a", "job-b"]
    sizes = {key: size for key, (size, _) in bucket.sizes_and_ages("job-a").items()}
    assert sizes == {"job-a/run/x": 5, "job-a/weights/y": 5}
