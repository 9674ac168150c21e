"""Single keys of a terminal, while a screen is drawn; the terminal is as it was before, however the program ends."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

QUIT, UP, DOWN = "quit", "up", "down"
NAMES = {"q": QUIT, "Q": QUIT, "\x1b[A": UP, "\x1bOA": UP, "k": UP, "\x1b[B": DOWN, "\x1bOB": DOWN, "j": DOWN}


class Keyboard:
    """The keys of stdin."""

    def __init__(self, number: int | None) -> None:
        """number: of a terminal's file; None: there are no keys."""
        self._number = number

    def pressed(self, within_s: float) -> str:
        """The name of the next key, "" for none within the time, or one that has no meaning."""
        if self._number is None:
            time.sleep(within_s)
            return ""
        if not select.select([self._number], [], [], within_s)[0]:
            return ""
        data = os.read(self._number, 16)
        return QUIT if not data else NAMES.get(data.decode(errors="replace"), "")


@contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Keys without Enter and without echo; Ctrl-C stays what it is. Without a terminal on stdin there are none."""
    if not sys.stdin.isatty():
        yield Keyboard(None)
        return
    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)
    try:
        yield Keyboard(number)
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
