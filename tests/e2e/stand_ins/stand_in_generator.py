"""Lives until it is asked to end."""

from __future__ import annotations

import signal

signal.pause()
