"""Re-checks a job's audit chain and the weights that are still on disk: a function of values, and no trust.

What it proves of a run whose records it is given, oldest first:

- the chain: each record holds the digest of the one before (`previous`), and its own digest is the one recorded;
- the ledger: each iteration was committed once, in order, with exactly its expected batches (I3); one that only
  evaluated is the last, unless a job that was resumed with more iterations goes back to it and trains it;
- the versions: iteration t trained version t with one digest, and what it made is what t + 1 trained (I2, I4);
- the samplers: each trained batch is of one version that the schedule lets sample it, whose digest is that of the step
  that made it (I2); in a job without a lag that is version t;
- the trainers: epochs never decrease; a step back is a recorded rewind under a newer epoch, and a deterministic job
  that replays an iteration makes the same weights again (I7);
- the probes: each version has one of the same rows, whose log-probs are finite, and equal weights have equal ones
  (I11, `probes.py`); a run that was made before versions had probes has none, which is a note;
- the columns: in a job with stages each trained batch, and no other, has a digest of what stages made of it;
- the environment: in a deterministic job all iterations were played by one version of it;
- the draws: what measured pass rates decide is drawn again from what the records before have measured;
- the early end: `evaluation.stop_when` ends the job where the held-out scores of the records say so, and nowhere else;
- the named files: each iteration was trained with the model's folder, rows and stages' models of the spec;
- the rewards: functions of files are those of the spec, and a completion that couldn't be judged has a score only where
  the component, the environment or the stage stated one;
- the files: weights and checkpoints on disk have the digests that the chain says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from contracts.answers import AuditVerdict
from contracts.encoding.wire import Record
from contracts.events import AuditRecord, SampledBy, record_digest
from contracts.file_digests import digest_of_files
from contracts.rewards import source_digests
from contracts.schedule import versions_in_words
from contracts.spec.datasets import difficulty_pools_of
from contracts.spec.environment import VERSIONS_END, played_by
from contracts.spec.job import JobSpec
from contracts.stopping import scores_after, stop_reason
from onbeat.audit.probes import ChainProbes
from onbeat.data.prompts.difficulty import DrawCheck


class AuditEntry(Record, frozen=True, kw_only=True):
    """A record of the chain with the digest that the broker stored for it. The gateway and run folders create it."""

    record: AuditRecord
    digest: str


@dataclass
class _Walk:
    """The facts of the records that were checked so far. `verify_run` creates it; each check reads and changes it."""

    gaps: list[str] = field(default_factory=list)
    next_iteration: int = 0
    epoch: int = 0
    previous: str = ""
    digests: dict[int, str] = field(default_factory=dict)
    """Version → weights digest."""
    first_digests: dict[int, str] = field(default_factory=dict)
    """Iteration → digest of the version that it made when it was first committed."""
    rewinds: int = 0
    environments: list[str] = field(default_factory=list)
    probes: ChainProbes = field(default_factory=ChainProbes)
    draws: DrawCheck | None = None
    """Draws each iteration's prompts again; None in a job without difficulty pools."""
    only_evaluated: int | None = None
    """The iteration of the last record, where it made no version: nothing but a rewind may follow."""
    scores: dict[int, float] = field(default_factory=dict)
    """Version → mean held-out reward, by which `evaluation.stop_when` decides."""
    is_stopped: bool = False
    """True: the last record ended the job early."""


