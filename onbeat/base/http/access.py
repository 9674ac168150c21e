"""Every request of an HTTP service is checked here before anything of it reaches the app.

request ─ Host ─ Origin, Sec-Fetch-Site ─ key ─ its scope ─▶ app ─▶ answer, after the line of a change (change_log.py)
           │421           │403              │401   │403

A web page in an operator's browser reaches services on loopback: by a name of its own that it lets point here (DNS
rebinding), which `Host` shows, or by requests across origins, which `Origin` and `Sec-Fetch-Site` show. Every path
needs the key but OPEN_PATHS, also one that no route has; and but the paths of a page, where the service has one, which
a link of another site may lead to.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contracts.errors import InvalidInput
from contracts.settings import KEY_FORM, OPERATOR, StackSettings
from onbeat.base.http.asker import WorkLog
from onbeat.base.http.change_log import ChangeLine
from onbeat.base.http.probe_paths import HEALTH_PATH, METRICS_KEY, METRICS_PATH
from onbeat.base.http.problems import Problem, problem_response
from onbeat.base.telemetry.correlation import HEADER, about_request

API_KEY = "ONBEAT_API_KEY"
OPEN_PATHS = frozenset({HEALTH_PATH, "/readyz"})
LOOPBACK_NAMES = frozenset({"localhost"})
SAME_SITE = ("same-origin", "none")
"""`none`: the user typed the address."""
PAGE = "/"
LOOKS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""
PAGE_PARTS = "/assets/"


SCOPES = ("read", "submit", "admin")
"""A key may look; or also submit, verify, and change the jobs that it has submitted; or also change all jobs."""
CALLER = "onbeat.caller"
"""The key of an ASGI scope under which the app finds its Caller."""
KEY_LINE = re.compile(rf"([\w.-]{{1,64}}) ({'|'.join(SCOPES)}) ([0-9a-f]{{64}})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Caller:
    """The holder of a key, as a request's handler sees it. Access makes it; handlers read it."""

    name: str
    """The key's name in the file of keys, OPERATOR for the service's own key, "" where no key was needed."""
    scope: str
    """Its scope, of SCOPES; "" where no key was needed."""

    @property
    def may_change_all(self) -> bool:
        """True where jobs of other keys may be changed, too."""
        return self.scope == "admin"


NO_CALLER = Caller(name="", scope="")

log = logging.getLogger(__name__)


