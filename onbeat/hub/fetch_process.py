"""`python -m onbeat.hub.fetch_process`: fetches one model, or splits of one data set; the only code that asks the hub.

    name ─▶ commit, list of files with sizes and hashes ─▶ the files that are read ─▶ room? ─▶ each file: download,
    compare ─▶ one rename ─▶ the folder is there, whole

What hangs, trickles or breaks is its parent's to end (fetching.py): this process may be killed at any time. Files that
were compared stay in the staging folder, so that the next fetch goes on behind them; half a file is removed.

Nothing of a repository is run or unpickled: of a model its safetensors, configuration and tokenizer are taken, of a
data set its files of rows, and of its README.md the head.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from huggingface_hub import HfApi, constants, get_token, hf_hub_download
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

import onbeat.base.process.own_packages  # noqa: F401  (it refuses packages of ours that are a stranger's)
from contracts.encoding.names import is_below
from contracts.encoding.wire import decode_json, encode_json
from contracts.errors import InvalidInput, OnbeatError, Unavailable, first_line
from contracts.hub_names import COMMIT
from onbeat.base.process.launcher import end_with_parent
from onbeat.data.named_files import MOST_FILES, SAVED_STATE, is_read_of_model
from onbeat.hub.dataset_layout import CONVERTED, files_of_split, form_of, front_matter
from onbeat.hub.events import Fetched, HubEvent, HubOrder
from onbeat.hub.store import HubRequest, HubStore
from onbeat.weights.model_path import WEIGHTS_INDEX, weights_index

METADATA_S = 20.0
"""For the list of a repository's files."""
README = "README.md"
MOST_README_BYTES = 4 * 2**20
MB = 10**6
BLOCK_BYTES = 4 * 2**20
CHUNK_BYTES = 2**18
"""Bytes that huggingface_hub keeps before it counts them: by its own 10 MiB a slow line couldn't be told from none."""
LEAST_PAUSE_S = 0.1
"""Between two steps that are told."""
SPARE_BYTES = 64 * 2**20
"""Bytes that stay free on the disk."""
FIELD = "path"
HTTP_ERROR: type[Exception] = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
"""The error of the HTTP library that huggingface_hub has, whichever that is."""
WHOLE_MODEL = "model.safetensors"
Tell = Callable[[HubEvent], None]


@dataclass(frozen=True, kw_only=True)
class RemoteFile:
    """A file of a repository, as the hub lists it."""

    name: str
    num_bytes: int
    sha256: str
    """The SHA-256 of a large file; "" of another."""
    git_sha1: str
    """The name that git gives the bytes of a small file."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The files of one folder that a request becomes."""

    folder: Path
    """Where they will be."""
    files: Mapping[str, RemoteFile]
    """Name in the folder → file of the repository, in the order of a data set's rows."""
    is_ordered: bool
    """True where the folder gets a list of its files."""


def main() -> int:
    """Reads an order from stdin and writes its events to stdout; returns the exit code."""
    end_with_parent(signal.SIGKILL)
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    order = decode_json(sys.stdin.buffer.read(), HubOrder)
    try:
        _tell(HubEvent(fetched=fetch(order, _tell)))
    except OnbeatError as error:
        is_lasting = isinstance(error, InvalidInput)
        _tell(HubEvent(problem=_shown(error.problem), cure=_shown(error.cure or ""), is_lasting=is_lasting))
    except OSError as error:
        problem, cure = _of_the_disk(error)
        _tell(HubEvent(problem=_shown(problem), cure=cure))
    # A library of this size may raise anything; its words go to the person who asked.
    except Exception as error:
        _tell(HubEvent(problem=_shown(f"{type(error).__name__}: {first_line(error)}")))
    return 0


def _tell(event: HubEvent) -> None:
    sys.stdout.buffer.write(encode_json(event) + b"\n")
    sys.stdout.buffer.flush()


def fetch(order: HubOrder, tell: Tell) -> Fetched:
    """Fetches what isn't there yet.

    Args:
        order: The order.
        tell: Takes the steps.

    Raises:
        InvalidInput: The name, or what it names, can't be fetched as it is.
        Unavailable: The hub doesn't answer, or not as it should.
        OSError: The disk is full, or may not be written.
    """
    store = HubStore(Path(order.root))
    with _translated(order.request):
        commit, remote = _listed(order.request)
    request = order.request.at_commit(commit)
    if store.has(request):
        store.remember(order.request.name, commit)
        return _fetched(request, store, is_new=False)
    staging = store.staging(request)
    with _alone(staging, tell):
        is_new = not store.has(request)
        if is_new:
            _Fetch(request, remote, store=store, staging=staging, tell=tell, max_bytes=order.max_bytes).run()
        store.remember(order.request.name, commit)
    shutil.rmtree(staging, ignore_errors=True)
    return _fetched(request, store, is_new=is_new)


