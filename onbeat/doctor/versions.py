"""Packages against what Onbeat needs and was tested with, and the library for products."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from contracts.settings import StackSettings
from onbeat.base.machine_kernels import ProductSpeed, measured
from onbeat.base.shipped import shipped_root
from onbeat.doctor.finding import Finding, bad, ok, warn

DISTRIBUTION = "onbeat"
PINS = shipped_root() / "constraints.txt"
"""The versions that were tested."""
BIT_BY_BIT = ("torch", "transformers", "numpy", "tokenizers", "safetensors")
"""Packages of which another version may end in other weights."""


def look(settings: StackSettings) -> Iterator[Finding]:
    yield ok("onbeat", f"{metadata.version(DISTRIBUTION)}, Python {platform.python_version()}, {platform.platform()}")
    yield of_packages(metadata.requires(DISTRIBUTION) or [], installed)
    yield of_pins(pins(PINS), installed)
    if settings.device == "cpu":
        yield of_products(measured())


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def of_packages(required: list[str], version_of: Callable[[str], str | None]) -> Finding:
    """Judges the installed packages.

    Args:
        required: Lines of a distribution's metadata; those of extras are optional, and passed over.
        version_of: Returns a package's installed version; None for none.
    """
    wrong = []
    for line in required:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name}{requirement.specifier} is needed, {version or 'none'} is there")
    if wrong:
        return bad(
            "packages", "; ".join(wrong), "pip install onbeat in an environment of its own; in a clone: make setup"
        )
    return ok("packages", "all that Onbeat needs")


def of_pins(pinned: dict[str, str], version_of: Callable[[str], str | None]) -> Finding:
    others = []
    for name in BIT_BY_BIT:
        version = (version_of(name) or "").partition("+")[0]
        if name in pinned and version != pinned[name]:
            others.append(f"{name} {version or 'none'} for {pinned[name]}")
    if others:
        cure = f"digests of runs with other versions may differ: pip install -c {PINS} onbeat; in a clone: make setup"
        return warn("constraints", f"not what was tested: {', '.join(others)}", cure)
    return ok("constraints", f"{', '.join(BIT_BY_BIT)} as tested")


def pins(path: Path) -> dict[str, str]:
    versions = {}
    for line in path.read_text().splitlines():
        try:
            requirement = Requirement(line.partition("#")[0].strip())
        except InvalidRequirement:
            continue
        for specifier in requirement.specifier:
            if specifier.operator == "==":
                versions[requirement.name.lower()] = specifier.version.partition("+")[0]
    return versions


def of_products(speed: ProductSpeed) -> Finding:
    says = f"{speed.torch_flop_s / 1e9:.0f} GFLOP/s a core in float32"
    if speed.matmul == "onednn":
        return ok("products", f"{says}, and {speed.onednn_flop_s / 1e9:.0f} by oneDNN, which new jobs multiply by")
    return ok("products", says)
