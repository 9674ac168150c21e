"""Caches of other hosts, asked before the object store: what any of them has needs to leave the store once.

blobs ─ GET /v1/blobs/DIGEST, one host after the other, in another order each time ─▶ served.py of that host

One that is away isn't asked for a while, and none is waited for: the next one, or the store, has the bytes.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus

import httpx

from contracts.errors import InvalidInput, NotFound
from contracts.settings import KEY_FORM, StackSettings
from onbeat.base.http.outgoing import answer_text, make_client

SETTING = "ONBEAT_CACHE_HOSTS"
CONNECT_S = 2.0
ANSWER_S = 10.0
LEAST_BYTES_PER_S = 4 * 1024**2
"""A host that is slower is left for the next one."""
ASIDE_S = 30.0
"""How long a host isn't asked that was away."""

log = logging.getLogger(__name__)


class CacheHost:
    """Another host's cache, read over HTTP. CacheHosts creates it. Thread-safe."""

    def __init__(self, url: str, key: str) -> None:
        """Raises InvalidInput for what is no URL."""
        try:
            if not url.startswith(("http://", "https://")):
                raise ValueError("it begins with neither http:// nor https://")
            self._client = make_client(
                url, headers={"authorization": f"Bearer {key}"}, timeout=ANSWER_S, max_answer_bytes=2**62
            )
        except (httpx.InvalidURL, ValueError) as error:
            problem = f"`{url[:200]}` is no URL: {error}"
            raise InvalidInput(problem, field=SETTING, cure="http://HOST:8300") from error
        self.asked_from_s = 0.0

    def stream(self, key: str, take: Callable[[memoryview], None], *, most_bytes: int) -> int:
        """Streams bytes as `Bucket.stream` does. Raises NotFound also for a host that is away, or too slow."""
        timeout = httpx.Timeout(ANSWER_S + most_bytes / LEAST_BYTES_PER_S, connect=CONNECT_S)
        num_taken = 0
        try:
            with self._client.stream("GET", f"/v1/blobs/{key.rpartition('/')[2]}", timeout=timeout) as answer:
                if answer.status_code == HTTPStatus.NOT_FOUND:
                    raise NotFound("is not in that cache", field=key)
                if answer.status_code != HTTPStatus.OK:
                    answer.read()
                    raise httpx.RemoteProtocolError(f"answers {answer.status_code}: {answer_text(answer)}")
                for piece in answer.iter_bytes(1024**2):
                    if num_taken + len(piece) > most_bytes:
                        return most_bytes + 1
                    take(memoryview(piece))
                    num_taken += len(piece)
        except httpx.HTTPError as error:
            self.asked_from_s = time.monotonic() + ASIDE_S
            log.warning("the cache at %s isn't used for %.0f s: %s", self._client.base_url, ASIDE_S, error)
            raise NotFound("did not come from that host", field=key) from error
        return num_taken


class CacheHosts:
    """The other hosts' caches, without those that failed lately. `open_blobs` creates it, and iterating over it yields
    hosts.
    """

    def __init__(self, settings: StackSettings) -> None:
        """Raises InvalidInput that names the setting."""
        urls = [url.strip() for url in settings.cache_hosts.split(",") if url.strip()]
        if urls and not KEY_FORM.fullmatch(settings.cache_key):
            raise InvalidInput("is not set, or no key", field="ONBEAT_CACHE_KEY", cure=f"give it that of {SETTING}")
        self._hosts = [CacheHost(url, settings.cache_key) for url in urls]

    def __iter__(self) -> Iterator[CacheHost]:
        for host in random.sample(self._hosts, len(self._hosts)):
            if time.monotonic() >= host.asked_from_s:
                yield host
