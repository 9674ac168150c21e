"""The probe of a version: rows of tokens with the log-probs that the trainer has for them under that version.

A digest proves the bytes that an engine's loader was handed (I2). A probe proves what the engine computes with them
(I11): before it may claim a batch of a version, a generator computes the log-probs of the version's rows with its
engine, and the fence compares them with the trainer's (broker/scripts/generator.lua, `prove_version`).

The rows are the same for all versions of a job, so that the numbers of the version before say what an engine would
answer that still computes with the old weights.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from contracts.encoding.arrays import ITEM_BYTES
from contracts.encoding.digests import Digest, content_digest
from contracts.encoding.wire import Record, encode
from contracts.errors import ContractViolation
from contracts.rewards import TokenIds

LogProbs = bytes
"""float32 [rows · scored tokens], row by row, little-endian, natural logarithm."""
MAX_SCORED = 4
"""Most tokens at the end of a row whose log-probs are compared. Each is a decoding step of an engine that decodes by
itself; the tokens before them go through the model at once."""
MAX_ROWS = 256
MAX_TOKENS = 256

LIMITS = {"float64": 1e-3, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""torch name of a dtype → `rollout.probe.max_gap` where the spec leaves it out (docs/proofs.md has the reasons)."""
FLOORS = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""torch name of a dtype → a gap that rounding alone may make: eight roundings of a number of 16 bits, and some hundred
of one of float32, whose sums go through as many terms in an order of each engine's own."""
ROUTED_LIMITS = {"float16": 5e-1, "bfloat16": 5e-1}
"""torch name of a dtype → the limit, and the floor, for a mixture of experts. Two experts whose scores are nearly equal
change places by a rounding of 16 bits, and the token then goes through another one. How far that moves a log-prob has
nothing to do with the gap of the first version, which may have had no such token. Such tokens are few, or one expert of
many layers: half of the rows have the gaps of a dense model all the same."""


def is_rough(dtype: str, *, is_routed: bool) -> bool:
    """Returns True where engines round so much that only many log-probs tell a fault from it.

    Args:
        dtype: The torch name of the model's dtype.
        is_routed: True for a mixture of experts, whose rows also have to reach its experts.
    """
    return is_routed or FLOORS[dtype] > FLOORS["float32"]


class ProbeRow(Record, frozen=True, kw_only=True):
    """A row of a probe."""

    prompt: TokenIds
    """The tokens that the scored ones follow."""
    scored: TokenIds
    """The tokens whose log-probs are compared; every row of a probe has as many."""

    def __post_init__(self) -> None:
        for name, tokens in (("prompt", self.prompt), ("scored", self.scored)):
            if not tokens or len(tokens) % ITEM_BYTES:
                raise ContractViolation(f"{len(tokens)} bytes are no token ids", field=name)


class ProbeBounds(Record, frozen=True, kw_only=True):
    """How far an engine's log-probs may be from the trainer's; the unit is that of `scaled_gap`."""

    limit: Annotated[float, Meta(ge=0.0)]
    """No gap may be larger, at the first version either: `rollout.probe.max_gap`."""
    floor: Annotated[float, Meta(ge=0.0)]
    """A gap that is smaller is rounding, however small that of the first version was."""
    typical: Annotated[float, Meta(ge=0.0)] | UnsetType = UNSET
    """No more than half of the rows may have a larger gap; left out where `limit` says it of all."""
    is_exact: bool = False
    """True where the trainer computes as its own engine does, bit for bit (`trainer.packing = "as_sampled"`): an engine
    without a gap at its first version may have none later."""


def bounds_for(dtype: str, *, max_gap: float | UnsetType, is_routed: bool, is_exact: bool) -> ProbeBounds:
    """Returns the bounds of a job's probes.

    Args:
        dtype: The torch name of the model's dtype.
        max_gap: The spec's `rollout.probe.max_gap`; UNSET where it leaves it out.
        is_routed: True for a mixture of experts.
        is_exact: True where the trainer computes as its own engine does, bit for bit.
    """
    limit = LIMITS[dtype]
    floor = FLOORS[dtype]
    typical: float | UnsetType = UNSET
    if is_routed and dtype in ROUTED_LIMITS:
        typical = limit
        limit = ROUTED_LIMITS[dtype]
        floor = limit
    if max_gap is not UNSET:
        # Who says a limit knows of an engine that rounds more, in each row.
        limit = max_gap
        typical = UNSET
    return ProbeBounds(limit=limit, floor=min(limit, floor), typical=typical, is_exact=is_exact)


class Probe(Record, frozen=True, kw_only=True):
    """The probe of one version. The trainer makes it as it publishes the version; nothing changes it."""

    rows: Annotated[tuple[ProbeRow, ...], Meta(min_length=1, max_length=MAX_ROWS)]
    logprobs: LogProbs
    """The trainer's, under this version, at temperature 1 over the whole vocabulary."""
    before: LogProbs | UnsetType = UNSET
    """The same under the version before; left out where the trainer has not computed it."""
    bounds: ProbeBounds

    def __post_init__(self) -> None:
        num_scored = {len(row.scored) for row in self.rows}
        if len(num_scored) != 1:
            raise ContractViolation("every row has as many scored tokens", field="rows")
        num_bytes = len(self.rows) * num_scored.pop()
        for name, numbers in (("logprobs", self.logprobs), ("before", self.before)):
            if numbers is not UNSET and len(numbers) != num_bytes:
                raise ContractViolation(f"{len(numbers)} bytes for {num_bytes // ITEM_BYTES} tokens", field=name)

    @property
    def num_scored(self) -> int:
        """Scored tokens of each row."""
        return len(self.rows[0].scored) // ITEM_BYTES


class ProbedVersion(Record, frozen=True, kw_only=True):
    """A probe as the audit chain holds it: that of the version that an iteration has made."""

    rows: Digest
    """`rows_digest`: the same in each record of a job."""
    logprobs: LogProbs


def rows_digest(rows: tuple[ProbeRow, ...]) -> str:
    """Returns the digest of a probe's rows."""
    return content_digest(encode(rows))


def probed_version(probe: Probe | UnsetType) -> ProbedVersion | UnsetType:
    """Returns a probe as the audit chain holds it; UNSET without one."""
    if probe is UNSET:
        return UNSET
    return ProbedVersion(rows=rows_digest(probe.rows), logprobs=probe.logprobs)


class ProofVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The fence's judgement of a generator's log-probs of a probe; `prove_version` answers it."""

    outcome: str
    """proved, far (a gap above the bound), stale (the numbers of the version before), not_finite, unknown (no such
    version, or none with a probe)."""
    gap: float = 0.0
    """The largest gap, scaled: |engine - trainer| / (1 + |trainer|)."""
    row: int = 0
    """The row of the largest gap, from 0."""
    bound: float = 0.0
    """The largest gap that the engine may have."""
    k3: float = 0.0
    """The mean of exp(d) - 1 - d over the scored tokens, d = engine - trainer in nats."""
    share: float = 1.0
    """How much of the step from the version before the engine's numbers show: 1 for all of it, 0 for none."""
    can_tell: bool = False
    """True: that step is larger than the engine's own noise, so that `share` means something."""

    @property
    def is_proved(self) -> bool:
        return self.outcome == "proved"
