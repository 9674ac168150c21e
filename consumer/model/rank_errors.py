"""The edge where what torch.distributed raises becomes ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed import QueueEmptyError  # pyright: ignore[reportPrivateImportUsage]

from contracts.errors import Unavailable


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """torch says by RuntimeError, and no more exactly, that a peer or the launcher's store is gone or silent."""
    try:
        yield
    except QueueEmptyError:
        raise
    except RuntimeError as error:
        first_line = str(error).strip().partition("\n")[0]
        raise Unavailable(f"the trainer's ranks have lost each other: {first_line}", field="ranks") from error
