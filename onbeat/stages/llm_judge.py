"""A judge model behind an OpenAI-compatible server: one question for each row, some of them at a time.

    row ─ question ─ POST {ONBEAT_JUDGE_URL}/v1/chat/completions ─▶ number ────────────────────▶ score
                          ▲                                      ├▶ refused, no number, too high ▶ CompletionUnjudged
                          │                                      ├▶ 404, what is no answer ─▶ BatchFailed
                          │                                      ├▶ 401, 403: this worker's key ─▶ InvalidInput
                          ├── back-off ◀─ hung, broken off, 500 ◀┤ (after MAX_REQUESTS: BatchFailed)
                          └── until timeouts.dependency_s ◀─ away, 408, 425, 429, 502, 503, 504

Each request has one deadline for all of it, from the look-up of the name to the last byte, and its answer a size: a
server that trickles costs no more than one that is dead. The key goes to that server alone, and no error or log line
has it (`onbeat/base/http/outgoing.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any

import httpx
import msgspec

from broker.stage_side import ClaimedItem
from contracts.encoding.arrays import pack_float32
from contracts.errors import BatchFailed, CompletionUnjudged, InvalidInput, JudgeUnavailable
from contracts.experience.columns import ColumnValues
from contracts.settings import KEY_FORM, StackSettings
from contracts.spec.stages import LlmJudgeStage
from onbeat.base.http.outgoing import NEVER_ASKED, OF_THE_MOMENT, AnswerRefused, in_doubt, legible, make_async_client
from onbeat.base.process.dependency import JUDGE, Dependency
from onbeat.base.process.waiting import backoff, tried_again
from onbeat.stages.judge_answer import question, scores_of, shown
from onbeat.stages.served_stages import ServedStage, StageKey
from onbeat.stages.services import Services

MAX_REQUESTS = 4
"""Requests of one question that a server leaves without an answer which answers others, before the item counts as
failed."""
LONGEST_PAUSE_S = 20.0
MAX_ANSWER_BYTES = 2**20
OF_THE_QUESTION = frozenset({400, 413, 422})
"""Refusals that may speak of what is asked, as of a text that is longer than the judge's context; of how it is asked,
where the server has never given a number for this stage."""
OF_A_DOOR = frozenset({502, 503, 504})
"""Statuses of a server, or of the proxy before it, that has nothing behind it."""


def judge_service(settings: StackSettings) -> Services:
    """Makes the service of judges where a server is named. Raises InvalidInput that names the setting."""
    return {"llm_judge": JudgeService(settings)} if settings.judge_url else {}


class JudgeService:
    """A StageService: questions to a server."""

    is_busy = False

    def __init__(self, settings: StackSettings, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Raises InvalidInput that names the setting."""
        self._most = settings.judge_questions
        self._sleep = sleep
        self._num_asking = 0
        self._proven: set[StageKey] = set()
        """Stages that the server has given a number for."""
        self._http = make_async_client(
            _url(settings),
            headers=_authorization(settings),
            timeout=settings.judge_timeout_s,
            max_answer_bytes=MAX_ANSWER_BYTES,
            max_connections=settings.judge_questions,
        )
        self.server = Dependency(JUDGE, str(self._http.base_url).rstrip("/"), probe=self._probe)

    def num_free(self, stage: ServedStage) -> int:
        return 0 if self.server.is_away else self._most - self._num_asking

    async def values(self, stage: ServedStage, item: ClaimedItem) -> ColumnValues:
        judge = stage.stage
        if not isinstance(judge, LlmJudgeStage):
            raise TypeError(f"{stage} is no judge")
        self._num_asking += 1
        try:
            rows = zip(*(item.inputs[name] for name in ("prompt", "text", "reference")), strict=True)
            scores_of_rows = [await self._ask(stage, judge, *(text.decode() for text in row)) for row in rows]
        finally:
            self._num_asking -= 1
        columns = zip(judge.reward_weights, zip(*scores_of_rows, strict=True), strict=True)
        return {name: [pack_float32([score]) for score in scores] for name, scores in columns}

    def check(self, stage: ServedStage) -> None:
        """A host lacks nothing for a question."""

    def preload(self) -> None:
        """Nothing is loaded."""

    async def look(self, stage: ServedStage) -> None:
        await self._look()

    def forget_all_but(self, job_ids: Collection[str]) -> None:
        self._proven = {key for key in self._proven if key[0] in job_ids}

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _ask(
        self, stage: ServedStage, judge: LlmJudgeStage, prompt: str, completion: str, reference: str
    ) -> list[float]:
        """The scores of a row. Raises CompletionUnjudged where the row may be why there is none, else BatchFailed;
        JudgeUnavailable past timeouts.dependency_s, and InvalidInput where it is this worker's fault."""
        text = question(judge, prompt=prompt, completion=completion, reference=reference)
        messages = [{"role": "system", "content": judge.system}] if judge.system else []
        messages.append({"role": "user", "content": text})
        body = {"model": judge.model, "messages": messages, "temperature": 0.0}
        pauses = islice(backoff(base_s=1.0, cap_s=LONGEST_PAUSE_S), MAX_REQUESTS - 1)
        try:
            post = partial(self._post, msgspec.json.encode(body))
            ask = partial(self.server.outlast, post, deadline_s=stage.spec.timeouts.dependency_s)
            answer = await tried_again("a question", ask, pauses=pauses, helps=_may_pass, sleep=self._sleep)
        except CompletionUnjudged as error:
            if stage.key in self._proven:
                raise
            raise BatchFailed(error.problem) from error
        except JudgeUnavailable as error:
            if not error.is_doubtful:
                raise
            raise BatchFailed(f"{error.problem}, {MAX_REQUESTS} times", field=error.field, cure=error.cure) from error
        scores = scores_of(answer, judge)
        self._proven.add(stage.key)
        return scores

    async def _post(self, body: bytes) -> bytes:
        """Makes one request. Raises JudgeUnavailable if it may be repeated; BatchFailed, CompletionUnjudged and
        InvalidInput if not."""
        headers = {"content-type": "application/json"}
        request = self._http.build_request("POST", "/v1/chat/completions", content=body, headers=headers)
        return await self._send(request)

    async def _probe(self) -> None:
        """Asks whether the server is there, whatever it thinks of the key. Raises JudgeUnavailable."""
        with contextlib.suppress(InvalidInput):
            await self._look()

    async def _look(self) -> None:
        """Asks for what every such server has, or says that it hasn't. Raises JudgeUnavailable, and InvalidInput."""
        with contextlib.suppress(BatchFailed):
            await self._send(self._http.build_request("GET", "/v1/models"))

    async def _send(self, request: httpx.Request) -> bytes:
        try:
            answer = await self._http.send(request)
        except AnswerRefused as error:
            raise BatchFailed(f"the judge's answer is not read: {error}") from error
        except httpx.RequestError as error:
            away = _away(f"the judge gave no answer: {type(error).__name__} {error}".rstrip())
            raise (away if isinstance(error, NEVER_ASKED) else in_doubt(away)) from error
        # A reason is shown to clients, and a server may repeat what it was sent.
        return _checked(answer, legible(answer))


