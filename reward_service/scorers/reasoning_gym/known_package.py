"""Checks that the installed reasoning-gym is the one whose scorers were read: by its version and by its source."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from contracts.errors import InvalidInput
from contracts.known_tasks import INSTALL, SOURCE_DIGEST, VERSION, check_version

NAME = "reasoning_gym"


@functools.cache
def check_package() -> None:
    """Raises InvalidInput before any of the package's code has run."""
    try:
        check_version(version(NAME))
    except PackageNotFoundError as error:
        raise InvalidInput("is not installed where the reward service runs", field=NAME, cure=INSTALL) from error
    if source_digest(package_folder()) != SOURCE_DIGEST:
        raise InvalidInput(
            f"its source is not that of version {VERSION}, whose scorers we have read: they evaluate nothing",
            field=NAME,
            cure=f"install {NAME}=={VERSION} again",
        )


def package_folder() -> Path:
    """Where the package lies; finding it doesn't import it."""
    package = importlib.util.find_spec(NAME)
    if package is None or package.origin is None:
        raise InvalidInput("is not installed where the reward service runs", field=NAME, cure=INSTALL)
    return Path(package.origin).parent


def source_digest(folder: Path) -> str:
    """BLAKE2b-128 over the path and bytes of each Python file, in the order of their paths."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()
