"""The files of a run where other hosts have no part in its folder: what copies them is an extra, found by its name.

a trainer's commit ─▶ keep ─▶ copies ─▶ which they are, in Redis, under the trainer's epoch
another host's trainer, a gateway, verify, export, replay ─▶ bring ─▶ the run folder there
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from contracts.errors import InvalidInput
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.base.process.entry_points import all_of

if TYPE_CHECKING:
    from broker.trainer_side import TrainerSide

GROUP = "onbeat.run_folder.run_files"
BRING_S = 60.0
"""Longest that a person's program waits for copies without a byte of them."""


class RunFiles:
    """One job's, of a stack whose processes share the run root as it stands here: there is nothing to copy.

    Each method raises Unavailable where the copies can't be reached within the deadline.
    """

    def begin(self, listed: bytes | None) -> None:
        """Brings what a trainer goes on with, before it reads or writes a file; what it can't have it does without.

        listed: as Redis has it; the copies themselves may know a newer list, where Redis came back older.
        """

    def keep(self, iteration: int, side: TrainerSide, *, has_checkpoint: bool) -> None:
        """Copies what has changed since, after the commit of an iteration, and says so. Raises FencedOff.

        has_checkpoint: copies what isn't only appended to, too, and removes what is in no list any more.
        """

    def bring(self, listed: bytes | None = None, *, below: str = "") -> None:
        """Makes the run folder here what the list says; what is here already stays. For who reads it alone.

        listed: as Redis has it; None: the newest of which the copies know, which is one of a checkpoint. below: the
        part of the folder that is brought, "" for all.
        """

    def remove(self) -> None:
        """Removes all copies of a job that was removed. Safe to repeat."""

    def leave(self) -> None:
        """Lets others of this host bring files into the folder: its trainer writes none of them any more."""


def run_files(
    settings: StackSettings, folder: RunFolder, *, deadline_s: float, pause: Callable[[float], None] = time.sleep
) -> RunFiles:
    """Makes those of a job. pause: sleeps while the copies can't be reached; it may raise.

    Raises InvalidInput for an ONBEAT_OBJECTS that names no store.
    """
    if not settings.objects:
        return RunFiles()
    make: Callable[..., RunFiles] | None = all_of(GROUP).get("objects")
    if make is None:
        raise InvalidInput(
            "what copies run folders isn't installed", field="ONBEAT_OBJECTS", cure="pip install 'onbeat[objects]'"
        )
    return make(settings, folder, deadline_s=deadline_s, pause=pause)


def bring_missing(settings: StackSettings, folder: RunFolder) -> None:
    """Brings a run folder that isn't here, where copies are kept. Raises what `RunFiles.bring` does."""
    if settings.objects and not folder.path.is_dir():
        run_files(settings, folder, deadline_s=BRING_S).bring()
