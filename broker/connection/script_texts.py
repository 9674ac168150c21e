"""The library of functions as the server gets it: the shared head, then scripts/*.lua, each behind its roles' gate.

    python -m broker.connection.script_texts DIR    the library and users.acl, with @SEAL@ and @ROLE@ for the secrets

A library is known by the digest of its text, so that two releases stand side by side on one server. The server keeps it
in its file and sends it to its replicas. Imports the standard library only: the image of the Redis service is built
with it.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from pathlib import Path

from broker.connection.bounds import in_lua
from broker.connection.roles import OPERATOR, ROLES, SCRIPT_ROLES, SEAL_MARK, gate, users_acl

SCRIPTS = Path(__file__).parents[1] / "scripts"
PRELUDE = (SCRIPTS / "prelude.lua").read_text()
BRING_PAYLOADS = frozenset({"beat", "create_job", "publish_batch", "put_chunk"})
"""At maxmemory these are refused, unless what they bring frees more; what keeps a run alive or frees memory goes on."""
WHEN_FULL = "_when_full"
"""Behind the name of one of these: the same function for a server at maxmemory, which says why else it refuses."""
HEAD = re.compile(r"^(?=-- \w+: \{)", re.MULTILINE)
"""The beginning of a script in the file of its side: `-- name: {its arguments}`."""
ARGUMENTS = re.compile(r"\{((?:[\w, ]|\n--)*)\}")
"""The first braces of a script: the names of its arguments, where these are many on several lines of comment."""


@functools.cache
def library_text() -> str:
    """Returns the library, with SEAL_MARK where its secret goes."""
    functions = "".join(_function(name) for name in SCRIPT_ROLES)
    return f"#!lua name={library_name()}\n{PRELUDE}\n{functions}"


@functools.cache
def library_name() -> str:
    """Returns the library's name: it holds the digest of all that the library is made of."""
    texts = (PRELUDE, *(gate(name) + in_lua(name) + scripts()[name] for name in SCRIPT_ROLES))
    return f"onbeat_{hashlib.sha256(''.join(texts).encode()).hexdigest()[:12]}"


def function_name(name: str) -> str:
    """Returns the name by which FCALL calls a script."""
    return f"{library_name()}_{name}"


def _function(name: str) -> str:
    call = "moved()"
    if scripts()[name].startswith(f"-- {name}: {{epoch"):
        call = "as_trainer(moved)"
    # The role comes first: what another role's caller sends isn't decoded.
    begun = "begin(arguments, is_full, bounds)"
    run = f"local function run(arguments, is_full)\n{gate(name)}{begun}\nreturn {call}\nend\n"
    bounds = f"local bounds = {in_lua(name)}\n"
    body = f"do\n{bounds}local function moved()\n{scripts()[name]}end\n{run}"
    if name not in BRING_PAYLOADS:
        return f"{body}{_registered(name, is_full=False, goes_on_when_full=True)}end\n"
    when_full = _registered(name + WHEN_FULL, is_full=True, goes_on_when_full=True)
    return f"{body}{_registered(name, is_full=False, goes_on_when_full=False)}{when_full}end\n"


def _registered(name: str, *, is_full: bool, goes_on_when_full: bool) -> str:
    flags = "'allow-oom'" if goes_on_when_full else ""
    call = f"function(_, arguments) return run(arguments, {str(is_full).lower()}) end"
    named = f"function_name = '{function_name(name)}', flags = {{ {flags} }}"
    return f"redis.register_function{{ {named}, callback = {call} }}\n"


@functools.cache
def scripts() -> dict[str, str]:
    """Returns name → text of each script, from its head to the next one's."""
    files = (path.read_text() for path in sorted(SCRIPTS.glob("*.lua")) if path.stem != "prelude")
    texts = [text for file in files for text in HEAD.split(file)[1:]]
    return {text.partition(":")[0].removeprefix("-- "): f"{text.rstrip()}\n" for text in texts}


@functools.cache
def argument_names(name: str) -> frozenset[str]:
    """Returns the names of a script's arguments, as its head has them."""
    arguments = ARGUMENTS.search(scripts()[name])
    if arguments:
        return frozenset(re.findall(r"\w+", arguments[1]))
    return frozenset()


def write_texts(folder: Path) -> None:
    """Writes the library and users.acl, which a server needs at its start, for one that runs no Python."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "library.lua").write_text(library_text())
    (folder / "users.acl").write_text(users_acl({role: f"@{role.upper()}@" for role in (OPERATOR, *ROLES)}, SEAL_MARK))


if __name__ == "__main__":
    write_texts(Path(sys.argv[1]))
