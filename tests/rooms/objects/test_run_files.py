"""A run folder that goes to another host as objects: what a trainer keeps, what others bring, and what is refused."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import onbeat.run_folder.object_files as run_files_module
from broker.trainer_side import TrainerSide
from contracts.encoding.digests import content_digest
from contracts.encoding.wire import decode, encode
from contracts.errors import ContractViolation, FencedOff, InvalidInput
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.run_folder.object_files import PIECE_BYTES, FileList, Listed, ObjectFiles, Piece
from onbeat.run_folder.run_files import run_files
from onbeat.weights.objects.blobs import open_blobs
from tests.rooms.objects.conftest import has

JOB = "job-1"


class Side:
    """The side of a trainer that the fence knows, until another takes the job."""

    def __init__(self, epoch: int = 1) -> None:
        self.trainer_epoch = epoch
        self.listed: bytes | None = None
        self.is_fenced = False

    def record_files(self, listed: bytes) -> None:
        if self.is_fenced:
            raise FencedOff("another trainer holds the job")
        self.listed = listed

    def confirm(self, iteration: int) -> None: ...


@pytest.fixture
def host(tmp_path: Path) -> Callable[[str], Host]:
    return lambda name: Host(tmp_path, name)


class Host:
    """One of several that share nothing but the objects."""

    def __init__(self, root: Path, name: str) -> None:
        (root / "bucket").mkdir(exist_ok=True)
        self.settings = StackSettings(run_root=str(root / name), objects=(root / "bucket").as_uri())
        self.folder = RunFolder(self.settings.run_root_path, JOB)
        self.files = ObjectFiles(self.settings, self.folder, deadline_s=10.0, pause=time.sleep)
        self.blobs = open_blobs(self.settings, JOB, "run", deadline_s=10.0)

    def write(self, name: str, data: bytes) -> None:
        path = self.folder.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def append(self, name: str, data: bytes) -> None:
        with (self.folder.path / name).open("ab") as file:
            file.write(data)

    def read(self, name: str) -> bytes:
        return (self.folder.path / name).read_bytes()

    def keep(self, iteration: int, side: Side, *, has_checkpoint: bool = False) -> FileList:
        self.files.keep(iteration, as_side(side), has_checkpoint=has_checkpoint)
        assert side.listed is not None
        return self.list_of(side)

    def list_of(self, side: Side) -> FileList:
        at = decode(side.listed or b"", Listed).at
        return decode(self.blobs.get(at.digest, num_bytes=at.num_bytes), FileList)

    def names(self) -> set[str]:
        paths = (path for path in self.folder.path.rglob("*") if path.is_file())
        return {path.relative_to(self.folder.path).as_posix() for path in paths}


def as_side(side: Side) -> TrainerSide:
    return side  # type: ignore[return-value]


Hosts = Callable[[str], Host]


def trained(host: Host, side: Side) -> None:
    """A run of three iterations, with a checkpoint and a recorded batch."""
    host.files.begin(None)
    host.write("spec.json", b"{}")
    for iteration in range(3):
        for name in ("metrics.jsonl", "timeline.jsonl", "chain.jsonl", "trainer.log"):
            host.append(name, f"{name} {iteration}\n".encode())
        host.write(f"rollouts/i{iteration:06d}/train-000000.msgpack", bytes([iteration]) * 100)
        host.keep(iteration, side)
    host.write("checkpoints/i000002/model.safetensors", b"weights")
    host.write("checkpoints/i000002/state.json", b"state")
    host.keep(2, side, has_checkpoint=True)


def test_another_host_has_the_whole_run_folder_and_goes_on_with_it(host: Hosts) -> None:
    first, second, side = host("a"), host("b"), Side()
    trained(first, side)
    second.files.begin(side.listed)
    # Its own process writes the log there.
    assert second.names() == first.names() - {"trainer.log"}
    assert all(second.read(name) == first.read(name) for name in second.names())
    second.append("trainer.log", b"on the second host\n")
    second.append("metrics.jsonl", b"metrics.jsonl 3\n")
    second.keep(3, successor := Side(epoch=2))
    reader = host("c")
    reader.files.bring(successor.listed)
    assert reader.read("trainer.log") == first.read("trainer.log") + b"on the second host\n"
    assert reader.read("metrics.jsonl") == second.read("metrics.jsonl")
    assert reader.names() == first.names()


def test_what_is_hidden_put_aside_a_link_or_a_version_is_not_kept(host: Hosts) -> None:
    here, side = host("a"), Side()
    here.files.begin(None)
    scratch = ("checkpoints/aside/i000001/x", "checkpoints/.i000003.00/x", "weights/v000001/x")
    for name in (".audit.json", *scratch, "kept"):
        here.write(name, b"x")
    (here.folder.path / "link").symlink_to("/etc/passwd")
    assert set(here.keep(0, side, has_checkpoint=True).files) == {"kept"}


def test_a_growing_file_is_put_in_pieces_of_which_the_last_alone_is_put_again(host: Hosts) -> None:
    here, side = host("a"), Side()
    here.files.begin(None)
    here.write("metrics.jsonl", b"a" * PIECE_BYTES)
    closed = here.keep(0, side).files["metrics.jsonl"]
    here.append("metrics.jsonl", b"b")
    two = here.keep(1, side).files["metrics.jsonl"]
    here.append("metrics.jsonl", b"c")
    three = here.keep(2, side).files["metrics.jsonl"]
    assert two == (*closed, Piece(digest=content_digest(b"b"), num_bytes=1))
    assert three == (*closed, Piece(digest=content_digest(b"bc"), num_bytes=2))
    assert here.keep(3, side).files["metrics.jsonl"] == three
    # Another process of the same host goes on with its last piece.
    again = host("a")
    again.files.begin(side.listed)
    again.append("metrics.jsonl", b"d")
    assert again.keep(4, Side(epoch=2)).files["metrics.jsonl"][-1].digest == content_digest(b"bcd")


def test_a_log_that_was_rotated_goes_on_behind_what_was_kept(host: Hosts) -> None:
    here, side = host("a"), Side()
    here.files.begin(None)
    here.write("trainer.log", b"a long first line\n")
    here.keep(0, side)
    here.write("trainer.log", b"anew\n")
    here.keep(1, side)
    reader = host("b")
    reader.files.bring(side.listed)
    assert reader.read("trainer.log") == b"a long first line\nanew\n"


def test_a_trainer_that_was_fenced_off_changes_nothing_that_others_read(
    host: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_files_module, "UNUSED_S", 0.0)
    first, second, side = host("a"), host("b"), Side()
    trained(first, side)
    second.files.begin(side.listed)
    side.is_fenced = True
    first.write("checkpoints/i000004/state.json", b"of an old epoch")
    with pytest.raises(FencedOff):
        first.keep(4, side, has_checkpoint=True)
    second.append("metrics.jsonl", b"metrics.jsonl 3\n")
    kept = second.keep(3, Side(epoch=2), has_checkpoint=True)
    assert "checkpoints/i000004/state.json" not in kept.files
    assert second.blobs.pointers() == [f"{1:020d}-{2:09d}", f"{2:020d}-{3:09d}"]


def test_an_empty_redis_is_caught_up_from_the_newest_pointer_and_an_older_one_too(host: Hosts) -> None:
    first, side = host("a"), Side()
    first.files.begin(None)
    first.write("chain.jsonl", b"0\n")
    first.keep(0, side, has_checkpoint=True)
    older = side.listed
    first.append("chain.jsonl", b"1\n")
    first.keep(1, side, has_checkpoint=True)
    for name, listed in (("b", None), ("c", older)):
        later = host(name)
        later.files.begin(listed)
        assert later.read("chain.jsonl") == b"0\n1\n"
    first.append("chain.jsonl", b"2\n")
    first.keep(2, side)  # no pointer: Redis alone knows
    later = host("d")
    later.files.begin(side.listed)
    assert later.read("chain.jsonl") == b"0\n1\n2\n"


def test_a_checkpoint_that_has_lost_an_object_is_left_out_and_said(
    host: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, side = host("a"), host("b"), Side()
    trained(first, side)
    second.blobs.drop([content_digest(b"weights")])
    second.files.begin(side.listed)
    assert "checkpoints/i000002/model.safetensors" not in second.names()
    assert "checkpoints/i000002/state.json" in second.names()
    assert "model.safetensors" in caplog.text


def test_what_is_in_no_list_goes_at_a_checkpoint_once_it_is_old(host: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    here, side = host("a"), Side()
    trained(here, side)
    pruned = here.folder.path / "checkpoints/i000002/model.safetensors"
    pruned.unlink()
    here.keep(3, side, has_checkpoint=True)
    digest = content_digest(b"weights")
    assert has(here.blobs, [digest]) == {digest}
    monkeypatch.setattr(run_files_module, "UNUSED_S", 0.0)
    kept = here.keep(4, side, has_checkpoint=True)
    assert has(here.blobs, [digest]) == set()
    named = {piece.digest for pieces in kept.files.values() for piece in pieces}
    assert has(here.blobs, named) == named


def test_a_reader_has_the_part_that_it_asks_for_and_what_it_has_already_stays(host: Hosts) -> None:
    first, reader, side = host("a"), host("b"), Side()
    trained(first, side)
    reader.files.bring(side.listed, below="metrics.jsonl")
    assert reader.names() == {"metrics.jsonl"}
    before = (reader.folder.path / "metrics.jsonl").stat()
    reader.files.bring(side.listed)
    assert reader.names() == first.names()
    assert (reader.folder.path / "metrics.jsonl").stat().st_ino == before.st_ino
    # On a host that shares the folder with the trainer, it is ahead of the list.
    reader.append("metrics.jsonl", b"later\n")
    again = host("b")
    again.files.bring(side.listed)
    assert again.read("metrics.jsonl").endswith(b"later\n")


def test_a_gateway_that_shares_the_folder_with_the_trainer_changes_nothing_there(host: Hosts) -> None:
    first, side = host("a"), Side()
    trained(first, side)
    # Since then it has gone back to its second iteration, dropped its oldest record, and its log was emptied.
    first.write("rollouts/i000002/train-000000.msgpack", b"sampled anew")
    (first.folder.path / "rollouts/i000000/train-000000.msgpack").unlink()
    first.write("trainer.log", b"goes on\n")
    before = {name: first.read(name) for name in first.names()}
    with (first.folder.path / "trainer.log").open("ab") as its_log:
        gateway = host("a")
        gateway.files.bring(side.listed)
        its_log.write(b"and on\n")
    assert {name: first.read(name) for name in first.names()} == before | {"trainer.log": b"goes on\nand on\n"}
    # It ended, and another host goes on.
    first.files = gateway.files
    gateway.files.bring(side.listed)
    assert first.read("rollouts/i000000/train-000000.msgpack") == bytes(100)


def test_what_a_process_that_was_killed_has_half_brought_goes_at_the_next_start(host: Hosts) -> None:
    first, second, side = host("a"), host("b"), Side()
    trained(first, side)
    for name in (".audit.json", "checkpoints/i000002/.model.safetensors.0123456789ab"):
        second.write(name, b"half")
    second.files.begin(side.listed)
    assert second.names() == first.names() - {"trainer.log"} | {".audit.json"}


def test_a_host_that_trained_on_alone_gives_way_to_the_list(host: Hosts) -> None:
    first, side = host("a"), Side()
    trained(first, side)
    first.append("metrics.jsonl", b"an iteration that was lost\n")
    second = host("b")
    second.files.begin(side.listed)
    second.append("metrics.jsonl", b"the same iteration again\n")
    second.keep(3, successor := Side(epoch=2))
    again = host("a")
    again.files.begin(successor.listed)
    assert again.read("metrics.jsonl") == second.read("metrics.jsonl")


@pytest.mark.parametrize("name", ["../other/spec.json", "/etc/passwd", ""])
def test_a_path_out_of_the_run_folder_is_refused(host: Hosts, name: str) -> None:
    here = host("a")
    data = b"x"
    piece = Piece(digest=here.blobs.put(data), num_bytes=len(data))
    listed = encode(FileList(job_id=JOB, trainer_epoch=1, iteration=0, files={name: (piece,)}))
    at = Piece(digest=here.blobs.put(listed), num_bytes=len(listed))
    with pytest.raises(ContractViolation, match="no path in a run folder"):
        here.files.bring(encode(Listed(trainer_epoch=1, iteration=0, at=at)))


def test_a_link_in_the_run_folder_leads_nothing_out_or_in(host: Hosts, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret").write_bytes(b"secret")
    first, reader, side = host("a"), host("b"), Side()
    first.files.begin(None)
    first.write("spec.json", b"{}")
    (first.folder.path / "rollouts").symlink_to(elsewhere)
    for has_checkpoint in (False, True):
        assert "rollouts/secret" not in first.keep(0, side, has_checkpoint=has_checkpoint).files
    (first.folder.path / "rollouts").unlink()
    first.write("rollouts/planted", b"x")
    first.keep(1, side)
    reader.write("spec.json", b"{}")
    (reader.folder.path / "rollouts").symlink_to(elsewhere)
    with pytest.raises(ContractViolation, match="by a link"):
        reader.files.bring(side.listed)
    assert [path.name for path in elsewhere.iterdir()] == ["secret"]


def test_the_list_of_another_job_is_refused(host: Hosts) -> None:
    here = host("a")
    listed = encode(FileList(job_id="job-2", trainer_epoch=1, iteration=0, files={}))
    at = Piece(digest=here.blobs.put(listed), num_bytes=len(listed))
    with pytest.raises(ContractViolation, match="job-2"):
        here.files.begin(encode(Listed(trainer_epoch=1, iteration=0, at=at)))


def test_all_of_a_removed_job_goes(host: Hosts) -> None:
    first, side = host("a"), Side()
    trained(first, side)
    open_blobs(first.settings, JOB, "weights", deadline_s=10.0).put(b"a version")
    first.files.remove()
    first.files.remove()
    assert list(first.blobs.bucket.objects(JOB)) == []
    later = host("b")
    later.files.begin(None)
    assert later.names() == set()


def test_a_stack_without_objects_copies_nothing(tmp_path: Path) -> None:
    assert run_files(StackSettings(), RunFolder(tmp_path, JOB), deadline_s=1.0) is None


def test_a_store_whose_package_is_missing_is_refused_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(InvalidInput, match=r"onbeat\[objects\]") as raised:
        run_files(StackSettings(objects=tmp_path.as_uri()), RunFolder(tmp_path, JOB), deadline_s=1.0)
    assert raised.value.field == "ONBEAT_OBJECTS"
