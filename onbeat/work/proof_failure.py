"""The error of a generator whose engine has not shown a version (I11)."""

from __future__ import annotations

from contracts.errors import ProofFailed
from contracts.probes import ProofVerdict
from contracts.versions import WeightManifest

CURES = {
    "far": "an engine that quantizes or rounds more: raise rollout.probe.max_gap; any other: see `onbeat doctor MODEL`",
    "stale": "the engine keeps weights of the version before: see `onbeat doctor MODEL`, and its release's notes",
    "not_finite": "the engine's numbers have diverged: see its log",
}


def proof_failure(verdict: ProofVerdict, manifest: WeightManifest) -> ProofFailed:
    """Returns the error of a verdict that isn't `is_proved`: it names the version, the row, the gap and the cure."""
    version = f"version {manifest.policy_version}"
    if verdict.outcome == "unknown":
        return ProofFailed(f"{version} is announced no more", cure="none is needed: its successor is loaded next")
    row = f"row {verdict.row} of the probe"
    problems = {
        "far": f"is {verdict.gap:.2g} from the trainer's at {row}, and {verdict.bound:.2g} is allowed "
        f"(K3 {verdict.k3:.2g})",
        "stale": f"show {max(0.0, verdict.share):.0%} of the step from version {manifest.policy_version - 1}",
        "not_finite": f"are not finite at {row}",
    }
    whose = "log-prob" if verdict.outcome == "far" else "log-probs"
    return ProofFailed(
        f"this engine computes {version} wrongly: its {whose} {problems[verdict.outcome]}", cure=CURES[verdict.outcome]
    )
