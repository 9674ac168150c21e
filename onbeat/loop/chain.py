"""The audit chain as a trainer reads and writes it: where it may go on, and the record of what it did."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from msgspec import UNSET, UnsetType

from broker.fence import FenceState
from contracts.errors import FenceViolation, InvalidInput
from contracts.events import AuditRecord, ForkedFrom, IterationMetrics
from contracts.file_digests import digest_of_files
from contracts.probes import Probe, probed_version
from contracts.rewards import source_digests
from contracts.spec.datasets import environment_field
from contracts.spec.environment import VERSIONS_END
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest
from onbeat.loop.expected import ExpectedIteration

log = logging.getLogger(__name__)


def commit_record(
    iteration: ExpectedIteration,
    spec: JobSpec,
    *,
    manifest: WeightManifest | None,
    numbers: IterationMetrics | None,
    trainer_epoch: int,
    previous: str,
    environment: str = "",
    forked: ForkedFrom | UnsetType = UNSET,
    first_probe: Probe | UnsetType = UNSET,
    held_out: float | UnsetType = UNSET,
    stopped: str = "",
) -> AuditRecord:
    """Returns the audit record of an iteration's commit.

    Args:
        iteration: The iteration, complete.
        spec: The job's spec.
        manifest: The version that the iteration made; None where it only evaluated.
        numbers: The numbers of its training; None where it only evaluated.
        trainer_epoch: The epoch of the trainer that commits.
        previous: Digest of the record before.
        environment: The version of the job's environment; "" in a job without one.
        forked: The version that the job began with; UNSET but for a forked job.
        first_probe: The probe of version 0, which no commit makes.
        held_out: As in the record.
        stopped: The reason why the job ends here, before it trains; "" where it goes on.
    """
    loss = grad_norm = reward_mean = 0.0
    if numbers:
        loss = numbers.loss
        grad_norm = numbers.grad_norm
        reward_mean = numbers.reward_mean
    return AuditRecord(
        kind="commit",
        iteration=iteration.number,
        policy_version=iteration.policy_version,
        weights_digest=iteration.weights_digest,
        next_weights_digest=manifest.weights_digest if manifest else "",
        trainer_epoch=trainer_epoch,
        batches=iteration.digests,
        abandoned=iteration.abandoned,
        loss=loss,
        grad_norm=grad_norm,
        reward_mean=reward_mean,
        on_unscorable=spec.stated_scores or UNSET,
        unscorable=dict(sorted(iteration.unscorable.items())) or UNSET,
        sampled=iteration.sampled or UNSET,
        columns=dict(sorted(iteration.columns.items())) or UNSET,
        environment=environment or UNSET,
        in_sums=UNSET if iteration.in_sums is None else iteration.in_sums,
        rewards=source_digests(spec.reward.components) or UNSET,
        files=digest_of_files(spec.file_digests) or UNSET,
        forked=UNSET if iteration.number else forked,
        probe=probed_version(manifest.probe if manifest else UNSET),
        first_probe=UNSET if iteration.number else probed_version(first_probe),
        # Of an iteration that trains nothing no rate is measured.
        drawn=(iteration.drawn or UNSET) if manifest else UNSET,
        held_out=held_out,
        stopped=stopped or UNSET,
        previous=previous,
    )


def first_version(chain: list[AuditRecord]) -> dict[int, str]:
    """0 → the digest of the model as the job found it, which no commit has made; {} before the first commit."""
    firsts = [record.weights_digest for record in chain if record.kind == "commit" and record.policy_version == 0]
    return {0: firsts[-1]} if firsts else {}


def furthest_commit(chain: list[AuditRecord]) -> int:
    """Returns the last iteration that was ever committed, rewound or not; -1 for none."""
    return max((record.iteration for record in chain if record.kind == "commit"), default=-1)


def needs_rewind(fence: FenceState, first: int, digests: Mapping[int, str]) -> bool:
    """Returns True where the fence is ahead of the trainer, which starts at iteration `first` and repeats what follows.

    digests: version → digest, as the trainer has them. Open iterations whose versions have other digests stand on
    weights that are gone.
    """
    if fence.committed >= first:
        return True
    if not fence.window:
        return False
    if fence.window[0].iteration != first:
        return True
    return any(digests.get(version) != digest for version, digest in fence.versions.items())


def rewind_record(previous: str, manifest: WeightManifest, *, trainer_epoch: int) -> AuditRecord:
    """Returns the record that says from where the run is replayed. previous: digest of the newest record."""
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
    """Raises FenceViolation where a deterministic run would go on with weights that its own chain contradicts, and
    InvalidInput where any run would start again with another model."""
    for record in reversed(chain):
        if record.kind == "commit" and record.policy_version == manifest.policy_version == 0:
            if record.weights_digest != manifest.weights_digest:
                raise InvalidInput(
                    f"version 0 is {manifest.weights_digest[:12]}, the audit chain says {record.weights_digest[:12]}",
                    field="model.path",
                    cure="put the folder back that the job was started with",
                )
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


def check_same_environment(chain: list[AuditRecord], version: str, spec: JobSpec) -> None:
    """Raises InvalidInput where a deterministic run would go on with another version of its environment, and says so in
    the log where any other run does."""
    recorded = [record.environment for record in chain if record.environment is not UNSET]
    if not recorded or recorded[-1] == version:
        return
    problem = f"the environment is {version or 'of no version'}, the audit chain says {recorded[-1]}"
    if spec.deterministic:
        others = zip(spec.environments, version.split(VERSIONS_END), strict=False)
        source = next((source for source, version in others if version not in recorded[-1].split(VERSIONS_END)), "")
        raise InvalidInput(
            problem,
            field=f"{environment_field(spec.dataset, source)}.name",
            cure="install that version again where the reward service runs, or submit the job anew",
        )
    log.warning("%s: the job goes on with the new one, as its next records say", problem)
