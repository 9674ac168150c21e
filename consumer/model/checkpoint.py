"""Checkpoints hold all that the next iteration needs to give the same bits (contracts/checkpoints.py). No pickle.

The learning rate is a function of the iteration, so there is no scheduler to save.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec import UNSET

from contracts.checkpoints import FORMAT_VERSION, STATE_FILE, AdapterState, CheckpointState, OlderVersion, read_state
from contracts.encoding.digests import file_digest
from contracts.encoding.wire import encode_json
from contracts.errors import ContractViolation, InvalidInput, NotFound, OnbeatError, WeightsRejected
from contracts.run_folder import CHECKPOINT, numbered
from onbeat.weights.files.stored_tensors import StoredTensors
from onbeat.weights.files.tensor_folder import put_folders_aside, remove_folders, remove_scratch, write_folder
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.publication import StoredVersion

logger = logging.getLogger(__name__)

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose digests were verified; `read_checkpoint` creates it, and a trainer's start restores it."""

    folder: Path
    state: CheckpointState
    model_tensors: StoredTensors
    optimizer_tensors: StoredTensors

    @property
    def older(self) -> list[StoredVersion]:
        """The versions before its own, oldest first. Raises ContractViolation for a file that holds no tensors."""
        return [
            StoredVersion(
                policy_version=version.policy_version,
                weights_digest=version.weights_digest,
                tensors=StoredTensors([self.folder / version.file]),
                probe=version.probe,
                tensors_digest=version.tensors_digest,
            )
            for version in self.state.older or ()
        ]


