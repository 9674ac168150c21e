"""A generator's side: from a manifest to tensors in an engine's memory, and the digest of what that memory holds.

    manifest ─┬─ held version + deltas ────────┐
              ├─ whole version (+ deltas) ─────┼─▶ tensors in place ─▶ hashed by threads ─▶ digest = the manifest's
              ├─ chunks from Redis ────────────┤
              └─ held base + merged adapters ──┘

The fastest way comes first; where its result is not the version, the whole version is read once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from contracts.encoding.wire import decode
from contracts.errors import ContractViolation, WeightsRejected
from contracts.versions import AdapterVersion, WeightFile, WeightManifest, WeightStep
from contracts.weights import WeightDelta, WeightShard
from process.crash_points import reach
from weight_store.adapter.matrices import AdaptedBase, layers_of
from weight_store.delta.codec import DELTA_PREFIX, apply
from weight_store.hashing import HashingThreads, bytes_of, tensors_digest
from weight_store.layout import dtype_name
from weight_store.redis.chunks import ChunkReader, read_chunks
from weight_store.version_files import check_digest, check_names, folder_of, path_of, weight_files

log = logging.getLogger(__name__)


Identity = tuple[int, str]
"""Version and digest."""


@dataclass(kw_only=True)
class ShardsAhead:
    """Shards of a version that were put in place, and hashed there, before its manifest came."""

    policy_version: int
    base: Identity | None
    """What the tensors held before the first of them; None once that can't be told apart any more."""
    files: dict[str, tuple[int, list[str]]] = field(default_factory=dict)
    """Name → bytes, and the tensors that it held or changed."""
    hashing: HashingThreads = field(default_factory=HashingThreads)

    def known(self, files: tuple[WeightFile, ...]) -> dict[str, list[str]]:
        """Of `files` those that are in place: name → tensors."""
        found = ((file, self.files.get(file.name)) for file in files)
        return {file.name: one[1] for file, one in found if one is not None and one[0] == file.num_bytes}


