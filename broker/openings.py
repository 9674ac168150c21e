"""An iteration to open, in pieces that hold the server for milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from broker.keys import batch_shape
from contracts.encoding.wire import Record, encode
from contracts.rollouts import PromptBatch

CHUNK_BATCHES = 256
CHUNK_BYTES = 1 << 20
"""Most prompt batches, and their bytes, that one script dispatches: some milliseconds of the server."""


class IterationOpening(Record, frozen=True, kw_only=True):
    """An iteration to open: its number, the versions that may sample it, every batch that it expects now."""

    iteration: int
    oldest_version: int
    newest_version: int
    batches: tuple[PromptBatch, ...]
    num_later: int = 0
    """Batches that it expects as well, and that `TrainerSide.dispatch` brings before its commit: the version that alone
    may sample them isn't made yet."""

    @property
    def num_batches(self) -> int:
        return len(self.batches) + self.num_later


class NewBatch(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A prompt batch that goes in work, as scripts get it; its payload goes next to it."""

    id: str
    shape: str
    version: int | None = None
    """The only version that may sample it; None where the iteration's range says which may."""


class DispatchChunk(NamedTuple):
    """Prompt batches that one script puts in work."""

    batches: list[NewBatch]
    payloads: list[bytes]


def dispatch_chunks(batches: Iterable[PromptBatch], *, num_open: int = 1) -> Iterator[DispatchChunk]:
    """Cuts prompt batches into what scripts take at once, and encodes them as they are asked for.

    Args:
        batches: The batches.
        num_open: Iterations that may be open at once. Where several may, an evaluation is sampled by the version that
            its batch names, and by no other of the iteration's range; where one may, both are the same.
    """
    chunk = DispatchChunk([], [])
    num_bytes = 0
    for batch in batches:
        payload = encode(batch)
        # A single batch goes in any case, however large.
        if chunk.batches and (num_bytes + len(payload) > CHUNK_BYTES or len(chunk.batches) == CHUNK_BATCHES):
            yield chunk
            chunk = DispatchChunk([], [])
            num_bytes = 0
        is_pinned = num_open > 1 and batch.purpose == "evaluation"
        chunk.batches.append(
            NewBatch(
                id=batch.batch_id,
                shape=batch_shape(len(batch.prompts), batch.group_size),
                version=batch.policy_version if is_pinned else None,
            )
        )
        chunk.payloads.append(payload)
        num_bytes += len(payload)
    if chunk.batches:
        yield chunk


def opening_arguments(opening: IterationOpening, chunks: Iterator[DispatchChunk]) -> tuple[dict[str, Any], list[bytes]]:
    """Returns an opening as scripts know it (prelude.lua), with the first of the chunks; and that chunk's payloads."""
    # Takes the first chunk out of the iterator: the caller dispatches what is left in it.
    first = next(chunks, DispatchChunk([], []))
    following = {
        "iteration": opening.iteration,
        "oldest_version": opening.oldest_version,
        "newest_version": opening.newest_version,
        "num_batches": opening.num_batches,
        "batches": first.batches,
    }
    return following, first.payloads
