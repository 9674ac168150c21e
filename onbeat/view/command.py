"""`onbeat view DIR`: the page over run folders, without their stack."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from broker.connection.client import connect
from contracts.encoding.names import MADE_HERE
from contracts.errors import NotFound, OnbeatError
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.base.process.folders import write_private
from onbeat.commands import options
from onbeat.stack.plan import StackPlan, stack_settings
from onbeat.stack.stack import MODULES, EmbeddedStack
from onbeat.terminal.output import console_for, emit, tell_page
from onbeat.terminal.words import plural
from onbeat.view.told import tell

TICK_S = 0.25
FOR_EVER_DAYS = 36500.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Viewed:
    """A gateway that shows folders, and a key that may look alone."""

    url: str
    key: str
    jobs: tuple[str, ...]
    stack: EmbeddedStack


def view(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run folder, or a folder of run folders.")],
    json_output: options.Json = False,
) -> None:
    """Show runs whose stack is gone, or on another machine, on the page; Ctrl-C ends it. Nothing in DIR changes."""
    console = console_for(json_output=json_output)
    with contextlib.suppress(KeyboardInterrupt), viewed(directory) as found:
        one = found.jobs[0] if len(found.jobs) == 1 else ""
        if json_output:
            emit({"gateway_url": found.url, "jobs": found.jobs})
        console.print(f"{plural(len(found.jobs), 'run')} of {directory}; Ctrl-C ends the view", soft_wrap=True)
        tell_page(console, found.url, found.key, job_id=one)
        while True:
            found.stack.tick()
            time.sleep(TICK_S)


@contextmanager
def viewed(directory: Path) -> Iterator[Viewed]:
    """Raises NotFound for a folder without a run."""
    folders = run_folders(directory)
    settings = stack_settings(os.environ)
    key = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory(prefix="onbeat-view-", ignore_cleanup_errors=True) as scratch:
        keys = Path(scratch) / "keys"
        write_private(keys, f"view read {hashlib.sha256(key.encode()).hexdigest()}\n")
        # A run that ended long ago is not to be forgotten here.
        settings = replace(settings, redis_url="", keys_file=str(keys), keep_ended_days=FOR_EVER_DAYS)
        plan = StackPlan(run_root=folders[0].run_root, model_root=Path(scratch), threads=1, settings=settings)
        modules = {"gateway": MODULES["gateway"]}
        with EmbeddedStack(plan, modules=modules, folder=Path(scratch)) as stack:
            jobs = tuple(folder.job_id for folder in folders if _is_told(stack, folder))
            if not jobs:
                raise NotFound(f"no run of {directory} can be read", field="DIR", cure="see the warnings above")
            yield Viewed(url=stack.gateway_url, key=key, jobs=jobs, stack=stack)


def run_folders(directory: Path) -> list[RunFolder]:
    """Raises NotFound."""
    path = directory.resolve()
    named = [path] if (path / "spec.json").is_file() else sorted(path.glob("*/spec.json"))
    folders = [one.parent if one.name == "spec.json" else one for one in named]
    found = [RunFolder(folder.parent, folder.name) for folder in folders if MADE_HERE.fullmatch(folder.name)]
    if not found:
        raise NotFound(
            f"{directory} is no run folder, and has none", field="DIR", cure="give one with a spec.json, job-… by name"
        )
    return found


def _is_told(stack: EmbeddedStack, folder: RunFolder) -> bool:
    """Whether it is shown; one that is damaged hides no other."""
    assert stack.redis is not None
    broker = connect(StackSettings(redis_url=stack.redis.url))
    try:
        tell(broker, folder)
    except OnbeatError as error:
        log.warning("%s is left out: %s", folder.path, error)
        return False
    finally:
        broker.close()
    return True
