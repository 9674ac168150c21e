"""Policy versions, the manifest that pins the bytes of one, and what a delta holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from contracts.encoding.digests import Digest, DigestAlgorithm, content_digest
from contracts.encoding.names import FileName, RelativePath, is_below
from contracts.encoding.wire import Record
from contracts.errors import ContractViolation
from contracts.probes import Probe
from contracts.weights import TRANSPORTS, Transport

PolicyVersion = Annotated[int, Meta(ge=0)]
"""0 is the model as loaded; iteration t trains version t and makes version t + 1."""

WeightTransport: TypeAlias = Literal[tuple(TRANSPORTS)]  # pyright: ignore[reportInvalidTypeForm]  # the tags of `WeightsSpec`


class WeightFile(Record, frozen=True, kw_only=True):
    """A file of a version."""

    name: FileName
    num_bytes: Annotated[int, Meta(ge=0, le=2**62)]


class WeightStep(Record, frozen=True, kw_only=True):
    """A version that others stand on: a whole one, or a delta on the step before it."""

    policy_version: PolicyVersion
    weights_digest: Digest
    directory: RelativePath
    files: tuple[WeightFile, ...]


class AdapterVersion(Record, frozen=True, kw_only=True):
    """A version as LoRA matrices: each weight is the base's + scaling · B A (onbeat/weights/adapter/matrices.py)."""

    scaling: float
    """alpha / rank."""
    adapter_digest: Digest
    """`weights_digest` of the matrices in the manifest's files."""
    base: WeightStep
    """The weights that the job began with, the same for all of its versions; `VersionStore.bases` has them."""


class WeightManifest(Record, frozen=True, kw_only=True):
    """The manifest of a version: its files, and the digest of its tensors (`weights_digest`).

    The trainer creates it once the files are complete, and announces it through Redis; generators check what they load
    against it.
    """

    policy_version: PolicyVersion
    weights_digest: Digest
    digest_algorithm: DigestAlgorithm = "blake3-256"
    """The hash in `weights_digest`."""
    dtype: str
    """torch name of the published dtype, e.g. "float32"."""
    transport: WeightTransport = "file"
    """Where the files are. In the place of a delta there may be a whole version instead."""
    directory: RelativePath
    """Below the weight root, which every process mounts at its own place; also the version's name."""
    files: tuple[WeightFile, ...]
    """The files of the whole version, or of its delta on the last of `base`."""
    base: tuple[WeightStep, ...] = ()
    """The versions that a delta stands on, a whole version first."""
    adapter: AdapterVersion | None = None
    """The version that the files' adapters are merged into; None where the files hold weights. weights_digest is of the
    merged ones."""
    probe: Probe | UnsetType = UNSET
    """The log-probs that a generator's engine has to show before it samples with the version (I11); left out where
    the job asks for none."""

    def __post_init__(self) -> None:
        steps = list(self.steps)
        if self.adapter:
            steps.append(self.adapter.base)
        for step in steps:
            if not step.files:
                raise ContractViolation("a manifest without files", field="files")
            if not is_below(step.directory):
                raise ContractViolation("must stay inside the weight root", field="directory")
            if not all(is_below(file.name) and "/" not in file.name for file in step.files):
                raise ContractViolation("must be names of files", field="files")
        if self.base and not self.transport_kind.takes_deltas:
            raise ContractViolation("only a delta stands on other versions", field="base")
        if self.base and self.adapter:
            raise ContractViolation("adapters do not travel as deltas", field="adapter")

    @property
    def num_chunk_bytes(self) -> int:
        """Bytes of the version that are in Redis."""
        if not self.transport_kind.fills_redis:
            return 0
        return sum(file.num_bytes for file in self.files)

    @property
    def transport_kind(self) -> type[Transport]:
        """The kind of its transport, which says what the transport can do."""
        return TRANSPORTS[self.transport]

    @property
    def steps(self) -> tuple[WeightStep, ...]:
        """The steps from a whole version to this one."""
        own = WeightStep(
            policy_version=self.policy_version,
            weights_digest=self.weights_digest,
            directory=self.directory,
            files=self.files,
        )
        return (*self.base, own)

    @property
    def job_id(self) -> str:
        """The job, which its run folder is named after."""
        return self.directory.partition("/")[0]


class TensorDelta(Record, frozen=True, kw_only=True):
    """The changed elements of one tensor, as unsigned integers of the element's width.

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


def weights_digest(tensors: Iterable[tuple[str, str, tuple[int, ...], bytes | memoryview]]) -> str:
    """Returns the digest of named tensors (name, dtype, shape, little-endian bytes), whatever files they are in.

    Each tensor is hashed alone, and the sorted list of those digests is hashed: shards may be read in any order.
    """
    return digest_of_lines(tensor_line(*tensor) for tensor in tensors)


def tensor_line(name: str, dtype: str, shape: tuple[int, ...], data: bytes | memoryview) -> str:
    """Returns the line of a tensor in `weights_digest`: `layer.weight float32 2x3 DIGEST`."""
    return f"{name} {dtype} {'x'.join(map(str, shape))} {content_digest(data)}"


def digest_of_lines(lines: Iterable[str]) -> str:
    """Returns the `weights_digest` of tensors that were hashed one by one, by `tensor_line`."""
    return content_digest("\n".join(sorted(lines)).encode())


ELEMENTS = (
    ("F64", "float64", 8),
    ("F32", "float32", 4),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E5M2", "float8_e5m2", 1),
    ("I64", "int64", 8),
    ("I32", "int32", 4),
    ("I16", "int16", 2),
    ("I8", "int8", 1),
    ("U8", "uint8", 1),
    ("BOOL", "bool", 1),
)
"""The types that a version's tensors may have: (name in a safetensors header, name in torch and in a manifest, bytes
of an element). A reader of bytes needs no torch for it."""
TORCH_NAMES = {stored: name for stored, name, _ in ELEMENTS}
STORED_NAMES = {name: stored for stored, name, _ in ELEMENTS}
ITEM_BYTES = {name: num_bytes for _, name, num_bytes in ELEMENTS}
"""Bytes of an element, by the name in torch."""
