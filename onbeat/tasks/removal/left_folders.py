"""The run folders of jobs that Redis has forgotten: what retention still owes each of them.

A folder says itself what it is: `audit.json` has the job's end and its last version, `spec.json` its retention. A look
each minute must not read them all, nor hash the last version again to learn that nothing else is left. So what was read
stands in one file of the run root, which may be lost: a look without it reads again, and removes the same.
"""

from __future__ import annotations

import logging
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path

from msgspec import UNSET, UnsetType

from contracts.encoding.json_lines import read_plain
from contracts.encoding.wire import Record, changed, decode_json, encode_json
from contracts.errors import ContractViolation, InvalidInput, NotFound
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.retention import DAY_S, RetentionSpec, kept_for
from onbeat.audit.folder import read_audit_file, read_spec
from onbeat.audit.weights import digest_of
from onbeat.base.process.crash_points import reach
from onbeat.base.process.folders import usable, written_whole
from onbeat.tasks.removal.trees import remove_tree

NAME = ".left_folders.json"
"""The file below the run root."""
MAX_BYTES = 64 * 1024 * 1024
SMALL_FOLDERS = ("tensorboard",)
"""Folders that are a part of the result."""

log = logging.getLogger(__name__)


class ReadFolder(Record, frozen=True, kw_only=True):
    """What the run folder of a forgotten job says of itself."""

    stamp: tuple[int, int]
    """(size in bytes, time of the last change in ns) of its audit chain when it was read."""
    ended_s: float
    """Unix time; 0.0 where it doesn't say."""
    policy_version: int
    """The last version, and its digest."""
    weights_digest: str
    retention: RetentionSpec | UnsetType = UNSET
    """As the spec has it."""
    is_reduced: bool = False
    """True where what the result doesn't need is gone."""


class LeftFolder:
    """A run folder of a job that Redis has forgotten: neither its end nor its spec changes any more."""

    def __init__(self, folder: RunFolder, settings: StackSettings, known: ReadFolder | None = None) -> None:
        """Takes what is known of the folder, or reads it. Raises NotFound and InvalidInput where it doesn't say."""
        self.folder = folder
        self.read = known or read_folder(folder)
        ages = kept_for(self.read.retention, settings)
        ended_s = self.read.ended_s or math.inf
        self._files_until_s = ended_s + DAY_S * ages.files_days
        self._result_until_s = ended_s + DAY_S * ages.result_days

    def is_over(self, now_s: float) -> bool:
        """Returns True where nothing of it is kept any longer."""
        return now_s >= self._result_until_s

    def is_due(self, now_s: float) -> bool:
        """Returns True where something of it is to go."""
        return self.is_over(now_s) or (now_s >= self._files_until_s and not self.read.is_reduced)

    def reduce(self, now_s: float, forget: Callable[[list[Path]], None] = lambda _: None) -> list[Path]:
        """Removes what the result doesn't need, once its time has come.

        Args:
            now_s: Unix time.
            forget: Removes copies of what is to go.

        Returns:
            What was removed.

        Raises:
            OnbeatError: Something can't be removed.
        """
        if not self.is_due(now_s):
            return []
        removed: list[Path] = []
        going = needless(self.folder, self.read.policy_version, self.read.weights_digest)
        forget(going)
        for path in going:
            if remove_tree(path):
                removed.append(path)
            reach("tasks.reducing_files")
        self.read = changed(self.read, is_reduced=True)
        return removed


class LeftFolders:
    """All of a run root, with what earlier looks have read of them."""

    def __init__(self, settings: StackSettings) -> None:
        self._settings = settings
        self._path = settings.run_root_path / NAME
        self._before = self._load()
        self._now: dict[str, ReadFolder] = {}

    def of(self, folder: RunFolder) -> LeftFolder | None:
        """Returns the folder; None for one that has no audit chain of its own, or can't be read."""
        stamp = _stamp(folder.audit)
        known = self._before.get(folder.job_id)
        if stamp is None:
            return None
        try:
            left = LeftFolder(folder, self._settings, known if known and known.stamp == stamp else None)
        except (NotFound, InvalidInput) as error:
            log.debug("%s is left alone: %s", folder.path, error)
            return None
        self.keep(left)
        return left

    def keep(self, left: LeftFolder) -> None:
        """Has the next look know what this one knows."""
        self._now[left.folder.job_id] = left.read

    def save(self) -> None:
        """Writes what is known, where it has changed. Raises OnbeatError where it can't be written."""
        if self._now != self._before:
            with usable(self._path, to_be="written"), written_whole(self._path) as file:
                file.write(encode_json(self._now))

    def _load(self) -> dict[str, ReadFolder]:
        try:
            return decode_json(read_plain(self._path, max_bytes=MAX_BYTES), dict[str, ReadFolder])
        except FileNotFoundError:
            return {}
        except (OSError, InvalidInput) as error:
            log.warning("%s is read anew: %s", self._path, error)
            return {}


def read_folder(folder: RunFolder) -> ReadFolder:
    """Reads what a folder says of itself. Raises NotFound and InvalidInput for one that doesn't say what it was."""
    stamp = _stamp(folder.audit)
    stored = read_audit_file(folder.audit)
    return ReadFolder(
        stamp=stamp or (0, 0),
        ended_s=stored.status.ended_s or 0.0,
        policy_version=stored.status.policy_version,
        weights_digest=stored.status.weights_digest,
        retention=read_spec(folder).retention,
    )


def _stamp(path: Path) -> tuple[int, int] | None:
    """(size, time of the last change in ns); None for what is no plain file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


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
