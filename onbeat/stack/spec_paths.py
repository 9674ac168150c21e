"""The paths of a spec, as its author means them: relative to the spec's file, or to the program that has it.

    spec.toml, its folder ─┐
    program, its folder   ─┼─▶ PathSearch ─▶ the same spec; below the model root its paths are relative to that
    current folder        ─┘

This is for a stack of this machine and user alone. At any other gateway a path is one below the model root there, which
this machine can't look into, and goes as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contracts.errors import Refusal, SpecRefused
from contracts.spec.job import JobSpec
from contracts.spec.paths import with_paths

SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")
"""A name that is no path, as `hub:owner/name`."""


@dataclass(kw_only=True)
class PathSearch:
    """Finds the files of one spec; its caller reads `found_below` afterwards."""

    folders: Sequence[Path]
    """Where a relative path may start, the first one that has it counts."""
    model_root: Path
    """The stack's model root. A path that no folder has starts there."""
    found_below: list[Path] = field(default_factory=list)
    """Folders, other than the model root, below which a path was found."""
    _refusals: list[Refusal] = field(default_factory=list)

    def resolve(self, spec: JobSpec) -> JobSpec:
        """Returns the spec with its relative paths found; those that nothing has stay as they are."""
        return with_paths(spec, self._resolved)

    def resolve_all(self, spec: JobSpec) -> JobSpec:
        """Does `resolve`. Raises SpecRefused with each path that is nowhere, and where it was looked for."""
        self._refusals.clear()
        resolved = with_paths(spec, self._resolved_or_refused)
        if self._refusals:
            raise SpecRefused(self._refusals)
        return resolved

    def _resolved(self, _: str, path: str) -> str:
        if os.path.isabs(path) or SCHEME.match(path):
            return path
        for folder in self.folders:
            if not _is_there(folder / path):
                continue
            place = Path(os.path.abspath(folder / path))
            root = Path(os.path.abspath(self.model_root))
            if place.is_relative_to(root):
                return str(place.relative_to(root))
            if folder not in self.found_below:
                self.found_below.append(folder)
            return str(place)
        return path

    def _resolved_or_refused(self, key: str, path: str) -> str:
        resolved = self._resolved(key, path)
        if not SCHEME.match(resolved) and not _is_there(self.model_root / resolved):
            looked_in = list(dict.fromkeys(str(Path(os.path.abspath(folder))) for folder in self.folders))
            places = ", ".join([*looked_in, f"and the model root {Path(os.path.abspath(self.model_root))}"])
            if os.path.isabs(path):
                places = "this machine"
            self._refusals.append(
                Refusal(
                    field=key,
                    problem=f"there is no {path} in {places}",
                    cure="name a path from one of these folders, or another model root by --model-root, model_root= in "
                    "a program",
                )
            )
        return resolved


def _is_there(place: Path) -> bool:
    """Returns True for a file, a folder, and a part of a folder's files: of the hub's, `folder/train` are `train-*`."""
    try:
        return place.exists() or any(place.parent.glob(f"{place.name}-*"))
    except (OSError, ValueError):
        return False
