"""The port of a service, taken before anything else is started."""

from __future__ import annotations

import errno
import socket

from contracts.errors import InvalidInput


def listen(host: str, port: int) -> socket.socket:
    """Returns a bound socket. Raises InvalidInput that names the setting."""
    if not 0 < port < 65536:
        raise InvalidInput(f"{port} is not a port", field="ONBEAT_PORT", cure="1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidInput(f"`{host}` is not an address: {error.strerror}", field="ONBEAT_HOST") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)  # now, since two servers may both bind a port that neither listens on yet
    except OSError as error:
        listener.close()
        field = "ONBEAT_PORT" if error.errno != errno.EADDRNOTAVAIL else "ONBEAT_HOST"
        raise InvalidInput(
            f"cannot listen on {host}:{port}: {error.strerror}", field=field, cure="choose another"
        ) from error
    return listener
