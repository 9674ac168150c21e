"""Weights & Biases: one run a job, by its id; server, project and mode come from the WANDB_ variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import wandb  # pyright: ignore[reportMissingImports]
from msgspec import to_builtins

from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec
from onbeat.recording.records import RecordedSample

DEFAULT_PROJECT = "onbeat"
TABLES = {"train": "train", "held_out": "evaluation"}
"""Name of a table → the purpose of its completions."""
COLUMNS = ["version", "prompt", "reference", "completion", "reward"]
"""The first columns of a table; one for each reward component follows."""


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

    def log_samples(self, step: int, samples: Sequence[RecordedSample]) -> None:
        """Logs a table `samples/train` and one `samples/held_out`, of the iteration's completions."""
        for name, purpose in TABLES.items():
            of_purpose = [sample for sample in samples if sample.purpose == purpose]
            if not of_purpose:
                continue
            components = sorted({component for sample in of_purpose for component in sample.reward_components})
            table = wandb.Table(columns=[*COLUMNS, *components])
            for sample in of_purpose:
                row = [sample.policy_version, sample.prompt, sample.reference, sample.completion, sample.reward]
                table.add_data(*row, *(sample.reward_components.get(component) for component in components))
            self._run.log({f"samples/{name}": table}, step=step)

    def close(self) -> None:
        self._run.finish()
