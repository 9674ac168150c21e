"""Starts a trainer in a session of its own, which ignores SIGTERM, and leaves it behind when it is asked to end."""

from __future__ import annotations

import signal
import subprocess
import sys

TRAINER = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
subprocess.Popen([sys.executable, "-c", TRAINER], start_new_session=True)
signal.pause()
