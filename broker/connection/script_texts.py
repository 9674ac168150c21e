"""The scripts as the server gets them: flags, the gate of their roles, what they reach of the shared head, the script.

    python -m broker.connection.script_texts DIR    the scripts as they are loaded; users.acl with @ROLE@ for each hash

A script is known by the SHA-1 of its text. Imports the standard library only: the image of the Redis service is built
with it.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from pathlib import Path

from broker.connection.roles import OPERATOR, ROLES, SCRIPT_ROLES, gate, users_acl

SCRIPTS = Path(__file__).parents[1] / "scripts"
PRELUDE = (SCRIPTS / "prelude.lua").read_text()
REFUSED_WHEN_FULL = frozenset({"create_job"})
"""At maxmemory it is refused. `publish_batch` and `put_chunk` bring payloads, too, and look themselves whether that is
needed to free more; what keeps a run alive, and what frees memory, goes on."""
GOES_ON_WHEN_FULL = "#!lua flags=allow-oom\n"
ARGUMENTS = re.compile(r"\{([\w, ]*)\}")
"""The first braces of a script: what it is told."""
FUNCTION = re.compile(r"^local function (\w+)\(.*?^end\n", re.MULTILINE | re.DOTALL)


@functools.cache
def script_text(name: str) -> str:
    """scripts/{name}.lua as the server gets it."""
    head = "" if name in REFUSED_WHEN_FULL else GOES_ON_WHEN_FULL
    return head + gate(name) + _linked((SCRIPTS / f"{name}.lua").read_text())


def _linked(script: str) -> str:
    """The script behind the shared head, less the functions that it never reaches: Lua makes them anew at each call."""
    text = PRELUDE + script
    for function in reversed(list(FUNCTION.finditer(PRELUDE))):  # each calls earlier ones only
        if text.count(f"{function[1]}(") == 1:
            text = text.replace(function[0], "")
    return text


@functools.cache
def argument_names(name: str) -> frozenset[str]:
    """What the script is told by name, as its head says."""
    told = ARGUMENTS.search((SCRIPTS / f"{name}.lua").read_text())
    return frozenset(re.findall(r"\w+", told[1])) if told else frozenset()


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
