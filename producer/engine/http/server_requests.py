"""Requests to an inference server that the user runs: repeated where that may help, each answer decoded."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import httpx
import msgspec

from contracts.engines import OpenaiOptions
from contracts.errors import BatchFailed, DeadlineExceeded, EngineUnavailable, InvalidInput
from onbeat.base.http.outgoing import OF_THE_MOMENT, answer_text, make_async_client, make_client
from onbeat.base.process.waiting import Waiting, tried_again

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
PAUSES_S = (0.25, 0.5, 1.0, 2.0)
"""Pauses before each repetition of a request, times 0.5 to 1.5; after the last the server counts as gone."""
POLL_S = 0.5
MAX_ANSWER_BYTES = 2**30
"""The completions of a prompt: as many tokens as a batch may have are less, at some 100 bytes of JSON each."""
REFUSED_KEY = frozenset({401, 403})
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)


class _ModelCard(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_ModelCard]


class ServerRequests:
    """Requests to the server, with deadlines and repeats. OpenaiEngine creates it; many tasks may post at once."""

    def __init__(self, options: OpenaiOptions, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._url = options.url
        self._timeout_s = options.timeout_s
        self._sleep = sleep
        self._options: dict[str, Any] = {
            "base_url": options.url,
            "headers": {"authorization": f"Bearer {options.api_key}"} if options.api_key else {},
            "timeout": httpx.Timeout(options.timeout_s, connect=CONNECT_TIMEOUT_S),
            "max_answer_bytes": MAX_ANSWER_BYTES,
        }
        self._http = make_async_client(**self._options, max_connections=None)

    def served_model(self) -> str:
        """Returns the name of the model that the server serves. Blocks until it answers, or `timeout_s` is over.

        Raises:
            InvalidInput: The server refuses the key, or is none; the error names ONBEAT_ENGINE_API_KEY or
                ONBEAT_ENGINE_URL.
            EngineUnavailable: It doesn't answer in time.
        """
        waiting = Waiting(f"the server at {self._url}", deadline_s=self._timeout_s)
        with make_client(**self._options) as http:
            while True:
                try:
                    answer = http.get("/v1/models")
                    if answer.status_code in REFUSED_KEY:
                        raise InvalidInput(f"{self._url} refuses the key", field="ONBEAT_ENGINE_API_KEY")
                    if answer.is_success:
                        return msgspec.json.decode(answer.content, type=_Models).data[0].id
                except httpx.RequestError as error:
                    log.debug("%s: %s", self._url, error)
                except (msgspec.DecodeError, IndexError) as error:
                    raise InvalidInput(
                        f"what {self._url}/v1/models answers is no list of models", field="ONBEAT_ENGINE_URL"
                    ) from error
                try:
                    waiting.poke()
                except DeadlineExceeded as error:
                    raise self.gone(str(error)) from error
                time.sleep(POLL_S)

    async def post(
        self, path: str, body: dict[str, Any] | None, kind: Any, *, headers: Mapping[str, str] | None = None
    ) -> Any:
        """Posts a request, and returns the answer, an instance of `kind`.

        Raises:
            BatchFailed: The server refuses the request, or its answer stays unreadable.
            EngineUnavailable: The server stays away.
        """
        return await self._with_retries(partial(self._http.post, path, json=body, headers=headers), path, kind)

    async def get(self, path: str, kind: Any) -> Any:
        """Gets an instance of `kind`. Raises as `post` does."""
        return await self._with_retries(partial(self._http.get, path), path, kind)

    async def _with_retries(self, send: Callable[[], Awaitable[httpx.Response]], path: str, kind: Any) -> Any:
        pauses = (random.uniform(0.5 * pause_s, 1.5 * pause_s) for pause_s in PAUSES_S)
        ask = partial(self._answer, send, path, kind)
        return await tried_again(self._url, ask, pauses=pauses, helps=_may_pass, sleep=self._sleep)

    async def _answer(self, send: Callable[[], Awaitable[httpx.Response]], path: str, kind: Any) -> Any:
        """Makes one request. Raises BatchFailed, EngineUnavailable."""
        try:
            answer = await send()
        except httpx.RequestError as error:
            raise self.gone(f"{path}: {type(error).__name__} {error}".rstrip()) from error
        if answer.is_client_error and answer.status_code not in OF_THE_MOMENT:
            raise BatchFailed(f"the server refused {path} with {answer.status_code}: {answer_text(answer)}")
        if not answer.is_success:
            raise self.gone(f"{path}: {answer.status_code} {answer_text(answer)}")
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except UNREADABLE as error:
            raise BatchFailed(f"the server's answer to {path} does not decode: {error}") from error

    def gone(self, problem: str) -> EngineUnavailable:
        return EngineUnavailable(problem, field=self._url, cure="is the server up?")

    async def aclose(self) -> None:
        await self._http.aclose()


def _may_pass(error: Exception, _: float) -> bool:
    """Returns True where the request is worth repeating: after no answer, or one that is cut; a refusal would come
    again.
    """
    return isinstance(error, EngineUnavailable) or isinstance(error.__cause__, UNREADABLE)
