"""Versions as adapters: their base is written once, and each version after it is some percent of the weights.

    weights/base/weights-00001-of-00003.safetensors
    weights/v000003/weights-00001-of-00001.safetensors     A and B of version 3

The digest of a version is that of the merged weights, as if they had been published.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace
from torch import Tensor

from contracts.versions import AdapterVersion, WeightManifest, WeightStep
from onbeat.weights.adapter.matrices import AdapterSource, matrices_of
from onbeat.weights.layout import Layout, PendingVersion, layout_of, published_dtype
from onbeat.weights.publication import Publication, StoredVersion, WeightPublisher
from onbeat.weights.whole import WholeSink

BASE_NAME = "base"


class AdapterPublisher:
    """A WeightPublisher of adapters: it hashes the merged weights, and another publisher carries the matrices."""

    def __init__(self, carrier: WeightPublisher, source: AdapterSource) -> None:
        self._carrier = carrier
        self.store = carrier.store
        self._source = source
        self._bases = bases = carrier.store.bases
        self._directory = bases.folder.relative(bases.folder.weights / BASE_NAME)
        self._base: WeightStep | None = None
        """None until this trainer has seen that it is there, whole."""

    def begin(self, layout: Layout, *, policy_version: int, is_again: bool = False) -> Publication:
        """Begins a version.

        Args:
            layout: The layout of the merged weights, which is the base's, too. They are hashed and go nowhere; with
                each goes its layer's matrices, as they are then.
            policy_version: The version.
            is_again: True for a version that was published, and that receivers refuse.
        """
        base = self._publish_base(layout) if self._base is None or is_again else self._base
        matrices = self._source.matrices()
        carrier = self._carrier.begin(layout_of(matrices), policy_version=policy_version, is_again=is_again)
        manifest_of = partial(self._as_adapters, layout=layout, base=base)
        sink = AdapterSink(carrier=carrier, matrices=dict(matrices), manifest_of=manifest_of)
        return Publication(layout, sink, wait_s=self._bases.wait_s)

    def publish_stored(self, stored: StoredVersion, layout: Layout) -> WeightManifest:
        """Publishes matrices that are stored. Nothing is merged for it: the digest of the merged weights is known, and
        a receiver checks what it makes of them."""
        base = self._base or self._publish_base(layout)
        carried = self._carrier.publish_stored(stored, layout_of(self._source.matrices()))
        return self._as_adapters(carried, stored.weights_digest, layout=layout, base=base)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        self._carrier.remove_before(policy_version, in_use=in_use)

    def _as_adapters(
        self, carried: WeightManifest, weights_digest: str, *, layout: Layout, base: WeightStep
    ) -> WeightManifest:
        """Makes the manifest of the merged weights, whose layout this is, of that of their matrices, `carried`."""
        return replace(
            carried,
            weights_digest=weights_digest,
            dtype=published_dtype(layout),
            adapter=AdapterVersion(scaling=self._source.scaling, adapter_digest=carried.weights_digest, base=base),
        )

    def _publish_base(self, layout: Layout) -> WeightStep:
        """Compares what is there already, and writes it again if it is damaged."""
        version = PendingVersion(policy_version=0, layout=layout, directory=self._directory)
        sink = WholeSink(version, self._bases.begin(version), announce=lambda shard: None)
        with Publication(layout, sink, wait_s=self._bases.wait_s) as publication:
            self._source.base(publication)
            self._base = publication.finish().steps[-1]
        return self._base


@dataclass(frozen=True, kw_only=True)
class AdapterSink:
    """A VersionSink that sends the matrices of a merged weight instead of the weight."""

    carrier: Publication
    matrices: dict[str, Tensor]
    """Matrices that were not sent yet, by name."""
    manifest_of: Callable[[WeightManifest, str], WeightManifest]
    """(manifest of the matrices, digest of the merged weights) → theirs."""

    def put(self, name: str, tensor: Tensor) -> None:
        for matrix in matrices_of(name):
            if matrix in self.matrices:
                self.carrier.add(matrix, self.matrices.pop(matrix))

    def close(self, weights_digest: str) -> WeightManifest:
        # What is left belongs to layers that the model lacks: a receiver says what is wrong with them.
        for matrix, tensor in self.matrices.items():
            self.carrier.add(matrix, tensor)
        return self.manifest_of(self.carrier.finish(), weights_digest)

    def discard(self) -> None:
        self.carrier.abandon()