class KeyFile:
    """The file of further keys, each with a name and a scope: `NAME SCOPE SHA-256` a line, `#` begins a comment.

    AccessRules create it, each request whose key isn't the service's own reads it, and `onbeat key` or an editor
    changes the file, which is read again at the next request.
    """

    def __init__(self, path: str) -> None:
        """Reads the file.

        Args:
            path: The file; "" for none.

        Raises:
            InvalidInput: The file can't be read, or has a line of another form.
        """
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._keys: dict[str, tuple[str, str]] = {}
        if path:
            self._look()

    def find(self, sent: bytes) -> tuple[str, str] | None:
        """Finds a key that a request sent.

        A file that can't be read any more leaves the keys as they were, and the log says so.

        Returns:
            The key's name and scope; None for a key that the file doesn't have.
        """
        try:
            if self._path:
                self._look()
        except InvalidInput as error:
            log.error("the file of keys can't be read, so the keys from before stay valid: %s", error)
        return self._keys.get(hashlib.sha256(sent).hexdigest())

    def _look(self) -> None:
        """Reads the file again where it was changed since the last look. Raises InvalidInput."""
        try:
            state = os.stat(self._path)
            seen = (state.st_ino, state.st_size, state.st_mtime_ns)
            if seen == self._seen:
                return
            text = Path(self._path).read_text()
        except (OSError, UnicodeError) as error:
            raise InvalidInput(f"{self._path} cannot be read: {error}", field="ONBEAT_KEYS_FILE") from error
        lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
        keys: dict[str, tuple[str, str]] = {}
        for line in lines:
            match = KEY_LINE.fullmatch(line)
            if match is not None:
                keys[match[3]] = (match[1], match[2])
        # A file that is refused is read once, too, so that its error is logged once for each change.
        self._seen = seen
        if len(keys) < len(lines):
            raise InvalidInput(
                f"{self._path} has a line that is no NAME SCOPE SHA-256, or a key twice",
                field="ONBEAT_KEYS_FILE",
                cure=f"scopes are {', '.join(SCOPES)}; `onbeat key NAME` writes a line",
            )
        self._keys = keys


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """The conditions of one service on every request. The service creates them at its start; Access reads them."""

    key: bytes
    names: frozenset[str]
    """Host names, in small letters."""
    has_page: bool = False
    """True where PAGE and what lies under PAGE_PARTS are answered without the key: they hold no secret."""
    metrics_key: bytes = b""
    """Opens METRICS_PATH too, and nothing else; b"" opens nothing."""
    keys: KeyFile
    works_for_processes: bool = False
    """True where those that ask are processes of the stack, which all have the service's key and each say their name:
    its requests are work, of which the log has a summary, and not changes that a person makes."""

    @classmethod
    def of(
        cls,
        settings: StackSettings,
        *,
        key: str,
        key_setting: str,
        has_page: bool = False,
        works_for_processes: bool = False,
    ) -> AccessRules:
        """Makes the rules of a service from the stack's settings.

        Args:
            settings: The stack's settings.
            key: The service's own key.
            key_setting: The variable of that key, named in errors.
            has_page: True where the service has a page.
            works_for_processes: True where its clients are processes of the stack.

        Raises:
            InvalidInput: The service has no key, so that any process could use it; or a key can't stand in a header.
        """
        if not key:
            raise InvalidInput("is not set", field=key_setting, cure="give the service a long random key")
        for secret, setting in ((key, key_setting), (settings.metrics_key or key, METRICS_KEY)):
            if not KEY_FORM.fullmatch(secret):
                raise InvalidInput("has a character that a header can't carry", field=setting, cure="visible ASCII")
        if settings.metrics_key == key and key_setting != METRICS_KEY:
            raise InvalidInput(f"is that of {key_setting}, which opens all", field=METRICS_KEY, cure="make another one")
        keys = KeyFile(settings.keys_file if key_setting == API_KEY else "")
        return cls(
            key=key.encode(),
            names=allowed_names(settings),
            has_page=has_page,
            metrics_key=settings.metrics_key.encode(),
            keys=keys,
            works_for_processes=works_for_processes,
        )


