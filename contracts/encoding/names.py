"""Names from other processes that become a path or a key are checked where they do, whichever process brings them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from contracts.errors import ContractViolation, NotFound

JOB_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
MADE_HERE = re.compile(r"job-[0-9a-f]{12}")
"""The ids that the job store gives: nothing else in a run root is ever removed, as the folder of a Redis."""
JobFolder = Annotated[str, Meta(pattern=rf"^{MADE_HERE.pattern}$(?![\s\S])")]
"""Such an id where a record names a folder by it."""
SEGMENT = r"(?!\.{1,2}(?:/|$))[A-Za-z0-9._-]{1,128}"
"""Part of a path: neither this folder nor the one above it, and nothing that a shell or a terminal reads otherwise."""
FileName = Annotated[str, Meta(min_length=1, max_length=128, pattern=rf"^{SEGMENT}$(?![\s\S])")]
RelativePath = Annotated[str, Meta(min_length=1, max_length=1024, pattern=rf"^{SEGMENT}(?:/{SEGMENT})*$(?![\s\S])")]
"""Below a folder that each process has at its own place."""


def check_job_id(job_id: str) -> str:
    """Returns the id. Raises NotFound: another form is no job's, and would make another path, or another key."""
    if not JOB_ID.fullmatch(job_id):
        raise NotFound(f"`{job_id[:80]!a}` is not a job id", field="job_id", cure="`onbeat jobs` lists the ids")
    return job_id


def purpose_of(batch_id: str) -> str:
    """Returns `train` of `3/train/7`."""
    return batch_id.split("/")[1]


def number_of(batch_id: str) -> int:
    """Returns 7 of `3/train/7`."""
    return int(batch_id.rpartition("/")[2])


def is_below(path: str) -> bool:
    """Returns True for a RelativePath: a record that this process makes is not checked by its types."""
    return len(path) <= 1024 and re.fullmatch(rf"{SEGMENT}(?:/{SEGMENT})*", path) is not None


def inside(folder: Path, path: str) -> Path:
    """Returns a path below the folder, links followed. Raises ContractViolation for one that leads out of it."""
    place = folder / path
    if not place.resolve().is_relative_to(folder.resolve()):
        raise ContractViolation(f"`{path[:200]!a}` leads out of {folder}", field="path")
    return place
