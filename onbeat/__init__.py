"""The roof, which a person types and imports, and below it the rooms that the services share.

    run = onbeat.train("configs/demo.toml", iterations=50)
    for iteration in run:
        print(iteration.number, iteration.reward_mean)
    model, tokenizer = run.export("my-model")

`commands`, `client`, `stack` and `terminal` start the services as processes, and import none of them. The services
import the lower rooms: `loop`, `weights`, `data`, `environments`, `base` and their like.

Consumes:     job specs from programs, files and flags, and what the gateway answers over HTTP.
Waits for:    readiness of each service it started, and the events of the jobs it watches, each with a deadline.
Unblocked by: Redis PING, `/readyz` of the HTTP services, server-sent events.
Produces:     a running stack on loopback, submitted jobs, a verdict over the audit chain, figures, exit codes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onbeat.training.run import Run
    from onbeat.training.start import attach, train

__all__ = ["Run", "attach", "train"]
MODULES = {
    "Run": "onbeat.training.run",
    "attach": "onbeat.training.start",
    "train": "onbeat.training.start",
}
"""Name → its module, which is imported when a program asks for the name: `import onbeat` itself imports nothing."""


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(MODULES[name]), name)
