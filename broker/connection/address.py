"""The address of a Redis, read once.

    redis://user:password@host:port/0     rediss:// the same by TLS
    unix://user:password@/path?db=0       a server's socket file
    redis+sentinel://user:password@host1:port,host2:port/NAME/0
                                          the primary that sentinels call NAME; rediss+sentinel:// all by TLS

The user may be left out; sentinels with a password of their own have it as `?sentinel_password=`, and a user as
`&sentinel_username=`. What a URL has a meaning for (`/`, `@`, `%`) stands as `%2F` and so on in each part.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from redis import ConnectionPool, exceptions
from redis.connection import Connection, parse_url

from broker.connection.sentinels import Place, Primary, at_primary
from contracts.errors import InvalidInput

MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""The room in a socket's address (`sun_path`), less the zero at its end."""
CURE = "redis://:PASSWORD@HOST:PORT/0 or unix://:PASSWORD@/PATH?db=0, with password and path as in a URL"
SENTINEL_CURE = "redis+sentinel://:PASSWORD@HOST:PORT,HOST:PORT/NAME/0, with the password as in a URL"
SENTINEL_PORT = 26379
OF_SENTINELS = {"sentinel_username": "username", "sentinel_password": "password"}


def read_address(url: str, *, field: str = "ONBEAT_REDIS_URL") -> dict[str, Any]:
    """Reads an address into the options that redis-py makes connections with.

    Args:
        url: The address, in one of the forms at the head of this file.
        field: The setting that holds it, for the error.

    Raises:
        InvalidInput: It is no address. The error shows nothing of the URL, which has a password.
    """
    watched = "+sentinel://" in url
    try:
        address: dict[str, Any] = _watched(url) if watched else dict(parse_url(url))
        _check_socket(url, address)
        pool = ConnectionPool(**address)
        pool.connection_class(**pool.connection_kwargs)  # reads the options
    except (ValueError, TypeError, exceptions.ConnectionError):  # its text may hold a part of the password
        cure = SENTINEL_CURE if watched else CURE
        raise InvalidInput("is not a Redis address", field=field, cure=cure) from None
    return address


def user_of(url: str) -> str:
    """Returns the user that a Redis address names; "" where there is none. Raises InvalidInput as `read_address`."""
    return str(read_address(url).get("username") or "")


def _watched(url: str) -> dict[str, Any]:
    """Reads the address of a server that sentinels watch into options of redis-py. Raises ValueError."""
    # Several hosts in brackets are no netloc to urllib, so they are taken out before it splits the rest.
    full_scheme, _, rest = url.partition("://")
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    user, _, hosts = authority.rpartition("@")
    parts = urlsplit(f"{full_scheme}://watched{rest.removeprefix(authority)}")
    name, _, database = parts.path.removeprefix("/").partition("/")
    is_known = parts.scheme in ("redis+sentinel", "rediss+sentinel")
    if not is_known or not name or not (database or "0").isdigit():
        raise ValueError
    # Each host is read as that of an address, so that `[::1]:26379` means there what it means elsewhere.
    places = [parse_url(f"redis://{host}") for host in hosts.split(",")]
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    own = {OF_SENTINELS[key]: options.pop(key) for key in [*options] if key in OF_SENTINELS}
    scheme = parts.scheme.partition("+")[0]
    # The host is a placeholder: each connection asks the sentinels where the primary is.
    host = f"{user}@watched" if user else "watched"
    plain = urlunsplit((scheme, host, f"/{database}", urlencode(options), ""))
    address: dict[str, Any] = dict(parse_url(plain))
    connection_class = address.get("connection_class", Connection)
    by_tls = {key: value for key, value in address.items() if key.startswith("ssl_")}
    sentinels = [(str(place.get("host", "")), int(place.get("port", SENTINEL_PORT))) for place in places]
    if not all(host for host, _ in sentinels):
        raise ValueError
    primary = _primary(url, unquote(name), tuple(sentinels), **own, **by_tls, ssl=scheme == "rediss")
    return address | {"connection_class": at_primary(connection_class, primary)}


@functools.lru_cache(maxsize=16)
def _primary(_url: str, name: str, sentinels: tuple[Place, ...], **options: Any) -> Primary:
    """Returns the primary of an address, the same for all that read it: they share what a sentinel says."""
    return Primary(name, sentinels, options)


def _check_socket(url: str, address: dict[str, Any]) -> None:
    """Raises ValueError for the address of a socket that has a host or no path.

    A slash too few makes the path's beginning a host's name, which redis-py drops. A slash in the password moves a part
    of the password into the path, which an error would show.
    """
    if not url.lower().startswith("unix:"):
        return
    parts = urlsplit(url)
    has_host = parts.netloc.rpartition("@")[2] != ""
    num_bytes = len(os.fsencode(address.get("path", "")))
    if has_host or "@" in parts.path or not 1 < num_bytes <= MAX_SOCKET_PATH_BYTES:
        raise ValueError
