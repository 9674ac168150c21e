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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contracts.errors import Refusal
from contracts.hub_names import hub_cure
from contracts.spec.job import JobSpec
from contracts.spec.paths import with_paths

SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")
"""A name that is no path, as `hub:owner/name`."""
OWN_ROOT_CURE = "name a path from one of these folders, or another model root by --model-root, model_root= in a program"
"""The cure of a command that starts a stack, or needs none."""
STACK_CURE = "name a path from one of these folders; the model root is the one that `onbeat up --model-root` has"
"""The cure of a command that submits a job to a stack that runs."""


@dataclass(kw_only=True)
class PathSearch:
    """Finds the files of one spec; its caller reads `found_below` afterwards."""

    folders: Sequence[Path]
    """Where a relative path may start, the first one that has it counts."""
    model_root: Path
    """The stack's model root. A path that no folder has starts there."""
    typed: Mapping[str, Path] = field(default_factory=dict)
    """Key of the spec → the folder that comes first for it: its path was typed there, and is not from the file."""
    left: Collection[str] = ()
    """Paths that are the stack's own already, as those of a job's record; they stay."""
    cure: str = OWN_ROOT_CURE
    """The words of a refusal that say what may be done."""
    found_below: list[Path] = field(default_factory=list)
    """Folders, other than the model root, below which a path was found."""
    _refusals: list[Refusal] = field(default_factory=list)

    def resolve(self, spec: JobSpec) -> JobSpec:
        """Returns the spec with its relative paths found; those that nothing has stay as they are."""
        return with_paths(spec, self._resolved)

    def resolve_some(self, spec: JobSpec) -> tuple[JobSpec, list[Refusal]]:
        """Does `resolve`, and returns a refusal for each path that is nowhere beside the spec."""
        self._refusals.clear()
        resolved = with_paths(spec, self._resolved_or_refused)
        return resolved, list(self._refusals)

    def look(self, spec: JobSpec) -> tuple[dict[str, str], list[Refusal]]:
        """Finds the paths of a spec of which some keys may have no value, and leaves it as it is.

        Returns:
            Field → where its path leads, and a refusal for each path that is nowhere.
        """
        self._refusals.clear()
        places: dict[str, str] = {}

        def note(key: str, path: str) -> str:
            places[key] = self._resolved_or_refused(key, path)
            return path

        with_paths(spec, note)
        return places, list(self._refusals)

    def _resolved(self, key: str, path: str) -> str:
        if os.path.isabs(path) or SCHEME.match(path) or path in self.left:
            return path
        for folder in self._folders_of(key):
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

    def _folders_of(self, key: str) -> list[Path]:
        """Returns the folders where the path of a key may start, in their order."""
        first = self.typed.get(key)
        return list(self.folders) if first is None else [first, *self.folders]

    def _resolved_or_refused(self, key: str, path: str) -> str:
        resolved = self._resolved(key, path)
        is_name = SCHEME.match(resolved) is not None or resolved in self.left
        if not is_name and not _is_there(self.model_root / resolved):
            cure = "name a path that is there"
            if not os.path.isabs(path):
                of_hub = hub_cure(path)
                if of_hub and key.endswith("_path"):
                    name = path.removeprefix("datasets/")
                    of_hub += f', in dataset = {{ type = "huggingface", path = "hub:{name}" }}'
                cure = "; ".join(filter(None, (self.cure, of_hub)))
            self._refusals.append(Refusal(field=key, problem=f"there is no {path} {self._where(key, path)}", cure=cure))
        return resolved

    def _where(self, key: str, path: str) -> str:
        """Says where the path of a key was looked for."""
        if os.path.isabs(path):
            return "on this machine"
        root = os.path.abspath(self.model_root)
        folders = dict.fromkeys(os.path.abspath(folder) for folder in self._folders_of(key))
        places = [f"{folder}, " for folder in folders if folder != root]
        return f"in {''.join(places)}{'and ' if places else ''}the model root {root}"


def _is_there(place: Path) -> bool:
    """Returns True for a file, a folder, and a part of a folder's files: of the hub's, `folder/train` are `train-*`."""
    try:
        return place.exists() or any(place.parent.glob(f"{place.name}-*"))
    except (OSError, ValueError):
        return False
