"""A generator's side: from a manifest to tensors in an engine's memory, and the digest of what that memory holds.

    manifest ─┬─ delta/    held version, or a whole one, + deltas ─┐
              ├─ files/    shards                                  ├─▶ tensors in place ─▶ hashed ─▶ digest = the
              ├─ redis/    chunks                                  │                                 manifest's?
              └─ adapter/  held base, or one in files/, + adapters ┘

The fastest way comes first; where its result is not the version, the whole version is read once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from contracts.errors import WeightsRejected
from contracts.versions import WeightManifest
from contracts.weights import WeightShard
from weight_store.adapter.reader import AdapterReader
from weight_store.arrival import Arrival, EngineTensors, fill_and_check
from weight_store.redis.chunks import ChunkReader
from weight_store.transports import make_readers

log = logging.getLogger(__name__)


class WeightReceiver:
    """Fills one engine's tensors. Used by one thread; blocks while it reads."""

    def __init__(
        self, targets: Mapping[str, Tensor], *, root: Path, chunks: Callable[[str], ChunkReader] | None = None
    ) -> None:
        """targets: the engine's tensors, by published name; on the meta device, only what they must be.

        root: the weight root. chunks: job id → its chunks in Redis; None where there is no Redis.
        """
        self._engine = EngineTensors(targets)
        self._readers = make_readers(root, chunks)
        self._adapters = AdapterReader(self._readers)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The engine's tensors on the CPU: the targets themselves, or copies where those are elsewhere."""
        return self._engine.tensors

    def load(self, manifest: WeightManifest) -> str:
        """Puts the version in place; answers its digest, computed over the memory that the tensors are in.

        Raises WeightsRejected: a missing, shortened or damaged file or chunk, missing or unexpected tensors, another
        shape or dtype, another digest. Then the tensors hold nothing whole.
        """
        arrival = self._engine.take(manifest.policy_version)
        is_shortcut = arrival.is_shortcut_to(manifest)
        try:
            return self._load(manifest, arrival)
        except WeightsRejected as error:
            if not is_shortcut:
                raise
            log.warning("%s; reading the whole version", error)
        return self._load(manifest, Arrival(policy_version=manifest.policy_version))

    def load_ahead(self, shard: WeightShard) -> None:
        """Puts a shard in place whose version is not whole yet; the engine holds no version until `load`.

        A shard that cannot be read any more, or changes a version that is not held, is left for `load`, which finds the
        whole version or says what is wrong.
        """
        try:
            for reader in self._readers.values():
                reader.load_ahead(shard, self._engine)
        except WeightsRejected as error:
            log.debug("%s", error)

    def _load(self, manifest: WeightManifest, arrival: Arrival) -> str:
        if not manifest.adapter:
            # The copy of a base is let go.
            self._adapters = AdapterReader(self._readers)
        fill = (self._adapters if manifest.adapter else self._readers[manifest.transport]).fill
        digest = fill_and_check(fill, manifest, self._engine, arrival)
        self._engine.hold(manifest)
        return digest
