"""Who may ask an HTTP service: checked before anything of the request reaches the app.

request ─ Host ─ Origin, Sec-Fetch-Site ─ key ─▶ app
           │421           │403              │401

A web page in an operator's browser reaches services on loopback: by a name of its own that it lets point here (DNS
rebinding), which `Host` shows, or by requests across origins, which `Origin` and `Sec-Fetch-Site` show. Every path
needs the key but OPEN_PATHS, also one that no route has.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from contracts.errors import InvalidInput
from contracts.problems import MEDIA_TYPE, problem_body
from contracts.settings import StackSettings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
LOOPBACK_NAMES = frozenset({"localhost"})
KEY_FORM = re.compile(r"[\x21-\x7e]+")
"""What a header can carry."""
SAME_SITE = (b"same-origin", b"none")
"""`none`: the user typed the address."""


class Refused(Exception):
    """A request that may not pass."""

    def __init__(self, status: HTTPStatus, detail: str, *, field: str, cure: str) -> None:
        super().__init__(detail)
        self.status = status
        self.body = problem_body(status, detail, field=field, cure=cure)


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """What one service asks of every request."""

    key: bytes
    names: frozenset[str]
    """Host names, in small letters."""

    @classmethod
    def of(cls, settings: StackSettings, *, key: str, key_setting: str) -> AccessRules:
        """Raises InvalidInput for a service without a key: any process could use it. `key_setting` is its variable."""
        if not key:
            raise InvalidInput("is not set", field=key_setting, cure="give the service a long random key")
        if not KEY_FORM.fullmatch(key):
            raise InvalidInput("has a character that a header can't carry", field=key_setting, cure="visible ASCII")
        return cls(key=key.encode(), names=allowed_names(settings))


class Access:
    """ASGI: the app behind Host, origin and key."""

    def __init__(self, app: App, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            self._check(scope)
        except Refused as refused:
            return await _answer(refused, send)
        return await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        host = _host_of(headers)
        if not self._is_ours(host):
            raise Refused(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"`{host}` is not a name of this service",
                field="Host",
                cure="use its address, or add the name to ONBEAT_ALLOWED_HOSTS",
            )
        _refuse_other_origins(headers, host)
        if scope["path"] not in OPEN_PATHS:
            self._require_key(headers)

    def _is_ours(self, host: str) -> bool:
        """Whether it is a name of ours, or an address of numbers: a page can have none that points here but our own."""
        name = _name_of(host)
        return name in self._rules.names or _is_address(name)

    def _require_key(self, headers: list[tuple[bytes, bytes]]) -> None:
        given = _values(headers, b"authorization")
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(b" "), self._rules.key):
            return
        what = "the key is wrong" if given else "a bearer key is needed"
        raise Refused(HTTPStatus.UNAUTHORIZED, what, field="Authorization", cure="send `Authorization: Bearer KEY`")


def allowed_names(settings: StackSettings) -> frozenset[str]:
    """Returns host names in small letters. Raises InvalidInput for what is none."""
    given = {name.strip().lower().rstrip(".") for name in settings.allowed_hosts.split(",") if name.strip()}
    for name in given:
        if not re.fullmatch(r"[a-z0-9_.-]+", name):
            raise InvalidInput(f"`{name}` is not a host name", field="ONBEAT_ALLOWED_HOSTS", cure="names without ports")
    return LOOPBACK_NAMES | {settings.host.lower()} | given


def _host_of(headers: list[tuple[bytes, bytes]]) -> str:
    """Returns "" where it is missing, or there twice."""
    values = _values(headers, b"host")
    return values[0].decode("latin-1").strip() if len(values) == 1 else ""


def _name_of(host: str) -> str:
    """`Gateway:8000` → gateway, `[::1]:8000` → ::1; "" for what has another form."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9_.-]+))(?::\d{1,5})?", host)
    return (found[1] or found[2]).lower().rstrip(".") if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refuse_other_origins(headers: list[tuple[bytes, bytes]], host: str) -> None:
    """Browsers, and no other clients, send one of the two with all that a page asks for."""
    origins = [origin.partition(b"://")[2].decode("latin-1").lower() for origin in _values(headers, b"origin")]
    sites = _values(headers, b"sec-fetch-site")
    if any(origin != host.lower() for origin in origins) or any(site not in SAME_SITE for site in sites):
        raise Refused(
            HTTPStatus.FORBIDDEN,
            "a web page of another origin asked for this",
            field="Origin",
            cure="ask from a program, without this header",
        )


def _values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for given, value in headers if given == name]


async def _answer(refused: Refused, send: Send) -> None:
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(len(refused.body)).encode())]
    if refused.status is HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": int(refused.status), "headers": headers})
    await send({"type": "http.response.body", "body": refused.body})
