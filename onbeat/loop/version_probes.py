"""The probes of the versions that a trainer publishes (I11, contracts/probes.py)."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from contracts.encoding.arrays import unpack_float32
from contracts.errors import InvalidInput, OnbeatError, TrainingDiverged
from contracts.probes import LogProbs, Probe, ProbeRow, bounds_for
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest


class VersionProbes:
    """Makes the probe of each version from what its trainer computes. The trainer creates it, and publishes by it."""

    def __init__(
        self,
        spec: JobSpec,
        rows: tuple[ProbeRow, ...],
        compute: Callable[[tuple[ProbeRow, ...]], LogProbs],
        *,
        is_routed: bool,
    ) -> None:
        """Takes the rows of all versions.

        Args:
            spec: The job's spec.
            rows: The rows; () gives no version a probe.
            compute: Computes the rows' log-probs under the weights that the trainer holds.
            is_routed: True for a mixture of experts.
        """
        self._rows = rows
        self._dtype = spec.model.dtype
        self._compute = compute
        self._bounds = bounds_for(
            spec.model.dtype,
            max_gap=spec.rollout.version_probe.max_gap,
            is_routed=is_routed,
            is_exact=spec.trainer.packing == "as_sampled",
        )
        self._measured: tuple[int, LogProbs] | None = None
        """The newest version that was measured, with its log-probs."""
        self._before: tuple[int, LogProbs] | None = None
        """The one before: what an engine would answer that stayed at it."""

    def measure(self, policy_version: int) -> None:
        """Measures the rows under the weights that the trainer holds now, which are the version's.

        Raises:
            TrainingDiverged, InvalidInput: For log-probs that are not finite: every engine would refuse the version.
        """
        if not self._rows:
            return
        logprobs = self._compute(self._rows)
        if not all(map(math.isfinite, unpack_float32(logprobs))):
            raise self._not_finite(policy_version)
        self._before = self._measured
        self._measured = (policy_version, logprobs)

    def _not_finite(self, policy_version: int) -> OnbeatError:
        """Returns the error for a version whose log-probs the trainer itself can't compute."""
        if policy_version == 0:
            # Nothing has trained it yet.
            return InvalidInput(
                f"the model as it is gives log-probs that are not finite, in {self._dtype}",
                field="model.path",
                cure='check its weights, or set model.dtype = "float32"',
            )
        return TrainingDiverged(
            f"the weights of version {policy_version} have diverged: its log-probs are not finite",
            field="weights",
            cure="lower optimizer.learning_rate",
        )

    def with_probe(self, manifest: WeightManifest) -> WeightManifest:
        """Returns the manifest with the version's probe, which is measured now where it hasn't been.

        In a job without probes it is the manifest as it is.
        """
        version = manifest.policy_version
        if not self._rows:
            return manifest
        if self._measured is None or self._measured[0] != version:
            self.measure(version)
        assert self._measured is not None
        before: LogProbs | UnsetType = UNSET
        if self._before is not None and self._before[0] == version - 1:
            before = self._before[1]
        probe = Probe(rows=self._rows, logprobs=self._measured[1], before=before, bounds=self._bounds)
        return replace(manifest, probe=probe)
