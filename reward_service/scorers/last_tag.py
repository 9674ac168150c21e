"""Finds the text that a model put between its last tags.

It takes linear time, where `re` takes cubic time for `<answer>` and many line breaks.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from onbeat.scoring.patterns import matcher

SHAPE = re.compile(
    r"(?P<over_lines>\(\?s\))?<(?P<tag>[A-Za-z][\w-]*)>(?P<strips_left>\\s\*)?"
    r"\(\?P<answer>\.\*\?\)(?P<strips_right>\\s\*)?</(?P=tag)>",
    re.ASCII,
)
"""A tag, anything, the end of the tag: what most patterns are, the default of ReasoningGymReward among them."""


@dataclass(frozen=True)
class Tagged:
    """A pattern of that shape."""

    start_tag: str
    closing: str
    over_lines: bool
    strips_left: bool
    strips_right: bool

    def last_answer(self, text: str) -> str | None:
        """Returns what `re` would find as the group `answer` of the last match."""
        answer: str | None = None
        position = 0
        while (end := text.find(self.closing, position)) >= 0:
            start = self._start(text, position, end)
            if start >= 0:
                answer = text[start:end].lstrip() if self.strips_left else text[start:end]
                if self.strips_right:
                    answer = answer.rstrip()
            position = end + len(self.closing)
        return answer

    def _start(self, text: str, position: int, end: int) -> int:
        """Where the content before an end tag begins; -1 where no tag opens it."""
        if not self.over_lines:
            content = text[position:end].rstrip() if self.strips_right else text[position:end]
            before, line_break, _ = content.rpartition("\n")
            if line_break:  # the answer stands on one line: its tag opens after the break, but for white space
                content_before = before.rstrip() if self.strips_left else before + line_break
                position = max(position, position + len(content_before) - len(self.start_tag))
        found_at = text.find(self.start_tag, position, end)
        return found_at + len(self.start_tag) if found_at >= 0 else -1


def last_answer(pattern: str, text: str) -> str | None:
    """Group `answer` of the pattern's last match; None without a match, or where the group took no part in it.

    Raises BadPattern.
    """
    tagged = _tagged(pattern)
    if tagged is not None:
        return tagged.last_answer(text)
    return matcher(pattern).last_group("answer", text)


@functools.lru_cache(maxsize=64)
def _tagged(pattern: str) -> Tagged | None:
    shape = SHAPE.fullmatch(pattern)
    if shape is None:
        return None
    return Tagged(
        start_tag=f"<{shape['tag']}>",
        closing=f"</{shape['tag']}>",
        over_lines=shape["over_lines"] is not None,
        strips_left=shape["strips_left"] is not None,
        strips_right=shape["strips_right"] is not None,
    )
