"""Fetches from the hub by a process of its own, which ends when the hub doesn't go on.

    HubRequest ─▶ fetch_process.py, with the token in its environment ─ HubEvent … ─▶ Fetched
                    └─ nothing came for STALL_S: it is killed

The process gets no other secret of the stack, and no key of it.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from contracts.encoding.wire import decode_json, encode_json
from contracts.errors import ContractViolation, InvalidInput, Unavailable
from contracts.settings import PREFIX, StackSettings
from onbeat.base.process.launcher import LAUNCHER_PID, with_own_packages
from onbeat.hub.events import Fetched, HubEvent, HubOrder
from onbeat.hub.store import HubRequest

PROCESS = "onbeat.hub.fetch_process"
STALL_S = 120.0
"""A fetch in which less than STALL_BYTES came for so long is ended. Comparing files, and waiting for another process
that fetches the same, count as going on."""
STALL_BYTES = 256 * 2**10
LONGEST_S = 86_400.0
"""No fetch lasts longer."""
MAX_EVENT_BYTES = 2**16
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Variables of huggingface_hub with the token."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def is_offline(environment: Mapping[str, str]) -> bool:
    """Returns True where the operator has forbidden the libraries of Hugging Face to ask the hub."""
    return any(environment.get(name, "").strip().upper() in ("1", "TRUE", "YES", "ON") for name in OFFLINE)


def fetch(
    request: HubRequest,
    settings: StackSettings,
    *,
    advance: Callable[[HubEvent], None] = lambda event: None,
    is_over: Callable[[], bool] = lambda: False,
    stall_s: float = STALL_S,
) -> Fetched:
    """Fetches what isn't on this host yet; asks the hub which commit a branch or tag has now.

    Args:
        request: A model, or splits of a data set.
        settings: The folder, its bound and the token.
        advance: Takes the steps.
        is_over: Asked twice a second; True ends the fetch.
        stall_s: As STALL_S.

    Raises:
        InvalidInput: The request can't be fetched as it is. Its field is `path`.
        Unavailable: The hub doesn't go on, or the disk has no room.
    """
    order = HubOrder(request=request, root=str(settings.hub_root_path), max_bytes=settings.hub_mb * 2**20)
    process = subprocess.Popen(
        [sys.executable, "-m", PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_environment(settings),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(encode_json(order))
        process.stdin.close()
        return _followed(process, request, advance, is_over, stall_s)
    except BrokenPipeError as error:
        raise _ended(process, request) from error
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _environment(settings: StackSettings) -> dict[str, str]:
    """Returns this process's variables without settings; the token is among them, and on no command line."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    for name in OFFLINE:
        others.pop(name, None)
    if settings.hub_token:
        for name in TOKENS:
            others.pop(name, None)
        others["HF_TOKEN"] = settings.hub_token
    others |= {LAUNCHER_PID: str(os.getpid()), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    return with_own_packages(others)


def _followed(
    process: subprocess.Popen[bytes],
    request: HubRequest,
    advance: Callable[[HubEvent], None],
    is_over: Callable[[], bool],
    stall_s: float,
) -> Fetched:
    """Reads events until the last one."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    lines = bytearray()
    deadline_s = time.monotonic() + stall_s
    last_s = time.monotonic() + LONGEST_S
    counted = 0  # bytes at which the deadline was moved last
    with selectors.DefaultSelector() as pipe:
        pipe.register(descriptor, selectors.EVENT_READ)
        while True:
            if is_over():
                raise Unavailable(f"the fetch of {request.name} was given up", cure="ask for it again")
            if time.monotonic() > min(deadline_s, last_s):
                raise Unavailable(
                    f"the hub stopped sending {request.name}: nothing of use came for {stall_s:.0f} s",
                    cure="fetch again; it continues after the files that are complete",
                )
            if not pipe.select(0.5):
                continue
            chunk = os.read(descriptor, MAX_EVENT_BYTES)
            if not chunk:
                raise _ended(process, request)
            lines += chunk
            if len(lines) > 16 * MAX_EVENT_BYTES:
                raise _ended(process, request)
            *whole, rest = bytes(lines).split(b"\n")
            lines = bytearray(rest)
            for line in whole:
                event = _event(line)
                if event.fetched:
                    return event.fetched
                if event.problem:
                    kind = InvalidInput if event.is_lasting else Unavailable
                    raise kind(event.problem, field="path" if event.is_lasting else None, cure=event.cure or None)
                advance(event)
                if event.is_local or event.bytes_done >= counted + STALL_BYTES:
                    counted = event.bytes_done
                    deadline_s = time.monotonic() + stall_s


def _event(line: bytes) -> HubEvent:
    try:
        return decode_json(line, HubEvent)
    except InvalidInput as error:
        raise ContractViolation(f"a line of the fetch can't be read: {error}", field=PROCESS) from error


def _ended(process: subprocess.Popen[bytes], request: HubRequest) -> Unavailable:
    process.kill()
    code = process.wait()
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return Unavailable(
        f"the process that fetches {request.name} {how}", cure=f"`python -m {PROCESS} < /dev/null` says why"
    )


def progress_text(event: HubEvent) -> str:
    """Returns how far a fetch is, for a person."""
    if not event.bytes_total:
        return "the hub is asked"
    return f"{min(event.bytes_done, event.bytes_total) / 1e6:,.0f} of {event.bytes_total / 1e6:,.0f} MB"