class WeightReceiver:
    """Fills one engine's tensors. Used by one thread; blocks while it reads."""

    def __init__(
        self, targets: Mapping[str, Tensor], *, root: Path, chunks: Callable[[str], ChunkReader] | None = None
    ) -> None:
        """targets: the engine's tensors, by published name; on the meta device, only what they must be.

        root: the weight root. chunks: job id → its chunks in Redis; None where there is no Redis.
        """
        self._targets = dict(targets)
        self._tensors = {name: _memory_for(tensor) for name, tensor in targets.items()}
        self._root = root
        self._chunks = chunks
        self._held: Identity | None = None
        """Of what the tensors hold; None while that is nothing whole."""
        self._ahead: ShardsAhead | None = None
        self._adapted: AdaptedBase | None = None
        """The base of the adapters that are merged into the tensors; None while the tensors are anything else."""

    @property
    def _most_delta_bytes(self) -> int:
        """A delta lists gaps only where they are few, and what zstd can't make smaller it makes hardly larger."""
        return 2 * sum(tensor.nbytes for tensor in self._tensors.values()) + 1024 * (len(self._tensors) + 1024)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """On the CPU: the targets themselves, or copies where those are elsewhere."""
        return self._tensors

    def load(self, manifest: WeightManifest) -> str:
        """Puts the version in place; answers its digest, computed over the memory that the tensors are in.

        Raises WeightsRejected: a missing, shortened or damaged file or chunk, missing or unexpected tensors, another
        shape or dtype, another digest. Then the tensors hold nothing whole.
        """
        held, self._held = self._held, None
        adapted, self._adapted = self._adapted, None
        if self._ahead and self._ahead.policy_version != manifest.policy_version:
            self._drop_ahead()
        ahead, self._ahead = self._ahead, None
        if manifest.adapter:
            if ahead:
                ahead.hashing.close()
            return self._load_adapters(manifest, manifest.adapter, adapted)
        if manifest.base or ahead:
            try:
                return self._load(manifest, held=held, ahead=ahead)
            except WeightsRejected as error:
                if not ahead and held not in _identities(manifest.base):
                    raise
                log.warning("%s; reading the whole version", error)
        return self._load(manifest, held=None, ahead=None)

    def load_ahead(self, shard: WeightShard) -> None:
        """Puts a shard in place whose version is not whole yet; the engine holds no version until `load`.

        A shard that cannot be read any more, or changes a version that is not held, is left for `load`, which finds the
        whole version or says what is wrong.
        """
        try:
            if shard.name.startswith(DELTA_PREFIX):
                self._apply_ahead(shard)
            else:
                self._place_ahead(shard)
        except WeightsRejected as error:
            log.debug("%s", error)

    def _place_ahead(self, shard: WeightShard) -> None:
        tensors = _read(path_of(self._root, shard))
        self._check(tensors, shard.policy_version)
        ahead = self._ahead_of(shard)
        ahead.base = None
        self._place(tensors, shard.policy_version)
        ahead.files[shard.name] = shard.num_bytes, list(tensors)
        ahead.hashing.add((name, self._tensors[name]) for name in tensors)

    def _apply_ahead(self, shard: WeightShard) -> None:
        delta = _read_delta(path_of(self._root, shard), most_bytes=self._most_delta_bytes)
        stands_on = (delta.base_version, delta.base_digest)
        base = self._ahead.base if self._ahead else self._held
        if base != stands_on or (self._ahead and shard.name in self._ahead.files):
            return
        ahead = self._ahead_of(shard)
        if ahead.base != stands_on:
            return
        # Until it is done: elements that were changed are not told from others.
        ahead.base = None
        self._apply(delta)
        ahead.base = stands_on
        names = [changed.name for changed in delta.tensors]
        ahead.files[shard.name] = shard.num_bytes, names
        ahead.hashing.add((name, self._tensors[name]) for name in names)

    def _ahead_of(self, shard: WeightShard) -> ShardsAhead:
        """Of the shard's version; from here on the tensors hold nothing whole."""
        held, self._held, self._adapted = self._held, None, None
        if self._ahead is None or self._ahead.policy_version != shard.policy_version:
            self._drop_ahead()
            self._ahead = ShardsAhead(policy_version=shard.policy_version, base=held)
        return self._ahead

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.hashing.close()
            self._ahead = None

    def _load(self, manifest: WeightManifest, *, held: Identity | None, ahead: ShardsAhead | None) -> str:
        with ahead.hashing if ahead else HashingThreads() as hashing:
            if manifest.base:
                done = self._go_on(manifest, ahead) if ahead else self._follow(manifest, held)
                hashing.add((name, tensor) for name, tensor in self._tensors.items() if name not in done)
            else:
                self._read_whole(manifest, ahead, hashing)
            reach("producer.loading_weights")
            found = hashing.digest()
        check_digest(manifest, found)
        self._to_targets()
        self._held = manifest.policy_version, found
        return found

    def _load_adapters(self, manifest: WeightManifest, adapter: AdapterVersion, base: AdaptedBase | None) -> str:
        """Merges the matrices into the base, which is read where it is not at hand."""
        matrices: dict[str, Tensor] = {}
        for tensors in self._shards(manifest):
            matrices |= tensors
        if (found := tensors_digest(matrices)) != adapter.adapter_digest:
            raise WeightsRejected(
                f"the adapters of version {manifest.policy_version} have digest {found}, their manifest says "
                f"{adapter.adapter_digest}"
            )
        layers = layers_of(matrices, weights=self._tensors)
        if base is None or not base.fits(adapter.base.weights_digest, layers):
            self._load(_manifest_of(adapter.base, dtype=manifest.dtype), held=None, ahead=None)
            self._held = None
            base = AdaptedBase(adapter.base.weights_digest, {name: self._tensors[name] for name in layers})
        with HashingThreads({name: t for name, t in self._tensors.items() if name not in layers}) as hashing:
            for name, of_layer in layers.items():
                base.merge(name, of_layer, scaling=adapter.scaling, target=self._tensors[name])
                hashing.add([(name, self._tensors[name])])
            reach("producer.loading_weights")
            found = hashing.digest()
        check_digest(manifest, found)
        self._to_targets()
        self._adapted = base
        return found

    def _to_targets(self) -> None:
        for name, target in self._targets.items():
            if target is not self._tensors[name] and not target.is_meta:
                target.copy_(self._tensors[name])

    def _read_whole(self, manifest: WeightManifest, ahead: ShardsAhead | None, hashing: HashingThreads) -> None:
        """Hashes a shard while the next one is read."""
        known = ahead.known(manifest.files) if ahead else {}
        placed = [name for names in known.values() for name in names]
        for tensors in self._shards(manifest, known):
            self._place(tensors, manifest.policy_version)
            placed += tensors
            hashing.add((name, self._tensors[name]) for name in tensors)
        check_names(manifest.policy_version, expected=self._tensors, found=placed)

    def _shards(self, manifest: WeightManifest, known: Collection[str] = ()) -> Iterator[dict[str, Tensor]]:
        """But for those files that are `known`."""
        if manifest.transport == "redis":
            if self._chunks is None:
                raise WeightsRejected(
                    f"version {manifest.policy_version} is in Redis, which this engine does not read",
                    cure='set weights.transport = "file" or "delta"',
                )
            for file in manifest.files:
                data = read_chunks(self._chunks(manifest.job_id), file, policy_version=manifest.policy_version)
                yield _parsed(data, f"version {manifest.policy_version} in Redis")
            return
        for path in weight_files(self._root, manifest):
            if path.name not in known:
                yield _read(path)

    def _go_on(self, manifest: WeightManifest, ahead: ShardsAhead) -> set[str]:
        """Applies what is left of a delta. The tensors that were changed before, and hashed."""
        known = ahead.known(manifest.files)
        if ahead.base not in _identities(manifest.base[-1:]) or len(known) != len(ahead.files):
            raise WeightsRejected(f"shards of another version {manifest.policy_version} were put in place")
        self._apply_step(manifest.base[-1], manifest.steps[-1], known)
        return {name for names in known.values() for name in names}

    def _follow(self, manifest: WeightManifest, held: Identity | None) -> set[str]:
        """Starts at the newest step that is at hand, in memory or whole in its folder, and applies the deltas since."""
        steps = manifest.steps
        at = len(steps) - 1
        while not self._starts_at(steps[at], held, whole_is_listed=at == 0):
            at -= 1
        for before, step in pairwise(steps[at:]):
            self._apply_step(before, step)
        return set()

    def _starts_at(self, step: WeightStep, held: Identity | None, *, whole_is_listed: bool) -> bool:
        """Whether the tensors hold the step now: they did already, or it was read whole."""
        if (step.policy_version, step.weights_digest) == held:
            return True
        paths = weight_files(self._root, step) if whole_is_listed else whole_version(folder_of(self._root, step))
        placed: list[str] = []
        for path in paths:
            tensors = _read(path)
            self._place(tensors, step.policy_version)
            placed += tensors
        if paths:
            check_names(step.policy_version, expected=self._tensors, found=placed)
        return bool(paths)

    def _apply_step(self, before: WeightStep, step: WeightStep, known: Collection[str] = ()) -> None:
        """But for those files that are `known`."""
        for path in weight_files(self._root, step):
            if path.name in known:
                continue
            delta = _read_delta(path, most_bytes=self._most_delta_bytes)
            if (delta.base_version, delta.base_digest) != (before.policy_version, before.weights_digest):
                raise WeightsRejected(f"{path} stands on another version {delta.base_version}")
            self._apply(delta)

    def _apply(self, delta: WeightDelta) -> None:
        for changed in delta.tensors:
            tensor = self._tensors.get(changed.name)
            if tensor is None:
                raise WeightsRejected(f"a delta changes {changed.name}, which the model lacks")
            raw = np.frombuffer(bytes_of(tensor), dtype=np.uint8)
            apply(changed, raw, item_bytes=tensor.element_size())

    def _place(self, tensors: Mapping[str, Tensor], policy_version: int) -> None:
        self._check(tensors, policy_version)
        for name, source in tensors.items():
            self._tensors[name].copy_(source)

    def _check(self, tensors: Mapping[str, Tensor], policy_version: int) -> None:
        """Raises WeightsRejected for what is no tensor of the model."""
        check_names(policy_version, expected=self._tensors, found=self._tensors.keys() | tensors.keys())
        for name, source in tensors.items():
            target = self._tensors[name]
            if source.shape != target.shape or source.dtype != target.dtype:
                raise WeightsRejected(
                    f"{name} of version {policy_version} is {_shown(source)}, the model needs {_shown(target)}"
                )


