"""What extras offer: tests of the core that need it are skipped where the extras were deleted."""

from __future__ import annotations

import pytest

from gateway.app import EXTRAS
from onbeat.base.process.entry_points import OURS, all_of

needs_extra_routes = pytest.mark.skipif(
    not all_of(EXTRAS, distribution=OURS), reason="the extras that offer these routes are not there"
)
