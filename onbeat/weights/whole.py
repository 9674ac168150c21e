"""Versions as what they are: safetensors files, in as many shards as their bytes ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from contracts.errors import WeightsRejected
from contracts.versions import WeightManifest, WeightShard
from onbeat.base.process.crash_points import reach
from onbeat.weights.arrival import Arrival, EngineTensors
from onbeat.weights.files.tensor_folder import are_same
from onbeat.weights.hashing import bytes_of
from onbeat.weights.layout import Layout, PendingVersion, check_names, split_into_shards
from onbeat.weights.publication import Publication, StoredVersion, VersionSink
from onbeat.weights.stores import TensorFile, VersionFiles, VersionStore, VersionWriter, announced_file, version_files

SHARD_BYTES = 256 * 1024**2
"""Small enough that a receiver reads the first shards of a large model while the others are written."""
SHARD_NAME = "weights-{number:05d}-of-{count:05d}.safetensors"
Announce = Callable[[WeightShard], None]


class WholeSink:
    """A VersionSink: a whole version on its way into a store, shard by shard.

    Where the version is there already, what comes is compared with it, and nothing is written until they differ: a
    version that is published again leaves the files alone that generators may be reading.
    """

    def __init__(
        self, version: PendingVersion, writer: VersionWriter, *, announce: Announce, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Begins the version.

        Args:
            version: The version.
            writer: The version's place in the store.
            announce: Called with each shard but the last one as soon as it can be read, where the store lets it be.
            shard_bytes: The most bytes of a shard.

        Raises:
            InvalidInput: The version is too large for the store.
        """
        self._version = version
        self._writer = writer
        self._announce = announce
        shards = split_into_shards(version.layout, shard_bytes=shard_bytes)
        files = [
            TensorFile(SHARD_NAME.format(number=number, count=len(shards)), shard, writer.open)
            for number, shard in enumerate(shards, start=1)
        ]
        writer.reserve(sum(file.num_bytes for file in files))
        self._file_of = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        self._num_open = len(shards)
        self._equal: dict[str, Tensor] | None = {}
        """The tensors there that are equal to those that came; None while a version is being written."""
        self._there: Mapping[str, Tensor] | None = None
        """The tensors that are there; None until the first tensor comes."""

    def put(self, name: str, tensor: Tensor) -> None:
        if self._there is None:
            self._there = self._writer.stored()
        if self._equal is not None:
            stored = self._there.get(name)
            if stored is not None and are_same(stored, tensor):
                self._equal[name] = stored
                return
            self._begin_writing(self._equal)
        self._write(name, tensor)

    def close(self, weights_digest: str) -> WeightManifest:
        if self._equal is not None and (self._there or {}).keys() != self._equal.keys():
            # The store holds more than the version.
            self._begin_writing(self._equal)
        return self._version.manifest(
            weights_digest, transport=self._writer.transport, files=self._writer.put_in_place()
        )

    def discard(self) -> None:
        for file in self._file_of.values():
            file.close()
        self._writer.discard()

    def _begin_writing(self, earlier: Mapping[str, Tensor]) -> None:
        """Writes the tensors that were equal to the stored ones so far, since a later one is not."""
        self._equal = None
        for name, tensor in earlier.items():
            self._write(name, tensor)

    def _write(self, name: str, tensor: Tensor) -> None:
        file = self._file_of[name]
        file.write(name, bytes_of(tensor))
        if file.num_missing:
            return
        reach("consumer.writing_weights")
        self._num_open -= 1
        # The last shard is not announced: the manifest, which follows at once, names it.
        if self._num_open:
            self._tell(file.name, num_bytes=file.num_bytes)

    def _tell(self, name: str, *, num_bytes: int) -> None:
        path = self._writer.early_path(name)
        version = self._version.policy_version
        if path is not None:
            name = path.rpartition("/")[2]
            self._announce(WeightShard(policy_version=version, path=path, name=name, num_bytes=num_bytes))


class WholePublisher:
    """A WeightPublisher of whole versions, for every store."""

    def __init__(self, store: VersionStore, *, announce: Announce, shard_bytes: int = SHARD_BYTES) -> None:
        """Takes the job's store.

        Args:
            store: The store.
            announce: Called with each shard before the version is whole.
            shard_bytes: The most bytes of a shard.
        """
        self.store = store
        self._announce = announce
        self._shard_bytes = shard_bytes

    def begin(self, layout: Layout, *, policy_version: int, is_again: bool = False) -> Publication:
        """Begins a version. One that is there already is left as it is; one with other content is replaced.

        Raises InvalidInput for one that is too large for the store.
        """
        folder = self.store.folder
        directory = folder.relative(folder.weights_of(policy_version))
        version = PendingVersion(policy_version=policy_version, layout=layout, directory=directory)
        return Publication(layout, self._sink(version, is_again=is_again), wait_s=self.store.wait_s)

    def publish_stored(self, stored: StoredVersion, layout: Layout) -> WeightManifest:
        """Publishes what is stored as any version, tensor by tensor, without a second copy in memory."""
        check_names(stored.policy_version, expected=layout, actual=stored.tensors)
        with self.begin(layout, policy_version=stored.policy_version) as publication:
            for name, tensor in layout.items():
                publication.make_room(tensor.num_bytes)
                publication.add(name, stored.tensors[name])
            manifest = publication.finish()
        if manifest.weights_digest != stored.tensors_digest:
            raise WeightsRejected(
                f"what is stored of version {stored.policy_version} has digest {manifest.weights_digest}, it was "
                f"published with {stored.tensors_digest}"
            )
        return manifest

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        self.store.remove_before(policy_version, in_use=in_use)

    def _sink(self, version: PendingVersion, *, is_again: bool) -> VersionSink:
        writer = self.store.begin(version)
        return WholeSink(version, writer, announce=self._announce, shard_bytes=self._shard_bytes)


def fill_whole(files: VersionFiles, manifest: WeightManifest, engine: EngineTensors, arrival: Arrival) -> None:
    """Puts a whole version in place, and has each of its tensors hashed, but for those that were ahead of it.

    Raises WeightsRejected for what is missing, damaged, or not the engine's model.
    """
    known = arrival.known(manifest.files)
    shards = (files.tensors(file) for file in version_files(manifest) if file.name not in known)
    engine.place_all(shards, manifest.policy_version, hashing=arrival.hashing, in_place=known.values())


def take_shard_ahead(files: VersionFiles, shard: WeightShard, engine: EngineTensors) -> None:
    """Puts a shard of a version that is not whole yet in place. Raises WeightsRejected, or changes nothing."""
    tensors = files.tensors(announced_file(shard))
    engine.check(tensors, shard.policy_version)
    arrival = engine.arriving(shard.policy_version)
    # Before the first byte is overwritten: from then on no delta can start at what the tensors held.
    arrival.base = None
    engine.place(tensors, shard.policy_version)
    arrival.took(shard, {name: engine.tensors[name] for name in tensors})
