"""A version's probe as the fence holds it, and the fence's verdict on an engine's proof (I11, contracts/probes.py)."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from contracts.encoding.wire import Record, decode, encode
from contracts.probes import LogProbs, ProofVerdict
from contracts.versions import WeightManifest


class FenceProbe(Record, frozen=True, kw_only=True, omit_defaults=True):
    """How `prove_version` judges an engine's log-probs of one version."""

    digest: str
    """The weights digest of the version."""
    num_scored: int
    """Scored tokens of a row."""
    limit: float
    floor: float
    typical: float | UnsetType = UNSET
    is_exact: bool = False


def fence_probe(manifest: WeightManifest) -> tuple[bytes, LogProbs, LogProbs]:
    """Returns a version's probe as the fence holds it.

    Returns:
        FenceProbe, packed; the log-probs under the version, and under the version before. Lua's msgpack has no bytes:
        they stand beside the record. Each is b"" where there is none.
    """
    probe = manifest.probe
    if probe is UNSET:
        return b"", b"", b""
    record = encode(
        FenceProbe(
            digest=manifest.weights_digest,
            num_scored=probe.num_scored,
            limit=probe.bounds.limit,
            floor=probe.bounds.floor,
            typical=probe.bounds.typical,
            is_exact=probe.bounds.is_exact,
        )
    )
    return record, probe.logprobs, probe.before or b""


class Numbers(Record, frozen=True, kw_only=True):
    """The numbers of a verdict, as the script packs them."""

    gap: float
    row: int
    bound: float
    k3: float
    share: float
    can_tell: bool


def verdict(answer: list[bytes]) -> ProofVerdict:
    """Returns the verdict of `prove_version`."""
    outcome = answer[0].decode()
    if outcome == "unknown":
        return ProofVerdict(outcome=outcome)
    numbers = decode(answer[1], Numbers)
    return ProofVerdict(
        outcome=outcome,
        gap=numbers.gap,
        row=numbers.row,
        bound=numbers.bound,
        k3=numbers.k3,
        share=numbers.share,
        can_tell=numbers.can_tell,
    )
