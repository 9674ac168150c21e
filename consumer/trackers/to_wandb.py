"""Weights & Biases: one run a job, by its id; server, project and mode come from the WANDB_ variables."""

from __future__ import annotations

import os
from collections.abc import Mapping

import wandb  # pyright: ignore[reportMissingImports]
from msgspec import to_builtins

from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec

DEFAULT_PROJECT = "onbeat"


class WandbTracker:
    def __init__(self, folder: RunFolder, spec: JobSpec) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
            id=folder.job_id,
            name=spec.name,
            config=to_builtins(spec),
            dir=str(folder.path),
            # A successor of a trainer that died goes on with the same run.
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
