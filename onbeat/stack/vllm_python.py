"""The interpreter that runs generators with vLLM: the launcher's own, or that of the environment made for it.

onbeat setup vllm ─▶ .venv-vllm/ with a mark ─▶ a generator whose profile, or ONBEAT_ENGINE, says vllm
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from contracts.errors import InvalidInput
from onbeat.base.process.own_packages import DISTRIBUTION, PACKAGES
from onbeat.base.shipped import is_checkout, shipped_root

FOLDER = ".venv-vllm"
"""The environment's default name, in the folder in which `onbeat setup vllm` is typed."""
MARK = "onbeat-setup"
"""File of a finished environment; its text is the fingerprint of what was installed."""
FOLDERS = tuple(f"{package}/" for package in PACKAGES)
PINS = ("constraints.txt", "constraints-vllm.txt", "requirements/vllm/cuda.txt")
CURE = (
    "run `onbeat setup vllm`; on a machine with a GPU also `pip install 'onbeat[vllm]'` makes one environment of both"
)


def fingerprint() -> str:
    """Returns a digest of the pins, and of this Onbeat where it was installed from a wheel.

    An environment of a checkout runs the checkout's own files, whatever they are by then.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in PINS:
        digest.update((shipped_root() / name).read_bytes())
    if not is_checkout():
        # The list of the installed files with a hash of each, without what differs by interpreter and by installer.
        record = metadata.distribution(DISTRIBUTION).read_text("RECORD") or ""
        files = [line for line in record.splitlines() if line.startswith(FOLDERS) and ".pyc," not in line]
        digest.update("\n".join(sorted(files)).encode())
    return digest.hexdigest()


def has_vllm() -> bool:
    """Returns True where this interpreter has vLLM; nothing of it is imported."""
    return find_spec("vllm") is not None


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def python_with_vllm(folders: Sequence[Path], *, field: str) -> str:
    """Returns the path of an interpreter that has vLLM.

    Args:
        folders: Where the environment may lie, the first one first.
        field: The setting that asks for vLLM.

    Raises:
        InvalidInput: There is none, or its environment was made for another Onbeat.
    """
    if has_vllm():
        return sys.executable
    for folder in folders:
        # Not resolved: an environment is found by the path of its link.
        environment = folder.absolute() / FOLDER
        if not os.access(python_of(environment), os.X_OK):
            continue
        mark = environment / MARK
        # Without a mark it was made by hand, and is its owner's to keep.
        if mark.is_file() and mark.read_text() != fingerprint():
            raise InvalidInput(
                f"{environment} was made for another version of Onbeat or other pins",
                field=field,
                cure="run `onbeat setup vllm` there again",
            )
        return str(python_of(environment))
    places = " and ".join(str(folder.absolute() / FOLDER) for folder in dict.fromkeys(folders))
    raise InvalidInput(f"no Python has vLLM: neither this one nor {places}", field=field, cure=CURE)
