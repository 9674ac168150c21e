"""Lists that a model wrote as Python or JSON, read as text: `[[1, 0], ["Q", '_']]`. Linear, at most two levels deep."""

from __future__ import annotations

import re

TOKEN = re.compile(
    r"(?P<open>[\[(])|(?P<close>[\])])|(?P<comma>,)"
    r"|(?P<number>[-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?(?![\w.]))"
    r"""|(?P<string>'[^'\\\n]*'|"[^"\\\n]*")|(?P<space>\s+)|(?P<unknown>[\s\S])"""
)
MAX_DEPTH = 2

Items = list["str | Items"]
"""Numbers as they are written, strings without their quotes, lists."""


def read_list(text: str) -> Items | None:
    """Returns the list that the text is; None where it is something else, or deeper than MAX_DEPTH."""
    open_lists: list[Items] = []
    wants_item = True
    whole: Items | None = None
    for match in TOKEN.finditer(text):
        kind, token = match.lastgroup, match[0]
        if kind == "space":
            continue
        if whole is not None or (not open_lists and kind != "open"):
            return None
        if kind == "open" and wants_item and len(open_lists) < MAX_DEPTH:
            inner: Items = []
            if open_lists:
                open_lists[-1].append(inner)
            open_lists.append(inner)
        elif kind == "close" and (not wants_item or not open_lists[-1]):
            closed = open_lists.pop()
            whole = closed if not open_lists else None
            wants_item = False
        elif kind == "comma" and not wants_item:
            wants_item = True
        elif kind in ("number", "string") and wants_item:
            open_lists[-1].append(token if kind == "number" else token[1:-1])
            wants_item = False
        else:
            return None
    return whole
