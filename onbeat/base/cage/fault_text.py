"""The text of an exception that caged code raised, as it reaches the reason of a job, which every read key sees."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from onbeat.base.process.own_packages import PACKAGES

MAX_CHARS = 500
"""Most characters of such a text."""
FROZEN = "<frozen "
"""The file names of Python's own import system begin with it: an import fails where it stands in the author's code."""
FOLDERS_OF_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib", "platstdlib")
)
"""Most specific first: installed packages lie inside the standard library's folder."""


def fault_text(error: BaseException) -> str:
    """Says what caged code raised: the message where the author's own code raised it, else the places alone.

    The author's own code is the file or package that our code called. A library that it uses puts into its messages
    what it was reading, which is not for each reader of a job.

    Args:
        error: An exception that was raised below a call of ours.

    Returns:
        "TYPE: MESSAGE", or "TYPE, raised in PLACE, called at PLACE", MAX_CHARS characters at most.
    """
    kind = type(error).__name__
    places = _foreign_places(error.__traceback__)
    if places and not _are_of_one_author(places[-1], places[0]):
        called = next(place for place in reversed(places) if _are_of_one_author(place, places[0]))
        text = f"{kind}, raised in {_shown(places[-1])}, called at {_shown(called)}"
    else:
        text = f"{kind}: {_message(error)}"
    encodable = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(encodable) <= MAX_CHARS:
        return encodable
    return f"{encodable[: MAX_CHARS - 1]}…"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # foreign code, which may raise what is no Exception
        return "an error that can't be shown"


def _foreign_places(frames: TracebackType | None) -> list[tuple[str, str, int]]:
    """Lists (module, file, line) of each frame that isn't ours, the outermost first."""
    places: list[tuple[str, str, int]] = []
    for frame, line in traceback.walk_tb(frames):
        module = str(frame.f_globals.get("__name__", ""))
        file = frame.f_code.co_filename
        if module.partition(".")[0] not in PACKAGES and not file.startswith(FROZEN):
            places.append((module, file, line))
    return places


def _are_of_one_author(place: tuple[str, str, int], other: tuple[str, str, int]) -> bool:
    """Returns True where both are of one top-level package, or of modules that lie next to each other."""
    package, other_package = (module.partition(".")[0] for module, _, _ in (place, other))
    folder, other_folder = (Path(file).parent.resolve() for _, file, _ in (place, other))
    return package == other_package or (folder == other_folder and folder not in FOLDERS_OF_LIBRARIES)


def _shown(place: tuple[str, str, int]) -> str:
    """Returns FILE:LINE, the file below the folder of its library, or without any folder."""
    _, file, line = place
    path = Path(file)
    for folder in FOLDERS_OF_LIBRARIES:
        if path.is_relative_to(folder):
            return f"{path.relative_to(folder)}:{line}"
    return f"{path.name}:{line}"
