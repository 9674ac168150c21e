"""A host's cache as another one reads it: over real HTTP, with the key, and never believed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from contracts.encoding.digests import content_digest
from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.base.http.outgoing import make_client
from onbeat.base.metrics.wrong_reads import WRONG_READS
from onbeat.base.process.child_process import ChildProcess
from onbeat.stack.options import child_environment
from onbeat.stack.ports import free_port
from onbeat.weights.objects import hosts as hosts_module
from onbeat.weights.objects.blobs import Blobs, open_blobs
from onbeat.weights.objects.cache import open_cache
from onbeat.weights.objects.served import create_app
from tests.pipeline import until_ready
from tests.rooms.objects.s3_server import FaultyProxy

KEY = "key-of-caches"
DATA = b"some bytes" * 100_000
DIGEST = content_digest(DATA)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackSettings]:
    """A host that serves its cache. Its settings, with its address in `cache_hosts`."""
    folder, port = tmp_path_factory.mktemp("host"), free_port()
    settings = StackSettings(cache=str(folder / "cache"), cache_key=KEY, cache_hosts=f"http://127.0.0.1:{port}")
    child = ChildProcess(
        "cache",
        command=(sys.executable, "-m", "onbeat.weights.objects.served"),
        environment=child_environment(os.environ, settings, port=port),
        log_path=folder / "cache.log",
    )
    child.start()
    try:
        until_ready(f"{settings.cache_hosts}/readyz", child)
        yield settings
    finally:
        child.stop(grace_s=5.0)


@pytest.fixture
def kept(host: StackSettings) -> Path:
    """The file of DATA in the host's cache."""
    open_cache(host.cache, cache_mb=host.cache_mb).put(DIGEST, DATA)
    return Path(host.cache) / "blobs" / DIGEST


Reader = Callable[..., Blobs]


@pytest.fixture
def reader(host: StackSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Opens an area as another host does, whose store is a folder. changes: of the settings."""
    monkeypatch.setattr(hosts_module, "ANSWER_S", 120.0)
    settings = StackSettings(objects=f"file://{tmp_path}/store", cache_hosts=host.cache_hosts, cache_key=KEY)

    def opened(**changes: str) -> Blobs:
        return open_blobs(replace(settings, **changes), "job-1", "weights", deadline_s=120.0)

    return opened


@pytest.mark.usefixtures("kept")
def test_what_another_host_has_costs_the_store_nothing(reader: Reader, tmp_path: Path) -> None:
    blobs = reader(cache=str(tmp_path / "cache"))
    assert blobs.get(DIGEST, num_bytes=len(DATA)) == DATA
    reader().fetch(DIGEST, tmp_path / "fetched", num_bytes=len(DATA))
    assert (tmp_path / "fetched").read_bytes() == DATA
    assert blobs.bucket.traffic["requests"] == 0
    assert blobs.cache is not None
    assert blobs.cache.read(DIGEST, lambda _: None), "a host that was given bytes can give them on"


def test_what_it_does_not_have_or_has_damaged_comes_from_the_store(reader: Reader, kept: Path) -> None:
    blobs = reader()
    other = blobs.put(b"more bytes")
    assert blobs.get(other, num_bytes=10) == b"more bytes"
    blobs.put(DATA)
    kept.write_bytes(DATA[:-1] + b"x")
    asked = blobs.bucket.traffic["requests"]
    assert blobs.get(DIGEST, num_bytes=len(DATA)) == DATA
    assert not kept.exists()
    assert blobs.bucket.traffic["requests"] == asked + 1


@pytest.mark.usefixtures("kept")
def test_bytes_that_a_host_has_wrong_or_too_many_of_are_not_believed(reader: Reader, host: StackSettings) -> None:
    with FaultyProxy(int(host.cache_hosts.rpartition(":")[2])) as between:
        blobs = reader(cache_hosts=f"http://127.0.0.1:{between.port}")
        blobs.put(DATA)
        before, wrong_before = blobs.bucket.traffic["requests"], WRONG_READS["host"]
        for wrong in (b"other bytes", DATA + b"more"):
            between.spoil = lambda method, path, body, wrong=wrong: wrong
            assert blobs.get(DIGEST, num_bytes=len(DATA)) == DATA
        assert (len(between.requests), blobs.bucket.traffic["requests"]) == (2, before + 2)
        assert WRONG_READS["host"] == wrong_before + 2
        between.spoil = lambda method, path, body: None
        assert blobs.get(DIGEST, num_bytes=len(DATA)) == DATA
        asked = len(between.requests)
        assert blobs.get(DIGEST, num_bytes=len(DATA)) == DATA
        assert len(between.requests) == asked, "a host that broke off is asked again at once"


@pytest.mark.usefixtures("kept")
def test_a_host_that_is_away_or_has_another_key_is_passed_over(reader: Reader, host: StackSettings) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    blobs = reader(cache_hosts=f"{gone}, {host.cache_hosts}")
    assert [blobs.get(DIGEST, num_bytes=len(DATA)) == DATA for _ in range(4)] == [True] * 4
    assert blobs.bucket.traffic["requests"] == 0
    blobs = reader(cache_key="another-key")
    blobs.put(DATA)
    asked = blobs.bucket.traffic["requests"]
    assert blobs.get(DIGEST, num_bytes=len(DATA)) == DATA
    assert blobs.bucket.traffic["requests"] == asked + 1


@pytest.mark.usefixtures("kept")
def test_only_who_has_the_key_is_given_bytes_and_nothing_but_a_digest_is_a_name(host: StackSettings) -> None:
    path = f"/v1/blobs/{DIGEST}"
    with make_client(host.cache_hosts) as stranger:
        assert stranger.get(path).status_code == 401
        assert stranger.get(path, headers={"authorization": "Bearer other"}).status_code == 401
    with make_client(host.cache_hosts, headers={"authorization": f"Bearer {KEY}"}) as client:
        assert client.get(path).content == DATA
        assert client.get(f"/v1/blobs/{content_digest(b'none')}").status_code == 404
        for name in ("..%2Fowner.json", "owner.json", DIGEST.upper(), f".{DIGEST}"):
            answer = client.get(f"/v1/blobs/{name}")
            assert answer.status_code == 404, name
            assert b"boot_id" not in answer.content
        assert b"onbeat_cache_served_total" in client.get("/metrics").content


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cache": ""}, "ONBEAT_CACHE: is not set"),
        ({"cache_key": ""}, "ONBEAT_CACHE_KEY: is not set"),
        ({"cache_key": "two words"}, "ONBEAT_CACHE_KEY: has a character"),
    ],
)
def test_a_service_without_a_cache_or_a_key_does_not_start(
    changes: dict[str, str], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        create_app(replace(StackSettings(cache=str(tmp_path), cache_key=KEY), **changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"cache_hosts": "127.0.0.1:8300"}, "ONBEAT_CACHE_HOSTS: `127.0.0.1:8300` is no URL"),
        ({"cache_hosts": "http://host:x"}, "ONBEAT_CACHE_HOSTS: .* is no URL"),
        ({"cache_key": ""}, "ONBEAT_CACHE_KEY: is not set"),
    ],
)
def test_other_hosts_that_cannot_be_asked_are_refused_by_the_setting(
    changes: dict[str, str], problem: str, reader: Reader
) -> None:
    with pytest.raises(InvalidInput, match=problem):
        reader(**changes)
