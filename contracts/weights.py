"""How versions of the weights travel: which transport, and what a delta holds."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from contracts.encoding.names import FileName, RelativePath
from contracts.encoding.wire import Record
from contracts.versions import Digest, PolicyVersion


class FileWeights(Record, tag_field="transport", tag="file", frozen=True, kw_only=True):
    """Whole versions as safetensors shards, in a folder that trainer and generators share."""


class DeltaWeights(Record, tag_field="transport", tag="delta", frozen=True, kw_only=True):
    """What changed since the version before, in the same folder, with a whole version now and then. Lossless.

    It pays where few values change and bytes are dear: bfloat16 weights at RL's learning rates, over a network.
    """

    snapshot_every_versions: Annotated[int, Meta(ge=2, le=1000)] = 10
    """A whole version is written this often; a generator that joins reads it and the deltas since."""


class RedisWeights(Record, tag_field="transport", tag="redis", frozen=True, kw_only=True):
    """Whole versions in chunks through Redis, for small models without a shared folder; at most 256 MiB a version,
    and under a lag of K its part of 512 MiB, which K + 2 versions share."""


WeightsSpec = FileWeights | DeltaWeights | RedisWeights


class TensorDelta(Record, frozen=True, kw_only=True):
    """One tensor's changed elements, as unsigned integers of the element's width.

    Both arrays are stored as byte planes (all first bytes, then all second bytes, …), because gaps and differences are
    small numbers whose high bytes are zeros, and each is one zstd frame.
    """

    name: str
    num_changed: Annotated[int, Meta(ge=1, le=2**32 - 1)]
    gaps: bytes
    """zstd of uint32[num_changed]: the first position, then the distance to each next one; b"" where the differences
    of all positions are listed."""
    differences: bytes
    """zstd of uint[num_changed]: old bits XOR new bits."""


class WeightDelta(Record, frozen=True, kw_only=True):
    """A delta file: from one version to the next. A tensor that is not named is unchanged."""

    base_version: PolicyVersion
    base_digest: Digest
    tensors: tuple[TensorDelta, ...]


class WeightShard(Record, frozen=True, kw_only=True):
    """A file of a version whose manifest is still to come: a generator that has nothing to do may read it already."""

    policy_version: PolicyVersion
    path: RelativePath
    """Below the weight root; the file moves when the version is complete, and a process that has it open keeps it."""
    name: FileName
    """As the manifest will list it."""
    num_bytes: Annotated[int, Meta(ge=0, le=2**62)]

    @property
    def job_id(self) -> str:
        """The job, which its run folder is named after."""
        return self.path.partition("/")[0]