def write_checkpoint(
    folder: Path,
    *,
    job_id: str,
    iteration: int,
    weights_digest: str,
    save: Callable[[Path], None],
    adapters: AdapterState | None = None,
    save_older: Callable[[Path], tuple[OlderVersion, ...]] = lambda _: (),
) -> None:
    """Writes the state after `iteration` to `folder` (`RunFolder.checkpoint_after`), on disk when it returns.

    Earlier checkpoints stay good where it raises, and nothing is left behind.

    Args:
        folder: The checkpoint's, which isn't there yet.
        job_id: The job that is trained.
        iteration: The iteration whose steps are in the weights.
        weights_digest: The digest of the version that the iteration made.
        save: Writes the tensors' files into a folder, each rank its own (`file_of_rank`).
        adapters: The digests of the adapters that the model's files hold instead of the weights; None without any.
        save_older: Writes the files of older versions into a folder, and returns their records.

    Raises:
        OnbeatError: When the folder, which it names, cannot be written, and as `save_older` does.
    """

    def fill(scratch: Path) -> None:
        save(scratch)
        older = save_older(scratch)
        state = CheckpointState(
            format_version=FORMAT_VERSION,
            job_id=job_id,
            iteration=iteration,
            # Iteration t begins with version t and makes version t + 1.
            policy_version=iteration + 1,
            weights_digest=weights_digest,
            adapters=adapters,
            torch_random_state=torch.get_rng_state().numpy().tobytes().hex(),
            # The digests of all files that are there by now; state.json is written after them, and has none.
            files={path.name: file_digest(path) for path in sorted(scratch.iterdir())},
            older=older or UNSET,
        )
        (scratch / STATE_FILE).write_bytes(encode_json(state))

    write_folder(folder, fill)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads and verifies a checkpoint, but for its older versions: each rank reads it, rank 0 alone publishes those.

    Raises:
        NotFound: For a missing file.
        ContractViolation: For a damaged file.
        InvalidInput: For a checkpoint of another release.
        WeightsRejected: For weights whose digest is not the recorded version's. Each names the file.
    """
    state = read_state(folder)
    # Of one rank the two names are fixed, so that a state that lacks the optimizer's file is damaged; of several ranks
    # the files are those that the state names.
    names = {MODEL_FILE, OPTIMIZER_FILE}
    if MODEL_FILE not in state.files:
        names = state.files.keys() - {version.file for version in state.older or ()}
    for name in names:
        _verify_file(folder / name, state.files.get(name, ""))
    model_tensors = _stored(folder, state, MODEL_FILE)
    # The files of a job with adapters hold the adapters, and not the version's weights.
    expected = state.weights_digest
    if state.adapters:
        expected = state.adapters.adapters_digest
    if tensors_digest(model_tensors) != expected:
        raise WeightsRejected(
            f"the weights are not version {state.policy_version} as recorded", field=str(folder / MODEL_FILE)
        )
    return Checkpoint(
        folder=folder,
        state=state,
        model_tensors=model_tensors,
        optimizer_tensors=_stored(folder, state, OPTIMIZER_FILE),
    )


def latest_checkpoint(
    checkpoints: Path,
    *,
    job_id: str,
    versions: Mapping[int, str],
    older_than: Callable[[int], Iterable[int]] = lambda _: (),
) -> Checkpoint | None:
    """Returns the newest good checkpoint of a version that the job has; None where there is none.

    A checkpoint is skipped with a logged reason where it is damaged or another job's, is of a future that was
    abandoned, or lacks an older version that its window needs: the run replays the iterations since the one before.

    Args:
        checkpoints: The folder of the job's checkpoints.
        job_id: The job's.
        versions: Version → its weights' digest by the audit chain (`contracts.events.versions_of`).
        older_than: Version → the older versions that its window needs.

    Raises:
        InvalidInput: For a checkpoint of another release: it isn't replaced unasked.
    """
    # Newest first: the fewest iterations are done again.
    for _, folder in reversed(numbered(checkpoints, CHECKPOINT)):
        try:
            checkpoint = read_checkpoint(folder)
            _check_older(checkpoint, needed=older_than(checkpoint.state.policy_version), versions=versions)
        except InvalidInput:
            raise
        except OnbeatError as error:
            logger.warning("checkpoint %s is skipped: %s", folder.name, error)
            continue
        state = checkpoint.state
        if state.job_id != job_id:
            logger.warning("checkpoint %s is skipped: it belongs to job %s", folder.name, state.job_id)
        elif versions.get(state.policy_version) != state.weights_digest:
            logger.warning("checkpoint %s is skipped: its version is not one of this job", folder.name)
        else:
            return checkpoint
    return None


def set_aside_after(checkpoints: Path, iteration: int) -> None:
    """Puts the checkpoints after `iteration` aside, with which a trainer goes on, and removes killed writers' scratch.

    Later checkpoints can't be read, or follow from no record of the chain: a rewind took their future back, or Redis is
    older than they are. Put aside they push out no fresh checkpoint, and nothing is lost.

    Args:
        checkpoints: The folder of the job's checkpoints.
        iteration: The iteration that the trainer restored; -1 puts all aside.
    """
    put_folders_aside(folder for after, folder in numbered(checkpoints, CHECKPOINT) if after > iteration)
    remove_scratch(checkpoints)


def keep_newest_and_best(
    checkpoints: Path, count: int, *, scores: Mapping[int, float], needed: Collection[int] = ()
) -> None:
    """Removes all but the newest `count` checkpoints, the best, and those of the versions that are needed.

    A version is evaluated after its checkpoint is written, so a checkpoint is judged when newer ones push it out.

    Args:
        checkpoints: The folder of the job's checkpoints.
        count: How many of the newest stay.
        scores: Policy version → held-out score; of equal scores that of the oldest version is the best.
        needed: Policy versions whose checkpoints other jobs are forked from.
    """
    # A checkpoint after iteration t holds version t + 1.
    folders = {iteration + 1: folder for iteration, folder in numbered(checkpoints, CHECKPOINT)}
    # max returns the first of equal ones, and folders are in ascending order.
    best = max((version for version in folders if version in scores), key=lambda version: scores[version], default=None)
    lasting = {*sorted(folders)[-count:], best, *needed}
    remove_folders(folder for version, folder in folders.items() if version not in lasting)


def file_of_rank(name: str, rank: int, num_ranks: int) -> str:
    """Returns the name of a rank's file: `model.safetensors`, of several ranks `model-00001-of-00004.safetensors`."""
    if num_ranks == 1:
        return name
    stem, _, suffix = name.partition(".")
    # Files count from 1, as those of transformers do; ranks from 0.
    return f"{stem}-{rank + 1:05d}-of-{num_ranks:05d}.{suffix}"


def _check_older(checkpoint: Checkpoint, *, needed: Iterable[int], versions: Mapping[int, str]) -> None:
    """Checks that a checkpoint has each older version that is needed, as the job's audit chain knows it.

    Args:
        checkpoint: The checkpoint, verified but for its older versions.
        needed: Policy versions.
        versions: Version → digest by the chain.

    Raises:
        WeightsRejected: For a version that is missing, or isn't the chain's; and as `_verify_file`.
    """
    state = checkpoint.state
    digests = {older.policy_version: older.weights_digest for older in state.older or ()}
    for version in needed:
        if version not in digests:
            raise WeightsRejected(f"it lacks version {version}, which batches of its window are sampled with")
        if digests[version] != versions.get(version):
            raise WeightsRejected(f"its version {version} is not one of this job")
    for older in state.older or ():
        _verify_file(checkpoint.folder / older.file, state.files.get(older.file, ""))


def _verify_file(path: Path, expected: str) -> None:
    try:
        actual = file_digest(path)
    except OSError as error:
        raise NotFound(f"cannot read: {error.strerror}", field=str(path)) from error
    if actual != expected:
        raise ContractViolation("is damaged: its digest is not the recorded one", field=str(path))


def _stored(folder: Path, state: CheckpointState, name: str) -> StoredTensors:
    """Returns the tensors of the file of that name, or of the files that the ranks wrote instead."""
    stem = name.partition(".")[0]
    return StoredTensors([folder / file for file in sorted(state.files) if re.split(r"[-.]", file)[0] == stem])
