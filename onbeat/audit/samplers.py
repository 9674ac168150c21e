"""Which version sampled each trained batch of an iteration, checked against the schedule and the chain.

A record names the batches that an older version sampled (`AuditRecord.sampled`); every other training batch is of the
version that the iteration trained. The evaluation batches are always of that one, and are never named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from contracts.events import AuditRecord, SampledBy
from contracts.spec import JobSpec


def check_sampled(record: AuditRecord, spec: JobSpec, digests: Mapping[int, str], gaps: list[str]) -> None:
    """Adds to gaps what is wrong; digests: version → digest, of those that this record may have been sampled with."""
    name = f"iteration {record.iteration}"
    sampled = record.sampled or ()
    if sampled and not spec.schedule_rule.lags:
        gaps.append(f"{name}: it names older versions that sampled its batches, and this job has no lag")
        return
    trained = {batch for batch in record.batches if "/train/" in batch}
    for one in sampled:
        gaps += (f"{name}: {problem}" for problem in _of_sampler(one, record, spec, digests))
    named = Counter(batch for one in sampled for batch in one.batches)
    if twice := sorted(batch for batch, times in named.items() if times > 1):
        gaps.append(f"{name}: {some(twice)} are named as sampled more than once")
    if strange := sorted(named.keys() - trained):
        gaps.append(f"{name}: {some(strange)} are named as sampled, and were not trained")
    oldest, newest = spec.schedule_rule.versions_of(record.iteration)
    if newest < record.iteration and (own := sorted(trained - named.keys())):
        gaps.append(
            f"{name}: {some(own)} name no older version, where only {in_words(oldest, newest)} may have sampled"
        )


def _of_sampler(one: SampledBy, record: AuditRecord, spec: JobSpec, digests: Mapping[int, str]) -> Iterator[str]:
    version, what = one.policy_version, some(sorted(one.batches)) or "no batch"
    oldest, newest = spec.schedule_rule.versions_of(record.iteration)
    if not one.batches:
        yield f"version {version} is named as a sampler of no batch"
    if sum(other.policy_version == version for other in record.sampled or ()) > 1:
        yield f"version {version} is named as a sampler more than once"
    if version == record.iteration:
        yield f"{what} are named as sampled with version {version}, which is no older one"
    elif not oldest <= version <= newest:
        yield f"{what} were sampled with version {version}, where only {in_words(oldest, newest)} may have sampled"
    known = digests.get(version)
    if known is None:
        yield f"{what} were sampled with version {version}, which is in no record before"
    elif known != one.weights_digest:
        yield (
            f"{what} were sampled with version {version} of digest {one.weights_digest[:12]}, "
            f"the step that made it says {known[:12]}"
        )


def in_words(oldest: int, newest: int) -> str:
    """`version 3`, or `versions 1 to 3`."""
    return f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"


def some(names: Sequence[str], limit: int = 3) -> str:
    """`1/train/0, 1/train/1, 1/train/2 and 5 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
