"""A run folder as objects: each file is pieces, named by their content, and a list says which.

    metrics, timeline, chain, log ─ grow ─▶ pieces ─┐
    checkpoints, records ─ whole ─▶ a piece each ───┴▶ list, an object too ─▶ its name in Redis, and in a pointer

Half an upload is in no list, and a trainer that was fenced off gets none into Redis. Pointers are what a Redis that
comes back older, or empty, is caught up from: with the newest list there comes the audit chain.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import stat
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from broker.trainer_side import TrainerSide
from contracts.encoding.digests import content_digest, file_digest
from contracts.encoding.json_lines import open_plain
from contracts.encoding.wire import Record, decode, encode
from contracts.errors import ContractViolation, NotFound
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.base.process.crash_points import reach
from onbeat.base.process.folders import make_private, usable, written_whole
from onbeat.weights.files.tensor_folder import ASIDE
from onbeat.weights.objects.blobs import Blobs, Piece, open_blobs
from onbeat.weights.objects.cache import lock

log = logging.getLogger(__name__)

PIECE_BYTES = 256 * 1024
"""A piece of a growing file goes on growing up to here: each commit writes its last one again."""
MOST_PIECE_BYTES = 16 * 1024 * 1024
AT_ONCE = 8
"""Objects that are put or fetched side by side."""
PART = re.compile(r"\..+\.[0-9a-f]{12}")
"""The name of a file that is being brought (`written_whole`): a process that was killed leaves it."""
READERS_S = 1.0
"""Longest that a trainer waits for readers of its host, who bring files into the folder that it will write."""
UNUSED_S = 3600.0
"""Age from which an object goes that is in no list: a list may be on its way that names it."""


Files = Mapping[str, tuple[Piece, ...]]
"""Path below the run folder → what a file consists of, in order."""


class FileList(Record, frozen=True, kw_only=True):
    """A run folder after one commit."""

    job_id: str
    trainer_epoch: int
    iteration: int
    files: Files


class Listed(Record, frozen=True, kw_only=True):
    """Where a list is: what Redis and pointers hold."""

    trainer_epoch: int
    iteration: int
    at: Piece


class GrowingFile:
    """A file of this host that is only appended to, and the pieces that it has become."""

    def __init__(self, path: Path, pieces: tuple[Piece, ...]) -> None:
        """pieces: of the newest list. What another host has written stays before what this one writes."""
        self._path = path
        self._pieces = pieces
        self._closed = len(pieces)
        """How many of them stay as they are."""
        self._start = self._seen = _size(path)
        """Where in the file the last, open piece begins; and how long it was when it was put."""
        if begins_with(path, pieces):
            self._seen = sum(piece.num_bytes for piece in pieces)
            if pieces and pieces[-1].num_bytes < PIECE_BYTES:
                self._closed -= 1
            self._start = sum(piece.num_bytes for piece in pieces[: self._closed])

    def put(self, blobs: Blobs) -> tuple[Piece, ...]:
        """The pieces of the file as it is now. Raises OSError."""
        size = _size(self._path)
        if size < self._seen:  # another file has its name now: it was rotated
            self._closed, self._start, self._seen = len(self._pieces), 0, 0
        if size == self._seen:
            return self._pieces
        pieces = list(self._pieces[: self._closed])
        with open_plain(self._path) as file:
            file.seek(self._start)
            left = size - self._start
            while left > 0 and (data := file.read(min(left, MOST_PIECE_BYTES))):
                # It is new: whether the store has it needs no request.
                pieces.append(Piece(digest=blobs.put(data, again=True), num_bytes=len(data)))
                left -= len(data)
                if len(data) >= PIECE_BYTES:
                    self._start += len(data)
                    self._closed = len(pieces)
        self._pieces, self._seen = tuple(pieces), size
        return self._pieces


class ObjectFiles:
    """Copies one job's run folder to the object store, and brings it from there to other hosts.

    Each method raises Unavailable where the copies can't be reached within the deadline.
    """

    def __init__(
        self, settings: StackSettings, folder: RunFolder, *, deadline_s: float, pause: Callable[[float], None]
    ) -> None:
        """Raises as `open_blobs`; `begin` as `Blobs.check_writable`."""
        self._folder = folder
        self._blobs = open_blobs(settings, folder.job_id, "run", deadline_s=deadline_s, sleep=pause)
        self._give_folder_back: Callable[[], object] | None = None
        """Set while this object keeps readers of this host out."""
        self._brought: dict[str, bytes] = {}
        """Part of the folder → the list that it was brought by."""
        self._growing: dict[str, GrowingFile] = {}
        self._whole: dict[str, tuple[tuple[int, int], tuple[Piece, ...]]] = {}
        """Path → (its size and time, the pieces that it has become)."""
        paths = (folder.metrics, folder.timeline, folder.evaluations, folder.chain, folder.trainer_log)
        self._appended = tuple(path.name for path in paths)

    def begin(self, listed: bytes | None) -> None:
        """Brings what a trainer goes on with, before it reads or writes a file; what it can't have it does without.

        Args:
            listed: The list of copies, as Redis has it; the copies themselves may know a newer one, where Redis came
                back older.
        """
        self._blobs.check_writable()
        self._take_folder()
        files: Files = {}
        known = [*_read(listed), *_read(self._newest_pointer())]
        # A later trainer knows more, whatever it rewound.
        for pointer in sorted(known, key=lambda pointer: (pointer.trainer_epoch, pointer.iteration), reverse=True):
            try:
                files = self._list_at(pointer).files
                break
            except NotFound as error:
                log.warning("the list of the files of %s can't be found: %s", self._folder.job_id, error)
        # Lines of this process go into the log meanwhile.
        self._bring({name: pieces for name, pieces in files.items() if name != self._folder.trainer_log.name})
        for name in self._appended:
            self._growing[name] = GrowingFile(self._path_of(name), files.get(name, ()))
        for name, pieces in files.items():
            if name not in self._appended and (stamp := _stamp(self._path_of(name))) is not None:
                self._whole[name] = (stamp, pieces)

    def bring(self, listed: bytes | None = None, *, below: str = "") -> None:
        """Makes the run folder here what the list says, for a reader of it; what is here already stays.

        Args:
            listed: The list of copies, as Redis has it; None takes the newest of which the copies know, which is one of
                a checkpoint.
            below: The part of the folder that is brought; "" brings all.
        """
        listed = listed or self._newest_pointer()
        if listed is None or self._brought.get(below) == listed:
            return
        with self._unless_written() as is_free:
            for newest in _read(listed) if is_free else ():
                files = self._list_at(newest).files
                self._bring({name: pieces for name, pieces in files.items() if name.startswith(below)})
                self._brought[below] = listed

    def keep(self, iteration: int, side: TrainerSide, *, has_checkpoint: bool) -> None:
        """Copies what has changed since, after the commit of an iteration, and says so. Raises FencedOff.

        Args:
            iteration: The number of the iteration.
            side: The trainer's side of Redis, which is told where the list of copies is.
            has_checkpoint: Copies what isn't only appended to, too, and removes what is in no list any more.
        """
        # All at once: over a network each request waits for the store, whatever it carries.
        with usable(self._folder.path, to_be="copied"), ThreadPoolExecutor(AT_ONCE) as pool:
            whole = pool.submit(self._put_whole, everything=has_checkpoint)
            growing = pool.map(lambda name: self._growing[name].put(self._blobs), self._appended)
            files = {name: pieces for name, pieces in zip(self._appended, growing, strict=True) if pieces}
            files |= whole.result()
        listed = FileList(
            job_id=self._folder.job_id, trainer_epoch=side.trainer_epoch, iteration=iteration, files=files
        )
        at = self._put_list(listed)
        name = encode(Listed(trainer_epoch=side.trainer_epoch, iteration=iteration, at=at))
        reach("consumer.keeping_files")
        side.record_files(name)
        reach("consumer.after_files_kept")
        if has_checkpoint:
            self._blobs.put_pointer(f"{side.trainer_epoch:020d}-{iteration:09d}", name)
            # What Redis holds of it is held where it counts, before anything that an older list names goes.
            side.confirm(iteration)
            self._blobs.sweep(_named(at, files), older_than_s=UNUSED_S)

    def remove(self) -> None:
        """Removes all copies of a job that was removed. Safe to repeat."""
        # Its versions are among them, where its trainer's end could not see to them.
        self._blobs.bucket.delete_below(self._folder.job_id)

    def leave(self) -> None:
        """Lets others of this host bring files into the folder: its trainer writes none of them any more."""
        if self._give_folder_back is not None:
            self._give_folder_back()

    def _take_folder(self) -> None:
        """Keeps readers of this host out while this trainer's object lives; what killed ones have left goes."""
        make_private(self._folder.path)
        descriptor = os.open(self._folder.path, os.O_RDONLY)
        self._give_folder_back = weakref.finalize(self, os.close, descriptor)
        with contextlib.suppress(OSError):  # a file system without locks of folders
            if lock(descriptor, fcntl.LOCK_EX, wait_s=READERS_S):
                for path in self._folder.path.rglob(".*"):
                    if PART.fullmatch(path.name) and path.is_file():
                        path.unlink()

    @contextlib.contextmanager
    def _unless_written(self) -> Iterator[bool]:
        """Yields True where no trainer of this host writes the folder; while the lock is held here, none begins to."""
        with contextlib.ExitStack() as opened:
            try:
                descriptor = os.open(self._folder.path, os.O_RDONLY)
                opened.callback(os.close, descriptor)
                is_free = lock(descriptor, fcntl.LOCK_SH, wait_s=0.0)
            except OSError:
                is_free = True
            yield is_free

    def _put_whole(self, *, everything: bool) -> dict[str, tuple[Piece, ...]]:
        """Copies the files that aren't appended to, where they are new; all of them, or the records of rollouts alone.

        Others stay as they were copied last. Raises OSError.
        """
        part = "" if everything else "rollouts/"
        names = [name for name in self._names() if name.startswith(part)]
        there = {name: stamp for name in names if (stamp := _stamp(self._folder.path / name)) is not None}
        known = {name: copied for name, copied in self._whole.items() if name in there or not name.startswith(part)}
        new = [name for name, stamp in there.items() if name not in known or known[name][0] != stamp]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            pieces = pool.map(lambda name: self._blobs.put_file(self._folder.path / name), new)
            self._whole = known | {name: (there[name], (piece,)) for name, piece in zip(new, pieces, strict=True)}
        return {name: pieces for name, (_, pieces) in self._whole.items()}

    def _names(self) -> Iterator[str]:
        """The plain files but scratch, what was put aside, and versions, which have stores of their own."""
        top = self._folder.path
        for folder, folders, names in () if top.is_symlink() else os.walk(top):
            below = Path(folder).relative_to(top)
            left_out = (ASIDE, "" if below.name else self._folder.weights.name)
            folders[:] = [name for name in folders if name[0] != "." and name not in left_out]
            there = ((below / name).as_posix() for name in names if name[0] != ".")
            yield from (name for name in there if name not in self._appended)

    def _put_list(self, listed: FileList) -> Piece:
        data = encode(listed)
        return Piece(digest=self._blobs.put(data, again=True), num_bytes=len(data))

    def _newest_pointer(self) -> bytes | None:
        names = self._blobs.pointers()
        return self._blobs.get_pointer(names[-1]) if names else None

    def _list_at(self, newest: Listed) -> FileList:
        """Raises ContractViolation for a list of another job."""
        files = decode(self._blobs.get(newest.at.digest, num_bytes=newest.at.num_bytes), FileList)
        if files.job_id != self._folder.job_id:
            raise ContractViolation(f"the list of its files is of {files.job_id}", field=self._folder.job_id)
        return files

    def _bring(self, files: Files) -> None:
        """A file that has lost a piece is left out, and said: of checkpoints the one before is gone on with."""

        def bring(name: str) -> None:
            try:
                with usable(path := self._path_of(name), to_be="brought"):
                    self._bring_file(path, files[name])
            except NotFound as error:
                log.warning("%s of %s can't be fetched: %s", name, self._folder.job_id, error)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(bring, files))

    def _bring_file(self, path: Path, pieces: tuple[Piece, ...]) -> None:
        is_ahead = path.name in self._appended and path.parent == self._folder.path
        if begins_with(path, pieces) if is_ahead else _is_all_of(path, pieces):
            return
        make_private(path.parent)
        if len(pieces) == 1:
            self._blobs.fetch(pieces[0].digest, path, num_bytes=pieces[0].num_bytes)
            return
        with written_whole(path) as file:
            file.writelines(self._content(path, pieces))

    def _content(self, path: Path, pieces: Iterable[Piece]) -> Iterator[bytes]:
        """The bytes of each piece: those that the file here has in its place already, and the copies of others."""
        start = 0
        for piece in pieces:
            data = _part(path, start, piece.num_bytes)
            is_here = content_digest(data) == piece.digest
            yield data if is_here else self._blobs.get(piece.digest, num_bytes=piece.num_bytes)
            start += piece.num_bytes

    def _path_of(self, name: str) -> Path:
        """Raises ContractViolation for a path out of the run folder: a writer of the bucket names them, and a
        job's author may have left a link there."""
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise ContractViolation("is no path in a run folder", field=name)
        if any((self._folder.path / folder).is_symlink() for folder in path.parents):
            raise ContractViolation("leads out of the run folder by a link", field=name)
        return self._folder.path / path


