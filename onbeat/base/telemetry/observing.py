"""Work that only observes: a cost, a share, a rule of health. It can't end what it observes.

An exception of it is caught, logged with where it came from, and counted; the number that it would give is absent.
Errors of ours pass: they say that Redis, a lease or the job itself is at its end, and are answered by those who know.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from contracts.errors import OnbeatError, kind_and_text

T = TypeVar("T")

MISSED: Counter[str] = Counter()
"""Observation → how often it has failed since the process began."""

log = logging.getLogger(__name__)


def observed(what: str, observe: Callable[[], T]) -> T | None:
    """Returns what `observe` returns, and None where it raises: said the first time, counted each time.

    Args:
        what: names the observation in the log, as "the floating-point operations of a batch".
        observe: reads; it must change nothing that is computed.
    """
    try:
        return observe()
    except OnbeatError:
        raise
    except Exception as error:
        # What only observes must not end the work: the number is absent, and the failure is counted.
        MISSED[what] += 1
        if MISSED[what] == 1:
            log.warning("%s: unknown from here on, since %s", what, kind_and_text(error), exc_info=error)
        return None