def verify_run(
    entries: Sequence[AuditEntry],
    spec: JobSpec,
    *,
    complete: bool,
    digests_on_disk: Mapping[str, tuple[int, str]],
    job_id: str = "",
    notes: tuple[str, ...] = (),
) -> AuditVerdict:
    """Checks a job's chain of records against its spec, and the versions on disk against the chain.

    Args:
        entries: The records, in the order of the chain.
        spec: The job.
        complete: True for a job that succeeded, so that nothing may be missing at the end.
        digests_on_disk: Folder → (policy version, recomputed digest), from `weights.digests_on_disk`.
        job_id: The job's id, for the verdict.
        notes: Further notes for the verdict.
    """
    walk = _Walk()
    for position, entry in enumerate(entries):
        _check_link(walk, entry, position)
        _check_after_evaluation(walk, entry.record)
        walk.scores = scores_after(walk.scores, entry.record)
        walk.is_stopped = entry.record.stopped is not UNSET
        if entry.record.kind == "commit":
            _check_commit(walk, entry.record, spec)
        elif entry.record.kind == "rewind":
            _check_rewind(walk, entry.record)
        else:
            walk.gaps.append(f"record {position}: unknown kind `{entry.record.kind}`")
    if complete:
        _check_end(walk, spec)
    _check_files(walk, digests_on_disk)
    notes += walk.probes.notes(spec)
    final = {entry.record.iteration: entry.record for entry in entries if entry.record.kind == "commit"}
    trained = [record for record in final.values() if record.next_weights_digest]
    return AuditVerdict(
        job_id=job_id,
        verified=not walk.gaps,
        records=len(entries),
        iterations=len(trained),
        batches_trained=sum("/train/" in batch for record in trained for batch in record.batches),
        batches_evaluated=sum("/evaluation/" in batch for record in final.values() for batch in record.batches),
        rewinds=walk.rewinds,
        digests_recomputed=len(digests_on_disk),
        gaps=tuple(walk.gaps),
        environments=tuple(walk.environments) or UNSET,
        notes=notes,
    )


def expected_batches(spec: JobSpec, iteration: int) -> frozenset[str]:
    """Returns the ids of an iteration's training batches; none after the last one, which only evaluates."""
    if iteration >= spec.iterations:
        return frozenset()
    return frozenset(f"{iteration}/train/{index}" for index in range(spec.rollout.batches_per_iteration))


def _check_link(walk: _Walk, entry: AuditEntry, position: int) -> None:
    actual = record_digest(entry.record)
    name = f"record {position} ({entry.record.kind} of iteration {entry.record.iteration})"
    if entry.digest != actual:
        walk.gaps.append(f"{name}: its digest is {actual[:12]}, recorded is {entry.digest[:12]}: it was changed")
    if entry.record.previous != walk.previous:
        walk.gaps.append(
            f"{name}: it follows {entry.record.previous[:12] or 'nothing'}, "
            f"the record before is {walk.previous[:12] or 'none'}: one is missing or out of order"
        )
    walk.previous = actual


def _check_commit(walk: _Walk, record: AuditRecord, spec: JobSpec) -> None:
    name = f"iteration {record.iteration}"
    if record.iteration != walk.next_iteration:
        walk.gaps.append(f"{name} was committed where iteration {walk.next_iteration} was due")
    if record.policy_version != record.iteration:
        walk.gaps.append(f"{name} trained version {record.policy_version}")
    _check_epoch(walk, record, name)
    _check_version(walk, record.policy_version, record.weights_digest, name)
    _check_batches(walk, record, spec, name)
    check_sampled(record, spec, walk.digests, walk.gaps)
    _check_unscorable(walk, record, name)
    _check_columns(walk, record, spec, name)
    walk.gaps += walk.probes.check(record, spec, name)
    _check_sums(walk, record, spec, name)
    _check_environment(walk, record, spec, name)
    _check_forked(walk, record, spec, name)
    _check_drawn(walk, record, spec, name)
    _check_stop(walk, record, spec, name)
    if (record.rewards or {}) != source_digests(spec.reward.components):
        walk.gaps.append(f"{name}: its rewards are of another file than the spec's")
    if (record.files or "") != digest_of_files(spec.file_digests):
        walk.gaps.append(f"{name}: the files that it was trained with are not those of the spec")
    if record.next_weights_digest:
        _check_next_version(walk, record, spec, name)
    else:
        walk.only_evaluated = record.iteration
    walk.next_iteration = record.iteration + 1


def _check_forked(walk: _Walk, record: AuditRecord, spec: JobSpec, name: str) -> None:
    named: tuple[str, int, str] | None = None
    # The first record alone names the version that a fork starts from.
    if spec.fork is not UNSET and not record.iteration:
        named = (spec.fork.job, spec.fork.version, record.weights_digest)
    forked = record.forked or None
    if named != (forked and (forked.job_id, forked.policy_version, forked.weights_digest)):
        walk.gaps.append(f"{name}: where its weights come from is not what the spec says")