def _checked(answer: httpx.Response, body: bytes) -> bytes:
    """The body of a good answer. Raises as `_post` does."""
    if answer.status_code == 200:
        return body
    problem = f"the judge answered {answer.status_code}: {shown(body.decode(errors='replace'))}"
    if answer.status_code == HTTPStatus.INTERNAL_SERVER_ERROR:
        raise in_doubt(_away(problem))
    if answer.status_code in OF_THE_MOMENT | OF_A_DOOR:
        raise _away(problem)
    if answer.status_code in (401, 403):
        raise InvalidInput(problem, field="ONBEAT_JUDGE_KEY", cure="does it belong to the server?")
    if answer.status_code in OF_THE_QUESTION:
        raise CompletionUnjudged(problem, reason="refused", lasts=True)
    raise BatchFailed(problem)


def _away(problem: str) -> JudgeUnavailable:
    return JudgeUnavailable(problem, field="ONBEAT_JUDGE_URL", cure="is the server up?")


def _may_pass(error: Exception, _: float) -> bool:
    return isinstance(error, JudgeUnavailable) and error.is_doubtful


def _url(settings: StackSettings) -> str:
    try:
        url = httpx.URL(settings.judge_url)
    except httpx.InvalidURL as error:
        raise InvalidInput(f"is no address: {error}", field="ONBEAT_JUDGE_URL") from error
    if url.scheme not in ("http", "https") or not url.host or url.userinfo:
        raise InvalidInput(
            "is no http address of a server", field="ONBEAT_JUDGE_URL", cure="e.g. http://127.0.0.1:8200, without /v1"
        )
    return str(url)


def _authorization(settings: StackSettings) -> dict[str, Any]:
    if not settings.judge_key:
        return {}
    if not KEY_FORM.fullmatch(settings.judge_key):
        raise InvalidInput("has characters that a header can't carry", field="ONBEAT_JUDGE_KEY")
    return {"authorization": f"Bearer {settings.judge_key}"}
