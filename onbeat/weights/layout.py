"""The layout of a version: names, shapes and dtypes, known before any value, by which a writer places each tensor."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from contracts.errors import OnbeatError, WeightsUnfit
from contracts.versions import STORED_NAMES, WeightFile, WeightManifest, WeightStep, WeightTransport

HEADER_ALIGNMENT = 8


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """Dtype and shape of a tensor. `layout_of` creates it; publishers and receivers read it."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def in_words(self) -> str:
        return f"{dtype_name(self)}{list(self.shape)}"

    @property
    def num_items(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        # Of a scalar the product of no lengths is 1: one item.
        return self.num_items * self.dtype.itemsize


Layout = Mapping[str, TensorLayout]
"""Tensors in the order in which they are expected: those that come together share a file."""


@dataclass(frozen=True, kw_only=True)
class PendingVersion:
    """A version that is about to be published: its names, and its layout. A publisher creates it; its sink reads it."""

    policy_version: int
    layout: Layout
    directory: str
    """The version's folder below the weight root, as its manifest names it; also where no folder is written."""

    def manifest(
        self,
        weights_digest: str,
        *,
        transport: WeightTransport,
        files: tuple[WeightFile, ...],
        base: tuple[WeightStep, ...] = (),
    ) -> WeightManifest:
        return WeightManifest(
            policy_version=self.policy_version,
            weights_digest=weights_digest,
            dtype=published_dtype(self.layout),
            transport=transport,
            directory=self.directory,
            files=files,
            base=base,
        )


class FileLayout:
    """The place of each tensor in one safetensors file, so that tensors can be written in any order.

    An 8-byte little-endian header length, a JSON header (name → dtype, shape, data_offsets), and the tensors'
    little-endian bytes (https://github.com/huggingface/safetensors#format).
    """

    def __init__(self, layout: Layout) -> None:
        entries: dict[str, dict[str, Any]] = {}
        end = 0
        # Tensors of wide elements come first, so that each begins at a multiple of its element's width.
        for name, tensor in sorted(layout.items(), key=lambda item: -item[1].dtype.itemsize):
            # [begin, end) in bytes.
            place = [end, end + tensor.num_bytes]
            entries[name] = {
                "dtype": STORED_NAMES[dtype_name(tensor)],
                "shape": list(tensor.shape),
                "data_offsets": place,
            }
            end += tensor.num_bytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        # data_offsets count from the header's end, so blanks make its length a multiple of 8: a reader that maps the
        # file can use what is aligned among the tensors in place only where the tensors begin at such a multiple.
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        # <Q: 8 bytes, little-endian, without the length of themselves.
        self.header = struct.pack("<Q", len(text)) + text
        self.num_bytes = len(self.header) + end
        self.starts = {name: len(self.header) + entry["data_offsets"][0] for name, entry in entries.items()}
        """Positions of tensors' first bytes, from the beginning of the file."""


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorLayout]:
    """Takes the shapes of tensors that are at hand; a sharded tensor has that of the whole."""
    return {name: TensorLayout(dtype=t.dtype, shape=tuple(t.shape)) for name, t in tensors.items()}


def total_bytes(layout: Layout) -> int:
    """Sums the bytes of all tensors."""
    return sum(tensor.num_bytes for tensor in layout.values())


def published_dtype(layout: Layout) -> str:
    """Returns the parameters' dtype as a manifest names it; buffers may have others."""
    for tensor in layout.values():
        if tensor.dtype.is_floating_point:
            return dtype_name(tensor)
    raise OnbeatError("a policy without floating-point tensors", field="weights")


def dtype_name(tensor: Tensor | TensorLayout) -> str:
    """Returns the dtype as a manifest names it, e.g. "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def split_into_shards(layout: Layout, *, shard_bytes: int) -> list[dict[str, TensorLayout]]:
    """Splits tensors into shards in their order, a new one where the next tensor would not fit. A tensor larger than
    `shard_bytes` has a shard of its own.
    """
    shards: list[dict[str, TensorLayout]] = [{}]
    used = 0
    for name, tensor in layout.items():
        # An empty shard takes any tensor, however large.
        if shards[-1] and used + tensor.num_bytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = tensor
        used += tensor.num_bytes
    return shards


def check_layout(policy_version: int, *, expected: Layout, actual: Layout) -> None:
    """Raises WeightsUnfit unless both name the same tensors with the same shapes and dtypes.

    Args:
        policy_version: The version, for the error.
        expected: The model's layout.
        actual: The layout of the version's files.
    """
    check_names(policy_version, expected=expected, actual=actual)
    for name, tensor in actual.items():
        if tensor != expected[name]:
            raise WeightsUnfit(
                f"{name} of version {policy_version} is {tensor.in_words}, the model needs {expected[name].in_words}"
            )


def check_names(policy_version: int, *, expected: Collection[str], actual: Collection[str]) -> None:
    """Raises WeightsUnfit unless the files hold exactly the model's tensors.

    Args:
        policy_version: The version, for the error.
        expected: The names of the model's tensors.
        actual: The names in the version's files.
    """
    missing = sorted(set(expected) - set(actual))
    if missing:
        raise WeightsUnfit(f"version {policy_version} lacks {len(missing)} tensors, the first: {missing[0]}")
    unexpected = sorted(set(actual) - set(expected))
    if unexpected:
        raise WeightsUnfit(
            f"version {policy_version} has {len(unexpected)} tensors that the model lacks, the first: {unexpected[0]}"
        )
