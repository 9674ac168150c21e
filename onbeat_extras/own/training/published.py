"""Versions of an external trainer: its tensors, checked against the job's model, published, and read back.

It imports torch, so it is imported where weights are at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor

from broker.generator_side import WeightChunks
from broker.trainer_side import TrainerSide
from contracts.errors import InvalidInput, Unavailable, WeightsRejected
from contracts.run_folder import RunFolder
from contracts.spec import JobSpec
from contracts.versions import WeightManifest
from onbeat.weights.layout import Layout, layout_of
from onbeat.weights.model_folder import empty_model, weight_tensors
from onbeat.weights.publication import WeightPublisher
from onbeat.weights.receiver import PublishedVersions
from onbeat.weights.transports import make_publisher, make_stores
from onbeat_extras.own.connection import JobConnection

Weights = torch.nn.Module | Mapping[str, Tensor]


class Versions:
    """The versions of one job, as its trainer writes them."""

    def __init__(
        self,
        spec: JobSpec,
        folder: RunFolder,
        *,
        side: TrainerSide,
        connection: JobConnection,
        model_folder: Path,
        pause: Callable[[float], None],
    ) -> None:
        """Raises InvalidInput that names model.path."""
        model = empty_model(model_folder, dtype=getattr(torch, spec.model.dtype), device="meta")
        self._layout: Layout = layout_of(dict(weight_tensors(model)))
        settings = connection.settings
        uncached = replace(settings, cache="", cache_hosts="")
        stores = make_stores(folder.weight_root, partial(WeightChunks, connection.broker), uncached)
        self._published = PublishedVersions(self._layout, stores)
        self.publisher: WeightPublisher = make_publisher(
            spec, folder, chunks=side, announce=side.announce_shard, pause=pause, settings=settings
        )

    def publish(self, weights: Weights, policy_version: int) -> WeightManifest:
        """Writes a version; the fence isn't told. Raises InvalidInput for tensors that are not the model's."""
        tensors = self._tensors(weights)
        with self.publisher.begin(self._layout, policy_version=policy_version) as publication:
            for name in self._layout:
                publication.add(name, tensors[name])
            return publication.finish()

    def reread(self, manifest: WeightManifest) -> None:
        """Raises Unavailable where a version is not there as it was published: a trainer that starts writes it."""
        try:
            self._published.check(manifest)
        except WeightsRejected as error:
            raise Unavailable(
                f"a published version is damaged: {error}",
                field=manifest.directory,
                cure="start this process again: it publishes the version anew",
            ) from error

    def _tensors(self, weights: Weights) -> Mapping[str, Tensor]:
        tensors = weights if isinstance(weights, Mapping) else dict(weight_tensors(weights))
        for name in sorted(self._layout.keys() ^ tensors.keys()):
            problem = "is missing" if name in self._layout else "is none of the model's"
            raise InvalidInput(
                f"tensor {name} {problem}",
                field="weights",
                cure="give the module, or its named parameters, a tied one once, and its persistent buffers",
            )
        for name, asked in self._layout.items():
            found = tensors[name]
            if (found.dtype, tuple(found.shape)) != (asked.dtype, asked.shape):
                raise InvalidInput(
                    f"tensor {name} is {found.dtype} {list(found.shape)}, the job's model has {asked.dtype} "
                    f"{list(asked.shape)}",
                    field="weights",
                    cure="cast it to model.dtype",
                )
        return tensors
