"""Where a trainer starts: at the iteration after the newest checkpoint that the fence knows of."""

from __future__ import annotations

import logging

from broker.trainer_side import FenceState
from consumer.model.checkpoint import Checkpoint
from contracts.errors import FenceViolation, InvalidInput
from contracts.events import AuditRecord
from contracts.spec import JobSpec
from contracts.versions import WeightManifest

log = logging.getLogger(__name__)


def next_iteration(checkpoint: Checkpoint | None) -> int:
    """The first one that was not trained yet."""
    return checkpoint.state.iteration + 1 if checkpoint else 0


def furthest_commit(chain: list[AuditRecord]) -> int:
    """The last iteration that was ever committed, rewound or not; -1 for none."""
    return max((record.iteration for record in chain if record.kind == "commit"), default=-1)


def is_finished(fence: FenceState, checkpoint: Checkpoint | None, spec: JobSpec) -> bool:
    """Every iteration is committed, and the last weights are in a checkpoint."""
    return fence.committed >= spec.last_iteration and next_iteration(checkpoint) == spec.iterations


def needs_rewind(fence: FenceState, manifest: WeightManifest) -> bool:
    """Whether the fence is ahead of the weights that the trainer starts with: what came after is done again.

    An open iteration of the same number but another digest stands on weights that nobody has any more.
    """
    start = manifest.policy_version
    if fence.committed >= start:
        return True
    return fence.state == "open" and (fence.iteration != start or fence.weights_digest != manifest.weights_digest)


def rewind_record(previous: str, manifest: WeightManifest, *, trainer_epoch: int) -> AuditRecord:
    """The link that says from where the run is replayed. previous: digest of the newest record."""
    return AuditRecord(
        kind="rewind",
        iteration=manifest.policy_version,
        policy_version=manifest.policy_version,
        weights_digest=manifest.weights_digest,
        next_weights_digest="",
        trainer_epoch=trainer_epoch,
        batches={},
        abandoned={},
        previous=previous,
    )


def check_same_run(chain: list[AuditRecord], manifest: WeightManifest, spec: JobSpec) -> None:
    """Raises FenceViolation where a deterministic run would go on with weights that its own chain contradicts.

    InvalidInput where any run would start again with another model.
    """
    for record in reversed(chain):
        if record.kind == "commit" and record.policy_version == manifest.policy_version == 0:
            _check_model(record, manifest)
            return
        if record.kind != "commit" or record.policy_version + 1 != manifest.policy_version:
            continue
        if spec.deterministic and record.next_weights_digest != manifest.weights_digest:
            raise FenceViolation(
                f"version {manifest.policy_version} is {manifest.weights_digest[:12]}, "
                f"the audit chain says {record.next_weights_digest[:12]}",
                field="weights_digest",
            )
        return


def _check_model(record: AuditRecord, manifest: WeightManifest) -> None:
    if record.weights_digest != manifest.weights_digest:
        raise InvalidInput(
            f"version 0 is {manifest.weights_digest[:12]}, the audit chain says {record.weights_digest[:12]}",
            field="model.path",
            cure="put the folder back that the job was started with",
        )
