"""A version on its way into an engine: the engine's tensors, the version that they hold, and the ways to fill them.

shard, announced early ─▶ take_shard_ahead, take_delta_ahead ─┬─▶ EngineTensors ─▶ hashed by threads ─▶ digest
manifest ───────────────▶ fill_whole, fill_delta, adapters ───┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from contracts.errors import WeightsRejected, WeightsUnfit
from contracts.versions import WeightFile, WeightManifest, WeightShard, WeightStep
from onbeat.base.process.crash_points import reach
from onbeat.weights.hashing import HashingThreads
from onbeat.weights.layout import check_names, dtype_name
from onbeat.weights.stores import VersionFiles

Identity = tuple[int, str]
"""Version and digest."""
LOADING = "producer.loading_weights"
"""The crash point of a version that a batch waits for."""


def identity(step: WeightStep | WeightManifest) -> Identity:
    return step.policy_version, step.weights_digest


@dataclass(kw_only=True)
class Arrival:
    """A version that is being put in place of another one, some of its files perhaps before its manifest came.

    EngineTensors creates it; the functions that fill tensors change and read it.
    """

    policy_version: int
    base: Identity | None = None
    """The version that the tensors held before, and hold where nothing has changed them; None once that can't be told
    apart."""
    files: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    """Name of a file that is in place → its bytes, and the tensors that it held or changed."""
    hashing: HashingThreads = field(default_factory=HashingThreads)

    def known(self, files: tuple[WeightFile, ...]) -> dict[str, list[str]]:
        """Returns the tensors of each file that is in place already, by the file's name.

        A file of the same name and another size was announced for another try at the version: it isn't in place.
        """
        in_place: dict[str, list[str]] = {}
        for file in files:
            arrived = self.files.get(file.name)
            if arrived is None:
                continue
            num_bytes, tensor_names = arrived
            # Only the size is compared here; the digest of the version, over what is in memory, is the judge of the
            # content.
            if num_bytes == file.num_bytes:
                in_place[file.name] = tensor_names
        return in_place

    def took(self, shard: WeightShard, tensors: Mapping[str, Tensor]) -> None:
        """Notes that a shard is in place: its tensors, which are the engine's now, are hashed already."""
        self.files[shard.name] = shard.num_bytes, list(tensors)
        self.hashing.add(tensors.items())


