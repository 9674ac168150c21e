"""What a new job may not say: settings whose numbers would lie, or that could do nothing.

    spec file ─▶ onbeat/client/spec_file.py ─┐
    POST /v1/jobs, /v1/jobs/check ───────────┴─▶ check_submitted ─▶ a job

Not part of JobSpec: earlier releases took such specs, and their jobs must still be read, resumed and verified.
"""

from __future__ import annotations

from contracts.errors import InvalidInput
from contracts.rollouts import SamplingParams
from contracts.spec import JobSpec
from contracts.spec_tables.algorithm import PluginLoss


def check_submitted(spec: JobSpec) -> None:
    """Raises InvalidInput that names the field and the cure."""
    _check_support(spec)
    _check_clips(spec)


def _check_support(spec: JobSpec) -> None:
    """Refuses log-probs over two supports in one ratio.

    Generators answer those of the distribution that was sampled, renormalised over the kept tokens; the trainer's are
    over the whole vocabulary. Of equal weights the ratio would be the kept mass, and not 1.
    """
    truncated, compared = _truncated(spec.rollout.sampling), _compared(spec)
    if truncated and compared:
        raise InvalidInput(
            f"generators renormalise over the tokens that {truncated} keeps and the trainer doesn't, so that its "
            f"ratios against them would be wrong, which {compared} takes",
            field=f"rollout.sampling.{truncated.split()[0]}",
            cure="set top_p = 1.0 and top_k = 0; or sample with the trained version, old_policy = "
            '"trainer" and no correction',
        )


def _truncated(sampling: SamplingParams) -> str:
    """The setting that keeps some tokens out of the draw; "" where each may be drawn."""
    if sampling.top_p < 1.0:
        return f"top_p = {sampling.top_p:g}"
    return f"top_k = {sampling.top_k}" if sampling.top_k > 0 else ""


def _compared(spec: JobSpec) -> str:
    """The setting by which the trained policy is held against the one that sampled; "" where none is."""
    algorithm = spec.algorithm
    if algorithm.old_policy == "generator":
        return 'algorithm.old_policy = "generator"'
    if algorithm.correction_name != "none":
        return f'algorithm.correction = "{algorithm.correction_name}"'
    return f"max_policy_lag = {spec.max_policy_lag}" if spec.max_policy_lag > 0 else ""


def _check_clips(spec: JobSpec) -> None:
    """Refuses clips of a ratio that is 1: that of one update against the trainer's own log-probs before it.

    Under a lag as well: the old policy is the trainer's then, too. A loss of a package may use them as it likes.
    """
    algorithm = spec.algorithm
    is_one = algorithm.old_policy == "trainer" and algorithm.updates_per_iteration == 1
    if not is_one or isinstance(algorithm.loss, PluginLoss):
        return
    for name, value in (("clip_low", algorithm.clip_low), ("clip_high", algorithm.clip_high)):
        if value is not None:
            raise InvalidInput(
                'it has no effect: in an iteration\'s one update with old_policy = "trainer" the ratio is exactly 1',
                field=f"algorithm.{name}",
                cure='leave it out, or set updates_per_iteration above 1 or old_policy = "generator"',
            )