def _fetched(request: HubRequest, store: HubStore, *, is_new: bool) -> Fetched:
    folders = store.folders(request)
    num_bytes = sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())
    return Fetched(request=request, folders=tuple(map(str, folders)), num_bytes=num_bytes, is_new=is_new)


def _listed(request: HubRequest) -> tuple[str, dict[str, RemoteFile]]:
    """Asks the hub for the commit of the revision, and for the files that it has."""
    name = request.name
    api = HfApi()
    ask = api.model_info if name.kind == "model" else api.dataset_info
    info = ask(name.repository, revision=name.revision, files_metadata=True, timeout=METADATA_S)
    commit = info.sha or ""
    if not COMMIT.fullmatch(commit) or (name.is_at_commit and commit != name.revision):
        raise Unavailable(f"the hub names `{commit[:80]!a}` as the commit of {name}", cure="check HF_ENDPOINT")
    files: dict[str, RemoteFile] = {}
    for sibling in info.siblings or ():
        # A name that leads elsewhere, or into a hidden folder, is left out: nothing that is read has one.
        if not is_below(sibling.rfilename) or any(part.startswith(".") for part in sibling.rfilename.split("/")):
            continue
        sha256 = (sibling.lfs or {}).get("sha256", "")
        files[sibling.rfilename] = RemoteFile(
            name=sibling.rfilename, num_bytes=sibling.size or 0, sha256=sha256, git_sha1=sibling.blob_id or ""
        )
    return commit, files


