"""What an HTTP service answers when it refuses: RFC 9457 problem details."""

from __future__ import annotations

from http import HTTPStatus

from contracts.encoding.wire import Record, encode_json

MEDIA_TYPE = "application/problem+json"


class ProblemDetails(Record, frozen=True, kw_only=True):
    """The body of every answer of 400 and above."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    field: str | None = None
    """Path of the offending field, e.g. "model.path" or "items[3].reference"; null where no field is at fault."""
    cure: str | None = None
    """What to do about it."""


def problem_body(status: int, detail: str, *, field: str | None = None, cure: str | None = None) -> bytes:
    """Makes JSON of the problem; text that UTF-8 can't hold, as a hostile header may bring, is escaped."""
    texts = [_encodable(detail), *(text and _encodable(text) for text in (field, cure))]
    title = HTTPStatus(status).phrase
    return encode_json(ProblemDetails(title=title, status=status, detail=texts[0] or "", field=texts[1], cure=texts[2]))


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
