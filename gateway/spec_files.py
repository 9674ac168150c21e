"""Lists the models and row files that a spec of this stack may name.

model root ─ walked, by SpecRoot alone ─▶ folders with a config.json, files of rows ─┬▶ SpecFiles
folder of what was fetched from the hub ─▶ names of models and data sets ────────────┘
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator

from contracts.answers import SpecFiles
from contracts.errors import InvalidInput
from contracts.spec.root import SpecRoot
from onbeat.hub.store import HubStore

DEEPEST = 4
"""Folders of a path: a link that leads back up would otherwise be walked for ever."""
MOST_ENTRIES = 20_000
"""Names that are looked at for one answer."""
MODEL_FILE = "config.json"
ROW_SUFFIXES = (".jsonl", ".parquet", ".arrow")
FIELD = "path"
"""SpecRoot asks for a field to name in its refusal. Here a path that it refuses is only left out of the list."""


def spec_files(root: SpecRoot) -> SpecFiles:
    """Walks the model root, nearest folders first, and lists only paths that a submission would take.

    Names of the hub that are on this host follow them.

    Args:
        root: The stack's model root. It refuses what is hidden, below the run root, or led out of the root by a link.
    """
    models: list[str] = []
    rows: list[str] = []
    num_entries = 0
    folders = deque([""])
    while folders and num_entries < MOST_ENTRIES:
        folder = folders.popleft()
        entries = sorted(_entries(root, folder), key=lambda entry: entry.name)
        num_entries += len(entries)
        if folder and any(entry.name == MODEL_FILE for entry in entries):
            models.append(folder)
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir() and path.count("/") < DEEPEST:
                folders.append(path)
            elif entry.name.endswith(ROW_SUFFIXES):
                rows.append(path)
    fetched: list[str] = []
    datasets: list[str] = []
    if root.hub is not None:
        fetched = HubStore(root.hub).names("model")
        datasets = HubStore(root.hub).names("dataset")
    return SpecFiles(
        models=(*sorted(models), *fetched),
        rows=tuple(sorted(rows)),
        datasets=tuple(datasets),
        is_complete=not folders,
    )


def _entries(root: SpecRoot, folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(root.find(folder or ".", field=FIELD)) as entries:
            yield from (entry for entry in entries if _may_be_named(root, folder, entry.name))
    except (InvalidInput, OSError):
        return  # the folder may not be named or read, or has gone meanwhile


def _may_be_named(root: SpecRoot, folder: str, name: str) -> bool:
    try:
        root.find(f"{folder}/{name}" if folder else name, field=FIELD)
    except InvalidInput:
        return False
    return True
