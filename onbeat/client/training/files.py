"""The files of an external trainer in the run folder: its own state next to each version, and lines of the run log.

trainer_state/v000004/     whatever the trainer saves, written under a hidden name and complete once it has its own
    onbeat.json            the version and digest that it belongs to
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from contracts.checkpoints import MAX_STATE_BYTES
from contracts.encoding.digests import Digest
from contracts.encoding.json_lines import read_plain
from contracts.encoding.wire import Record, decode_json, encode_json
from contracts.errors import InvalidInput
from contracts.run_folder import VERSION, RunFolder, numbered
from contracts.spec.job import JobSpec
from contracts.versions import PolicyVersion, WeightManifest
from onbeat.loop.trained_job import begin_folder

STAMP = "onbeat.json"
KEPT_STATES = 2
"""The newest may be of a version that no commit made: the state before it is still there."""


class StateStamp(Record, frozen=True, kw_only=True):
    """The version that a state belongs to."""

    job_id: str
    policy_version: PolicyVersion
    weights_digest: Digest


class TrainerFiles:
    """The files of one external trainer."""

    def __init__(self, folder: RunFolder, spec: JobSpec) -> None:
        """Raises OnbeatError that names the folder where it can't be written."""
        self._folder = folder
        begin_folder(folder, spec)

    def newest_state(self, versions: Mapping[int, str]) -> tuple[int, Path] | None:
        """Finds the newest state of a version that the audit chain has. versions: version → digest."""
        for version, path in reversed(numbered(self._folder.trainer_state, VERSION)):
            stamp = _stamp_of(path)
            if stamp == (self._folder.job_id, version, versions.get(version, "")):
                return version, path
        return None

    def save(self, manifest: WeightManifest, save: Callable[[Path], object]) -> None:
        """Calls `save` with an empty folder, and gives it its name once all of it is on disk. Raises OnbeatError."""
        from onbeat.weights.files.tensor_folder import write_folder

        stamp = StateStamp(
            job_id=self._folder.job_id, policy_version=manifest.policy_version, weights_digest=manifest.weights_digest
        )

        def fill(scratch: Path) -> None:
            save(scratch)
            (scratch / STAMP).write_bytes(encode_json(stamp))

        write_folder(self._folder.trainer_state_of(manifest.policy_version), fill)

    def set_aside_after(self, policy_version: int) -> None:
        """Puts the states of versions that this start can't go on from aside, and removes a killed process' scratch."""
        from onbeat.weights.files.tensor_folder import put_folders_aside, remove_scratch

        states = numbered(self._folder.trainer_state, VERSION)
        later = [path for version, path in states if version > policy_version]
        put_folders_aside(later)
        if states:
            remove_scratch(self._folder.trainer_state)

    def keep_newest(self) -> None:
        from onbeat.weights.files.tensor_folder import remove_folders

        remove_folders([path for _, path in numbered(self._folder.trainer_state, VERSION)[:-KEPT_STATES]])


def _stamp_of(state: Path) -> tuple[str, int, str] | None:
    """Reads the stamp of a state; None where it can't be read."""
    try:
        stamp = decode_json(read_plain(state / STAMP, max_bytes=MAX_STATE_BYTES), StateStamp)
    except (OSError, InvalidInput):
        return None
    return stamp.job_id, stamp.policy_version, stamp.weights_digest
