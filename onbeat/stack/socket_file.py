"""Where the stack's own Redis listens: a socket file, in a folder that its owner alone may enter.

Every user of the machine may connect to a port of loopback, and hold all connections that a server takes before it asks
for a password. A file in a private folder is out of their reach.
"""

from __future__ import annotations

import errno
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

from contracts.errors import InvalidInput
from onbeat.process.private_folders import is_private

NAME = "redis.sock"
TEMPORARY = "onbeat-"
"""How the name of a temporary folder begins."""


def place_socket(folder: Path, *, owner: object) -> Path:
    """A path in this folder or, where it can't be there, in a temporary one that goes with its owner. The server makes
    the file, and replaces one that a killed server left. Raises InvalidInput where neither has a place for it.
    """
    if _takes_sockets(folder):
        return folder / NAME
    temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY)).resolve()
    weakref.finalize(owner, shutil.rmtree, temporary, ignore_errors=True)
    if not _takes_sockets(temporary):
        raise InvalidInput(
            f"neither {folder} nor {temporary} is private and has a short enough path for a socket file",
            field="--run-dir",
            cure="choose a shorter one on a local disk, or another TMPDIR",
        )
    return temporary / NAME


def check_private(folder: Path) -> None:
    """Raises InvalidInput; a temporary folder may have been cleaned away, and made anew by another user."""
    if not is_private(folder):
        raise InvalidInput(
            f"{folder}, where the server would listen, is open to others",
            field="--run-dir",
            cure="chmod 700, or remove it",
        )


def _takes_sockets(folder: Path) -> bool:
    """Whether other users may not enter it, a path fits into a socket's address, and its file system has sockets."""
    if not is_private(folder):
        return False
    path = folder / NAME
    try:
        with socket.socket(socket.AF_UNIX) as trial:
            trial.bind(str(path))
    except OSError as error:
        return error.errno == errno.EADDRINUSE  # a server has listened here before
    path.unlink()
    return True