class _Fetch:
    """The fetch of a request at a commit; this process is the only one that has its staging folder."""

    def __init__(
        self,
        request: HubRequest,
        remote: Mapping[str, RemoteFile],
        *,
        store: HubStore,
        staging: Path,
        tell: Tell,
        max_bytes: int,
    ) -> None:
        self.request = request
        self.remote = remote
        self.store = store
        self.tell = tell
        self.max_bytes = max_bytes
        self.incoming = staging / "incoming"
        """Files that are downloaded."""
        self.whole = staging / "whole"
        """Files that were compared, by their names in the repository."""
        self.bytes_done = 0
        self.bytes_total = 0
        self.told_s = 0.0

    def run(self) -> None:
        """Brings the request's folders to their places."""
        # A process that was killed has left halves of files, which huggingface_hub doesn't go on with.
        shutil.rmtree(self.incoming, ignore_errors=True)
        choices = self._model() if self.request.name.kind == "model" else self._splits()
        choices = [chosen for chosen in choices if not chosen.folder.is_dir()]
        files = {file.name: file for chosen in choices for file in chosen.files.values()}
        self._check_room(files)
        self.bytes_total = sum(file.num_bytes for file in files.values())
        for file in files.values():
            self._bring(file)
        for chosen in choices:
            self._put(chosen)

    def _model(self) -> list[Chosen]:
        """Chooses what is read of a model: configuration, tokenizer, and the weights that its index names."""
        small = [name for name in self.remote if is_read_of_model(name, weights=False)]
        weights = [WHOLE_MODEL] if WHOLE_MODEL in self.remote else []
        if WEIGHTS_INDEX in self.remote:
            index = self._bring(self.remote[WEIGHTS_INDEX])
            weights = [WEIGHTS_INDEX, *sorted(set((weights_index(index.parent, field=FIELD) or {}).values()))]
        if "config.json" not in self.remote:
            raise InvalidInput(
                f"{self.request.name} has no config.json, so it is no model of transformers",
                field=FIELD,
                cure="name a causal LM; adapters alone are none",
            )
        lacking = [name for name in weights if name not in self.remote]
        if lacking or not weights:
            missing = f", {lacking[0]} is missing" if lacking else ""
            raise InvalidInput(
                f"{self.request.name} has no weights as safetensors{missing}",
                field=FIELD,
                cure="load it where you trust it, and save it by save_pretrained; then name that folder",
            )
        files = {name: self.remote[name] for name in sorted({*small, *weights})}
        (folder,) = self.store.folders(self.request)
        return [Chosen(folder=folder, files=files, is_ordered=False)]

    def _splits(self) -> list[Chosen]:
        """Chooses the files of each split, and gives them names that don't meet, in their order."""
        metadata: dict[str, Any] = {}
        if README in self.remote and self.remote[README].num_bytes <= MOST_README_BYTES:
            metadata = _yaml(self._bring(self.remote[README]).read_text(errors="replace"))
        choices = []
        for split, folder in zip(self.request.splits, self.store.folders(self.request), strict=True):
            names = files_of_split(
                list(self.remote),
                metadata,
                config=self.request.config or "",
                split=split,
                what=str(self.request.name).partition("@")[0],
            )
            files = {
                f"{place:05d}-{Path(name).stem}{form_of(name)}": self.remote[name] for place, name in enumerate(names)
            }
            choices.append(Chosen(folder=folder, files=files, is_ordered=True))
        return choices

    def _check_room(self, files: Mapping[str, RemoteFile]) -> None:
        """Raises InvalidInput for more files than a job may name, Unavailable for more bytes than there is room for."""
        if len(files) > MOST_FILES - 8:
            raise InvalidInput(f"{self.request.name} has {len(files)} files, and {MOST_FILES - 8} may be", field=FIELD)
        needed = sum(file.num_bytes for name, file in files.items() if not (self.whole / name).is_file())
        used = self.store.num_bytes()
        if used + needed > self.max_bytes:
            raise Unavailable(
                f"{self.request.name} takes {needed / MB:,.0f} MB, and {self.store.root} has {used / MB:,.0f} MB of "
                f"the {self.max_bytes / MB:,.0f} MB that it may take",
                cure="remove what isn't needed there, or raise ONBEAT_HUB_MB",
            )
        free = shutil.disk_usage(self.store.root).free - SPARE_BYTES
        if needed > free:
            raise Unavailable(
                f"{self.request.name} takes {needed / MB:,.0f} MB, and the disk of {self.store.root} has "
                f"{max(0, free) / MB:,.0f} MB free",
                cure="make room, or set ONBEAT_HUB_ROOT to a folder of another disk",
            )

    def _bring(self, file: RemoteFile) -> Path:
        """Returns a file that was compared with what the hub says of it; downloads it where it isn't there."""
        whole = self.whole / file.name
        if whole.is_file() and self._is_as_listed(whole, file):
            return whole
        whole.unlink(missing_ok=True)
        for is_last in (False, True):
            with _translated(self.request):
                # A copy of huggingface_hub's own cache may be damaged: then the file is downloaded.
                came = Path(self._downloaded(file, anew=is_last))
            if self._is_as_listed(came, file):
                break
            came.unlink()
        else:
            raise Unavailable(
                f"{file.name} of {self.request.name} came with other bytes than the hub lists, twice",
                cure="fetch again; if the error remains, a proxy in between changes the bytes",
            )
        whole.parent.mkdir(parents=True, exist_ok=True)
        came.replace(whole)
        return whole

    def _downloaded(self, file: RemoteFile, *, anew: bool) -> str:
        advance = self._advance

        class Bar(tqdm):
            """The bar of huggingface_hub, which no person sees: its steps are signs of life."""

            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **{**options, "disable": True})

            def update(self, n: float | None = 1) -> bool | None:
                advance(max(0, int(n or 0)))
                return None

        return hf_hub_download(
            self.request.name.repository,
            file.name,
            repo_type=self.request.name.kind,
            revision=self.request.name.revision,
            local_dir=self.incoming,
            force_download=anew,
            tqdm_class=Bar,
        )

    def _is_as_listed(self, path: Path, file: RemoteFile) -> bool:
        """Compares a file with its length and hash in the hub's list; it is on the disk when this returns."""
        size = path.stat().st_size
        if file.num_bytes and size != file.num_bytes:
            return False
        hasher = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        with path.open("rb") as opened:
            while block := opened.read(BLOCK_BYTES):
                hasher.update(block)
                self._advance(0, is_local=True)
            os.fsync(opened.fileno())
        listed = file.sha256 or file.git_sha1
        return not listed or hasher.hexdigest() == listed

    def _advance(self, num_bytes: int, *, is_local: bool = False) -> None:
        self.bytes_done += num_bytes
        if not is_local and time.monotonic() < self.told_s + LEAST_PAUSE_S:
            return
        self.told_s = time.monotonic()
        self.tell(HubEvent(bytes_done=self.bytes_done, bytes_total=self.bytes_total, is_local=is_local))

    def _put(self, chosen: Chosen) -> None:
        """Makes the folder, and moves it to its place."""
        folder = self.incoming.parent / "folder"
        shutil.rmtree(folder, ignore_errors=True)
        for name, file in chosen.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _link(self.whole / file.name, folder / name)
        if chosen.is_ordered:
            state = {"_data_files": [{"filename": name} for name in chosen.files]}
            (folder / SAVED_STATE).write_bytes(encode_json(state))
        for name in chosen.files:
            self._check_rows(folder / name)
        chosen.folder.parent.mkdir(parents=True, exist_ok=True)
        _sync(folder)
        _sync(chosen.folder.parent)
        try:
            folder.rename(chosen.folder)
        except OSError:
            # Another request has the same split, and was first.
            if not chosen.folder.is_dir():
                raise
        _sync(chosen.folder.parent)

    def _check_rows(self, file: Path) -> None:
        """Raises InvalidInput for JSON that is one list, or no rows at all."""
        if file.suffix != ".jsonl":
            return
        with file.open("rb") as opened:
            first = opened.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if first not in (b"{", b""):
            raise InvalidInput(
                f"{file.name} of {self.request.name} isn't a JSON object on each line", field=FIELD, cure=CONVERTED
            )


