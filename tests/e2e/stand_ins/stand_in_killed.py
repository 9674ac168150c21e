"""Is killed at each of its starts."""

from __future__ import annotations

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
