"""Which model a stage has, by its kind: a new kind that computes in this process is a line here.

A stage worker may serve a judge alone, and torch takes seconds to import: a kind's code is imported when it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from consumer.stages.compute_service import StageModel
from consumer.stages.served_stages import ServedStage, model_folder
from contracts.settings import StackSettings
from contracts.spec_tables.stages import RewardModelStage

COMPUTED = ("reference", "teacher", "reward_model")
"""Kinds of stages whose models are in the stage worker's process."""


def model_loader(settings: StackSettings) -> Callable[[ServedStage], StageModel]:
    """Returns what loads the model of a stage; it raises InvalidInput that names the stage's key."""

    def load(stage: ServedStage) -> StageModel:
        if isinstance(stage.stage, RewardModelStage):
            from consumer.stages.reward_model import load_reward_model

            return load_reward_model(settings, stage)
        from consumer.stages.log_prob_model import load_log_prob_model

        return load_log_prob_model(settings, stage)

    return load


def model_check(settings: StackSettings) -> Callable[[ServedStage], None]:
    """Returns what looks for a stage's model on this host; it raises what loading would, without reading it."""

    def check(stage: ServedStage) -> None:
        if stage.stage.kind in COMPUTED:
            model_folder(settings, stage)

    return check


def import_models() -> None:
    """Imports torch and the models' code before the first item asks for it."""
    # cuBLAS reads it once, when it starts; a deterministic job may come after one that isn't.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from consumer.stages import log_prob_model, reward_model  # noqa: F401
