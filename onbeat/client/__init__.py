"""A process of one's own joins the stream, as a producer, a trainer or a stage (docs/extend.md); beside it, what
the command line asks of a gateway. The parts are an extra's, found when they are asked for; none of them imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onbeat.client.consumer import Consumer
    from onbeat.client.producer import Producer
    from onbeat.client.rows import Rows
    from onbeat.client.samples import PromptClaim, Sample
    from onbeat.client.stage import Stage, StageRows
    from onbeat.client.training.arrivals import TrainingIteration, TrainingRows

__all__ = [
    "Consumer",
    "Producer",
    "PromptClaim",
    "Rows",
    "Sample",
    "Stage",
    "StageRows",
    "TrainingIteration",
    "TrainingRows",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from onbeat.base.process.entry_points import find_entry_point

    return find_entry_point(__name__, name, field=f"{__name__}.{name}", where="program").load()