def _link(source: Path, target: Path) -> None:
    """Gives a file a second name; copies it where the file system has no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _sync(folder: Path) -> None:
    """Has the names of a folder on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _yaml(readme: str) -> dict[str, Any]:
    """Returns the head of a README.md; {} where it is none that can be read."""
    try:
        value = yaml.safe_load(front_matter(readme))
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def _alone(staging: Path, tell: Tell) -> Iterator[None]:
    """Holds a staging folder; waits for another process that has it, for as long as that lives."""
    staging.mkdir(parents=True, exist_ok=True)
    with (staging.parent / f"{staging.name}.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # It has a deadline of its own.
                tell(HubEvent(is_local=True))
                time.sleep(0.5)
        yield


@contextmanager
def _translated(request: HubRequest) -> Iterator[None]:
    """Raises huggingface_hub's errors as ours, with the cure."""
    name = request.name
    host = urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT
    has_token = bool(get_token())
    try:
        yield
    except GatedRepoError as error:
        problem = f"{name} is gated"
        cure = f"ask for access at {constants.ENDPOINT}/{_page(request)}, then set HF_TOKEN or run `hf auth login`"
        if has_token:
            problem = f"{name} is gated, and the token has no access to it"
            cure = f"ask for access at {constants.ENDPOINT}/{_page(request)}"
        raise InvalidInput(problem, field=FIELD, cure=cure) from error
    except DisabledRepoError as error:
        raise InvalidInput(f"{name} is disabled by the hub", field=FIELD) from error
    except RepositoryNotFoundError as error:
        cure = "check its spelling; for a private one set HF_TOKEN, or run `hf auth login`"
        if has_token:
            cure = "check its spelling, and whether the token may read it"
        raise InvalidInput(f"{host} has no {name.kind} {name.repository}", field=FIELD, cure=cure) from error
    except RevisionNotFoundError as error:
        cure = "name a branch, a tag or a commit of it"
        raise InvalidInput(f"{name.repository} has no revision {name.revision}", field=FIELD, cure=cure) from error
    except EntryNotFoundError as error:
        raise Unavailable(f"{name}: {first_line(error)}", cure="fetch again") from error
    except OfflineModeIsEnabled as error:
        raise Unavailable(f"{name} isn't fetched, and HF_HUB_OFFLINE is set", cure="unset it to fetch") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        if status in (401, 403):
            problem = f"{host} refuses {name} (status {status})"
            cure = "check the token, and whether it may read it" if has_token else "set HF_TOKEN"
            raise InvalidInput(problem, field=FIELD, cure=cure) from error
        raise Unavailable(f"{host} answered {name} with status {status}", cure="try again later") from error
    except HTTP_ERROR as error:
        kind = type(error).__name__
        raise Unavailable(f"no answer of {host} for {name}: {kind}", cure="check the network connection") from error
    except OSError as error:
        # huggingface_hub raises its own errors, as that of a file that came short, as OSError without a number.
        if error.errno is not None:
            raise
        raise Unavailable(f"{name}: {first_line(error)}", cure="fetch again") from error


def _page(request: HubRequest) -> str:
    folder = "datasets/" if request.name.kind == "dataset" else ""
    return f"{folder}{request.name.repository}"


def _of_the_disk(error: OSError) -> tuple[str, str]:
    """Returns problem and cure of an error of the file system."""
    where = error.filename or "the folder of what was fetched"
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"the disk is full: {where}", "make room, or set ONBEAT_HUB_ROOT to a folder of another disk"
    return f"{where}: {error.strerror or error}", "set ONBEAT_HUB_ROOT to a folder that can be written"


def _shown(text: str) -> str:
    """Returns a text without the token, and without what stands behind the ? of an address, which may be signed."""
    token = get_token()
    if token:
        text = text.replace(token, "********")
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", text)[:2000]


if __name__ == "__main__":
    sys.exit(main())
