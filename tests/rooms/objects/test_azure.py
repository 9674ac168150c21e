"""Azure's object store, by its emulator: what blobs ask of a store beside S3's, and how it refuses."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.errors import InvalidInput, NotFound
from contracts.settings import StackSettings
from onbeat.weights.objects.blobs import Blobs, open_blobs
from onbeat.weights.objects.bucket import PART_BYTES
from tests.rooms.objects.azurite import COMMAND, CONTAINER, Azurite
from tests.rooms.objects.conftest import has

pytestmark = pytest.mark.skipif(COMMAND is None, reason="azurite-blob is not on the PATH: `npm install -g azurite`")


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    with Azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def settings(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> StackSettings:
    for name, value in azurite.environment.items():
        monkeypatch.setenv(name, value)
    return StackSettings(objects=f"az://{CONTAINER}/{uuid.uuid4().hex}")


def opened(settings: StackSettings) -> Blobs:
    blobs = open_blobs(settings, "job-1", "run", deadline_s=30.0)
    blobs.check_writable()
    return blobs


def test_blobs_are_put_read_listed_swept_and_named_once(settings: StackSettings, tmp_path: Path) -> None:
    blobs, large = opened(settings), tmp_path / "large"
    large.write_bytes(bytes(range(256)) * (PART_BYTES // 100))
    small = blobs.put(b"small")
    piece = blobs.put_file(large)
    digest, num_bytes = piece.digest, piece.num_bytes
    assert num_bytes > 2 * PART_BYTES
    assert blobs.get(small, num_bytes=5) == b"small"
    blobs.fetch(digest, tmp_path / "fetched", num_bytes=num_bytes)
    assert (tmp_path / "fetched").read_bytes() == large.read_bytes()
    assert has(blobs, [small, digest, "0" * 64]) == {small, digest}
    assert blobs.put_pointer("first", b"one")
    assert not blobs.put_pointer("first", b"two")
    assert (blobs.pointers(), blobs.get_pointer("first")) == (["first"], b"one")
    blobs.sweep([digest], older_than_s=-60.0)  # its clock tells whole seconds
    assert has(blobs, [small, digest]) == {digest}
    blobs.bucket.delete_below("job-1")
    with pytest.raises(NotFound):
        blobs.get(digest, num_bytes=num_bytes)
    assert blobs.pointers() == []


def test_a_container_that_is_not_there_and_an_account_that_may_not_write_are_refused(
    settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInput, match="ONBEAT_OBJECTS: `az://absent/here` names a bucket that isn't there"):
        opened(StackSettings(objects="az://absent/here"))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(bytes(64)).decode())
    with pytest.raises(InvalidInput, match="ONBEAT_OBJECTS: the store refuses to take"):
        opened(settings)
