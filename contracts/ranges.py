"""The ranges that spec fields share."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveSeconds = Annotated[float, Meta(gt=0.0, le=604800.0)]
