"""The ranges that spec fields share. Every number of a job has two bounds, and every text and list a longest length, so
that no valid job can end a stack; contracts/spec_limits.py bounds their products.

The upper bounds are far beyond what the largest known runs use, and within what one Redis and one process can hold.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_ITERATIONS = 1_000_000
MAX_BATCHES = 10_000
MAX_PROMPTS = 4096
MAX_TOKENS = 2**20
MAX_ATTEMPTS = 1000
NO_CONTROL_CHARACTERS = r"^(?![\s\S]*[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069])"
"""Neither line breaks, escapes, nor marks that turn the direction of writing around: the text is shown in logs and
terminals, or is a path."""

Iterations = Annotated[int, Meta(ge=1, le=MAX_ITERATIONS)]
IterationsOrNone = Annotated[int, Meta(ge=0, le=MAX_ITERATIONS)]
Batches = Annotated[int, Meta(ge=1, le=MAX_BATCHES)]
"""Of an iteration: a ledger entry and a stream entry each, opened by one script."""
Prompts = Annotated[int, Meta(ge=1, le=MAX_PROMPTS)]
"""Of a batch."""
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
"""Of one text: contexts of a million tokens."""
Characters = Annotated[int, Meta(ge=0, le=2**27)]
Attempts = Annotated[int, Meta(ge=1, le=MAX_ATTEMPTS)]
Seconds = Annotated[float, Meta(gt=0.0, le=604800.0)]
"""A deadline of a week at most."""
Lease = Annotated[float, Meta(ge=0.01, le=86400.0)]
"""A holder renews it three times in this time."""
Factor = Annotated[float, Meta(ge=0.0, le=1000.0)]
"""A coefficient of the loss, or what is added to a denominator."""
Line = Annotated[str, Meta(min_length=1, max_length=256, pattern=NO_CONTROL_CHARACTERS)]
"""A name."""
FilePath = Annotated[str, Meta(min_length=1, max_length=1024, pattern=NO_CONTROL_CHARACTERS)]
FilePathOrNone = Annotated[str, Meta(max_length=1024, pattern=NO_CONTROL_CHARACTERS)]
Text = Annotated[str, Meta(max_length=65536)]
"""A part of a prompt."""
Pattern = Annotated[str, Meta(max_length=4096)]
"""A regular expression."""
