"""The versions that recorded batches were sampled by: with its version, a batch can be sampled again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from contracts.recorded.batches import RecordedBatch
from contracts.spec import JobSpec
from contracts.versions import WeightManifest, WeightStep


def steps_of(manifest: WeightManifest) -> Iterator[WeightStep]:
    """Yields the folders that a version is read from: its own, and those that it stands on."""
    yield from manifest.steps
    if manifest.adapter is not None:
        yield manifest.adapter.base


def folders_of(manifests: Iterable[WeightManifest]) -> dict[str, int]:
    """Returns the folders of versions below the weight root → bytes; none of a version that is in Redis."""
    return {
        step.directory: sum(file.num_bytes for file in step.files)
        for manifest in manifests
        if not manifest.transport_kind.fills_redis
        for step in steps_of(manifest)
    }


def why_not_again(record: RecordedBatch, spec: JobSpec, weight_root: Path) -> str:
    """Says why a recorded batch can't be sampled again; "" where it can."""
    if not spec.deterministic:
        return "the job is not deterministic: sampled again, a batch has other tokens"
    manifest = record.manifest
    if manifest is None:
        return "its record doesn't say where the version is that sampled it"
    if manifest.transport_kind.fills_redis:
        return f'weights.transport = "{manifest.transport}" keeps no version of an iteration that is over'
    # What lies elsewhere is looked for by the process that samples it again.
    for step in () if manifest.transport_kind.elsewhere else steps_of(manifest):
        for file in step.files:
            try:
                if (weight_root / step.directory / file.name).stat().st_size == file.num_bytes:
                    continue
            except OSError:
                pass
            return f"version {manifest.policy_version} is not kept any more: {step.directory} lacks {file.name}"
    return ""
