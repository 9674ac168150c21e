"""What a new job may not say: settings whose numbers would lie, or that could do nothing.

    spec file ─▶ onbeat/client/spec_file.py ─┐
    POST /v1/jobs, /v1/jobs/check ───────────┴─▶ check_submitted ─▶ a job

Not part of JobSpec: earlier releases took such specs, and their jobs must still be read, resumed and verified.
"""

from __future__ import annotations

from msgspec import UNSET

from contracts.errors import InvalidInput
from contracts.spec import JobSpec
from contracts.spec_tables.algorithm import PluginLoss
from contracts.spec_tables.stages import REFERENCE_LOGPROBS, TEACHER_LOGPROBS, ExternalStage


def check_submitted(spec: JobSpec) -> None:
    """Raises InvalidInput that names the field and the cure."""
    _check_kept_sets(spec)
    _check_clips(spec)


def _check_kept_sets(spec: JobSpec) -> None:
    """Refuses log-probs over the whole vocabulary beside those over what truncated sampling kept."""
    truncation = spec.rollout.sampling.truncation
    for stage in spec.stages if truncation else ():
        made = {REFERENCE_LOGPROBS, TEACHER_LOGPROBS}.intersection(column.name for column in stage.outputs)
        if made and isinstance(stage, ExternalStage):
            raise InvalidInput(
                f"no column tells stage {stage.name} which tokens {truncation} kept, over which {made.pop()} are",
                field=f"rollout.sampling.{truncation.split()[0]}",
                cure='leave it out, or take a stage of type "teacher" or "reference"',
            )


def _check_clips(spec: JobSpec) -> None:
    """Refuses clips of a ratio that is 1: that of an iteration's one step against the trainer's log-probs before it.

    Under a lag as well: the old policy is the trainer's then, too. A loss of a package may use them as it likes.
    """
    algorithm = spec.algorithm
    is_one = algorithm.old_policy == "trainer" and not algorithm.moves_between_steps
    if not is_one or isinstance(algorithm.loss, PluginLoss):
        return
    for name in ("clip_low", "clip_high", "clip_max"):
        if getattr(algorithm, name) not in (None, UNSET):
            raise InvalidInput(
                'it has no effect: in an iteration\'s one step with old_policy = "trainer" the ratio is exactly 1',
                field=f"algorithm.{name}",
                cure='leave it out, or set updates_per_iteration or mini_batches above 1, or old_policy = "generator"',
            )
