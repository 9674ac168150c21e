"""Chooses how the files of a run reach other hosts: by copies in an object store, or by a run root that hosts share.

a trainer's commit ─▶ keep ─▶ copies ─▶ which they are, in Redis, under the trainer's epoch
another host's trainer, a gateway, verify, export, replay ─▶ bring ─▶ the run folder there
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from contracts.run_folder import RunFolder
from contracts.settings import StackSettings

if TYPE_CHECKING:
    from onbeat.run_folder.object_files import ObjectFiles

BRING_S = 60.0
"""Longest that a person's program waits for copies without a byte of them."""


def run_files(
    settings: StackSettings, folder: RunFolder, *, deadline_s: float, pause: Callable[[float], None] = time.sleep
) -> ObjectFiles | None:
    """Makes what copies a job's run folder; None in a stack whose processes share the run root (no ONBEAT_OBJECTS).

    Args:
        settings: The stack's settings.
        folder: The job's run folder.
        deadline_s: Longest wait in seconds for a store that is away.
        pause: Sleeps while the copies can't be reached; it may raise.

    Raises:
        InvalidInput: ONBEAT_OBJECTS names no store, or the package that speaks to it isn't installed.
    """
    if not settings.objects:
        return None
    # It imports the readers of versions, which a command without objects should not pay for.
    from onbeat.run_folder.object_files import ObjectFiles

    return ObjectFiles(settings, folder, deadline_s=deadline_s, pause=pause)


def bring_files(
    settings: StackSettings,
    folder: RunFolder,
    *,
    listed: bytes | None = None,
    below: str = "",
    deadline_s: float = BRING_S,
) -> None:
    """Makes the run folder here what its copies are, where copies are kept. Raises what `ObjectFiles.bring` does.

    Args:
        settings: The stack's settings.
        folder: The job's run folder.
        listed: The list of copies, as Redis has it; None takes the newest that the store knows.
        below: The part of the folder that is brought; "" brings all.
        deadline_s: Longest wait in seconds for a store that is away.
    """
    files = run_files(settings, folder, deadline_s=deadline_s)
    if files is not None:
        files.bring(listed, below=below)


def bring_missing(settings: StackSettings, folder: RunFolder) -> None:
    """Brings a run folder that isn't here, where copies are kept. Raises what `bring_files` does."""
    if not folder.path.is_dir():
        bring_files(settings, folder)
