"""An export fetched from a gateway: complete and verified in its folder here, or not there at all.

GET …/files ─▶ .DIR.hidden/ each name, size and head as the task's result has them ─▶ hashed ─▶ DIR/
     └─ breaks off: the rest is asked for, from the byte that is missing
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import UNSET

from contracts.errors import ContractViolation, InvalidInput, Unavailable
from contracts.tasks.records import ExportedFiles, TaskProgress, TaskStatus
from onbeat.audit.weights import digest_of
from onbeat.base.http.tar_layout import TarLayout, TarUnpacking
from onbeat.base.process.waiting import Waiting
from onbeat.client.gateway import UNREACHABLE_S, GatewayClient, result_of
from onbeat.export.target import check_target
from onbeat.terminal.task_view import ProgressView
from onbeat.terminal.words import plural

AGAIN_AFTER_S = 1.0


def fetch(client: GatewayClient, task_id: str, exported: ExportedFiles, target: Path, view: ProgressView) -> None:
    """Brings the files of an export to `target`, a folder that isn't there or is empty.

    Raises:
        InvalidInput: The target isn't such a folder.
        ContractViolation: What came isn't what the task has exported.
        Unavailable: The gateway stays away.
        OnbeatError: The disk has no room, or refuses.
    """
    # torch is slow to import: what may be wrong before is told before.
    from onbeat.weights.files.tensor_folder import ScratchFolder

    check_target(target)
    layout = TarLayout(exported.files)
    scratch = ScratchFolder(target)
    try:
        scratch.create()
        with scratch.errors():
            _check_space(scratch.path, layout)
            unpacking = TarUnpacking(layout, scratch.path)
            try:
                _Download(client, task_id, layout, unpacking, view).run()
            finally:
                unpacking.close()
        _check_digest(scratch.path, exported, view)
        scratch.put_in_empty_place()
    finally:
        scratch.remove()


class _Download:
    """A download of an export, over as many connections as it takes."""

    def __init__(
        self, client: GatewayClient, task_id: str, layout: TarLayout, unpacking: TarUnpacking, view: ProgressView
    ) -> None:
        self._client = client
        self._task_id = task_id
        self._num_bytes = layout.num_bytes
        self._unpacking = unpacking
        self._view = view
        self._etag = ""

    def run(self) -> None:
        """Returns once every byte is there. Raises what `fetch` does."""
        away: Waiting | None = None
        while not self._unpacking.is_whole:
            before = self._unpacking.position
            try:
                self._read()
            except Unavailable as error:
                self._view.line(f"the download broke off at byte {self._unpacking.position}: {error.problem}")
                if away is None or self._unpacking.position > before:
                    away = Waiting(f"the rest of {self._task_id} from {self._client.url}", deadline_s=UNREACHABLE_S)
                away.poke()
                time.sleep(AGAIN_AFTER_S)

    def _read(self) -> None:
        """Reads the rest, or until the connection breaks."""
        start = self._unpacking.position
        with self._client.task_files(self._task_id, start=start, etag=self._etag, num_bytes=self._num_bytes) as answer:
            if start and answer.status_code != 206:
                # The gateway, or what stands before it, begins anew.
                self._unpacking.restart()
            elif start and not answer.headers.get("content-range", "").startswith(f"bytes {start}-"):
                raise ContractViolation(f"the rest doesn't begin at byte {start}", field=self._task_id)
            self._etag = answer.headers.get("etag", "")
            for chunk in answer.iter_raw():
                self._unpacking.add(chunk)
                self._show()

    def _show(self) -> None:
        progress = TaskProgress(bytes_done=self._unpacking.position, bytes_total=self._num_bytes)
        self._view.show(f"fetches {self._task_id}", progress)


def _check_space(folder: Path, layout: TarLayout) -> None:
    free = shutil.disk_usage(folder).free
    if free < layout.num_bytes:
        raise InvalidInput(
            f"{folder.parent} has {free} bytes free, and the export has {layout.num_bytes}",
            field="DIR",
            cure="free space there, or give a folder on another disk",
        )


def _check_digest(folder: Path, exported: ExportedFiles, view: ProgressView) -> None:
    """Hashes the weights as they are on this disk. Raises ContractViolation where they aren't those of the result."""
    weights = sorted(folder.glob("*.safetensors"))
    num_bytes = sum(path.stat().st_size for path in weights)
    digest = digest_of(weights, count=_counter(view, len(weights), num_bytes))
    if digest != exported.files_digest:
        raise ContractViolation(
            f"the received weights have the digest {digest[:12]}, the export has {exported.files_digest[:12]}",
            field="DIR",
            cure="fetch it again; if the error remains, check the disk",
        )


def _counter(view: ProgressView, num_files: int, bytes_total: int) -> Callable[[int], None]:
    bytes_done = 0

    def count(num_bytes: int) -> None:
        nonlocal bytes_done
        bytes_done += num_bytes
        view.show(
            f"hashes {plural(num_files, 'file')} of weights",
            TaskProgress(bytes_done=bytes_done, bytes_total=bytes_total),
        )

    return count


def exported_of(status: TaskStatus) -> ExportedFiles:
    """Returns what a task has exported. Raises OnbeatError where it has exported nothing."""
    exported = result_of(status).exported
    if exported is UNSET:
        raise ContractViolation("the task has exported nothing", field=status.task_id, cure="export again")
    return exported
