"""The probes of the versions that a trainer publishes (I11, contracts/probes.py)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from consumer.model.policy import Policy
from consumer.ranks.base import Ranks
from contracts.probes import FLOORS, LIMITS, LogProbs, Probe, ProbeBounds, ProbeRow
from contracts.rollouts import Prompt
from contracts.spec.job import JobSpec
from contracts.versions import WeightManifest
from onbeat.data.probe_rows import plain_tokens, probe_rows
from onbeat.data.prompts.prompt_batches import PromptBatches


class VersionProbes:
    """Makes the probe of each version from what the ranks hold. A `HeldJob` creates it, and publishes by it."""

    def __init__(self, spec: JobSpec, ranks: Ranks, prompt_batches: PromptBatches) -> None:
        self._spec = spec
        self._ranks = ranks
        self._rows = rows_of(spec, ranks.learner.policy, prompt_batches.training_prompts)
        self._measured: tuple[int, LogProbs] | None = None
        """The newest version that was measured, with its log-probs."""
        self._before: tuple[int, LogProbs] | None = None
        """The one before: what an engine would answer that stayed at it."""

    def measure(self, policy_version: int) -> None:
        """Measures the rows under the weights that the ranks hold now, which are the version's."""
        if self._rows:
            self._before = self._measured
            self._measured = (policy_version, self._ranks.probe(self._rows))

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
        probe = Probe(rows=self._rows, logprobs=self._measured[1], before=before, bounds=self._bounds())
        return replace(manifest, probe=probe)

    def _bounds(self) -> ProbeBounds:
        dtype = self._spec.model.dtype
        limit = self._spec.rollout.version_probe.max_gap
        if limit is UNSET:
            limit = LIMITS[dtype]
        return ProbeBounds(
            limit=limit,
            floor=min(limit, FLOORS[dtype]),
            is_exact=self._spec.trainer.packing == "as_sampled",
        )


def rows_of(spec: JobSpec, policy: Policy, prompts: Sequence[Prompt]) -> tuple[ProbeRow, ...]:
    """Returns the rows of a job's probe; () in a job without probes.

    Args:
        spec: The job.
        policy: Its model.
        prompts: All training prompts of the job.
    """
    if spec.rollout.version_probe.rows == 0:
        return ()
    return probe_rows(
        spec.rollout.version_probe,
        prompts,
        seed=spec.seed,
        tokens=plain_tokens(policy.tokenizer, vocabulary_tokens=policy.vocabulary_size),
        longest_tokens=min(policy.context_tokens, spec.longest_row),
    )
