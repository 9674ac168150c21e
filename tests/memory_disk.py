"""A folder on a disk in memory, for as long as its process lives."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

MEMORY_FOLDER = re.compile(r"onbeat-redis-(?P<pid>[0-9]+)-\w+")


def folder_in_memory(disk: Path) -> Path:
    """A folder that is named after this process. Those of processes that were killed before their end go."""
    for folder in disk.iterdir():
        owner = MEMORY_FOLDER.fullmatch(folder.name)
        if owner and not Path("/proc", owner["pid"]).exists():
            shutil.rmtree(folder, ignore_errors=True)  # another session may be at it
    return Path(tempfile.mkdtemp(prefix=f"onbeat-redis-{os.getpid()}-", dir=disk))