class EngineTensors:
    """Memory that versions are put into: the engine's own, or as much beside it. Used by one thread at a time."""

    def __init__(
        self, targets: Mapping[str, Tensor], *, is_beside: bool = False, is_given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """Takes the engine's tensors, which hold no version yet.

        Args:
            targets: The engine's tensors.
            is_beside: True where versions go into other memory than the targets', until `use`.
            is_given_up: Returns True when the version on its way isn't needed any more; called before each tensor is
                copied.
        """
        self._targets = dict(targets)
        self._is_given_up = is_given_up
        self.tensors = {name: _memory_for(tensor, is_beside=is_beside) for name, tensor in targets.items()}
        """Contiguous, on the CPU: the memory of the targets themselves, or other memory of the same shapes."""
        self._held_version: Identity | None = None
        """The version that the tensors hold, whole and verified."""
        self._ahead: Arrival | None = None
        """A version of which some files are in place, and no manifest came yet; then nothing is held."""

    def base_of(self, policy_version: int) -> Identity | None:
        """Returns the whole version that a delta which leads to `policy_version` would change now; None where there is
        none.
        """
        if self._ahead is None:
            return self._held_version
        # Once a version has begun to arrive, what is in memory serves the deltas of that version alone.
        return self._ahead.base if self._ahead.policy_version == policy_version else None

    def arriving(self, policy_version: int) -> Arrival:
        """Goes on with a version, or begins it: from here on the tensors hold nothing whole."""
        base = self._held_version
        self._held_version = None
        if self._ahead is None or self._ahead.policy_version != policy_version:
            if self._ahead is not None:
                self._ahead.hashing.close()
            self._ahead = Arrival(policy_version=policy_version, base=base)
        return self._ahead

    def take(self, policy_version: int) -> Arrival:
        """Goes on with a version whose manifest is there, as `arriving` does: it ends with `hold`, or counts for
        nothing.
        """
        arrival = self.arriving(policy_version)
        self._ahead = None
        return arrival

    @property
    def held_version(self) -> Identity | None:
        """The version that the tensors hold, whole and verified; None while there is none."""
        return self._held_version

    def hold(self, manifest: WeightManifest) -> None:
        """Notes that the tensors are this version, by its digest."""
        self._held_version = identity(manifest)

    def use(self) -> None:
        """Lets the engine sample from these tensors: on the CPU from their very memory, elsewhere from a copy (I2)."""
        for name, target in self._targets.items():
            memory = self.tensors[name]
            # The very memory, or none at all: nothing to copy.
            if target.is_meta or target.data_ptr() == memory.data_ptr():
                continue
            if target.device.type == "cpu" and target.is_contiguous():
                target.data = memory
            else:
                target.copy_(memory)

    def begin_at(self, other: EngineTensors, policy_version: int) -> None:
        """Begins a version at a copy of what other memory holds: nothing is held here before that version is."""
        base = other.held_version
        self.forget()
        for name, tensor in other.tensors.items():
            self.tensors[name].copy_(tensor)
        self._ahead = Arrival(policy_version=policy_version, base=base)

    def forget(self) -> None:
        """Holds nothing from now on, and awaits nothing."""
        self._held_version = None
        if self._ahead is not None:
            self._ahead.hashing.close()
            self._ahead = None

    @property
    def awaits(self) -> int | None:
        """Number of the version that was begun here, while it is not taken."""
        return None if self._ahead is None else self._ahead.policy_version

    def place(self, tensors: Mapping[str, Tensor], policy_version: int) -> None:
        """Copies values in. Raises WeightsRejected as `check` does, before anything is changed."""
        self.check(tensors, policy_version)
        for name, source in tensors.items():
            if self._is_given_up():
                raise WeightsRejected(f"version {policy_version} was given up while it was read")
            # Into the memory that is hashed and sampled from: its address doesn't change.
            self.tensors[name].copy_(source)

    def place_all(
        self,
        shards: Iterable[dict[str, Tensor]],
        policy_version: int,
        *,
        hashing: HashingThreads | None = None,
        in_place: Iterable[list[str]] = (),
    ) -> None:
        """Copies a whole version into the engine's tensors.

        Args:
            shards: The tensors of each file.
            policy_version: The version, for errors.
            hashing: Hashes a shard while the next one is read.
            in_place: Names of the tensors of files that are there already.

        Raises:
            WeightsRejected: A tensor of the model didn't come.
        """
        placed = [name for names in in_place for name in names]
        for tensors in shards:
            self.place(tensors, policy_version)
            placed += tensors
            if hashing is not None:
                hashing.add((name, self.tensors[name]) for name in tensors)
        check_names(policy_version, expected=self.tensors, actual=placed)

    def check(self, tensors: Mapping[str, Tensor], policy_version: int) -> None:
        """Raises WeightsUnfit for what is no tensor of the model."""
        check_names(policy_version, expected=self.tensors, actual=self.tensors.keys() | tensors.keys())
        for name, source in tensors.items():
            target = self.tensors[name]
            if source.shape != target.shape or source.dtype != target.dtype:
                raise WeightsUnfit(
                    f"{name} of version {policy_version} is {_shown(source)}, the model needs {_shown(target)}"
                )


Fill = Callable[[VersionFiles, WeightManifest, EngineTensors, Arrival], None]
"""Puts a version in place of what the engine's tensors hold: `fill_whole`, `fill_delta`, `AdapterReader.fill`."""


def fill_and_check(
    fill: Fill,
    files: VersionFiles,
    manifest: WeightManifest,
    engine: EngineTensors,
    arrival: Arrival,
    *,
    crash_point: str = LOADING,
) -> str:
    """Puts a version in place, and computes its digest over the memory that the tensors are in (I2).

    Args:
        fill: The function that fills the tensors.
        files: The files of the store that has the version.
        manifest: The version's manifest.
        engine: The tensors that are filled.
        arrival: The version's progress.
        crash_point: The point of `reach` between the last tensor and the digest.

    Returns:
        The digest, which is the manifest's.

    Raises:
        WeightsRejected: `fill` raised it, or the digest is another than the manifest's.
    """
    with arrival.hashing as hashing:
        fill(files, manifest, engine, arrival)
        reach(crash_point)
        digest = hashing.digest()
    check_digest(manifest, digest)
    return digest


def check_digest(manifest: WeightManifest, digest: str) -> None:
    """Raises WeightsRejected unless what was loaded has the manifest's digest (I2)."""
    if digest != manifest.weights_digest:
        raise WeightsRejected(
            f"version {manifest.policy_version} was loaded with digest {digest}, its manifest says "
            f"{manifest.weights_digest}"
        )


def _memory_for(target: Tensor, *, is_beside: bool) -> Tensor:
    """Returns memory where a delta can be applied and a hash computed: the target's own if that is contiguous on the
    CPU.
    """
    if target.device.type == "cpu" and target.is_contiguous() and not is_beside:
        # Not the target itself, which `use` gives other memory.
        return target.data
    return torch.empty(target.shape, dtype=target.dtype)


def _shown(tensor: Tensor) -> str:
    return f"{dtype_name(tensor)}{list(tensor.shape)}"
