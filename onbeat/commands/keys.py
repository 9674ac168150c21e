"""`onbeat key`: a line of the file that ONBEAT_KEYS_FILE names."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import Conflict, InvalidInput, NotFound
from contracts.settings import settings_from
from onbeat.base.http.access import KEY_LINE, SCOPES
from onbeat.base.process.folders import written_whole
from onbeat.commands import options
from onbeat.terminal.output import console_for, tell

NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)


def key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Who has the key: letters, digits, . _ and -.")],
    scope: Annotated[str, typer.Option("--scope", help="read, submit or admin.")] = "submit",
    revoke: Annotated[bool, typer.Option("--revoke", help="Take the name's keys away.")] = False,
    rotate: Annotated[bool, typer.Option("--rotate", help="Make a second key; the older one still opens.")] = False,
    revoke_older: Annotated[bool, typer.Option("--revoke-older", help="Leave the newest key alone.")] = False,
    file: Annotated[Path | None, typer.Option("--file", help="The file of keys. [ONBEAT_KEYS_FILE]")] = None,
    json_output: options.Json = False,
) -> None:
    """Make a key of the gateway with a scope, or revoke one; a running gateway knows it with its next request."""
    path = file or Path(settings_from(os.environ).keys_file or "/")
    if path == Path("/"):
        raise InvalidInput("names no file", field="--file", cure="give it, or set ONBEAT_KEYS_FILE")
    if not NAME.fullmatch(name):
        raise InvalidInput(
            "has a character that a name cannot have", field="NAME", cure="use at most 64 letters, digits, . _ and -"
        )
    if scope not in SCOPES:
        raise InvalidInput(f"`{scope}` is not a scope", field="--scope", cure=f"use one of {', '.join(SCOPES)}")
    if revoke + rotate + revoke_older > 1:
        raise InvalidInput("cannot be combined", field="--revoke, --rotate, --revoke-older", cure="use one of them")
    if revoke or revoke_older:
        revoked(path, name, keeps_newest=revoke_older)
        left = "its newest key alone" if revoke_older else "no key any more"
        tell({"name": name, "revoked": True}, f"{name} has {left}", json_output=json_output)
        return
    new_key = rotated(path, name) if rotate else add(path, name, scope)
    tell({"name": name, "scope": scope, "key": new_key}, new_key, json_output=json_output)
    if not json_output:
        console_for(json_output=True).print(f"{name} may {scope}; the key is shown here once: the file has its hash")


def add(path: Path, name: str, scope: str) -> str:
    """Returns the new key of a name that has none. Raises Conflict for a name that has one."""
    lines = _lines(path)
    if any(_name_of(line) == name for line in lines):
        raise Conflict(f"{name} has a key", field="NAME", cure="--rotate makes another one, --revoke takes it away")
    return _added(path, lines, name, scope)


def rotated(path: Path, name: str) -> str:
    """Returns a second key of a name, with the scope of its newest one; jobs are owned by names, and stay its own.

    Raises:
        NotFound: The name has no key.
    """
    lines = _lines(path)
    key_lines = [KEY_LINE.fullmatch(line.strip()) for line in lines]
    scopes = [key_line[2] for key_line in key_lines if key_line is not None and key_line[1] == name]
    if not scopes:
        raise NotFound(f"{name} has no key in {path}", field="NAME", cure="leave --rotate out")
    return _added(path, lines, name, scopes[-1])


def revoked(path: Path, name: str, *, keeps_newest: bool = False) -> None:
    """Takes a name's keys away; with keeps_newest, all but the one that was made last. Raises NotFound."""
    lines = _lines(path)
    own = [number for number, line in enumerate(lines) if _name_of(line) == name]
    if not own:
        raise NotFound(f"{name} has no key in {path}", field="NAME")
    going = set(own[:-1] if keeps_newest else own)
    _write(path, [line for number, line in enumerate(lines) if number not in going])


def _added(path: Path, lines: list[str], name: str, scope: str) -> str:
    new_key = secrets.token_urlsafe(32)
    _write(path, [*lines, f"{name} {scope} {hashlib.sha256(new_key.encode()).hexdigest()}"])
    return new_key


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []


def _name_of(line: str) -> str:
    key_line = KEY_LINE.fullmatch(line.strip())
    return key_line[1] if key_line else ""


def _write(path: Path, lines: list[str]) -> None:
    """Writes the file whole: a gateway that reads meanwhile finds it as it was, or as it is to be."""
    with written_whole(path) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())
