"""The gateway's fetches from the hub, for the jobs that are submitted.

    spec ─▶ names that aren't on this host ─▶ may this key have them fetched? ─▶ one fetch for each name ─▶ commits
                                                                                   └─ longer than WAIT_S: 503

The client asks again while a fetch goes on, and so do clients that want the same. A fetch that has failed is told to
the client that asks next, once; then it may be tried again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from contracts.errors import HubFetching, InvalidInput, OnbeatError, Unavailable, first_line
from contracts.settings import OPERATOR, StackSettings
from onbeat.hub.events import HubEvent
from onbeat.hub.fetching import fetch, is_offline, progress_text
from onbeat.hub.store import HubRequest, HubStore

WAIT_S = 5.0
"""How long a request waits for a fetch."""
MOST_FETCHES = 4
"""At a time."""
STALE_S = 30.0
"""So long a failure is kept for who asks next."""

log = logging.getLogger(__name__)


@dataclass
class _Running:
    """A fetch, and what came of it."""

    done: threading.Event = field(default_factory=threading.Event)
    event: HubEvent = field(default_factory=HubEvent)
    error: OnbeatError | None = None
    ended_s: float = 0.0


class HubFetches:
    """The fetches of one gateway; safe to share between threads."""

    def __init__(self, settings: StackSettings, *, wait_s: float = WAIT_S) -> None:
        self._settings = settings
        self._store = HubStore(settings.hub_root_path)
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._closing = threading.Event()

    def close(self) -> None:
        """Ends all fetches; the processes of theirs end within a second."""
        self._closing.set()

    def commits(self, requests: Mapping[str, HubRequest], *, who: str, begins: bool = True) -> dict[str, str] | None:
        """Finds the commit of each request, and has fetched what isn't there.

        A branch or tag has the commit that it had when it was fetched last: `onbeat fetch` asks the hub again.

        Args:
            requests: By the fields of the spec.
            who: The name of the caller's key.
            begins: False fetches nothing.

        Returns:
            Field → commit; None where something isn't there that would be fetched.

        Raises:
            InvalidInput: A name can't be fetched, or not for this key. It names the field.
            HubFetching: It takes its time: ask again.
            Unavailable: The hub, or the disk, doesn't let it.
        """
        missing = {field: request for field, request in requests.items() if not self._store.has(self._known(request))}
        for field_of_spec, request in missing.items():
            self._check_allowed(field_of_spec, request, who)
        if missing and not begins:
            return None
        for field_of_spec, request in missing.items():
            # Two keys of one name get one commit: the second is asked for at that of the first.
            self._bring(field_of_spec, request, self._known(request))
        return {field: self._known(request).name.revision for field, request in requests.items()}

    def _known(self, request: HubRequest) -> HubRequest:
        """Returns the request at the commit that its name had when it was fetched last, or as it is."""
        commit = self._store.commit_of(request.name)
        return request.at_commit(commit) if commit else request

    def _check_allowed(self, field_of_spec: str, request: HubRequest, who: str) -> None:
        allowed = self._settings.hub_fetch or ("none" if is_offline(os.environ) else "operator")
        if allowed == "all" or (allowed == "operator" and who == OPERATOR):
            return
        why = "this gateway fetches nothing"
        if allowed == "operator":
            why = "this gateway fetches for the operator's key alone"
        raise InvalidInput(
            f"{request.name} isn't on the gateway's host, and {why}",
            field=field_of_spec,
            cure=f"run `onbeat fetch {request}` there, or let the operator set ONBEAT_HUB_FETCH",
        )

    def _bring(self, field_of_spec: str, request_of_spec: HubRequest, request: HubRequest) -> None:
        """Waits until a request is there. request_of_spec: with the revision as the spec has it."""
        key = str(request)
        running = self._begun(key, request)
        if not running.done.wait(self._wait_s):
            raise HubFetching(
                f"{request_of_spec.name} is being fetched: {progress_text(running.event)}",
                field=HubFetching.FIELD,
                cure="submit again, with the same Idempotency-Key; the fetch goes on meanwhile",
            )
        with self._lock:
            if self._running.get(key) is running:
                del self._running[key]
        if isinstance(running.error, InvalidInput):
            raise InvalidInput(running.error.problem, field=field_of_spec, cure=running.error.cure)
        if running.error is not None:
            raise running.error

    def _begun(self, key: str, request: HubRequest) -> _Running:
        """Returns the fetch of a request, which this begins where there is none."""
        with self._lock:
            now_s = time.monotonic()
            ended = [name for name, run in self._running.items() if run.ended_s and run.ended_s + STALE_S < now_s]
            for name in ended:
                del self._running[name]
            running = self._running.get(key)
            if running is not None:
                return running
            if sum(not run.done.is_set() for run in self._running.values()) >= MOST_FETCHES:
                raise Unavailable(f"{MOST_FETCHES} other names of the hub are being fetched", cure="try again later")
            running = self._running[key] = _Running()
        log.info("%s is being fetched", request.name)
        threading.Thread(target=self._run, args=(request, running), name="hub-fetch", daemon=True).start()
        return running

    def _run(self, request: HubRequest, running: _Running) -> None:
        """Fetches, in a thread of its own; whatever happens, who waits is told."""

        def advance(event: HubEvent) -> None:
            running.event = event

        try:
            fetched = fetch(request, self._settings, advance=advance, is_over=self._closing.is_set)
            log.info("%s is fetched: %s bytes", fetched.request.name, f"{fetched.num_bytes:,}")
        except OnbeatError as error:
            log.warning("%s is not fetched: %s", request.name, error)
            running.error = error
        except Exception as error:
            # Requests wait for this thread: they get an answer, whatever ended it.
            log.exception("%s is not fetched", request.name)
            running.error = Unavailable(f"{request.name} can't be fetched: {first_line(error)}")
        finally:
            running.ended_s = time.monotonic()
            running.done.set()