class Access:
    """The ASGI middleware that lets a request reach the app only after its Host, origin, key and scope were checked."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules
        self._work = WorkLog() if rules.works_for_processes else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" and self._work is not None:
            await self._app(scope, receive, _log_at_the_end(send, self._work))
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request by the app, or by a refusal. One that may change something has a line in the log."""
        headers = Headers(scope=scope)
        change = None
        if scope["method"] not in LOOKS:
            change = ChangeLine(scope, self._work)
            send = change.sending(send)
        with about_request(headers.get(HEADER, "")):
            try:
                caller = self._check(scope["path"], headers)
                if change is not None:
                    change.key_name = caller.name
                _require_scope(caller, scope["method"])
            except Problem as refusal:
                answer = problem_response(refusal.status, refusal.detail, field=refusal.field, cure=refusal.cure)
                if refusal.status is HTTPStatus.UNAUTHORIZED:
                    answer.headers["WWW-Authenticate"] = "Bearer"
                await answer(scope, receive, send)
                return
            scope[CALLER] = caller
            try:
                await self._app(scope, receive, send)
            except Exception:
                # The server answers it outside of here. What it changed before it failed may stand.
                if change is not None:
                    change.write(HTTPStatus.INTERNAL_SERVER_ERROR)
                raise

    def _check(self, path: str, headers: Headers) -> Caller:
        """Returns the caller whose key was sent, NO_CALLER for a path without a key. Raises Problem."""
        hosts = headers.getlist("host")
        host = hosts[0].strip() if len(hosts) == 1 else ""
        name = _name_of(host)
        # A page can have no address of numbers that points here but our own.
        if not (name in self._rules.names or _is_address(name)):
            raise Problem(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"`{host}` is not a name of this service",
                field="Host",
                cure="use its address, or add the name to ONBEAT_ALLOWED_HOSTS",
            )
        is_page = self._rules.has_page and path == PAGE
        # A browser asks for a document to show in a tab; the page itself refuses to be shown inside another.
        fetch = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest"))
        if not (is_page and fetch == ("navigate", "document")):
            _refuse_other_origins(headers, host)
        if not (is_page or path in OPEN_PATHS or (self._rules.has_page and path.startswith(PAGE_PARTS))):
            return self._require_key(path, headers)
        return NO_CALLER

    def _require_key(self, path: str, headers: Headers) -> Caller:
        authorizations = headers.getlist("authorization")
        scheme, _, key = authorizations[0].partition(" ") if len(authorizations) == 1 else ("", "", "")
        sent = key.strip(" ").encode("latin-1")
        is_right = hmac.compare_digest(sent, self._rules.key)
        if path == METRICS_PATH and self._rules.metrics_key:
            is_right |= hmac.compare_digest(sent, self._rules.metrics_key)
        if scheme.lower() == "bearer" and is_right:
            return Caller(name=OPERATOR, scope="admin")
        named = None
        if scheme.lower() == "bearer":
            named = self._rules.keys.find(sent)
        if named is not None:
            return Caller(name=named[0], scope=named[1])
        problem = "a bearer key is needed"
        if authorizations:
            problem = "the key is wrong"
        raise Problem(HTTPStatus.UNAUTHORIZED, problem, field="Authorization", cure="send `Authorization: Bearer KEY`")


def _require_scope(caller: Caller, method: str) -> None:
    """Raises Problem where the key of the caller may not send a request with this method."""
    if caller is NO_CALLER:
        return
    needed = "read" if method in LOOKS else "submit"
    if SCOPES.index(caller.scope) < SCOPES.index(needed):
        problem = f"the key of {caller.name} has the scope {caller.scope}"
        raise Problem(HTTPStatus.FORBIDDEN, problem, field="Authorization", cure=f"use one with {needed}")


def _log_at_the_end(send: Send, work: WorkLog) -> Send:
    """Returns a `send` that logs the requests counted since the last line when the service ends."""

    async def sending(message: Message) -> None:
        if message["type"].startswith("lifespan.shutdown"):
            work.say()
        await send(message)

    return sending


def allowed_names(settings: StackSettings) -> frozenset[str]:
    """Returns host names in small letters. Raises InvalidInput for what is none."""
    extra_names = {name.strip().lower().rstrip(".") for name in settings.allowed_hosts.split(",") if name.strip()}
    for name in extra_names:
        if not re.fullmatch(r"[a-z0-9_.-]+", name):
            raise InvalidInput(f"`{name}` is not a host name", field="ONBEAT_ALLOWED_HOSTS", cure="names without ports")
    return LOOPBACK_NAMES | {settings.host.lower()} | extra_names


def _name_of(host: str) -> str:
    """Returns the name in a Host header: `Gateway:8000` → gateway, `[::1]:8000` → ::1; "" for another form."""
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9_.-]+))(?::\d{1,5})?", host)
    if match is None:
        return ""
    return (match[1] or match[2]).lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refuse_other_origins(headers: Headers, host: str) -> None:
    """Raises Problem for a request of a web page of another origin.

    Browsers, and no other clients, send `Origin` or `Sec-Fetch-Site` with each request of a page.
    """
    origins = [origin.partition("://")[2].lower() for origin in headers.getlist("origin")]
    is_foreign = any(site not in SAME_SITE for site in headers.getlist("sec-fetch-site"))
    if is_foreign or any(origin != host.lower() for origin in origins):
        raise Problem(
            HTTPStatus.FORBIDDEN,
            "a web page of another origin asked for this",
            field="Origin",
            cure="ask from a program, without this header",
        )
