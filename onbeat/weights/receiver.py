"""A generator's side: from a manifest to tensors in an engine's memory, and the digest of what that memory holds.

                 files of a store:
    manifest ─┬─ whole     shards                                  ┐
              ├─ delta/    held version, or a whole one, + deltas  ├─▶ tensors in place ─▶ hashed ─▶ digest = the
              └─ adapter/  held base, or one in files/, + adapters ┘                                 manifest's?

The fastest way comes first; where its result is not the version, the whole version is read once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from contracts.checkpoints import OlderVersion
from contracts.errors import ContractViolation, ObjectsUnavailable, WeightsRejected
from contracts.versions import WeightManifest, WeightShard
from onbeat.base.process.crash_points import reach
from onbeat.weights.adapter.reader import AdapterReader
from onbeat.weights.arrival import LOADING, Arrival, EngineTensors, Fill, fill_and_check, identity
from onbeat.weights.delta.codec import DELTA_PREFIX
from onbeat.weights.delta.reader import fill_delta, take_delta_ahead
from onbeat.weights.files.store import LocalFile
from onbeat.weights.hashing import HashingThreads, bytes_of
from onbeat.weights.layout import Layout, check_names, layout_of
from onbeat.weights.stores import Stores, TensorFile, version_files
from onbeat.weights.whole import fill_whole, take_shard_ahead

Take = Callable[[str, Tensor], None]
"""A function that takes a tensor, by its name."""

log = logging.getLogger(__name__)


class VersionLoader:
    """Reads versions into any memory of one engine. Used by one thread at a time; blocks while it reads."""

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._early = [files for files in dict.fromkeys(stores.values()) if files.announces_early]
        self._adapters = AdapterReader()

    def load(self, manifest: WeightManifest, memory: EngineTensors, *, crash_point: str = LOADING) -> str:
        """Puts the version in place; answers its digest, computed over the memory that the tensors are in.

        Raises WeightsRejected: a missing, shortened or damaged file or chunk, missing or unexpected tensors, another
        shape or dtype, another digest. Then the tensors hold nothing whole.
        """
        arrival = memory.take(manifest.policy_version)
        # Not all of the version is to be read then: where the result is wrong, the whole may still be right.
        is_shortcut = bool(arrival.files) or arrival.base in {identity(step) for step in manifest.base}
        try:
            return self._load(manifest, memory, arrival, crash_point)
        except WeightsRejected as error:
            if not is_shortcut:
                raise
            log.warning("%s; reading the whole version", error)
        return self._load(manifest, memory, Arrival(policy_version=manifest.policy_version), crash_point)

    def load_ahead(self, shard: WeightShard, memory: EngineTensors) -> None:
        """Puts a shard in place whose version is not whole yet; the memory holds no version until `load`.

        A shard that cannot be read any more, or changes a version that is not held, is left for `load`, which finds the
        whole version or says what is wrong.
        """
        take_ahead = take_delta_ahead if shard.name.startswith(DELTA_PREFIX) else take_shard_ahead
        # A shard doesn't say which store has it.
        for files in self._early:
            try:
                take_ahead(files, shard, memory)
                return
            except (WeightsRejected, ObjectsUnavailable) as error:
                log.debug("%s", error)

    def _load(self, manifest: WeightManifest, memory: EngineTensors, arrival: Arrival, crash_point: str) -> str:
        if not manifest.adapter:
            # The copy of a base is let go.
            self._adapters = AdapterReader()
        fill: Fill = fill_whole
        if manifest.adapter:
            fill = self._adapters.fill
        elif manifest.base:
            fill = fill_delta
        files = self._stores[manifest.transport]
        digest = fill_and_check(fill, files, manifest, memory, arrival, crash_point=crash_point)
        memory.hold(manifest)
        return digest


class WeightReceiver:
    """Fills one engine's tensors. Used by one thread; blocks while it reads."""

    def __init__(self, targets: Mapping[str, Tensor], stores: Stores) -> None:
        """Takes the engine's tensors and the stores.

        Args:
            targets: The engine's tensors, by published name; on the meta device, only their shapes and dtypes.
            stores: The stores, by transport.
        """
        self._memory = EngineTensors(targets)
        self._loader = VersionLoader(stores)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The engine's tensors on the CPU: in the memory of the targets, or copies where those are elsewhere."""
        return self._memory.tensors

    def load(self, manifest: WeightManifest) -> str:
        """Loads a version into the engine's tensors, as `VersionLoader.load` does."""
        digest = self._loader.load(manifest, self._memory)
        self._memory.use()
        return digest

    def load_ahead(self, shard: WeightShard) -> None:
        """Loads an announced shard into the engine's tensors, as `VersionLoader.load_ahead` does."""
        self._loader.load_ahead(shard, self._memory)