def _check_drawn(walk: _Walk, record: AuditRecord, spec: JobSpec, name: str) -> None:
    measured = difficulty_pools_of(spec.dataset) if record.next_weights_digest else {}
    if [drawn.source for drawn in record.drawn or ()] != [*measured]:
        walk.gaps.append(f"{name}: it doesn't say what was drawn by measured pass rates, or of other sources")
    elif measured:
        if walk.draws is None:
            walk.draws = DrawCheck(spec)
        walk.gaps += (f"{name}: {problem}" for problem in walk.draws(record))


def _check_stop(walk: _Walk, record: AuditRecord, spec: JobSpec, name: str) -> None:
    """Checks that the job goes on, or ends, as the held-out scores of the chain say."""
    has_score = spec.evaluation.stop_when is not UNSET and spec.evaluates(record.iteration)
    if record.held_out is not UNSET and not has_score:
        walk.gaps.append(f"{name}: it has a held-out score, by which this job does not end")
    if record.held_out is UNSET and has_score and not record.abandoned:
        walk.gaps.append(f"{name}: it lacks the held-out score by which the job may end")
    # The last iteration of a job that was resumed with more of them made no version either, and ended nothing early.
    if record.stopped is UNSET and not record.next_weights_digest:
        return
    due = stop_reason(spec, record.iteration, walk.scores)
    if (record.stopped or "") != due:
        walk.gaps.append(f"{name}: {'the job was due to end there' if due else 'it ended the job, which was not due'}")


def _check_after_evaluation(walk: _Walk, record: AuditRecord) -> None:
    if walk.only_evaluated is not None and (record.kind != "rewind" or record.iteration > walk.only_evaluated):
        walk.gaps.append(f"iteration {walk.only_evaluated} made no version")
    walk.only_evaluated = None


def _check_rewind(walk: _Walk, record: AuditRecord) -> None:
    name = f"rewind to iteration {record.iteration}"
    walk.rewinds += 1
    if record.iteration > walk.next_iteration:
        walk.gaps.append(f"{name}: only {walk.next_iteration} iterations were committed before it")
    if record.trainer_epoch <= walk.epoch:
        walk.gaps.append(f"{name}: epoch {record.trainer_epoch} is not above {walk.epoch}, of the trainer before")
    if record.sampled:
        walk.gaps.append(f"{name}: it names versions that sampled batches, and trained none")
    if record.columns:
        walk.gaps.append(f"{name}: it names columns of batches, and trained none")
    _check_epoch(walk, record, name)
    _check_version(walk, record.iteration, record.weights_digest, name)
    # What the abandoned future made is no longer a version of this run.
    walk.digests = {version: digest for version, digest in walk.digests.items() if version <= record.iteration}
    walk.next_iteration = record.iteration


def _check_epoch(walk: _Walk, record: AuditRecord, name: str) -> None:
    if record.trainer_epoch < walk.epoch:
        walk.gaps.append(f"{name}: trainer epoch fell from {walk.epoch} to {record.trainer_epoch}")
    walk.epoch = max(walk.epoch, record.trainer_epoch)


def _check_version(walk: _Walk, version: int, digest: str, name: str) -> None:
    known = walk.digests.setdefault(version, digest)
    if known != digest:
        walk.gaps.append(f"{name}: version {version} has digest {digest[:12]}, the step that made it says {known[:12]}")


def _check_next_version(walk: _Walk, record: AuditRecord, spec: JobSpec, name: str) -> None:
    """Checks that a step which was replayed led to the same weights, and notes the version that it led to."""
    first = walk.first_digests.setdefault(record.iteration, record.next_weights_digest)
    if spec.deterministic and first != record.next_weights_digest:
        digests = f"{record.next_weights_digest[:12]} when it was replayed, {first[:12]} before"
        walk.gaps.append(f"{name}: it made {digests}, although the job is deterministic")
    walk.digests[record.policy_version + 1] = record.next_weights_digest


