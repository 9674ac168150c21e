"""The address of a Redis, read once for the broker's connections and for Celery's.

    redis://user:password@host:port/0     rediss:// the same by TLS
    unix://user:password@/path?db=0       a server's socket file

The user may be left out. What a URL has a meaning for (`/`, `@`, `%`) stands as `%2F` and so on in each part.
"""

from __future__ import annotations

import os
import sys
from typing import Any
from urllib.parse import urlsplit

from redis import ConnectionPool, exceptions
from redis.connection import parse_url

from contracts.errors import InvalidInput

MAX_SOCKET_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""The room in a socket's address (`sun_path`), less the zero at its end."""
CURE = "redis://:PASSWORD@HOST:PORT/0 or unix://:PASSWORD@/PATH?db=0, with password and path as in a URL"


def read_address(url: str, *, field: str = "ONBEAT_REDIS_URL") -> dict[str, Any]:
    """What redis-py makes connections with. Raises InvalidInput that shows nothing of the URL: it has a password."""
    try:
        address = parse_url(url)
        _check_socket(url, address)
        pool = ConnectionPool.from_url(url)
        pool.connection_class(**pool.connection_kwargs)  # reads the options
    except (ValueError, TypeError, exceptions.ConnectionError):  # its text may hold a part of the password
        raise InvalidInput("is not a Redis address", field=field, cure=CURE) from None
    return address


def _check_socket(url: str, address: dict[str, Any]) -> None:
    """A slash too few makes the path's beginning a host's name, which redis-py drops; one in the password moves a part
    of it into the path, which an error shows. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme != "unix":
        return
    has_host = parts.netloc.rpartition("@")[2] != ""
    num_bytes = len(os.fsencode(address.get("path", "")))
    if has_host or "@" in parts.path or not 1 < num_bytes <= MAX_SOCKET_PATH_BYTES:
        raise ValueError
