"""When trainer and generator disagree about the sampled tokens so much that somebody should look."""

from __future__ import annotations

import time
from collections.abc import Sequence

from consumer.gradient.statistics import MicroBatchStats, trainer_generator_gap
from contracts.events import MismatchAlarm

LIKELY_CAUSES = (
    "likely causes: another dtype or other kernels in the generator, top_p or top_k below the whole distribution, "
    "a logits processor of the engine, weights that were changed after they were hashed"
)


def mismatch_alarm(stats: Sequence[MicroBatchStats], *, iteration: int, threshold: float) -> MismatchAlarm | None:
    """None up to the threshold of the mean K3 a token; stats: of every training batch under the sampled weights."""
    gap = trainer_generator_gap([of_batch.mismatch for of_batch in stats])
    # A K3 that overflowed to NaN is above every threshold.
    if gap["mismatch_k3"] <= threshold:
        return None
    return MismatchAlarm(at_s=time.time(), iteration=iteration, threshold=threshold, **gap)


def in_words(alarm: MismatchAlarm) -> str:
    """`trainer and generator log-probs differ by a mean K3 of 0.31 a token (alarm above 0.01), at most by 5.1, …`"""
    return (
        f"in iteration {alarm.iteration} trainer and generator log-probs differ by a mean K3 of "
        f"{alarm.mismatch_k3:.3g} a token (alarm above {alarm.threshold:g}), at most by {alarm.mismatch_max:.3g}; "
        f"effective sample share {alarm.effective_sample_share:.2f}"
    )