def _check_batches(walk: _Walk, record: AuditRecord, spec: JobSpec, name: str) -> None:
    accounted = set(record.batches) | set(record.abandoned)
    both = sorted(set(record.batches) & set(record.abandoned))
    if both:
        walk.gaps.append(f"{name}: {first_few(both)} are counted both as used and as abandoned")
    if record.abandoned and spec.rollout.on_failed_batch == "fail":
        walk.gaps.append(f"{name}: {first_few(sorted(record.abandoned))} were abandoned, which this job does not allow")
    undigested = sorted(batch for batch, digest in record.batches.items() if not digest)
    if undigested:
        walk.gaps.append(f"{name}: {first_few(undigested)} have no digest")
    # The last iteration of a job that was resumed with more: it evaluated, and trained nothing. One that ended the job
    # early had its training batches, and made no version of them.
    has_training = bool(record.next_weights_digest) or record.stopped is not UNSET
    expected = set(expected_batches(spec, record.iteration)) if has_training else set()
    if not record.next_weights_digest or spec.evaluates(record.iteration):
        expected |= {f"{record.iteration}/evaluation/{index}" for index in range(spec.evaluation.num_batches)}
    missing = sorted(expected - accounted)
    if missing:
        walk.gaps.append(f"{name}: {first_few(missing)} are missing")
    extra = sorted(accounted - expected)
    if extra:
        walk.gaps.append(f"{name}: {first_few(extra)} were not expected")


def _check_unscorable(walk: _Walk, record: AuditRecord, name: str) -> None:
    """Checks that each stand-in for a score is in a batch that was used, and of a scorer that states such a score."""
    stated = set(record.on_unscorable or ())
    counts = record.unscorable or {}
    strange = sorted(counts.keys() - record.batches.keys())
    if strange:
        walk.gaps.append(f"{name}: {first_few(strange)} have unscorable completions, and were not used")
    judges = {reason.partition(": ")[0] for of_batch in counts.values() for reason in of_batch}
    unstated = sorted(judges - stated)
    if unstated:
        walk.gaps.append(f"{name}: {first_few(unstated)} could not judge completions, and states no score for that")


def _check_environment(walk: _Walk, record: AuditRecord, spec: JobSpec, name: str) -> None:
    played = (record.environment or "").split(VERSIONS_END)
    for source, environment in spec.environments.items():
        if environment.file_version and played_by({source: environment.file_version}) not in played:
            walk.gaps.append(f"{name}: its environment is of another file than the spec's")
    if record.environment is UNSET:
        return
    if spec.deterministic and walk.environments and record.environment != walk.environments[-1]:
        walk.gaps.append(f"{name} was played by {record.environment}, the iterations before by {walk.environments[-1]}")
    if record.environment not in walk.environments:
        walk.environments.append(record.environment)


def _check_columns(walk: _Walk, record: AuditRecord, spec: JobSpec, name: str) -> None:
    columns = record.columns or {}
    trained = {batch for batch in record.batches if "/train/" in batch} if spec.stages else set()
    lacking = sorted(trained - columns.keys())
    if lacking:
        walk.gaps.append(f"{name}: {first_few(lacking)} were trained without columns, the job has stages")
    strange = sorted(columns.keys() - trained)
    if strange:
        of_job = "no stage made any" if spec.stages else "the job has no stages"
        walk.gaps.append(f"{name}: {first_few(strange)} have columns, {of_job}")
    undigested = sorted(batch for batch, digest in columns.items() if not digest)
    if undigested:
        walk.gaps.append(f"{name}: the columns of {first_few(undigested)} have no digest")


def _check_sums(walk: _Walk, record: AuditRecord, spec: JobSpec, name: str) -> None:
    """Checks that the exact sums have each batch that teaches in every pass over the iteration, and no other batch."""
    for number, times in enumerate(record.in_sums or ()):
        batch = f"{record.iteration}/train/{number}"
        if times and (times != spec.algorithm.updates_per_iteration or batch not in record.batches):
            walk.gaps.append(f"{name}: {times} of its gradient's sums held {batch}")


