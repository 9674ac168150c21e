"""The record of an export."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A version that was exported to a folder. `export` creates it; the command and the task report it."""

    job_id: str
    directory: str
    policy_version: int
    weights_digest: str
    """The version's digest; with adapters, that of what they make of their base."""
    files_digest: str
    """The digest of the files' tensors, by the names that they have there."""
    adapters_digest: str
    """"" for a whole model."""
    base: str
    """The folder of the model that the job started with."""
    source: str
    """The folder below the run root that it was read from."""
    files: tuple[str, ...]
