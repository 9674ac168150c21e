"""A refusal of bad input names its field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from contracts.errors import InvalidInput


@contextmanager
def refusal_of(field: str, match: str | None = None) -> Iterator[pytest.ExceptionInfo[InvalidInput]]:
    """Asserts that bad input is refused by the name of this field, in words that match."""
    with pytest.raises(InvalidInput, match=match) as caught:
        yield caught
    assert caught.value.field == field
