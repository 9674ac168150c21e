"""Text in recorded prompts and completions: newest first, bounded in files, bytes and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from contracts.errors import OnbeatError
from contracts.recorded.batches import RecordedBatch
from contracts.recorded.files import RecordedFiles, read_record
from contracts.recorded.views import FoundText, FoundTexts
from gateway.recorded.views import pieces_of

MAX_FILES = 5000
MAX_BYTES = 512 * 1024**2
MAX_S = 5.0
BESIDE = 60
"""Characters of an excerpt on each side of what was found."""


@dataclass(kw_only=True)
class Search:
    """One search; `run` looks at each record once."""

    files: RecordedFiles
    text: str
    limit: int
    max_files: int = MAX_FILES
    max_bytes: int = MAX_BYTES
    max_s: float = MAX_S
    clock: Callable[[], float] = time.monotonic
    _num_files: int = field(default=0, init=False)
    _num_bytes: int = field(default=0, init=False)

    def run(self) -> FoundTexts:
        """Returns what was found within the bounds; case doesn't matter. A file that can't be read is passed over."""
        found: list[FoundText] = []
        searched, ends_s = 0, self.clock() + self.max_s
        for iteration in reversed(self.files.iterations()):
            for path in self.files.batch_paths(iteration):
                is_spent = self._num_files >= self.max_files or self._num_bytes >= self.max_bytes
                if len(found) >= self.limit or is_spent or self.clock() >= ends_s:
                    return FoundTexts(found=tuple(found[: self.limit]), searched_iterations=searched, is_complete=False)
                self._num_files += 1
                try:
                    self._num_bytes += path.stat().st_size
                    record = read_record(path, RecordedBatch, max_bytes=self.files.max_bytes)
                except (OSError, OnbeatError):
                    continue
                found += found_in(record, self.text)
            searched += 1
        is_complete = len(found) <= self.limit
        return FoundTexts(found=tuple(found[: self.limit]), searched_iterations=searched, is_complete=is_complete)


def found_in(record: RecordedBatch, text: str) -> Iterator[FoundText]:
    """Yields each prompt and each completion of the batch that has the text; of a trajectory all turns count."""
    wanted, pieces = text.casefold(), record.text_of
    for place, group in enumerate(record.batch.groups):
        asked = record.asked.prompt_at(place, num_resamples=group.num_resamples)
        texts = [(-1, asked.text if asked else "")]
        for sample, rollout in enumerate(group.rollouts):
            whole = "".join(pieces_of(rollout.completion, pieces)) if pieces else ""
            texts.append((sample, rollout.text if wanted in rollout.text.casefold() else whole))
        for sample, content in texts:
            at = place_of(wanted, content)
            if at >= 0:
                excerpt = content[max(0, at - BESIDE) : at + len(text) + BESIDE]
                yield FoundText(batch_id=record.batch.batch_id, group=place, sample=sample, excerpt=excerpt)


def place_of(wanted: str, content: str) -> int:
    """Where a folded text begins in a text as it stands; -1 where it doesn't. Folding makes some characters two."""
    folded = content.casefold()
    at = folded.find(wanted)
    if at <= 0 or len(folded) == len(content):
        return at
    passed = 0
    for place, character in enumerate(content):
        passed += len(character.casefold())
        if passed > at:
            return place
    return -1
