"""Where a stack says how to reach it: `<run_dir>/stack.json`, readable by its owner alone, gone when the stack is."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

from msgspec import field
from msgspec.structs import replace

from contracts.encoding.wire import Record, decode_json, encode_json
from contracts.errors import InvalidInput, NotFound
from contracts.run_folder import STACK_FILE
from contracts.settings import PREFIX, StackSettings
from onbeat.base.process.folders import write_private

FILE_NAME = STACK_FILE
ROOTS_NAME = "roots.json"
DEFAULT_RUN_DIR = "runs"
T = TypeVar("T", bound=Record)


class StackFile(Record, frozen=True, kw_only=True):
    """The file by which a client reaches the gateway."""

    gateway_url: str
    api_key: str
    pid: int
    """Process that runs the stack."""
    roles: dict[str, dict[str, str]] = field(default_factory=dict)
    """Role in Redis → the ONBEAT_ variables with which a process of this user's own takes that part."""


class Roots(Record, frozen=True, kw_only=True):
    """The folders in which the stack of a run folder finds models and data; `<run_dir>/roots.json`.

    The stack writes it when it starts, and leaves it: an export or a replay of a run reads the job's model again, also
    when the stack is down.
    """

    model_root: str
    extra_roots: str = ""
    """As ONBEAT_EXTRA_ROOTS."""


class GatewayAccess(Record, frozen=True, kw_only=True):
    """The address of a gateway, the key, and the folder of its runs."""

    url: str
    key: str
    run_root: str


def inputs_below(run_root: Path) -> Path:
    """Returns the folder for data and rewards that programs of this user bring; specs may name files below it."""
    return run_root.resolve() / "inputs"


def write_stack_file(run_root: Path, stack: StackFile) -> Path:
    """The caller holds the folder's lock: no other stack writes one there."""
    path = run_root / FILE_NAME
    write_private(path, encode_json(stack).decode())
    return path


def write_roots(run_root: Path, settings: StackSettings) -> None:
    """Writes the roots of a stack that starts."""
    roots = Roots(model_root=settings.model_root, extra_roots=settings.extra_roots)
    write_private(run_root / ROOTS_NAME, encode_json(roots).decode())


def with_roots(settings: StackSettings, run_root: Path, chosen: Path | None, *, default: Path) -> StackSettings:
    """Returns the settings with the model root by which the jobs of a run folder name their models.

    Args:
        settings: Of this process.
        run_root: The folder of the runs.
        chosen: The model root of a flag or an argument, which counts first; then ONBEAT_MODEL_ROOT, then the run
            folder's own.
        default: Counts where the run folder has none.
    """
    roots = _read_own(run_root / ROOTS_NAME, Roots)
    if chosen is not None:
        return replace(settings, model_root=str(chosen))
    if roots is None or os.environ.get(f"{PREFIX}MODEL_ROOT"):
        return replace(settings, model_root=str(default))
    extra = os.pathsep.join(filter(None, (settings.extra_roots, roots.extra_roots)))
    return replace(settings, model_root=roots.model_root, extra_roots=extra)


def with_extra_roots(settings: StackSettings, folders: Sequence[Path]) -> StackSettings:
    """Returns the settings with further folders in which a job's files lie."""
    extra = [settings.extra_roots, *(str(folder.resolve()) for folder in folders)]
    return replace(settings, extra_roots=os.pathsep.join(filter(None, extra)))


def read_roots(run_root: Path) -> Roots | None:
    """Returns the roots of the stack that ran last in a folder; None where none wrote them."""
    return _read_own(run_root / ROOTS_NAME, Roots)


def read_stack_file(run_root: Path) -> StackFile | None:
    """Returns how to reach the stack of a folder; None where none runs."""
    return _read_own(run_root / FILE_NAME, StackFile)


