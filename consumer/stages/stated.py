"""The columns of a stage that states a score for what it can't judge: a score, and why it is no measurement.

values(stage, item) ─┬─▶ scores ──────────────────────────────────────────────▶ scores, and no reason
                     └─▶ CompletionUnjudged ─ it lasts, or so in each of max_attempts ─▶ the stated score, and why
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from broker.stage_side import ClaimedItem
from consumer.stages.served_stages import ServedStage
from contracts.encoding.arrays import pack_float32
from contracts.errors import CompletionUnjudged
from contracts.experience.columns import ColumnValues
from contracts.spec_tables.stages import JudgingStage

log = logging.getLogger(__name__)

Values = Callable[[ServedStage, ClaimedItem], Awaitable[ColumnValues]]


async def judged_values(values: Values, stage: ServedStage, item: ClaimedItem) -> ColumnValues:
    """Returns the columns of an item. values: makes those of a completion that can be judged.

    An attempt whose worker died says nothing of the completion, so all times that it can't be judged are in one claim.
    Raises what `values` raises; CompletionUnjudged where the spec states no score.
    """
    judge = stage.stage
    if not isinstance(judge, JudgingStage) or judge.stated_score is None:
        return await values(stage, item)
    num_failures = 0
    while True:
        try:
            return {**await values(stage, item), judge.failure_column: [b""] * len(item.rows)}
        except CompletionUnjudged as error:
            num_failures += 1
            log.info("%s: %s (%s), %d times", item, error, error.reason, num_failures)
            if error.lasts or num_failures >= judge.max_attempts:
                score = pack_float32([judge.stated_score])
                return {judge.name: [score], judge.failure_column: [error.reason.encode()]}
