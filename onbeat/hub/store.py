"""The folder of all that was fetched from the hub, `hub_root`.

    models/OWNER/NAME/COMMIT/                         a model's folder, whole
    datasets/OWNER/NAME/COMMIT/CONFIG/SPLIT/          the files of a split, in the order of state.json
    …/OWNER/NAME/refs/REVISION                        the commit that a branch or tag had when it was fetched last
    .staging/…                                        what is on its way; no spec leads there

A folder of a model or a split comes to its place by one rename, when each of its files has been checked: one that is
there is whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import quote, unquote

from msgspec import UNSET, UnsetType

from contracts.encoding.wire import Record
from contracts.hub_names import COMMIT, DEFAULT_CONFIG, KINDS, MAIN, SCHEME, HubKind, HubName, HubPart

STAGING = ".staging"
REFS = "refs"


class HubRequest(Record, frozen=True, kw_only=True):
    """A model, or splits of a data set, that are to be on this host."""

    name: HubName
    config: HubPart | UnsetType = UNSET
    """The configuration of a data set; left out: the only one, or the one called default."""
    splits: tuple[HubPart, ...] = ()
    """The splits of a data set, of which a job needs one or two."""

    def at_commit(self, commit: str) -> HubRequest:
        """Returns the same request at a commit."""
        return HubRequest(name=self.name.at_commit(commit), config=self.config, splits=self.splits)

    def __str__(self) -> str:
        """Returns the arguments of `onbeat fetch` that ask for it."""
        options = [f"--config {self.config}"] if self.config else []
        options += [f"--split {split}" for split in self.splits if split != "train" or len(self.splits) > 1]
        return " ".join([str(self.name), *options])


def name_in_spec(name: HubName) -> str:
    """Returns the name as a key of its kind has it: `hub:OWNER/NAME` also of a data set."""
    revision = "" if name.revision == MAIN else f"@{name.revision}"
    return f"{SCHEME}{name.repository}{revision}"


def _entries(folder: Path) -> list[Path]:
    """Returns what lies in a folder; [] where there is none."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


class HubStore:
    """Finds what was fetched. Processes that read and one that writes may use one folder at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: HubName) -> Path:
        """Returns the folder of a model or data set, which has one for each commit."""
        return self.root / KINDS[name.kind] / name.repository

    def folders(self, request: HubRequest) -> list[Path]:
        """Returns the folders of a request at a commit: a model's, or one for each split."""
        folder = self.folder(request.name) / request.name.revision
        if request.name.kind == "model":
            return [folder]
        return [folder / (request.config or DEFAULT_CONFIG) / split for split in request.splits]

    def has(self, request: HubRequest) -> bool:
        """Returns True where all of a request at a commit is there."""
        return request.name.is_at_commit and all(folder.is_dir() for folder in self.folders(request))

    def commit_of(self, name: HubName) -> str | None:
        """Returns the commit that the name had when it was fetched last; None where it never was."""
        if name.is_at_commit:
            return name.revision
        try:
            commit = self._ref(name).read_text()
        except (OSError, ValueError):
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def names(self, kind: HubKind) -> list[str]:
        """Returns the models or data sets that are here, in the order of their names, as a spec names them.

        Each branch or tag has a name of its own; a commit has one where neither stands for it.
        """
        names: set[str] = set()
        for folder in (self.root / KINDS[kind]).glob("*/*"):
            commits = {entry.name for entry in _entries(folder) if COMMIT.fullmatch(entry.name)}
            repository = f"{folder.parent.name}/{folder.name}"
            revisions = {unquote(ref.name) for ref in _entries(folder / REFS) if not ref.name.startswith(".")}
            for revision in revisions:
                commit = self.commit_of(HubName(kind=kind, repository=repository, revision=revision))
                if commit is not None and (folder / commit).is_dir():
                    commits.discard(commit)
                    names.add(name_in_spec(HubName(kind=kind, repository=repository, revision=revision)))
            names |= {name_in_spec(HubName(kind=kind, repository=repository, revision=commit)) for commit in commits}
        return sorted(names)

    def remember(self, name: HubName, commit: str) -> None:
        """Writes down which commit a branch or tag has."""
        if name.is_at_commit:
            return
        ref = self._ref(name)
        ref.parent.mkdir(parents=True, exist_ok=True)
        written = ref.with_name(f".{ref.name}.{os.getpid()}")
        written.write_text(commit)
        written.replace(ref)

    def _ref(self, name: HubName) -> Path:
        return self.folder(name) / REFS / quote(name.revision, safe="")

    def staging(self, request: HubRequest) -> Path:
        """Returns the folder in which a request at a commit is put together."""
        parts = [KINDS[request.name.kind], *request.name.repository.split("/"), request.name.revision]
        if request.name.kind == "dataset":
            parts += [request.config or DEFAULT_CONFIG, *request.splits]
        return self.root / STAGING / "--".join(parts)

    def num_bytes(self) -> int:
        """Returns the bytes of all files of the folder."""
        total = 0
        for folder, _, names in os.walk(self.root):
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except OSError:
                    continue  # moved meanwhile by another process
        return total
