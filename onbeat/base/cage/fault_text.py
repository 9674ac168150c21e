"""The text of an exception that caged code raised, as it reaches the reason of a job, which every read key sees."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from onbeat.base.process.own_packages import PACKAGES

MAX_CHARS = 500
"""Most characters of such a text."""
MAX_PLACE_CHARS = 200
"""Most characters of the place in it."""
MAX_FRAMES = 8
"""Most calls of a traceback that are printed, the innermost."""
FROZEN = "<frozen "
"""The file names of Python's own import system begin with it: an import fails where it stands in the author's code."""
FOLDERS_OF_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib", "platstdlib")
)
"""Most specific first: installed packages lie inside the standard library's folder."""


class Place(NamedTuple):
    """A line of code that an exception went through."""

    module: str
    file: str
    line: int
    function: str


def fault_text(error: BaseException) -> str:
    """Says what caged code raised: the message where the author's own code raised it, else the places alone.

    The author's own code is the file or package that our code called. A library that it uses puts into its messages
    what it was reading, which is not for each reader of a job.

    Args:
        error: An exception that was raised below a call of ours.

    Returns:
        "TYPE: MESSAGE, at PLACE in FUNCTION: LINE", or "TYPE, raised in PLACE, called at PLACE in FUNCTION: LINE",
        MAX_CHARS characters at most.
    """
    kind = type(error).__name__
    places = _foreign_places(error.__traceback__)
    if not places:
        return _cut(f"{kind}: {_message(error)}", MAX_CHARS)
    own_place = next(place for place in reversed(places) if _are_of_one_author(place, places[0]))
    where = _cut(_in_function(own_place), MAX_PLACE_CHARS)
    if own_place is places[-1]:
        # A long message must not push out the place, by which its author finds the line.
        return f"{_cut(f'{kind}: {_message(error)}', MAX_CHARS - len(where) - len(', at '))}, at {where}"
    return _cut(f"{kind}, raised in {_shown(places[-1])}, called at {where}", MAX_CHARS)


def print_traceback(title: str, error: BaseException, *notes: str) -> None:
    """Prints a traceback to the standard error, from where the service's log has what caged code prints.

    Args:
        title: The line before it.
        error: An exception of foreign code, of which nothing is trusted: what can't be printed is left out.
        notes: Lines behind it.
    """
    # The code may have put anything in the place of the standard error, and its exception may not be printable.
    with suppress(Exception):
        lines = [f"{title}:\n", *traceback.TracebackException.from_exception(error, limit=-MAX_FRAMES).format()]
        sys.stderr.write("".join((*lines, *(f"{note}\n" for note in notes))))


def _cut(text: str, max_chars: int) -> str:
    """Returns the text, cut to a number of characters, with what can't be encoded escaped."""
    encodable = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(encodable) <= max_chars:
        return encodable
    return f"{encodable[: max_chars - 1]}…"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # foreign code, which may raise what is no Exception
        return "an error that can't be shown"


def _foreign_places(frames: TracebackType | None) -> list[Place]:
    """Lists the place of each frame that isn't ours, the outermost first."""
    places: list[Place] = []
    for frame, line in traceback.walk_tb(frames):
        module = str(frame.f_globals.get("__name__", ""))
        file = frame.f_code.co_filename
        if module.partition(".")[0] not in PACKAGES and not file.startswith(FROZEN):
            places.append(Place(module=module, file=file, line=line, function=frame.f_code.co_name))
    return places


def _are_of_one_author(place: Place, other: Place) -> bool:
    """Returns True where both are of one top-level package, or of modules that lie next to each other."""
    package, other_package = (each.module.partition(".")[0] for each in (place, other))
    folder, other_folder = (Path(each.file).parent.resolve() for each in (place, other))
    return package == other_package or (folder == other_folder and folder not in FOLDERS_OF_LIBRARIES)


def _shown(place: Place) -> str:
    """Returns FILE:LINE, the file below the folder of its library, or without any folder."""
    path = Path(place.file)
    for folder in FOLDERS_OF_LIBRARIES:
        if path.is_relative_to(folder):
            return f"{path.relative_to(folder)}:{place.line}"
    return f"{path.name}:{place.line}"


def _in_function(place: Place) -> str:
    """Returns FILE:LINE in FUNCTION: the text of the line, where it can be read."""
    shown = _shown(place)
    if not place.function.startswith("<"):  # as <module> and <lambda>
        shown += f" in {place.function}"
    text = linecache.getline(place.file, place.line).strip()
    return f"{shown}: {text}" if text else shown
