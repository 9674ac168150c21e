"""Classes by which a process of your own joins a job, as a producer, a trainer or a stage (docs/extend.md).

The command line's client of a gateway stands next to them. None of these modules imports torch.
"""

from __future__ import annotations

from importlib import import_module
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
MODULES = {
    "Consumer": "onbeat.client.consumer",
    "Producer": "onbeat.client.producer",
    "PromptClaim": "onbeat.client.samples",
    "Rows": "onbeat.client.rows",
    "Sample": "onbeat.client.samples",
    "Stage": "onbeat.client.stage",
    "StageRows": "onbeat.client.stage",
    "TrainingIteration": "onbeat.client.training.arrivals",
    "TrainingRows": "onbeat.client.training.arrivals",
}
"""Name → its module, which is imported when a program asks for the name."""


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(MODULES[name]), name)
