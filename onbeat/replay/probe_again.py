"""`python -m onbeat.replay.probe_again JOB AUDIT ANSWER`: computes a job's probes again, from the weights on disk.

    spec, prompts ─▶ rows ─▶ the trainer's forward of each version on disk ─▶ compared with AUDIT ─▶ ANSWER (JSON)

It is told what a trainer is (ONBEAT_ variables, as `onbeat verify --probe` sets them); it has no broker and no lease.
Exit 0 once ANSWER is written, whatever it says; 2 for a bad setting.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec import UNSET
from msgspec.structs import replace

import onbeat.base.process.own_packages  # noqa: F401  (first: it refuses packages of ours that are a stranger's)
from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner
from consumer.model.checkpoint import read_checkpoint
from consumer.trainer.probes import rows_of
from contracts.answers import ComputedProbe, ProbeCheck
from contracts.encoding.wire import encode_json
from contracts.errors import OnbeatError
from contracts.probes import LIMITS, LogProbs, ProbedVersion, rows_digest
from contracts.run_folder import CHECKPOINT, RunFolder, numbered
from contracts.settings import StackSettings, settings_from
from contracts.spec.job import JobSpec
from onbeat.audit.chain import AuditEntry
from onbeat.audit.folder import read_audit_file, read_spec
from onbeat.audit.probes import largest_gap, numbers_of, probes_of
from onbeat.base.process.signals import exit_cleanly_on_signals
from onbeat.base.telemetry.logs import configure
from onbeat.loop.trained_job import job_prompts
from onbeat.recording.files import write_record

log = logging.getLogger(__name__)

NAME = "verify"
REFUSED = 2
MODEL = "the model's folder"


def check(settings: StackSettings, folder: RunFolder, spec: JobSpec, entries: list[AuditEntry]) -> ProbeCheck:
    """Computes the probe of each version whose weights are on disk, and compares it with the chain's.

    Args:
        settings: A trainer's.
        folder: The run folder.
        spec: The job.
        entries: Its audit chain.
    """
    probes = probes_of(entry.record for entry in entries)
    if not probes:
        return ProbeCheck(notes=("no version has a probe that could be computed again",))
    if spec.environments:
        # Its prompts are an environment's first messages, which only the reward service can play.
        return ProbeCheck(
            notes=("the probe's rows begin as prompts that an environment makes: none is computed again",)
        )
    try:
        # One process computes what several ranks have: a version's weights don't depend on who sums.
        alone = replace(spec, trainer=replace(spec.trainer, world_size=1, sharding="none"))
        learner = make_learner(settings, alone)
        rows = rows_of(spec, learner.policy, job_prompts(settings, spec, folder.job_id).train)
    except OnbeatError as error:
        return ProbeCheck(gaps=(f"no probe can be computed again: {error}",))
    if rows_digest(rows) != next(iter(probes.values())).rows:
        return ProbeCheck(
            gaps=(
                "the probes have other rows than the spec's seed and prompts give: the model's tokenizer or the data "
                "is another one than the job's (put it back), or the chain was made by hand",
            )
        )
    limit = spec.rollout.version_probe.max_gap
    if limit is UNSET:
        limit = LIMITS[spec.model.dtype]
    versions: list[ComputedProbe] = []
    on_disk: set[int] = set()
    gaps: list[str] = []
    for version, source, error in _versions(learner, folder, spec, entries):
        probe = probes.get(version)
        if error:
            gaps.append(f"{source}: {error}")
            continue
        if probe is None:
            continue
        on_disk.add(version)
        logprobs = learner.probe(rows)
        if len(probe.logprobs) != len(logprobs):
            gaps.append(
                f"{source}: version {version} has a probe of {len(probe.logprobs)} bytes, its rows give {len(logprobs)}"
            )
            continue
        computed = _compared(version, source, logprobs, probe, num_scored=len(rows[0].scored) // 4)
        versions.append(computed)
        if computed.gap > limit:
            gaps.append(
                f"{source}: version {version} computes otherwise than its probe says: row {computed.row} is "
                f"{computed.gap:.2g} off, and {limit:.2g} is allowed"
            )
    missing = sorted(probes.keys() - on_disk)
    notes = (f"the weights of {len(missing)} of {len(probes)} versions are no longer on disk",) if missing else ()
    return ProbeCheck(versions=tuple(versions), gaps=tuple(gaps), notes=notes)


def _versions(
    learner: Learner, folder: RunFolder, spec: JobSpec, entries: list[AuditEntry]
) -> Iterator[tuple[int, str, str]]:
    """Yields (version, what holds it, why it can't be read or ""), with the version in the learner's policy."""
    if spec.fork is UNSET:
        yield 0, MODEL, ""
    digests = {
        entry.record.policy_version + 1: entry.record.next_weights_digest
        for entry in entries
        if entry.record.kind == "commit"
    }
    for iteration, path in numbered(folder.checkpoints, CHECKPOINT):
        name = folder.relative(path)
        try:
            checkpoint = read_checkpoint(path)
            if checkpoint.state.weights_digest != digests.get(iteration + 1):
                # One of an abandoned future, or of a trainer that has yet to commit: the chain says nothing of it.
                continue
            learner.policy.load_state_tensors(checkpoint.model_tensors)
        except OnbeatError as error:
            yield iteration + 1, name, str(error)
        else:
            yield iteration + 1, name, ""


def _compared(version: int, source: str, now: LogProbs, then: ProbedVersion, *, num_scored: int) -> ComputedProbe:
    gap, place = largest_gap(numbers_of(now), numbers_of(then.logprobs))
    return ComputedProbe(
        version=version, source=source, is_equal=now == then.logprobs, gap=gap, row=place // num_scored
    )


def main(job_id: str, audit: str, answer: str) -> int:
    configure(StackSettings(), service=NAME)
    try:
        settings = settings_from(os.environ)
        configure(settings, service=NAME)
        folder = RunFolder(settings.run_root_path, job_id, weight_root=settings.weight_root_path)
        spec = read_spec(folder)
        stored = read_audit_file(Path(audit))
    except OnbeatError as error:
        log.error("%s", error)
        return REFUSED
    exit_cleanly_on_signals()
    write_record(Path(answer), encode_json(check(settings, folder, spec, list(stored.entries))))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