def _named(at: Piece, files: Files) -> set[str]:
    """The digests of a list, and of all that it names."""
    return {at.digest, *(piece.digest for pieces in files.values() for piece in pieces)}


def begins_with(path: Path, pieces: Iterable[Piece]) -> bool:
    """Returns True where a file here begins with these bytes, hashed again."""
    start = 0
    for piece in pieces:
        if content_digest(_part(path, start, piece.num_bytes)) != piece.digest:
            return False
        start += piece.num_bytes
    return True


def _is_all_of(path: Path, pieces: tuple[Piece, ...]) -> bool:
    """Returns True where a file here is the copied one; it is hashed again where its size is the same."""
    with contextlib.suppress(OSError):
        return len(pieces) == 1 and _size(path) == pieces[0].num_bytes and file_digest(path) == pieces[0].digest
    return False


def _part(path: Path, start: int, num_bytes: int) -> bytes:
    """At most so many bytes of a file; b"" where there is none, or what has its name is none."""
    try:
        with open_plain(path) as file:
            file.seek(start)
            return file.read(num_bytes)
    except OSError:
        return b""


def _stamp(path: Path) -> tuple[int, int] | None:
    """(size, time of the last change in ns); None for what is no plain file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size, status.st_mtime_ns


def _size(path: Path) -> int:
    return (_stamp(path) or (0, 0))[0]


def _read(listed: bytes | None) -> list[Listed]:
    return [decode(listed, Listed)] if listed else []
