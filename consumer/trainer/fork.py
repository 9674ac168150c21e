"""Where a forked job begins: at a version of another job, with the optimizer state of the checkpoint that has it.

[fork] job, version ─▶ the other job's folder: its checkpoint, and the record of its chain that made the version
                                    └─▶ policy and optimizer        └─▶ `forked` of this chain's iteration 0
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import UNSET, UnsetType

from consumer.model.checkpoint import Checkpoint, read_checkpoint
from contracts.encoding.digests import content_digest
from contracts.encoding.wire import decode_json
from contracts.errors import InvalidInput, OnbeatError
from contracts.events import AuditRecord, ForkedFrom, record_digest
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.spec_submission import fork_problem, unusable_fork
from onbeat.loop.chain_file import ChainFile


def read_fork(
    run_root: Path, spec: JobSpec, chain: Sequence[AuditRecord]
) -> tuple[Checkpoint | None, ForkedFrom | UnsetType]:
    """Returns what a job without a checkpoint of its own begins with, and what its chain says of that.

    chain: of this job, which must have begun with the same. Raises InvalidInput that names the spec's field.
    """
    fork = spec.fork
    if fork is UNSET:
        return None, UNSET
    source = RunFolder(run_root, fork.job)
    folder = source.checkpoint_after(fork.version - 1)
    try:
        checkpoint = read_checkpoint(folder)
        state = checkpoint.state
        link = _made_by(ChainFile(source), state.policy_version, state.weights_digest)
        if problem := fork_problem(decode_json(source.spec.read_bytes(), JobSpec), spec):
            raise InvalidInput(problem)
        found = ForkedFrom(
            job_id=fork.job,
            policy_version=state.policy_version,
            weights_digest=state.weights_digest,
            state_digest=content_digest((folder / "state.json").read_bytes()),
            link=link,
        )
    except (OnbeatError, OSError) as error:
        raise unusable_fork(fork, source, str(error)) from error
    begun = [record.forked for record in chain if record.policy_version == 0 and record.kind == "commit"]
    if begun and begun[-1] != found:
        raise InvalidInput(
            f"version {fork.version} of {fork.job} is another than the one that the job began with",
            field="fork.version",
            cure="put that checkpoint back, or submit the job anew",
        )
    return checkpoint, found


def _made_by(chain: ChainFile, version: int, weights_digest: str) -> str:
    """The digest of the record that made a version. Raises InvalidInput where the chain has none."""
    made = (version, weights_digest)
    for record in reversed(chain.after("")):
        if record.kind == "commit" and (record.policy_version + 1, record.next_weights_digest) == made:
            return record_digest(record)
    raise InvalidInput(f"its audit chain has no version {version} of these weights")
