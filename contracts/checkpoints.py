"""The state file of a trainer's checkpoint: state.json, which trainers, `verify` and `export` read.

checkpoints/i000010/          state after iteration 10: it resumes at 11
    model.safetensors         `Policy.state_tensors`: the weights in the trained dtype, or the adapters alone
    optimizer.safetensors     the optimizer's state, `{state}.{parameter}`
    model-00001-of-00004.safetensors, …    instead of these, where ranks share the parameters: each rank's rows
    older-v000009.safetensors, …    versions before, where batches may lag
    state.json                CheckpointState, with a digest of each file above
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from contracts.encoding.digests import Digest
from contracts.encoding.json_lines import read_plain
from contracts.encoding.names import FileName
from contracts.encoding.wire import Record, decode_json
from contracts.errors import ContractViolation, InvalidInput, NotFound
from contracts.probes import Probe
from contracts.versions import PolicyVersion

FORMAT_VERSION = 2
STATE_FILE = "state.json"


class AdapterState(Record, frozen=True, kw_only=True):
    """A version as adapters on weights that are not in the checkpoint."""

    base_digest: Digest
    """Digest of the model without adapters."""
    adapters_digest: Digest


class OlderVersion(Record, frozen=True, kw_only=True):
    """A version before the checkpoint's own, which batches of its window are sampled with."""

    policy_version: PolicyVersion
    weights_digest: Digest
    tensors_digest: Digest
    """Digest of what its file holds: weights_digest, or that of the matrices where the job publishes adapters alone."""
    file: FileName
    probe: Probe | UnsetType = UNSET
    """As its manifest had it; left out of a version without one."""


class CheckpointState(Record, frozen=True, kw_only=True):
    """state.json."""

    format_version: int
    job_id: str
    iteration: Annotated[int, Meta(ge=0)]
    """The last iteration that was trained."""
    policy_version: PolicyVersion
    """The version that it made: iteration + 1."""
    weights_digest: Digest
    """Digest of that version."""
    adapters: AdapterState | None = None
    """Not None where model.safetensors holds adapters alone."""
    torch_random_state: str
    """Hex of torch's CPU generator. No pass draws from it (dropout is off); a model's own code might."""
    files: dict[FileName, Digest]
    """BLAKE3-256 of each other file."""
    older: tuple[OlderVersion, ...] | UnsetType = UNSET
    """Versions before, oldest first; left out of a job whose batches don't lag."""


MAX_STATE_BYTES = 64 * 1024 * 1024
"""The longest state.json: the names and digests of a checkpoint of some hundred thousand files."""


def read_state(folder: Path) -> CheckpointState:
    """Reads what the checkpoint in `folder` says of itself.

    Raises NotFound for a missing file, ContractViolation for a damaged one, InvalidInput for one of another release;
    each names the file.
    """
    path = folder / STATE_FILE
    try:
        state = decode_json(read_plain(path, max_bytes=MAX_STATE_BYTES), CheckpointState)
    except OSError as error:
        raise NotFound(f"cannot read: {error.strerror}", field=str(path)) from error
    except InvalidInput as error:
        raise ContractViolation(f"is damaged: {error}", field=str(path)) from error
    if folder.name != f"i{state.iteration:06d}" or state.policy_version != state.iteration + 1:
        raise ContractViolation(
            f"says iteration {state.iteration}, version {state.policy_version}, against its folder's name",
            field=str(path),
        )
    if state.format_version != FORMAT_VERSION:
        raise InvalidInput(
            f"has format {state.format_version}, this release reads {FORMAT_VERSION}",
            field=str(path),
            cure="resume it with the release that wrote it",
        )
    return state
