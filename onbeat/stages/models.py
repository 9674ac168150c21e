"""The models of stages that compute in this process: a new kind of stage with a model is a row here.

A stage worker may serve a judge alone, and torch takes seconds to import: a kind's code is imported when it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from contracts.settings import StackSettings
from contracts.spec.stages import RewardModelStage
from onbeat.stages.compute_service import ComputeService, StageModel
from onbeat.stages.served_stages import ServedStage, model_folders
from onbeat.stages.services import Services

COMPUTED = ("reference", "teacher", "reward_model")
"""Kinds of stages whose models are in the stage worker's process."""


def model_service(settings: StackSettings) -> Services:
    """Makes the one service that computes for all kinds of stages with a model."""
    compute = ComputeService(
        model_loader(settings),
        most_models=settings.stage_models,
        check=lambda stage: model_folders(settings, stage),
        imports=import_models,
    )
    return dict.fromkeys(COMPUTED, compute)


def model_loader(settings: StackSettings) -> Callable[[ServedStage], StageModel]:
    """Returns a function that loads the model of a stage; it raises InvalidInput that names the stage's key."""

    def load(stage: ServedStage) -> StageModel:
        if isinstance(stage.stage, RewardModelStage):
            from onbeat.stages.reward_model import load_reward_model

            return load_reward_model(settings, stage)
        from onbeat.stages.log_prob_model import load_log_prob_model

        return load_log_prob_model(settings, stage)

    return load


def import_models() -> None:
    """Imports torch and the models' code before the first item asks for it."""
    # cuBLAS reads it once, when it starts; a deterministic job may come after one that isn't.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    from onbeat.stages import log_prob_model, reward_model  # noqa: F401
