"""Runs an embedded stack of stand-ins until it is killed; writes its process numbers to the file named first."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from onbeat.stack.options import StackOptions
from onbeat.stack.stack import EmbeddedStack

target, folder = Path(sys.argv[1]), Path(sys.argv[2])
MODULES = {
    "reward_service": "stand_in_http",
    "gateway": "stand_in_http",
    "consumer": "stand_in_generator",
    "generator": "stand_in_generator",
}
stack = EmbeddedStack(StackOptions(run_root=folder, model_root=folder), modules=MODULES)
stack.start()
scratch = target.with_suffix(".tmp")
scratch.write_text(json.dumps(stack.pids))
scratch.rename(target)
signal.pause()
