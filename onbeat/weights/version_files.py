"""What a receiver checks of a version, before it reads it and after."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from contracts.encoding.names import inside
from contracts.errors import ContractViolation, WeightsRejected
from contracts.versions import WeightManifest, WeightStep


def weight_files(root: Path, step: WeightStep | WeightManifest) -> list[Path]:
    """Finds the step's files below the weight root. Raises WeightsRejected for a missing or shortened file."""
    folder = below(root, step.directory, policy_version=step.policy_version)
    paths = []
    for file in step.files:
        path = below(folder, file.name, policy_version=step.policy_version)
        try:
            num_bytes = path.stat().st_size
        except FileNotFoundError as error:
            raise WeightsRejected(
                f"version {step.policy_version} is not at {path}",
                cure="is the run root, or the weight root, the folder that the trainer writes to?",
            ) from error
        if num_bytes != file.num_bytes:
            raise WeightsRejected(
                f"{path} of version {step.policy_version} has {num_bytes} bytes, its manifest {file.num_bytes}"
            )
        paths.append(path)
    return paths


def below(folder: Path, name: str, *, policy_version: int) -> Path:
    """Finds a file or folder of a version. Raises WeightsRejected where it isn't below `folder`, links followed."""
    try:
        return inside(folder, name)
    except ContractViolation as error:
        raise WeightsRejected(f"version {policy_version}: {error}") from error


def check_names(policy_version: int, *, expected: Collection[str], found: Collection[str]) -> None:
    """Raises WeightsRejected unless the files hold exactly the model's tensors."""
    if missing := sorted(set(expected) - set(found)):
        raise WeightsRejected(f"version {policy_version} lacks {len(missing)} tensors, the first: {missing[0]}")
    if unexpected := sorted(set(found) - set(expected)):
        raise WeightsRejected(
            f"version {policy_version} has {len(unexpected)} tensors that the model lacks, the first: {unexpected[0]}"
        )


def check_digest(manifest: WeightManifest, found: str) -> None:
    """Raises WeightsRejected unless what was loaded has the manifest's digest (I2)."""
    if found != manifest.weights_digest:
        raise WeightsRejected(
            f"version {manifest.policy_version} was loaded with digest {found}, its manifest says "
            f"{manifest.weights_digest}"
        )
