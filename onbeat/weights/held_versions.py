"""Several versions in host memory: the one that an engine samples from, and others that came, or are on their way.

    announced ─ receive ─▶ memory beside the engine's, hashed there ─┐
                                                                     ├─ load ─▶ the engine samples from that memory, or
    claimed, and not held ─▶ free memory, or that of the oldest ─────┘          on another device from a copy of it

The digest of a version is computed once, over the memory that it stays in; a version that is held is put into use
without being read again. Memory beside the engine's holds versions of one job, and only those that are announced.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor

from contracts.errors import WeightsRejected
from contracts.versions import WeightManifest, WeightShard
from onbeat.weights.arrival import EngineTensors, Identity, identity
from onbeat.weights.delta.codec import DELTA_PREFIX
from onbeat.weights.receiver import VersionLoader
from onbeat.weights.stores import Stores

log = logging.getLogger(__name__)

RECEIVING = "producer.receiving_weights"
"""The crash point of a version that is read beside the one that the engine samples from."""


class HeldVersions:
    """The versions that an engine has in memory: one in use, and others next to it that batches may ask for.

    The engine creates it and has it receive versions; a batch's version is put into use by it. Thread-safe: while one
    thread reads a version, another puts one into use.

    Only `receive` and `receive_ahead` may run while the engine samples: they leave the memory in use as it is.
    """

    def __init__(self, targets: Mapping[str, Tensor], stores: Stores, *, beside_bytes: int = 0) -> None:
        """Begins with the memory of the engine alone.

        Args:
            targets: The engine's tensors, as a WeightReceiver has them.
            stores: The stores, by transport.
            beside_bytes: The most host memory for versions next to the one in use; less than a version's size keeps
                none.
        """
        self._targets = dict(targets)
        self._loader = VersionLoader(stores)
        self._given_up = threading.Event()
        """Set while what is received makes way for a load, and at the end."""
        self._in_use = EngineTensors(targets)
        self._beside: list[EngineTensors] = []
        self._reserved: EngineTensors | None = None
        """Memory that a version is read into, whatever it says that it holds."""
        self._most_beside = beside_bytes // max(1, sum(tensor.nbytes for tensor in targets.values()))
        self._limit = 0
        """Most versions beside the one in use: what the job asks for, as far as beside_bytes reach."""
        self._announced: set[Identity] = set()
        """Versions that may be asked for; next to the one in use, no others are held."""
        self._job_id = ""
        self._arriving: Identity | None = None
        """The version that `receive` reads now."""
        self._reading = threading.Lock()
        """Held by the one that reads, and by whatever gives memory to a version or takes it away."""
        self._placing = threading.RLock()
        """Held for a moment, while it changes which memory is in use, beside or reserved."""
        self.verified_versions: tuple[Identity, ...] = ()
        """Versions that are whole and verified, in use or next to it; as of the last call that changed them."""

    def load(self, manifest: WeightManifest) -> str:
        """Puts the version into use; answers its digest, computed over the memory that it is in. Nothing is sampled.

        Reads it only where it isn't held; a version that is received meanwhile makes way, unless it is this one.
        Raises what `VersionLoader.load` raises; then no version is to be sampled from.
        """
        version = identity(manifest)
        if not self._use_held(version):
            # The version itself may be the one that is read: it is needed now, and is read to its end.
            if self._arriving != version:
                self._given_up.set()
            with self._reading:
                self._given_up.clear()
                # What was received last may be the version.
                if not self._use_held(version):
                    self._read_into_use(manifest)
        return manifest.weights_digest

    def load_ahead(self, shard: WeightShard) -> None:
        """Puts a shard into the memory in use, which holds no version from then on. Nothing is sampled."""
        with self._reading:
            self._loader.load_ahead(shard, self._in_use)
            self._note()

    def receive(self, announced: Sequence[WeightManifest], *, num_versions: int) -> bool:
        """Reads the oldest announced version after the one in use that isn't in memory.

        Args:
            announced: Versions of one job; memory with any other version is freed, except for the one in use.
            num_versions: The most versions in memory, the one in use included; 1 frees all other memory.

        Returns:
            True where there was a version to read.

        Raises:
            OnbeatError: As `VersionLoader.load` raises it; versions in memory stay, unless one had to make room.
        """
        with self._reading:
            # Less the one in use.
            self._limit = min(num_versions - 1, self._most_beside)
            self._job_id = announced[0].job_id if announced else self._job_id
            self._announced = {identity(manifest) for manifest in announced}
            self._cut(self._limit)
            manifest = next_to_receive(announced, in_memory=self.verified_versions, in_use=self._in_use.held_version)
            memory = self._reserve_beside(manifest.policy_version) if manifest else None
            if manifest is None or memory is None:
                return False
            try:
                return self._receive(manifest, memory)
            finally:
                self._reserve(None)

    def receive_ahead(self, shard: WeightShard) -> None:
        """Reads a file of the version after all that are held, before that version is announced."""
        with self._reading:
            newest = max(self.verified_versions, default=None)
            if self._in_use.held_version is None or newest is None or shard.policy_version != newest[0] + 1:
                return
            memory = self._reserve_beside(shard.policy_version)
            if memory is None:
                return
            if shard.name.startswith(DELTA_PREFIX):
                self._begin(memory, shard.policy_version, bases=[newest])
            self._loader.load_ahead(shard, memory)
            self._reserve(None)

    def give_up(self) -> None:
        """Ends a `receive` that another thread is in, at the next tensor: the engine is closed."""
        self._given_up.set()

    def _receive(self, manifest: WeightManifest, memory: EngineTensors) -> bool:
        self._begin(memory, manifest.policy_version, bases=[identity(step) for step in manifest.base])
        self._arriving = identity(manifest)
        try:
            self._loader.load(manifest, memory, crash_point=RECEIVING)
        except WeightsRejected:
            if not self._given_up.is_set():
                raise
            return False
        finally:
            self._arriving = None
        return True

    def _read_into_use(self, manifest: WeightManifest) -> None:
        if manifest.job_id != self._job_id:
            self._job_id = manifest.job_id
            self._limit = 0
            self._cut(0)
        # A version of a job without a lag is the only one; with one, the next `receive` says what else there is.
        self._announced = {*(self._announced if self._limit else ()), identity(manifest)}
        memory = self._room_to_load(manifest)
        self._reserve(memory)
        try:
            self._loader.load(manifest, memory)
        finally:
            self._reserve(None)
        self._use_held(identity(manifest))

    def _use_held(self, version: Identity) -> bool:
        """Puts a version that is held into use; answers whether it is held."""
        with self._placing:
            holding = [memory for memory in self._offered() if memory.held_version == version]
            if not holding:
                return False
            memory = holding[0]
            memory.use()
            if memory is not self._in_use:
                self._beside[self._beside.index(memory)] = self._in_use
                self._in_use = memory
            return True

    def _reserve(self, memory: EngineTensors | None) -> None:
        """Marks the memory that is read into, or that none is."""
        with self._placing:
            self._reserved = memory
            self._note()

    def _note(self) -> None:
        self.verified_versions = tuple(
            memory.held_version for memory in self._offered() if memory.held_version is not None
        )

    def _offered(self) -> list[EngineTensors]:
        """Returns the memory that holds versions which may be asked for: that in use comes first."""
        beside = [memory for memory in self._beside if memory.held_version in self._announced]
        return [memory for memory in (self._in_use, *beside) if memory is not self._reserved]

    def _age(self, memory: EngineTensors) -> Identity:
        """Returns the version that memory holds, as a key for an order from the oldest on; free memory comes first."""
        is_kept = memory is self._in_use or memory.held_version in self._announced
        return memory.held_version if is_kept and memory.held_version is not None else (-1, "")

    def _cut(self, num_beside: int) -> None:
        """Gives back memory that is free, and then that of the oldest versions."""
        with self._placing:
            self._beside.sort(key=self._age, reverse=True)
            for memory in self._beside[num_beside:]:
                memory.forget()
            del self._beside[num_beside:]
            self._note()

    def _begin(self, memory: EngineTensors, policy_version: int, *, bases: Collection[Identity]) -> None:
        """Begins a delta at a copy of the newest of its bases that is held, unless the memory itself holds one."""
        if memory.awaits == policy_version or memory.held_version in bases:
            return
        sources = [other for other in (self._in_use, *self._beside) if other.held_version in bases]
        if sources:
            memory.begin_at(max(sources, key=self._age), policy_version)

    def _free_or_new(self, policy_version: int) -> EngineTensors | None:
        """Finds memory that holds no version of use, at best that which awaits this version; takes new memory within
        the limit.
        """
        free = [memory for memory in self._beside if memory.held_version not in self._announced]
        if free:
            return min(free, key=lambda memory: (memory.awaits != policy_version, memory.awaits is not None))
        if len(self._beside) >= self._limit:
            return None
        try:
            memory = EngineTensors(self._targets, is_beside=True, is_given_up=self._given_up.is_set)
        except RuntimeError as error:
            log.warning("there is no memory to hold another version next to %d: %s", 1 + len(self._beside), error)
            self._most_beside = self._limit = len(self._beside)
            return None
        self._beside.append(memory)
        return memory

    def _reserve_beside(self, policy_version: int) -> EngineTensors | None:
        """Finds memory for a version that no batch waits for: free memory, or that of a version before the one in use.

        Batches are handed out oldest first, so what comes after the one in use is needed before anything newer.
        """
        with self._placing:
            free = self._free_or_new(policy_version)
            passed = [memory for memory in self._beside if self._age(memory)[0] < self._age(self._in_use)[0]]
            memory = free or min(passed, key=self._age, default=None)
            self._reserve(memory)
            return memory

    def _room_to_load(self, manifest: WeightManifest) -> EngineTensors:
        """Finds memory for a version that a batch waits for: free memory, or that of the oldest version."""
        if self._limit == 0:
            return self._in_use
        free = self._free_or_new(manifest.policy_version)
        return free or min((self._in_use, *self._beside), key=self._age)


def next_to_receive(
    announced: Iterable[WeightManifest], *, in_memory: Collection[Identity], in_use: Identity | None
) -> WeightManifest | None:
    """Chooses the oldest announced version after the one in use that isn't in memory; None while none is in use."""
    if in_use is None:
        return None
    after = (
        manifest
        for manifest in announced
        if manifest.policy_version > in_use[0] and identity(manifest) not in in_memory
    )
    return min(after, key=lambda manifest: manifest.policy_version, default=None)