def _check_end(walk: _Walk, spec: JobSpec) -> None:
    if walk.is_stopped:
        return
    last = spec.last_iteration
    if walk.only_evaluated is not None and walk.only_evaluated < spec.iterations:
        walk.gaps.append(f"iteration {walk.only_evaluated} made no version")
    if walk.next_iteration <= last:
        walk.gaps.append(f"the job succeeded, but iteration {walk.next_iteration} of 0 to {last} was never committed")


def _check_files(walk: _Walk, digests_on_disk: Mapping[str, tuple[int, str]]) -> None:
    for folder, (version, digest) in sorted(digests_on_disk.items()):
        known = walk.digests.get(version)
        if known is None:
            # The version that a running trainer has just made, or one that a rewind took back, is in no record.
            if version <= max(walk.digests, default=-1):
                walk.gaps.append(f"{folder}: version {version} is in no record")
        elif known != digest:
            walk.gaps.append(f"{folder}: the files have digest {digest[:12]}, version {version} is {known[:12]}")


def check_sampled(record: AuditRecord, spec: JobSpec, digests: Mapping[int, str], gaps: list[str]) -> None:
    """Checks which version sampled each trained batch of an iteration, against the schedule and the chain.

    A record names the batches that an older version sampled (`AuditRecord.sampled`); every other training batch is of
    the version that the iteration trained. The evaluation batches are always of that one, and are never named. Adds to
    gaps what is wrong; digests: version → digest, of those that this record may have been sampled with.
    """
    name = f"iteration {record.iteration}"
    sampled = record.sampled or ()
    if sampled and not spec.schedule_rule.lags:
        gaps.append(f"{name}: it names older versions that sampled its batches, and this job has no lag")
        return
    trained = {batch for batch in record.batches if "/train/" in batch}
    for sampler in sampled:
        gaps += (f"{name}: {problem}" for problem in _of_sampler(sampler, record, spec, digests))
    named = Counter(batch for sampler in sampled for batch in sampler.batches)
    twice = sorted(batch for batch, times in named.items() if times > 1)
    if twice:
        gaps.append(f"{name}: {first_few(twice)} are named as sampled more than once")
    strange = sorted(named.keys() - trained)
    if strange:
        gaps.append(f"{name}: {first_few(strange)} are named as sampled, and were not trained")
    oldest, newest = spec.schedule_rule.versions_of(record.iteration)
    # A batch that no older version is named for was sampled by the version that the iteration trained.
    own = sorted(trained - named.keys())
    if newest < record.iteration and own:
        only = versions_in_words(oldest, newest)
        gaps.append(f"{name}: {first_few(own)} name no older version, where only {only} may have sampled")


def _of_sampler(sampler: SampledBy, record: AuditRecord, spec: JobSpec, digests: Mapping[int, str]) -> Iterator[str]:
    """Yields the problems of one older version that a record names as the sampler of some of its batches."""
    version = sampler.policy_version
    what = first_few(sorted(sampler.batches)) or "no batch"
    oldest, newest = spec.schedule_rule.versions_of(record.iteration)
    if not sampler.batches:
        yield f"version {version} is named as a sampler of no batch"
    if sum(other.policy_version == version for other in record.sampled or ()) > 1:
        yield f"version {version} is named as a sampler more than once"
    if version == record.iteration:
        yield f"{what} are named as sampled with version {version}, which is no older one"
    elif not oldest <= version <= newest:
        only = versions_in_words(oldest, newest)
        yield f"{what} were sampled with version {version}, where only {only} may have sampled"
    known = digests.get(version)
    if known is None:
        yield f"{what} were sampled with version {version}, which is in no record before"
    elif known != sampler.weights_digest:
        yield (
            f"{what} were sampled with version {version} of digest {sampler.weights_digest[:12]}, "
            f"the step that made it says {known[:12]}"
        )


def first_few(names: Sequence[str], limit: int = 3) -> str:
    """Lists the first names in words: `1/train/0, 1/train/1, 1/train/2 and 5 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
