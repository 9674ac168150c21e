"""How versions travel: the transports that a job may name, and what may be asked of each. STORES have their stores."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeGuard, get_args

from msgspec import Meta

from contracts.encoding.wire import Record


class Transport(Record, tag_field="transport", frozen=True, kw_only=True):
    """Base of the transports; the tag is the name in specs and manifests."""

    elsewhere: ClassVar[str] = ""
    """Where files lie that are not in folders below the weight root, as an error calls it: only a process with an
    account there reads them."""
    fills_redis: ClassVar[bool] = False
    """True where versions take Redis' memory: then none is kept when its iteration is over."""
    takes_deltas: ClassVar[bool] = False
    """True where a manifest of it may stand on other versions."""

    @property
    def name(self) -> str:
        """The transport's name in a spec."""
        return str(self.__struct_config__.tag)


class FileWeights(Transport, tag="file", frozen=True, kw_only=True):
    """Whole versions as safetensors shards, in a folder that trainer and generators share."""


class DeltaWeights(Transport, tag="delta", frozen=True, kw_only=True):
    """Changes since the version before, in the same folder, with a whole version now and then. Lossless.

    It pays if few values change and bytes are expensive: bfloat16 weights at RL's learning rates, over a network.
    """

    takes_deltas: ClassVar[bool] = True
    snapshot_every_versions: Annotated[int, Meta(ge=2, le=1000)] = 10
    """After each so many versions a whole one is written. A generator that joins reads it and the deltas since."""


class RedisWeights(Transport, tag="redis", frozen=True, kw_only=True):
    """Whole versions in chunks through Redis, for small models without a shared folder; at most 256 MiB a version,
    and under a lag of K its part of 512 MiB, which K + 2 versions share."""

    elsewhere: ClassVar[str] = "Redis"
    fills_redis: ClassVar[bool] = True


class ObjectWeights(Transport, tag="object", frozen=True, kw_only=True):
    """Versions in an object store (ONBEAT_OBJECTS), for hosts that share no folder."""

    elsewhere: ClassVar[str] = "the object store"
    takes_deltas: ClassVar[bool] = True
    snapshot_every_versions: Annotated[int, Meta(ge=1, le=1000)] = 1
    """After each so many versions a whole one is written; between them only what changed since the version before, as
    with "delta". 1: every version is whole."""


WeightsSpec = FileWeights | DeltaWeights | RedisWeights | ObjectWeights
TRANSPORTS: dict[str, type[Transport]] = {str(kind.__struct_config__.tag): kind for kind in get_args(WeightsSpec)}


def has_deltas(weights: WeightsSpec) -> TypeGuard[DeltaWeights | ObjectWeights]:
    """Returns True where versions of the job travel as deltas on the ones before."""
    return isinstance(weights, DeltaWeights | ObjectWeights) and weights.snapshot_every_versions > 1
