"""One agent's conversation: which request is the next turn, and which can't be recorded."""

from __future__ import annotations

import pytest

from contracts.environments.messages import Message
from contracts.sampling import SamplingParams
from onbeat.environments.agents.chat import check_sampling
from onbeat.environments.agents.conversation import Broken, Conversation, Ended, New, Request
from onbeat.environments.agents.door import _answer_of
from onbeat.environments.agents.refusal import Refusal


def user(content: str) -> Message:
    return Message(role="user", content=content)


def assistant(content: str) -> Message:
    return Message(role="assistant", content=content)


def request(*messages: Message) -> Request:
    return Request(body=repr(messages).encode(), messages=messages)


def asked(*messages: Message) -> tuple[Conversation, Request]:
    conversation, first = Conversation(), request(*messages)
    conversation.ask(first)
    assert conversation.wait() == New(messages)
    return conversation, first


def test_the_next_request_is_what_was_said_and_something_new() -> None:
    conversation, first = asked(user("a"))
    conversation.answer(assistant("b"))
    assert first.answered.result() == assistant("b")
    conversation.ask(request(user("a"), assistant("b"), user("c")))
    assert conversation.wait() == New((user("c"),))


def test_a_request_beside_one_that_waits_breaks_the_conversation() -> None:
    conversation, _ = asked(user("a"))
    with pytest.raises(Refusal, match="an earlier request of it waits"):
        conversation.ask(request(user("b")))
    assert isinstance(conversation.wait(), Broken)
    with pytest.raises(Refusal, match="can't be recorded"):
        conversation.ask(request(user("c")))


def test_a_request_takes_the_place_of_an_equal_one_whose_client_is_gone() -> None:
    conversation, first = asked(user("a"))
    conversation.leave(first)
    second = request(user("a"))
    conversation.ask(second)
    conversation.answer(assistant("b"))
    assert second.answered.result() == assistant("b")


def test_an_answer_that_met_no_client_is_told_to_the_one_that_asks_the_same_again() -> None:
    conversation, first = asked(user("a"))
    conversation.leave(first)
    conversation.answer(assistant("b"))
    again = request(user("a"))
    conversation.ask(again)
    assert again.answered.result() == assistant("b")
    third = request(user("a"))
    with pytest.raises(Refusal, match="message 1"):
        conversation.ask(third)


async def test_an_answer_that_comes_as_its_client_hangs_up_is_for_its_next_try() -> None:
    async def hung_up() -> dict[str, str]:
        return {"type": "http.disconnect"}

    conversation, first = asked(user("a"))
    conversation.answer(assistant("b"))
    with pytest.raises(ConnectionResetError):
        await _answer_of(first, conversation, hung_up)
    again = request(user("a"))
    conversation.ask(again)
    assert again.answered.result(0) == assistant("b")


def test_a_function_that_returns_without_the_answer_it_asked_for_has_no_trajectory() -> None:
    conversation, first = asked(user("a"))
    conversation.leave(first)
    conversation.end(Ended(returned=1.0))
    event = conversation.wait()
    assert isinstance(event, Broken)
    assert "waited for its answer" in event.problem


def test_a_function_that_raises_while_a_request_waits_has_raised() -> None:
    conversation, _ = asked(user("a"))
    error = ValueError("no")
    conversation.end(Ended(error=error))
    assert conversation.wait() == Ended(error=error)


def test_what_waits_and_what_comes_after_the_end_is_refused() -> None:
    conversation, first = asked(user("a"))
    conversation.close("the session has ended")
    with pytest.raises(Refusal, match="the session has ended") as refused:
        first.answered.result()
    assert (refused.value.status, refused.value.code) == (410, "session_ended")
    with pytest.raises(Refusal, match="the session has ended"):
        conversation.ask(request(user("a"), assistant("b"), user("c")))


def test_a_conversation_is_by_messages_or_by_tokens() -> None:
    conversation, _ = asked(user("a"))
    conversation.answer(assistant("b"))
    with pytest.raises(Refusal, match="by messages before, and now by tokens"):
        conversation.ask(Request(body=b"", token_ids=[1]))


def test_a_request_may_name_the_job_s_min_p_and_no_other() -> None:
    plain, truncated = SamplingParams(max_new_tokens=8), SamplingParams(max_new_tokens=8, min_p=0.1)
    check_sampling({"min_p": 0}, plain)
    check_sampling({"min_p": 0.1}, truncated)
    for sampling, value in ((plain, 0.1), (truncated, 0)):
        with pytest.raises(Refusal, match=f"min_p is {value}, and the job samples with"):
            check_sampling({"min_p": value}, sampling)