def _manifest_of(step: WeightStep, *, dtype: str) -> WeightManifest:
    return WeightManifest(
        policy_version=step.policy_version,
        weights_digest=step.weights_digest,
        dtype=dtype,
        directory=step.directory,
        files=step.files,
    )


def whole_version(directory: Path) -> list[Path]:
    """Shards in a folder where a delta was, or [] where the delta still is."""
    return sorted(directory.glob("*.safetensors"))


def _read(path: Path) -> dict[str, Tensor]:
    """Mapped, not copied."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsRejected(f"{path} cannot be read: {error}") from error


def _read_delta(path: Path, *, most_bytes: int) -> WeightDelta:
    try:
        if path.stat().st_size > most_bytes:
            raise WeightsRejected(f"{path} is larger than any delta of this model")
        return decode(path.read_bytes(), WeightDelta)
    except (OSError, ContractViolation) as error:
        raise WeightsRejected(f"{path} cannot be read: {error}") from error


def _parsed(data: bytes, what: str) -> dict[str, Tensor]:
    try:
        return load(data)
    except SafetensorError as error:
        raise WeightsRejected(f"{what} cannot be read: {error}") from error


def _memory_for(target: Tensor) -> Tensor:
    """Where a delta can be applied and a hash be computed: the target itself if it is contiguous on the CPU."""
    if target.device.type == "cpu" and target.is_contiguous():
        return target
    return torch.empty(target.shape, dtype=target.dtype)


def _identities(steps: tuple[WeightStep, ...]) -> set[Identity]:
    return {(step.policy_version, step.weights_digest) for step in steps}


def _shown(tensor: Tensor) -> str:
    return f"{dtype_name(tensor)}{list(tensor.shape)}"
