"""Imported first by every entry point: ends the process where a package of ours is not ours.

Our packages have plain names (`broker`, `contracts`, `consumer`), which a folder or another distribution may have too
(docs/decisions/0030-installed-names.md). A process with some modules of one and some of the other would fail in ways
that are hard to read; so all packages lie in one folder, unchanged since they were installed, or the process ends with
exit code 2 and names what is in the way. This module imports the standard library alone, and nothing by our names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DISTRIBUTION = "onbeat"
PACKAGES = ("broker", "consumer", "contracts", "gateway", "onbeat", "producer", "reward_service")
CURE = "give Onbeat an environment of its own: pipx install, uv tool install, or python -m venv"


def problem(home: Path) -> str:
    """Describes a package of ours that another distribution replaces, in one line that names both.

    Returns:
        The line; "" where every package lies in `home` as it was installed.
    """
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or not spec.origin:
            continue
        place = Path(spec.origin).resolve().parent
        if place != home / name:
            return f"package `{name}` is that of {_owner(place)}, and not of {DISTRIBUTION} ({home}); {CURE}"
    for path in _changed(home):
        return f"{path} is that of {_owner(home / path)}, which has replaced {DISTRIBUTION}'s; {CURE}"
    return ""


def _changed(home: Path) -> Iterator[Path]:
    """Yields our installed files that another distribution has overwritten; none in a checkout, where pip keeps no
    list."""
    ours = [
        distribution for distribution in metadata.distributions(path=[str(home)]) if distribution.name == DISTRIBUTION
    ]
    for file in ours[0].files or () if ours else ():
        if file.parts[0] in PACKAGES and file.suffix == ".py" and file.size is not None:
            try:
                size = os.stat(home / file).st_size
            except OSError:
                size = -1
            if size != file.size and _owner(home / file) != str(home / file):
                yield Path(file)


def _owner(place: Path) -> str:
    """Names the other distribution that has this file or package, with its version; the path where none has it."""
    for folder in place.parents[:2]:
        for distribution in metadata.distributions(path=[str(folder)]):
            names = (str(folder / file) for file in distribution.files or ())
            if distribution.name != DISTRIBUTION and any(
                name == str(place) or name.startswith(f"{place}/") for name in names
            ):
                return f"{distribution.name} {distribution.version} ({place})"
    return str(place)


def is_ours(modules: Mapping[str, Any]) -> bool:
    """Returns True where the program that runs is ours: a module by `python -m`, or the script `onbeat`."""
    spec = getattr(modules.get("__main__"), "__spec__", None)
    return f"{DISTRIBUTION}.__main__" in modules or (spec is not None and spec.name.partition(".")[0] in PACKAGES)


# Ctrl-C before a program answers signals ends it without a traceback: it has begun nothing. A user's program, which
# imports this after its own start, keeps its traceback.
if is_ours(sys.modules):
    sys.excepthook = lambda kind, *rest: None if kind is KeyboardInterrupt else sys.__excepthook__(kind, *rest)
PROBLEM = problem(Path(__file__).resolve().parents[3])
if PROBLEM:
    sys.stderr.write(f"onbeat: {PROBLEM}\n")
    raise SystemExit(2)
