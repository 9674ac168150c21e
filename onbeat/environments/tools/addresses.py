"""Where a tool's program lies in memory: at the same addresses each time, so that equal work has equal answers.

A process begins with it, before it imports anything that it would have to import again.
"""

from __future__ import annotations

import os
import sys

from onbeat.base.cage import kernel

ADDR_NO_RANDOMIZE = 0x0040000
PERSONALITY_NOW = 0xFFFFFFFF
"""Asks for the persona, and changes nothing (personality(2))."""


def keep_addresses() -> None:
    """Starts this program anew with its code and data at the same addresses each time, where the system allows it.

    None, types and functions are hashed by them, and so the order of a set of such.
    """
    if not kernel.IS_LINUX:
        return
    persona = kernel.libc().personality(PERSONALITY_NOW)
    if persona < 0 or persona & ADDR_NO_RANDOMIZE or kernel.libc().personality(persona | ADDR_NO_RANDOMIZE) < 0:
        return
    # execv keeps the persona: the program that starts anew finds the flag set, and goes on.
    if kernel.libc().personality(PERSONALITY_NOW) & ADDR_NO_RANDOMIZE:
        os.execv(sys.executable, sys.orig_argv)