def _read_own(path: Path, kind: type[T]) -> T | None:
    """Reads a file of this user's own; None where there is none. Raises InvalidInput for one of another user."""
    try:
        # A user that can plant a file here could have specs and keys sent to another address.
        if os.geteuid() not in (0, path.stat().st_uid):
            raise InvalidInput(
                f"{path} belongs to another user", field="--run-dir", cure="choose a --run-dir of your own"
            )
        return decode_json(path.read_bytes(), kind)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise InvalidInput(f"{path.parent} is not a folder", field="--run-dir", cure="name a folder") from error
    except PermissionError as error:
        raise InvalidInput(
            f"{path} belongs to another user", field="--run-dir", cure="choose a --run-dir of your own"
        ) from error


def run_root_from(environment: Mapping[str, str], run_dir: Path | None) -> Path:
    """Takes the flag, then ONBEAT_RUN_ROOT, then runs/."""
    return run_dir or Path(environment.get(f"{PREFIX}RUN_ROOT") or DEFAULT_RUN_DIR)


def run_dir_flag(environment: Mapping[str, str], run_root: Path) -> str:
    """` --run-dir DIR` for a printed command; empty where every shell in this folder finds the run root without it."""
    root = run_root.resolve()
    if root == Path(DEFAULT_RUN_DIR).resolve() == run_root_from(environment, None).resolve():
        return ""
    here = Path.cwd()
    if root.is_relative_to(here):
        root = root.relative_to(here)
    return f" --run-dir {shlex.quote(str(root))}"


def page_address(gateway_url: str, api_key: str, *, job_id: str = "") -> str:
    """Returns the gateway's page for a browser, with the key in the fragment, which a browser sends to no server.

    api_key: "" leaves it out; the page then asks for it.
    """
    parts: list[str] = []
    if job_id:
        parts.append(f"/jobs/{job_id}")
    if api_key:
        parts.append(f"key={quote(api_key, safe='')}")
    if not parts:
        return f"{gateway_url}/"
    return f"{gateway_url}/#{'?'.join(parts)}"


def gateway_access(
    environment: Mapping[str, str],
    *,
    gateway: str | None,
    api_key: str | None,
    run_dir: Path | None,
    job: str | None = None,
) -> GatewayAccess:
    """Flags first, then ONBEAT_GATEWAY_URL and ONBEAT_API_KEY, then the stack file of the run folder.

    A key goes only where it belongs: a stack's own to the address in its file, and the environment's to the address of
    the environment, where that names one. Anywhere else goes only a key that a flag gives.

    Raises NotFound where no stack is running and the run root has no folder of the job; InvalidInput without a job.
    """
    run_root = run_root_from(environment, run_dir)
    stack = read_stack_file(run_root)
    url_there = environment.get(f"{PREFIX}GATEWAY_URL", "")
    url = gateway or url_there or (stack.gateway_url if stack else "")
    is_the_stacks = stack is not None and same_origin(url, stack.gateway_url)
    key = ""
    if not url_there or same_origin(url, url_there):
        key = environment.get(f"{PREFIX}API_KEY", "")
    if stack is not None and is_the_stacks:
        key = key or stack.api_key
    elif stack is not None and key == stack.api_key:
        key = ""
    key = api_key or key
    if not url and job is not None and not (run_root / job).is_dir():
        raise NotFound(
            f"no stack is running in {run_root}, and {job} has no folder there",
            field="job",
            cure="name the folder of the job's stack or demo with --run-dir DIR",
        )
    if not url:
        raise InvalidInput(
            f"no stack is running in {run_root}",
            field="gateway",
            cure="start one with `onbeat up`, or give --gateway URL or --run-dir DIR",
        )
    return GatewayAccess(url=url, key=key, run_root=str(run_root.resolve()))


def same_origin(url: str, other: str) -> bool:
    """Compares scheme, host and port (RFC 6454): where they are the same, a key for `url` may be sent to `other`."""
    return _origin(url) is not None and _origin(url) == _origin(other)


def _origin(url: str) -> tuple[str, str, int | None] | None:
    """Returns scheme, host and port; None of what is no address."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None
