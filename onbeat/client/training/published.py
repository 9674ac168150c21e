"""Versions of an external trainer: its tensors, checked against the job's model, published, and read back.

It imports torch, so it is imported where weights are at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from contracts.errors import InvalidInput
from contracts.versions import WeightManifest
from onbeat.loop.trained_job import TrainedJob
from onbeat.weights.layout import Layout, layout_of
from onbeat.weights.model_folder import empty_model, weight_tensors

Weights = torch.nn.Module | Mapping[str, Tensor]


class Versions:
    """The versions of one job, as its trainer writes them."""

    def __init__(self, job: TrainedJob, model_folder: Path) -> None:
        """Raises InvalidInput that names model.path."""
        model = empty_model(model_folder, dtype=getattr(torch, job.spec.model.dtype), device="meta")
        self._layout: Layout = layout_of(dict(weight_tensors(model)))
        job.open_store(self._layout)
        self.publisher = job.weights

    def publish(self, weights: Weights, policy_version: int) -> WeightManifest:
        """Writes a version; the fence isn't told. Raises InvalidInput for tensors that are not the model's."""
        tensors = self._tensors(weights)
        with self.publisher.begin(self._layout, policy_version=policy_version) as publication:
            for name in self._layout:
                publication.add(name, tensors[name])
            return publication.finish()

    def _tensors(self, weights: Weights) -> Mapping[str, Tensor]:
        tensors = weights if isinstance(weights, Mapping) else dict(weight_tensors(weights))
        for name in sorted(self._layout.keys() ^ tensors.keys()):
            problem = "is none of the model's"
            if name in self._layout:
                problem = "is missing"
            raise InvalidInput(
                f"tensor {name} {problem}",
                field="weights",
                cure="give the module, or its named parameters, a tied one once, and its persistent buffers",
            )
        for name, expected in self._layout.items():
            tensor = tensors[name]
            if (tensor.dtype, tuple(tensor.shape)) != (expected.dtype, expected.shape):
                raise InvalidInput(
                    f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, the job's model has {expected.dtype} "
                    f"{list(expected.shape)}",
                    field="weights",
                    cure="cast it to model.dtype",
                )
        return tensors
