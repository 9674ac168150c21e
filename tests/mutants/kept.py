"""Guards that no test of theirs misses, each with the reason why it stays."""

from __future__ import annotations

KEPT: dict[str, str] = {}
"""`Guard.name` → reason."""
