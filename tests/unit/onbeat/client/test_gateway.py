"""What the gateway writes as server-sent events, its client reads again."""

from __future__ import annotations

import httpx
import pytest

from contracts.events import StateChanged
from contracts.jobs import JobState
from gateway.event_stream import encode_event
from onbeat.client.gateway import parse_events


@pytest.mark.parametrize(
    "reason", ["", "a\nb\r\nc", "data: x\n\n", "one\u2028two\u2029three\x85four\x0b\x1cfive", "\U0001f916"]
)
def test_whatever_an_event_s_text_holds_it_arrives_as_it_was(reason: str) -> None:
    failed = StateChanged(at_s=1.0, state=JobState.FAILED, reason=reason)
    body = b": keep-alive\n\n".join(encode_event(f"{number}-0", failed) for number in (1, 2))
    answer = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=body)
    assert list(parse_events(answer)) == [("1-0", failed), ("2-0", failed)]


def test_an_answer_of_another_kind_is_a_stream_that_broke_off() -> None:
    with pytest.raises(httpx.TransportError, match="text/event-stream"):
        list(parse_events(httpx.Response(200, html="<p>log in</p>")))
