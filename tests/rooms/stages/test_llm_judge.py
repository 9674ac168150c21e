"""A judge's server is asked some questions at a time, again where that may help, and each for no longer than it may."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from broker.stage_side import ClaimedItem
from contracts.encoding.arrays import unpack_float32
from contracts.errors import BatchFailed, CompletionUnjudged, InvalidInput, JudgeUnavailable
from contracts.settings import StackSettings
from onbeat.stack.ports import free_port
from onbeat.stages import llm_judge
from onbeat.stages.llm_judge import MAX_REQUESTS, JudgeService, judge_service
from onbeat.stages.served_stages import ServedStage
from onbeat.stages.services import judged_values
from tests.builders import rollout_batch
from tests.integration.test_outgoing import assert_speaks_to_no_proxy
from tests.judge_server import Answer, JudgeServer, Question, judge_server, says
from tests.rooms.stages.stage_fakes import claimed_item, served_stage

KEY = "a-secret-key-of-the-judge"
JUDGE: dict[str, Any] = {"type": "llm_judge", "model": "m", "prompt": "{prompt}|{completion}|{reference}"}


def served(dependency_s: float = 600.0) -> ServedStage:
    return served_stage(JUDGE | {"system": "Be strict."}, deterministic=False, timeouts__dependency_s=dependency_s)


def item(row: int = 0, completion: str = "c") -> ClaimedItem:
    texts = {"prompt": [b"p"], "text": [completion.encode()], "reference": [b"r"]}
    return claimed_item("llm_judge", rollout_batch(), range(row, row + 1), texts, number=row)


async def at_once(_seconds: float) -> None:
    """A pause that is over."""


def ask(settings: StackSettings, *items: ClaimedItem, dependency_s: float = 600.0) -> list[float]:
    """The scores of the items, whose questions are asked beside each other."""

    async def run() -> list[float]:
        service, stage = JudgeService(settings, sleep=at_once), served(dependency_s)
        try:
            made = await asyncio.gather(*(service.values(stage, one) for one in items or (item(),)))
        finally:
            await service.aclose()
        return [np.frombuffer(values["llm_judge"][0], dtype="<f4").item() for values in made]

    return asyncio.run(run())


def settings_for(server: JudgeServer, **changes: Any) -> StackSettings:
    return replace(StackSettings(judge_url=server.url, judge_key=KEY), **changes)


def test_a_question_names_the_model_and_carries_the_key_and_its_number_is_the_score() -> None:
    with judge_server(lambda _: says("7")) as server:
        assert ask(settings_for(server)) == pytest.approx([0.7])
    (question,) = server.questions
    assert question.path == "/v1/chat/completions"
    assert question.headers["authorization"] == f"Bearer {KEY}"
    told = [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "p|c|r"}]
    assert question.body == {"model": "m", "messages": told, "temperature": 0.0}


def test_each_criterion_s_number_is_a_column_and_a_stated_score_is_that_of_all() -> None:
    rubric = {"answer": "json", "criteria": {"right": 3, "short": 1}, "on_failure": 0.5, "max_attempts": 1}
    stage, answers = served_stage(JUDGE | rubric, deterministic=False), [says('{"right": 10, "short": 2}'), says("no")]

    async def run(settings: StackSettings) -> list[Any]:
        service = JudgeService(settings, sleep=at_once)
        made = [await judged_values(service.values, stage, item()) for _ in range(2)]
        await service.aclose()
        return made

    with judge_server(lambda _: answers.pop(0)) as server:
        judged, stated = asyncio.run(run(settings_for(server)))
    columns = ["llm_judge_right", "llm_judge_short"]
    assert list(judged) == list(stated) == [*columns, "llm_judge_failure"]
    assert [unpack_float32(*judged[name]) for name in columns] == [[1.0], [pytest.approx(0.2)]]
    assert [unpack_float32(*stated[name]) for name in columns] == [[0.5], [0.5]]
    assert (judged["llm_judge_failure"], stated["llm_judge_failure"]) == ([b""], [b"no_answer"])


def test_at_most_so_many_questions_are_out_at_a_time() -> None:
    both = threading.Barrier(2, timeout=120.0)

    def answer(_: Question) -> Answer:
        both.wait()
        return says("1")

    with judge_server(answer) as server:
        assert len(ask(settings_for(server, judge_questions=2), *(item(row) for row in range(6)))) == 6
    assert server.most_at_once == 2


@pytest.mark.parametrize("status", [408, 425, 429, 500, 503])
def test_a_refusal_of_the_moment_is_asked_again(status: int) -> None:
    answers = iter([(status, b"not now"), says("10")])
    with judge_server(lambda _: next(answers)) as server:
        assert ask(settings_for(server)) == [1.0]
    assert len(server.questions) == 2


def test_a_server_that_breaks_of_this_question_fails_the_item_with_its_words() -> None:
    with judge_server(lambda _: (500, b"the GPU is on fire")) as server, pytest.raises(BatchFailed) as raised:
        ask(settings_for(server))
    assert "500: 'the GPU is on fire', 4 times" in str(raised.value)
    assert len(server.questions) == MAX_REQUESTS


def test_a_server_that_is_away_for_everything_costs_the_item_no_attempt() -> None:
    with judge_server(lambda _: (503, b"starts")) as server, pytest.raises(JudgeUnavailable, match="503: 'starts'"):
        ask(settings_for(server), dependency_s=0.05)
    with pytest.raises(JudgeUnavailable, match="ONBEAT_JUDGE_URL: the judge gave no answer: ConnectError"):
        ask(StackSettings(judge_url=f"http://127.0.0.1:{free_port()}"), dependency_s=0.05)


def test_a_worker_takes_no_questions_for_a_server_that_is_away_until_it_answers() -> None:
    async def run(url: str) -> None:
        service = JudgeService(StackSettings(judge_url=url, judge_questions=2))
        with pytest.raises(JudgeUnavailable):
            await service.values(served(0.05), item())
        assert service.num_free(served()) == 0
        assert f"at {url}: ONBEAT_JUDGE_URL: the judge gave no answer: ConnectError" in service.server.why
        with judge_server(lambda _: says("1"), port=int(url.rpartition(":")[2])):
            await service.server.look()
            assert service.num_free(served()) == 2
        await service.aclose()

    asyncio.run(run(f"http://127.0.0.1:{free_port()}"))


def test_a_refused_key_is_the_workers_fault_and_not_the_items() -> None:
    with (
        judge_server(lambda _: (401, b"who are you")) as server,
        pytest.raises(InvalidInput, match="ONBEAT_JUDGE_KEY: the judge answered 401"),
    ):
        ask(settings_for(server))
    assert len(server.questions) == 1


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ((404, b"no such model"), "404: 'no such model'"),
        ((302, b""), "answered 302"),
        (says("I would rather not"), "has no number"),
        (says("11"), "not between 0 and 10"),
        ((200, b"{" + (llm_judge.MAX_ANSWER_BYTES + 1) * b" "), "longer than 1048576 bytes"),
    ],
)
def test_an_answer_that_another_request_would_not_change_fails_the_item_at_once(answer: Answer, problem: str) -> None:
    with judge_server(lambda _: answer) as server, pytest.raises(BatchFailed, match=problem):
        ask(settings_for(server))
    assert len(server.questions) == 1


@pytest.mark.parametrize("part", ["head", "body"])
def test_a_server_that_trickles_or_hangs_is_given_up_at_the_deadline(part: str) -> None:
    def trickle(handler: Any) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        if part == "body":
            handler.wfile.write(b"content-length: 1000\r\n\r\n")
        # A byte now and then: no read of the client ever waits for long.
        while not server.ended.wait(0.02):
            handler.wfile.write(b"x")

    with (
        judge_server(lambda _: trickle) as server,
        pytest.raises(BatchFailed, match=rf"no whole answer within 0\.2 s, {MAX_REQUESTS}"),
    ):
        ask(settings_for(server, judge_timeout_s=0.2))


def test_a_connection_that_breaks_off_is_asked_again() -> None:
    def reset(handler: Any) -> None:
        linger = struct.pack("ii", 1, 0)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.connection.close()

    answers = iter([reset, says("5")])
    with judge_server(lambda _: next(answers)) as server:
        assert ask(settings_for(server)) == [0.5]


def test_a_server_that_repeats_its_key_does_not_get_it_into_a_reason_or_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in KEY)
    _, refusal = says(f"bad key {KEY}")
    for last in [
        (400, f"bad key {KEY}".encode()),
        (200, refusal),
        (200, refusal.replace(KEY.encode(), escaped.encode())),
    ]:
        answers = [(500, KEY.encode()), last]
        with judge_server(lambda _, answers=answers: answers.pop(0)) as server, pytest.raises(BatchFailed) as raised:
            ask(settings_for(server))
        assert "bad key (the key)" in str(raised.value)
        assert KEY not in str(raised.value) + caplog.text


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"judge_url": "127.0.0.1:80"}, "ONBEAT_JUDGE_URL"),
        ({"judge_url": "file:///etc/passwd"}, "ONBEAT_JUDGE_URL"),
        ({"judge_url": "http://user:word@host"}, "ONBEAT_JUDGE_URL"),
        ({"judge_url": "http://host", "judge_key": "two\nlines"}, "ONBEAT_JUDGE_KEY"),
    ],
)
def test_a_bad_setting_is_refused_by_its_name_and_without_its_value(changes: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        JudgeService(replace(StackSettings(), **changes))
    assert raised.value.field == field
    assert "word" not in str(raised.value)
    assert "two" not in str(raised.value)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_question_that_the_server_refuses_is_the_completions_only_once_the_server_gave_a_number(status: int) -> None:
    answers = iter([(status, b"too long"), says("7"), (status, b"too long")])

    async def run(settings: StackSettings) -> None:
        service, stage = JudgeService(settings, sleep=at_once), served()
        try:
            with pytest.raises(BatchFailed, match="too long") as unproven:
                await service.values(stage, item())
            assert not isinstance(unproven.value, CompletionUnjudged), "a wrong model's name would be refused as well"
            await service.values(stage, item())
            with pytest.raises(CompletionUnjudged, match="too long") as refused:
                await service.values(stage, item())
            assert (refused.value.reason, refused.value.lasts) == ("refused", True)
        finally:
            await service.aclose()

    with judge_server(lambda _: next(answers)) as server:
        asyncio.run(run(settings_for(server)))


def test_a_judge_needs_no_model_on_this_host_and_speaks_to_no_proxy_of_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert judge_service(StackSettings()) == {}
    judge_service(StackSettings(model_root=str(tmp_path), judge_url="http://127.0.0.1"))["llm_judge"].check(served())

    def judge(settings: StackSettings) -> None:
        async def ask() -> None:
            service = JudgeService(settings, sleep=at_once)
            try:
                await service.values(served(), item())
            finally:
                await service.aclose()

        asyncio.run(ask())

    assert_speaks_to_no_proxy(judge, monkeypatch, tmp_path)
