"""The scripts as the server gets them: flags, then the gate of their roles, then the shared head, then the script.

    python -m broker.connection.script_texts DIR    the scripts as they are loaded; users.acl with @ROLE@ for each hash

A script is known by the SHA-1 of its text. Imports the standard library only: the image of the Redis service is built
with it.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path

from broker.connection.roles import OPERATOR, ROLES, SCRIPT_ROLES, gate, users_acl

SCRIPTS = Path(__file__).parents[1] / "scripts"
PRELUDE = (SCRIPTS / "prelude.lua").read_text()
REFUSED_WHEN_FULL = frozenset({"create_job", "publish_batch", "put_chunk"})
"""Scripts that bring payloads: at maxmemory they are refused. What keeps a run alive and what frees memory goes on."""
GOES_ON_WHEN_FULL = "#!lua flags=allow-oom\n"


@functools.cache
def script_text(name: str) -> str:
    """scripts/{name}.lua as the server gets it."""
    head = "" if name in REFUSED_WHEN_FULL else GOES_ON_WHEN_FULL
    return head + gate(name) + PRELUDE + (SCRIPTS / f"{name}.lua").read_text()


@functools.cache
def script_sha(name: str) -> str:
    """By which EVALSHA calls it."""
    return hashlib.sha1(script_text(name).encode(), usedforsecurity=False).hexdigest()


def write_texts(folder: Path) -> None:
    """What a server needs at its start, for one that runs no Python."""
    (folder / "scripts").mkdir(parents=True, exist_ok=True)
    for name in SCRIPT_ROLES:
        (folder / "scripts" / f"{name}.lua").write_text(script_text(name))
    (folder / "users.acl").write_text(users_acl({role: f"@{role.upper()}@" for role in (OPERATOR, *ROLES)}))


if __name__ == "__main__":
    write_texts(Path(sys.argv[1]))
