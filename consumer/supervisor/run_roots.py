"""The folders that trainers write to: a worker that can't write there takes no jobs, and says so."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

from contracts.errors import InvalidInput
from contracts.settings import StackSettings
from onbeat.process.folders import make_missing

log = logging.getLogger(__name__)


class RunRoots:
    """The run root, and the weight root where it is another folder."""

    def __init__(self, settings: StackSettings) -> None:
        self._roots: dict[str, Path] = {"ONBEAT_RUN_ROOT": settings.run_root_path}
        if settings.weight_root:
            self._roots["ONBEAT_WEIGHT_ROOT"] = settings.weight_root_path
        self._is_said = False

    def check(self) -> None:
        """Raises InvalidInput that names the setting of a folder that cannot be written. Makes what is not there."""
        for field, root in self._roots.items():
            try:
                make_missing(root)
                # Permission bits don't tell of a read-only mount, of a full disk, or of a file server that is away.
                with tempfile.TemporaryFile(dir=root) as file:
                    file.write(b"\0")
            except OSError as error:
                raise InvalidInput(
                    f"{root} cannot be written: {error.strerror or error}",
                    field=field,
                    cure="give this user a folder that it may write to, with free space",
                ) from error

    def are_writable(self) -> bool:
        """Checks for a worker that is at work: what it lacks is logged once, and so is that it has it again."""
        try:
            self.check()
        except InvalidInput as error:
            if not self._is_said:
                log.error("this consumer takes no jobs: %s", error)
            self._is_said = True
            return False
        if self._is_said:
            log.info("this consumer takes jobs again")
        self._is_said = False
        return True
