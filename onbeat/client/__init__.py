"""A process of one's own joins the stream, as a producer, a trainer or a stage (docs/extend.md); beside it, what
the command line asks of a gateway. The parts are imported when they are asked for, and none of them imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onbeat.client.asynchronous import AsyncConsumer, AsyncProducer, AsyncStage
    from onbeat.client.consumer import Consumer
    from onbeat.client.producer import Producer
    from onbeat.client.rows import Rows
    from onbeat.client.samples import PromptClaim, Sample
    from onbeat.client.stage import Stage, StageRows
    from onbeat.client.training.arrivals import MicroBatch, TrainingIteration

__all__ = [
    "AsyncConsumer",
    "AsyncProducer",
    "AsyncStage",
    "Consumer",
    "MicroBatch",
    "Producer",
    "PromptClaim",
    "Rows",
    "Sample",
    "Stage",
    "StageRows",
    "TrainingIteration",
]
_MODULES = {
    "training.arrivals": ("MicroBatch", "TrainingIteration"),
    "asynchronous": ("AsyncConsumer", "AsyncProducer", "AsyncStage"),
    "consumer": ("Consumer",),
    "producer": ("Producer",),
    "samples": ("PromptClaim", "Sample"),
    "rows": ("Rows",),
    "stage": ("Stage", "StageRows"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
