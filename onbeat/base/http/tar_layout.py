"""Flat folders as uncompressed tars in which each byte has its place before the first is read.

    head ─ model.safetensors ─ zeros to 512 │ head ─ onbeat.json ─ zeros to 512 │ two blocks of zeros

Names are sorted; time, owner and mode are the same in every head. So the same files make the same bytes, their number
is known in advance, a download goes on from any byte, and a reader who knows the files knows each head.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from contracts.encoding.names import SEGMENT
from contracts.errors import ContractViolation

MEDIA_TYPE = "application/x-tar"
CHUNK_BYTES = 1024 * 1024
"""Bytes that are read at a time."""
END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, kw_only=True)
class TarPart:
    """A stretch of a tar: bytes that are known, or a whole file. TarLayout creates it."""

    start: int
    num_bytes: int
    name: str = ""
    """The file's; "" where `content` is all of it."""
    content: bytes = b""


class TarLayout:
    """The places of a tar's bytes, which follow from the names and sizes of its files. Each side of a transfer computes
    it.
    """

    def __init__(self, files: Mapping[str, int]) -> None:
        """Lays the files out in the order of their names.

        Args:
            files: Name → size in bytes.

        Raises:
            ContractViolation: A name is a path, or has another form than a plain file's.
        """
        self.parts: list[TarPart] = []
        self.num_bytes = 0
        for name, size in sorted(files.items()):
            if not re.fullmatch(SEGMENT, name):
                raise ContractViolation(f"`{name[:80]!a}` is no file's name", field="files")
            self._add_bytes(_head(name, size))
            self._add(TarPart(start=self.num_bytes, num_bytes=size, name=name))
            self._add_bytes(bytes(-size % tarfile.BLOCKSIZE))
        self._add_bytes(END)

    def _add_bytes(self, content: bytes) -> None:
        self._add(TarPart(start=self.num_bytes, num_bytes=len(content), content=content))

    def _add(self, part: TarPart) -> None:
        if part.num_bytes or part.name:
            self.parts.append(part)
            self.num_bytes += part.num_bytes


def _head(name: str, size: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = size
    # Of 8 GiB and more the size is binary: every tar that reads models takes GNU's form.
    return member.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def check_files(folder: Path, files: Mapping[str, int]) -> None:
    """Raises ContractViolation where a file isn't there, is no plain file or has another size, and OSError."""
    for name, size in files.items():
        with open_file(folder / name, size):
            pass


def open_file(path: Path, size: int) -> IO[bytes]:
    """Opens a plain file of this size, and no link. Raises ContractViolation, OSError."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    state = os.fstat(file.fileno())
    if not stat.S_ISREG(state.st_mode) or state.st_size != size:
        file.close()
        raise ContractViolation(f"is no file of {size} bytes any more", field=path.name)
    return file


def tar_bytes(folder: Path, layout: TarLayout, *, start: int = 0) -> Iterator[bytes]:
    """Yields the tar from its byte `start` on, a chunk at a time.

    Raises ContractViolation and OSError where the folder isn't as the layout says: the tar ends before its end then.
    """
    for part in layout.parts:
        skipped = max(0, start - part.start)
        if skipped >= part.num_bytes:
            continue
        if not part.name:
            yield part.content[skipped:]
            continue
        with open_file(folder / part.name, part.num_bytes) as file:
            file.seek(skipped)
            left = part.num_bytes - skipped
            while left:
                chunk = file.read(min(CHUNK_BYTES, left))
                if not chunk:
                    raise ContractViolation("ends before its end", field=part.name)
                left -= len(chunk)
                yield chunk


class TarUnpacking:
    """Writes the files of a tar whose layout is known. Nothing in the tar itself decides where a file goes.

    The receiver of a tar creates it and feeds it the bytes as they come.
    """

    def __init__(self, layout: TarLayout, folder: Path) -> None:
        self.position = 0
        """The byte of the tar that is to come next."""
        self._layout = layout
        self._folder = folder
        self._place = 0
        self._file: IO[bytes] | None = None

    @property
    def is_whole(self) -> bool:
        """True once every byte of the tar was there."""
        return self.position == self._layout.num_bytes

    def add(self, chunk: bytes) -> None:
        """Takes the next bytes. Raises ContractViolation where they aren't those of the layout, and OSError."""
        rest = memoryview(chunk)
        while rest:
            if self._place == len(self._layout.parts):
                raise ContractViolation("the tar is longer than its files", field="files")
            part = self._layout.parts[self._place]
            done = self.position - part.start
            piece = rest[: part.num_bytes - done]
            if not part.name:
                if piece != part.content[done : done + len(piece)]:
                    raise ContractViolation(f"byte {self.position} of the tar isn't that of its files", field="files")
            else:
                self._open(part).write(piece)
            self.position += len(piece)
            rest = rest[len(piece) :]
            self._next()

    def restart(self) -> None:
        """Begins anew: what was written is replaced."""
        self.close()
        self.position = self._place = 0

    def close(self) -> None:
        """Closes the file that is being written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, part: TarPart) -> IO[bytes]:
        if self._file is None:
            self._file = (self._folder / part.name).open("wb")
        return self._file

    def _next(self) -> None:
        """Goes to the part of the next byte; a file without bytes is written on the way."""
        while self._place < len(self._layout.parts):
            part = self._layout.parts[self._place]
            if self.position < part.start + part.num_bytes:
                return
            if part.name:
                self._open(part)
                self.close()
            self._place += 1
