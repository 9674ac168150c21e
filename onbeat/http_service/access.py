"""Who may ask an HTTP service: checked before anything of the request reaches the app.

request ─ Host ─ Origin, Sec-Fetch-Site ─ key ─▶ app
           │421           │403              │401

A web page in an operator's browser reaches services on loopback: by a name of its own that it lets point here (DNS
rebinding), which `Host` shows, or by requests across origins, which `Origin` and `Sec-Fetch-Site` show. Every path
needs the key but OPEN_PATHS, also one that no route has; and but the paths of a page, where the service has one, which
a link of another site may lead to.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from contracts.errors import InvalidInput
from contracts.settings import KEY_FORM, StackSettings
from onbeat.http_service.problems import Problem, problem_response
from onbeat.telemetry.correlation import HEADER, about_request

METRICS_PATH = "/metrics"
METRICS_KEY = "ONBEAT_METRICS_KEY"
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
LOOPBACK_NAMES = frozenset({"localhost"})
SAME_SITE = ("same-origin", "none")
"""`none`: the user typed the address."""
PAGE = "/"
PAGE_PARTS = "/assets/"


@dataclass(frozen=True, kw_only=True)
class AccessRules:
    """What one service asks of every request."""

    key: bytes
    names: frozenset[str]
    """Host names, in small letters."""
    has_page: bool = False
    """Whether PAGE and what lies under PAGE_PARTS are answered without the key: they hold no secret."""
    metrics_key: bytes = b""
    """Opens METRICS_PATH too, and nothing else; b"" opens nothing."""

    @classmethod
    def of(cls, settings: StackSettings, *, key: str, key_setting: str, has_page: bool = False) -> AccessRules:
        """Raises InvalidInput for a service without a key: any process could use it. `key_setting` is its variable."""
        if not key:
            raise InvalidInput("is not set", field=key_setting, cure="give the service a long random key")
        for one, setting in ((key, key_setting), (settings.metrics_key or key, METRICS_KEY)):
            if not KEY_FORM.fullmatch(one):
                raise InvalidInput("has a character that a header can't carry", field=setting, cure="visible ASCII")
        if settings.metrics_key == key and key_setting != METRICS_KEY:
            raise InvalidInput(f"is that of {key_setting}, which opens all", field=METRICS_KEY, cure="make another one")
        metrics_key = settings.metrics_key.encode()
        return cls(key=key.encode(), names=allowed_names(settings), has_page=has_page, metrics_key=metrics_key)


class Access:
    """ASGI: the app behind Host, origin and key."""

    def __init__(self, app: ASGIApp, rules: AccessRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http":
            try:
                self._check(scope["path"], Headers(scope=scope))
            except Problem as refused:
                answer = problem_response(refused.status, refused.detail, field=refused.field, cure=refused.cure)
                if refused.status is HTTPStatus.UNAUTHORIZED:
                    answer.headers["WWW-Authenticate"] = "Bearer"
        with about_request(Headers(scope=scope).get(HEADER, "") if scope["type"] == "http" else ""):
            await answer(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        """Raises Problem."""
        hosts = headers.getlist("host")
        host = hosts[0].strip() if len(hosts) == 1 else ""
        if not self._is_ours(host):
            raise Problem(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"`{host}` is not a name of this service",
                field="Host",
                cure="use its address, or add the name to ONBEAT_ALLOWED_HOSTS",
            )
        is_page = self._rules.has_page and path == PAGE
        if not (is_page and _is_followed_link(headers)):
            _refuse_other_origins(headers, host)
        if not (is_page or path in OPEN_PATHS or (self._rules.has_page and path.startswith(PAGE_PARTS))):
            self._require_key(path, headers)

    def _is_ours(self, host: str) -> bool:
        """Whether it is a name of ours, or an address of numbers: a page can have none that points here but our own."""
        name = _name_of(host)
        return name in self._rules.names or _is_address(name)

    def _require_key(self, path: str, headers: Headers) -> None:
        given = headers.getlist("authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        sent = key.strip(" ").encode("latin-1")
        is_right = hmac.compare_digest(sent, self._rules.key)
        if path == METRICS_PATH and self._rules.metrics_key:
            is_right |= hmac.compare_digest(sent, self._rules.metrics_key)
        if scheme.lower() == "bearer" and is_right:
            return
        what = "the key is wrong" if given else "a bearer key is needed"
        raise Problem(HTTPStatus.UNAUTHORIZED, what, field="Authorization", cure="send `Authorization: Bearer KEY`")


def allowed_names(settings: StackSettings) -> frozenset[str]:
    """Returns host names in small letters. Raises InvalidInput for what is none."""
    given = {name.strip().lower().rstrip(".") for name in settings.allowed_hosts.split(",") if name.strip()}
    for name in given:
        if not re.fullmatch(r"[a-z0-9_.-]+", name):
            raise InvalidInput(f"`{name}` is not a host name", field="ONBEAT_ALLOWED_HOSTS", cure="names without ports")
    return LOOPBACK_NAMES | {settings.host.lower()} | given


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


def _is_followed_link(headers: Headers) -> bool:
    """Whether a browser asks for a document to show in a tab; the page itself refuses to be shown inside another."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


def _refuse_other_origins(headers: Headers, host: str) -> None:
    """Browsers, and no other clients, send one of the two with all that a page asks for."""
    origins = [origin.partition("://")[2].lower() for origin in headers.getlist("origin")]
    is_foreign = any(site not in SAME_SITE for site in headers.getlist("sec-fetch-site"))
    if is_foreign or any(origin != host.lower() for origin in origins):
        raise Problem(
            HTTPStatus.FORBIDDEN,
            "a web page of another origin asked for this",
            field="Origin",
            cure="ask from a program, without this header",
        )
