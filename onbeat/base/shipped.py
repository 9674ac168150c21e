"""The files that come with the code: example specs with their small models, and the versions that were tested.

In a checkout they lie at its top: configs/, constraints.txt, constraints-vllm.txt, requirements/. An installed wheel
has the same files in onbeat/shipped. In a checkout that folder consists of links to them, so that the build finds each
file in one place and no second copy has to be kept.
"""

from __future__ import annotations

from pathlib import Path

from onbeat.base.process.launcher import HOME

SPECS = "configs"
"""Folder of the shipped specs, by which commands and documents name them: `configs/demo.toml`."""


def is_checkout(home: Path = HOME) -> bool:
    """Returns True where the code runs from a checkout, and not from an installed wheel."""
    return (home / "pyproject.toml").is_file()


def shipped_root(home: Path = HOME) -> Path:
    """Returns the folder that has configs/, at which the relative paths of shipped specs start.

    Args:
        home: The folder of our packages.
    """
    if is_checkout(home):
        return home
    return home / "onbeat" / "shipped"


def is_shipped(path: Path) -> bool:
    """Returns True for a name `configs/…` that the working folder lacks, and that the shipped files have."""
    return path.parts[:1] == (SPECS,) and not path.exists() and (shipped_root() / path).exists()


def own_or_shipped(path: Path) -> Path:
    """Returns the shipped file for a name `configs/…` that the working folder lacks, else the path itself."""
    if is_shipped(path):
        return shipped_root() / path
    return path
