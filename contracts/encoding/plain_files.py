"""Files of a run folder, opened as no more than what they should be.

Code of a job's author writes into the run folder: what has a file's name there may be a link to any file of this host,
a pipe that never ends, or a file that claims to be larger than any memory. A gateway or a consumer that reads it would
hang, or die, for all jobs.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_BYTES = 512 * 1024 * 1024
"""The largest file that is read as a whole: far more than a million iterations write."""


def read_plain(path: Path) -> bytes:
    """Returns what a file holds. Raises OSError as `open_plain` does."""
    with open_plain(path, max_bytes=MAX_BYTES) as file:
        return file.read(MAX_BYTES)


def open_plain(path: Path, *, max_bytes: int | None = None) -> BinaryIO:
    """Opens a file for reading. Raises OSError for what is missing, no plain file, or over max_bytes."""
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(number, "rb")
    found = os.fstat(number)
    if stat.S_ISREG(found.st_mode) and (max_bytes is None or found.st_size <= max_bytes):
        return file
    file.close()
    if stat.S_ISREG(found.st_mode):
        raise OSError(errno.EFBIG, f"is over {max_bytes} bytes", str(path))
    raise OSError(errno.EINVAL, "is no plain file", str(path))
