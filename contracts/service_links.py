"""What an orchestrator puts into every process for a service called onbeat, or onbeat-gateway: not our settings.

Kubernetes: ONBEAT_SERVICE_HOST=10.0.0.1, ONBEAT_SERVICE_PORT=8000, ONBEAT_SERVICE_PORT_HTTP=8000. Both it and Docker:
ONBEAT_PORT=tcp://10.0.0.1:8000, ONBEAT_PORT_8000_TCP=tcp://10.0.0.1:8000, ONBEAT_PORT_8000_TCP_PROTO, _PORT, _ADDR.
"""

from __future__ import annotations

import re

PROTOCOL = r"(?:tcp|udp|sctp)"
URL = rf"{PROTOCOL}://\S+"
LINKS = (
    (r"_SERVICE_HOST", r"[0-9A-Za-z.:-]+"),
    (r"_SERVICE_PORT(?:_[A-Z0-9_]+)?", r"\d+"),
    (r"_PORT", URL),
    (r"_PORT_\d+_(?:TCP|UDP|SCTP)", URL),
    (r"_PORT_\d+_(?:TCP|UDP|SCTP)_PROTO", PROTOCOL),
    (r"_PORT_\d+_(?:TCP|UDP|SCTP)_PORT", r"\d+"),
    (r"_PORT_\d+_(?:TCP|UDP|SCTP)_ADDR", r"[0-9A-Za-z.:-]+"),
)
"""(end of the name, form of the value)."""


def is_service_link(variable: str, value: str) -> bool:
    """Whether both its name and its value are of the form that orchestrators write."""
    return any(
        re.fullmatch(rf"ONBEAT(?:_[A-Z0-9_]+)?{name}", variable) and re.fullmatch(form, value) for name, form in LINKS
    )
