"""A host's cache: what is in it costs the store nothing, and no trouble with it is more than a detour."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from contracts.encoding.digests import content_digest
from contracts.encoding.wire import decode_json
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.base.metrics.wrong_reads import WRONG_READS
from onbeat.weights.objects import cache as cache_module
from onbeat.weights.objects.blobs import Blobs
from onbeat.weights.objects.cache import HostCache, Owner, open_cache
from tests.rooms.objects.conftest import OpenBlobs
from tests.rooms.objects.s3_server import FaultyProxy

READ = """
import sys
from contracts.settings import StackSettings
from onbeat.weights.objects.blobs import open_blobs
objects, cache, digest = sys.argv[1:]
blobs = open_blobs(StackSettings(objects=objects, cache=cache), "job-1", "weights", deadline_s=120.0)
blobs.get(digest, num_bytes=10)
print(blobs.bucket.traffic["requests"], blobs.bucket.traffic["received"])
"""


@pytest.fixture
def blobs(open_area: OpenBlobs, tmp_path: Path) -> Blobs:
    return open_area(cache=str(tmp_path / "cache"), cache_mb=1)


@pytest.fixture
def cache(tmp_path: Path) -> HostCache:
    return HostCache(tmp_path, most_bytes=100)


def file_of(cache: HostCache, digest: str) -> Path:
    return cache._blobs / digest


def kept(cache: HostCache) -> set[str]:
    return {path.name for path in cache._blobs.iterdir()}


def test_a_second_process_of_a_host_asks_the_store_for_nothing(
    open_area: OpenBlobs, settings: StackSettings, tmp_path: Path
) -> None:
    arguments = (settings.objects, str(tmp_path / "cache"), open_area().put(b"some bytes"))
    asked = [
        subprocess.run(
            [sys.executable, "-c", READ, *arguments], capture_output=True, text=True, check=True, timeout=60
        ).stdout.split()
        for _ in range(2)
    ]
    assert asked == [["1", "10"], ["0", "0"]]


def test_what_was_put_or_fetched_is_at_hand(blobs: Blobs, open_area: OpenBlobs, tmp_path: Path) -> None:
    digest, other = blobs.put(b"some bytes"), open_area().put(b"more bytes")
    blobs.fetch(other, tmp_path / "first", num_bytes=10)
    asked = blobs.bucket.traffic["requests"]
    assert blobs.get(digest, num_bytes=10) == b"some bytes"
    blobs.fetch(other, tmp_path / "second", num_bytes=10)
    assert (tmp_path / "second").read_bytes() == b"more bytes"
    assert blobs.bucket.traffic["requests"] == asked


def test_those_who_miss_the_same_bytes_at_once_fetch_them_once(
    blobs: Blobs, open_area: OpenBlobs, proxy: FaultyProxy
) -> None:
    digest = open_area().put(b"some bytes")
    all_wait = threading.Barrier(4, timeout=60.0)
    before = proxy.num_of("GET")

    def read(_: int) -> bytes:
        all_wait.wait()
        return blobs.get(digest, num_bytes=10)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read, range(4))) == [b"some bytes"] * 4
    assert proxy.num_of("GET") == before + 1


def test_a_damaged_file_is_deleted_counted_and_comes_from_the_store(blobs: Blobs, tmp_path: Path) -> None:
    digest, cache, before = blobs.put(b"some bytes"), blobs.cache, WRONG_READS["cache"]
    assert cache is not None
    for spoilt in (b"some bytez", b"some", b""):
        file_of(cache, digest).write_bytes(spoilt)
        assert blobs.get(digest, num_bytes=10) == b"some bytes"
    file_of(cache, digest).write_bytes(b"some bytez")
    blobs.fetch(digest, tmp_path / "fetched", num_bytes=10)
    assert (tmp_path / "fetched").read_bytes() == b"some bytes"
    assert file_of(cache, digest).read_bytes() == b"some bytes"
    assert WRONG_READS["cache"] == before + 4


def test_a_cache_that_takes_nothing_is_passed_over(blobs: Blobs, tmp_path: Path) -> None:
    cache = blobs.cache
    assert cache is not None
    # As on a disk that is full, or gone: no file can be made.
    for folder in (cache._blobs, cache._locks):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        folder.write_bytes(b"")
    digest = blobs.put(b"some bytes")
    assert blobs.get(digest, num_bytes=10) == b"some bytes"
    blobs.fetch(digest, tmp_path / "fetched", num_bytes=10)


def test_a_disk_that_is_full_takes_nothing_and_no_part_stays(cache: HostCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module.shutil, "copyfile", full)
    source = file_of(cache, "source").parent.parent / "source"
    source.write_bytes(b"bytes")
    with source.open("rb") as file:
        cache.put_file(content_digest(b"bytes"), file)
    assert kept(cache) == set()


def test_what_was_used_longest_ago_makes_room(cache: HostCache) -> None:
    blobs = {content_digest(data): data for data in (b"a" * 40, b"b" * 40, b"c" * 40)}
    first, second, third = blobs
    for age, digest in ((300, first), (200, second)):
        cache.put(digest, blobs[digest])
        used_s = file_of(cache, digest).stat().st_mtime - age
        os.utime(file_of(cache, digest), (used_s, used_s))
    data = bytearray()
    assert cache.read(first, data.extend)
    assert data == blobs[first]
    cache.put(third, blobs[third])
    assert kept(cache) == {first, third}


def test_what_is_larger_than_the_cache_is_not_kept_and_nothing_goes_for_it(cache: HostCache) -> None:
    small, large = b"a" * 100, b"b" * 101
    for data in (small, large):
        cache.put(content_digest(data), data)
    assert kept(cache) == {content_digest(small)}


def test_what_is_being_written_takes_its_room_until_its_writer_is_long_gone(cache: HostCache) -> None:
    part = file_of(cache, f".{content_digest(b'x')}.0")
    part.write_bytes(b"." * 90)
    data = b"a" * 20
    cache.put(content_digest(data), data)
    assert kept(cache) == {part.name}
    os.utime(part, (1.0, 1.0))
    cache.put(content_digest(data), data)
    assert kept(cache) == {content_digest(data)}


def test_a_file_and_its_folder_are_their_owners_alone(tmp_path: Path) -> None:
    cache = open_cache(str(tmp_path / "cache"), cache_mb=1)
    cache.put(content_digest(b"bytes"), b"bytes")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert file_of(cache, content_digest(b"bytes")).stat().st_mode & 0o777 == 0o600


HOST, OTHER = Owner(host="here", boot_id="1"), Owner(host="there", boot_id="2")
RESTARTED, NAMESAKE = Owner(host="here", boot_id="3"), Owner(host="here", boot_id="4")


def claim(folder: Path, owner: Owner) -> None:
    cache_module._claim(folder, lambda: owner)


def test_a_folder_of_another_host_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "owner.json").write_text('{"host":"there","boot_id":"2"}')
    with pytest.raises(InvalidInput, match=r"ONBEAT_CACHE: .* is the cache of host there, this is here"):
        claim(tmp_path, HOST)
    claim(tmp_path, OTHER)


def test_processes_and_containers_of_a_host_share_a_folder_and_a_namesake_may_not(tmp_path: Path) -> None:
    claim(tmp_path, HOST)
    claim(tmp_path, HOST)
    claim(tmp_path, Owner(host="a-container", boot_id=HOST.boot_id))
    with pytest.raises(InvalidInput, match="cache of another host here, this is here"):
        claim(tmp_path, NAMESAKE)


def test_a_host_that_started_anew_takes_its_folder_again(tmp_path: Path) -> None:
    for before in ('{"host":"here","boot_id":"12345678"}', '{"host":"here","boot_id":"1', ""):
        path = tmp_path / str(len(before)) / "owner.json"
        path.parent.mkdir()
        path.write_text(before)
        claim(path.parent, RESTARTED)
        assert decode_json(path.read_bytes(), Owner) == RESTARTED


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(InvalidInput, match="ONBEAT_CACHE: /dev/null/cache can't be used"):
        open_cache("/dev/null/cache", cache_mb=1)


def test_a_folder_of_the_cache_or_of_the_store_is_closed_to_specs_and_cages(tmp_path: Path) -> None:
    for setting in ({"cache": str(tmp_path / "kept")}, {"objects": f"file://{tmp_path}/kept"}):
        settings = StackSettings(model_root=str(tmp_path), **setting)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="leads into"):
            settings.spec_root.find("kept/model", field="model.path")
        assert settings.own_folders[1:] == (str(tmp_path / "kept"),), "caged processes see it"