class PublishedVersions:
    """Versions as generators find them, read back by their trainer."""

    def __init__(self, layout: Layout, stores: Stores) -> None:
        """layout: of the weights."""
        self._layout = layout
        self._stores = stores

    def check(self, manifest: WeightManifest) -> None:
        """Raises WeightsRejected for a version that is not there as it was published."""
        self._pass_through(manifest, lambda layout: lambda name, tensor: None)

    def save(self, manifests: Iterable[WeightManifest], folder: Path) -> tuple[OlderVersion, ...]:
        """Writes a file for each into a folder that exists, whichever transport carried it; raises as `check` does."""
        return tuple(self._save(manifest, folder) for manifest in manifests)

    def _save(self, manifest: WeightManifest, folder: Path) -> OlderVersion:
        name = f"older-v{manifest.policy_version:06d}.safetensors"

        def into_file(layout: Layout) -> Take:
            file = TensorFile(name, layout, lambda name, num_bytes: LocalFile(folder / name))
            return lambda tensor_name, tensor: file.write(tensor_name, bytes_of(tensor))

        tensors_digest = self._pass_through(manifest, into_file)
        reach("consumer.saving_older_versions")
        return OlderVersion(
            policy_version=manifest.policy_version,
            weights_digest=manifest.weights_digest,
            tensors_digest=tensors_digest,
            file=name,
            probe=manifest.probe,
        )

    def _pass_through(self, manifest: WeightManifest, make_take: Callable[[Layout], Take]) -> str:
        """Hands each tensor on and hashes it, one in memory where the transport lets it; returns their digest.

        make_take: the layout of what the version's files hold → what takes the tensors.
        """
        version = manifest.policy_version
        published = manifest.adapter.adapter_digest if manifest.adapter else manifest.weights_digest
        try:
            tensors = read_back(manifest, self._layout, self._stores)
            layout = layout_of(tensors) if manifest.adapter else self._layout
            check_names(version, expected=layout, actual=tensors)
            take = make_take(layout)
            with HashingThreads() as hashing:
                for name in layout:
                    tensor = tensors[name]
                    hashed = hashing.add_together([(name, tensor)])
                    take(name, tensor)
                    hashed.result()
                digest = hashing.digest()
        except ContractViolation as error:
            raise WeightsRejected(f"version {version}: {error}") from error
        if digest != published:
            raise WeightsRejected(f"version {version} has digest {digest}, it was published with {published}")
        return digest


def read_back(manifest: WeightManifest, layout: Layout, stores: Stores) -> Mapping[str, Tensor]:
    """Reads the tensors that a published version holds: the weights, or the matrices of adapters.

    Files are mapped where the store can; a delta is applied in memory. The caller checks the digest.

    Args:
        manifest: The version's manifest.
        layout: The layout of the weights.
        stores: The stores, by transport.

    Raises:
        WeightsRejected: A file is missing, or is no file of tensors.
    """
    if not manifest.base:
        files = stores[manifest.transport]
        return {name: tensor for file in version_files(manifest) for name, tensor in files.tensors(file).items()}
    targets = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in layout.items()}
    receiver = WeightReceiver(targets, stores)
    receiver.load(manifest)
    return receiver.tensors
