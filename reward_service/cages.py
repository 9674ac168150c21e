"""The cages of one pool: numbered, so that no two have a user in common, in one folder, under the operator's rules."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Literal

from onbeat.cage.cage import CageRules, own_slot

log = logging.getLogger(__name__)

SAID = {
    "rewards": ("scorers", "ONBEAT_SCORER_NETWORK"),
    "environments": ("environments", "ONBEAT_ENVIRONMENT_NETWORK"),
}
"""Service → what log lines call what is in its cages, and the setting that gives it the network."""


class Cages:
    """Thread-safe: the pool's lanes ask for the rules of the cages that they start."""

    def __init__(
        self, service: Literal["rewards", "environments"], *, memory_mb: int, network: bool, hidden: Sequence[str]
    ) -> None:
        """memory_mb, network: what each may have. hidden: folders that none may read."""
        self._service: Literal["rewards", "environments"] = service
        self._memory_mb = memory_mb
        self._network = network
        self._hidden = tuple(hidden)
        self.numbers: set[int] = set()
        """The cages that live."""
        self.folder = ""
        self._guard = Lock()
        self.missing: tuple[str, ...] | None = None
        """Locks that they lack on this platform; None before the first one has started."""

    def one_more(self, **limits: Any) -> tuple[CageRules, Callable[[], None]]:
        """Returns its rules, and what its owner calls when nothing is left in it. limits: beside the pool's own."""
        with self._guard:
            if not self.folder:
                self.folder = tempfile.mkdtemp(prefix=f"onbeat-{self._service}-")
                os.chmod(self.folder, 0o555)
            number = next(number for number in itertools.count() if number not in self.numbers)
            self.numbers.add(number)
        rules = CageRules(
            folder=self.folder,
            memory_mb=self._memory_mb,
            network=self._network,
            hidden=self._hidden,
            service=self._service,
            service_slot=own_slot(),
            number=number,
            **limits,
        )
        return rules, lambda: self.numbers.discard(number)

    def say_what_is_missing(self, missing: tuple[str, ...]) -> None:
        """Writes a log line, the first time."""
        with self._guard:
            if self.missing is not None:
                return
            self.missing = missing
        noun, setting = SAID[self._service]
        network = f", but for the network ({setting})" if self._network else ""
        if missing:
            locks = "; ".join(missing)
            log.warning("%s are caged as far as this platform allows; missing: %s%s", noun, locks, network)
        else:
            log.info("%s are caged%s", noun, network)

    def remove_folder(self) -> None:
        """Called when no cage is left."""
        if self.folder:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
