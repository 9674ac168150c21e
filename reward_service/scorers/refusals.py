"""Why a scorer refuses an item: the completion is not to blame, so that it must not be scored 0 (I6)."""

from __future__ import annotations

from contracts.errors import InvalidInput


class BadReference(InvalidInput):
    """The reference or task entry cannot be compared with anything."""


class TooComplex(Exception):
    """Comparing the completion would take longer, or more memory, than any item has."""
