"""Run folders of jobs that Redis has forgotten: what their retention still owes them stands in themselves.

files_days are over ─▶ checkpoints, recordings and older versions go; the last version's weights and the files stay
result_days are over ─▶ the whole folder goes

No folder without an audit chain of its own is touched: a server that lost its data has forgotten every job.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from contracts.errors import ContractViolation, InvalidInput, NotFound
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec_tables.retention import DAY_S, kept_for
from onbeat.audit.folder import read_audit_file, read_spec
from onbeat.audit.weights import digest_of
from onbeat.process.crash_points import reach
from onbeat.process.tree_removal import remove_tree

SMALL_FOLDERS = ("tensorboard",)
"""Folders that are a part of the result."""


class LeftFolder:
    """One of them, read once: neither its end nor its spec changes any more."""

    def __init__(self, folder: RunFolder, settings: StackSettings) -> None:
        """Raises NotFound and InvalidInput for a folder that doesn't say what it was."""
        stored = read_audit_file(folder.audit)
        ages = kept_for(read_spec(folder).retention, settings)
        ended_s = stored.status.ended_s or math.inf
        self._folder = folder
        self._result = (stored.status.policy_version, stored.status.weights_digest)
        self._is_reduced = False
        self._files_until_s = ended_s + DAY_S * ages.files_days
        self._result_until_s = ended_s + DAY_S * ages.result_days

    def is_over(self, now_s: float) -> bool:
        """Whether nothing of it is kept any longer."""
        return now_s >= self._result_until_s

    def reduce(self, now_s: float) -> list[Path]:
        """Removes what the result doesn't need, once its time has come; what was removed. Raises OnbeatError."""
        if self._is_reduced or now_s < self._files_until_s:
            return []
        removed = []
        for path in needless(self._folder, *self._result):
            if remove_tree(path):
                removed.append(path)
            reach("consumer.reducing_files")
        self._is_reduced = True
        return removed


def left_folder(folder: RunFolder, settings: StackSettings) -> LeftFolder | None:
    """None for a folder that has no audit chain of its own, or can't be read."""
    try:
        return LeftFolder(folder, settings)
    except (NotFound, InvalidInput):
        return None


def needless(folder: RunFolder, policy_version: int, weights_digest: str) -> list[Path]:
    """What the trained weights, and a look at the run, don't need. policy_version: the last one, with its digest.

    A whole version whose bytes have that digest stays alone. Where there is none (a delta, adapters, no published
    version at all, damage) versions stay as they are, and so does the model in the last checkpoint; where there is
    neither that, all checkpoints stay.
    """
    known = {folder.weights.name, folder.checkpoints.name, *SMALL_FOLDERS}
    found = [path for path in _folders(folder.path) if path.name not in known]
    last, checkpoint = folder.weights_of(policy_version), folder.checkpoint_after(policy_version - 1)
    if _holds(last, weights_digest):
        found += [folder.checkpoints, *(path for path in _folders(folder.weights) if path.name != last.name)]
    elif (checkpoint / "state.json").is_file():
        found += [path for path in _folders(folder.checkpoints) if path != checkpoint]
        found += sorted(checkpoint.glob("optimizer*.safetensors"))
    return found


def _holds(version: Path, weights_digest: str) -> bool:
    """Whether a folder holds a whole version, hashed again: nothing else is removed for the sake of a damaged one."""
    files = sorted(version.glob("*.safetensors"))
    try:
        return bool(files) and digest_of(files) == weights_digest
    except ContractViolation:
        return False


def _folders(parent: Path) -> list[Path]:
    """Real ones alone: a link leads to what isn't the job's."""
    if not parent.is_dir():
        return []
    with os.scandir(parent) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
