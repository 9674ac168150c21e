"""`python in_container.py FOLDER COMMAND …`: a command of ours in a working folder, as a container's process runs it.

Root is held to the modes of files, as a read-only mount would hold it.
"""

from __future__ import annotations

import ctypes
import os
import sys

from onbeat.cli import main

PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1
"""Numbers of prctl(2): a program that is started without this capability is held to the modes of files, root or not."""
VERSION_3 = 0x20080522
"""The layout of capset(2) with six words of 32 bits: effective, permitted and inheritable of the lower capabilities,
then of the upper ones."""


def bound_by_modes() -> None:
    """Takes the capability from all programs that this process is to execute."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def bound_by_modes_now() -> None:
    """Takes it from this process, which goes on without it."""
    libc = ctypes.CDLL(None)
    header, words = (ctypes.c_uint32 * 2)(VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, words)
    for number in range(3):
        words[number] &= ~(1 << CAP_DAC_OVERRIDE)
    libc.capset(header, words)


if __name__ == "__main__":
    bound_by_modes()
    bound_by_modes_now()
    os.chdir(sys.argv[1])
    main(sys.argv[2:])
