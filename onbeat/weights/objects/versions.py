"""Policy versions in the object store: `weights.transport = "object"`, for processes that share no folder.

    shard, delta ─ whole ─▶ put ─▶ {prefix}/{job}/weights/{digest} ─▶ announced, then read ahead by generators
    manifest ─▶ names each file with its digest in it    {prefix}/{job}/versions/v000003.{digest of the list}[.whole]

A manifest is in Redis, under the trainer's epoch: an object that no manifest names counts for nothing. The lists tell a
trainer which objects go with a version, also with those of the trainer before; and a generator, where a version is
whole of which it was promised a delta.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

from msgspec.structs import replace
from torch import Tensor

from contracts.encoding.digests import content_digest
from contracts.encoding.wire import decode_json, encode_json
from contracts.errors import ContractViolation, InvalidInput, NotFound, Unavailable, WeightsRejected
from contracts.run_folder import VERSION, RunFolder, number_of
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.versions import WeightFile, WeightStep, WeightTransport
from onbeat.weights.chunks import ChunkedFile
from onbeat.weights.layout import PendingVersion
from onbeat.weights.objects.blobs import open_blobs
from onbeat.weights.objects.bucket import Bucket
from onbeat.weights.stores import CopiedFiles, VersionFile, VersionStore, version_files

ABANDONED_S = 3600.0
"""Age at which an object that no list names was left by a trainer that was killed."""
RECEIVER_S = 60.0
"""Longest that a generator waits for the store before it says so, and asks again; some minutes in all."""
LAST_S = 30.0
"""Longest that the end of a job waits for its versions to be deleted."""
WHOLE = ".whole"
"""The end of the name of a whole version's list."""
TENSORS = ".safetensors"
NAME = re.compile(r"(?P<stem>.+)\.(?P<digest>[0-9a-f]{64})\.(?P<kind>[a-z]+)")

log = logging.getLogger(__name__)


class ObjectVersion:
    """A VersionWriter into the object store."""

    transport: WeightTransport = "object"
    holds_whole = False

    def __init__(self, store: ObjectVersions, version: PendingVersion, *, again: bool) -> None:
        """Begins a version.

        Args:
            store: The store.
            version: The version.
            again: True where this trainer has published the version before, and readers refuse it.
        """
        self._store = store
        self._directory = version.directory
        self._again = again
        self._files: dict[str, WeightFile] = {}
        """Name of a file, as it was opened → as a manifest lists it."""

    def stored(self) -> Mapping[str, Tensor]:
        """Returns {}: bytes that the store has already aren't sent again."""
        return {}

    def reserve(self, num_bytes: int) -> None:
        """Does nothing: a bucket has no size."""

    def open(self, name: str, num_bytes: int) -> ChunkedFile:
        """Opens a file, which is sent with its last byte."""

        def send(_number: int, data: bytearray) -> None:
            digest = self._store.send(memoryview(data), again=self._again)
            stem, _, kind = name.rpartition(".")
            self._files[name] = WeightFile(name=f"{stem}.{digest}.{kind}", num_bytes=num_bytes)

        return ChunkedFile(num_bytes, send, chunk_bytes=num_bytes)

    def early_path(self, name: str) -> str:
        """Returns the file's place: named by its content, it can be read as soon as it is there, and never moves."""
        return f"{self._directory}/{self._files[name].name}"

    def put_in_place(self) -> tuple[WeightFile, ...]:
        files = tuple(self._files[name] for name in sorted(self._files))
        self._store.note(self._directory, files)
        return files

    def discard(self) -> None:
        self._files.clear()
        self._store.let_go()


class ObjectVersions:
    """A VersionStore of objects named by their content, and of a list for each version."""

    def __init__(
        self, spec: JobSpec, folder: RunFolder, *, pause: Callable[[float], None], settings: StackSettings
    ) -> None:
        """Opens the job's area of the store.

        Args:
            spec: The job's; its `timeouts` bound the waits for the store.
            folder: Names the versions; nothing is written into it.
            pause: Sleeps so many seconds while the store is away; it may raise.
            settings: Have the store's address.

        Raises:
            InvalidInput: No store, or none that this process may write (`open_blobs`, `Blobs.check_writable`).
        """
        timeouts = spec.timeouts
        self.folder = folder
        self.wait_s = timeouts.iteration_s + timeouts.dependency_s
        """A tensor that fills a shard waits for the store, which may be away."""
        self.bases: VersionStore = self
        self._settings = settings
        recording = spec.recording_policy
        self._stays = recording.takes_any and recording.max_version_bytes > 0
        """True: versions stay at the job's end, as in a run folder. Recorded batches are sampled again with them."""
        self._blobs = open_blobs(settings, folder.job_id, "weights", deadline_s=timeouts.dependency_s, sleep=pause)
        self._blobs.check_writable()
        self._lists: dict[str, list[str]] | None = None
        """Key of a list → digests; None until the lists of the trainers before were read."""
        self._own: set[str] = set()
        """The directories that this trainer has published."""
        self._sent: set[str] = set()
        """Digests of the version that is being written."""

    def begin(self, version: PendingVersion) -> ObjectVersion:
        return ObjectVersion(self, version, again=version.directory in self._own)

    def send(self, data: memoryview, *, again: bool) -> str:
        """Stores a file of the version that is being written, and answers its digest."""
        digest = self._blobs.put(data, again=again)
        self._sent.add(digest)
        return digest

    def note(self, directory: str, files: tuple[WeightFile, ...]) -> None:
        """Lists the files of a version, all of which are there now."""
        text = encode_json(files)
        kind = WHOLE if all(file.name.endswith(TENSORS) for file in files) else ""
        key = f"{_lists_of(directory)}.{content_digest(text)}{kind}"
        self._blobs.bucket.put(key, text)
        self._known()[key] = _digests(files)
        self._own.add(directory)
        self._sent.clear()

    def let_go(self) -> None:
        """Deletes what was sent of a version that will not be, as far as the store is there: else a sweep does."""
        sent = self._sent
        self._sent = set()
        try:
            self._blobs.drop(sent - self._listed())
        except Unavailable as error:
            log.warning("%s; what was sent of a version stays for now", error)

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        used = {directory.rpartition("/")[2] for directory in in_use}
        self._remove(lambda version, name: version < policy_version and name not in used)

    def remove_after(self, policy_version: int) -> None:
        self._remove(lambda version, _: version > policy_version)

    def clear_scratch(self) -> None:
        """Deletes what no list names and is an hour old: no other trainer of this job writes for so long."""
        self._blobs.sweep(self._listed(), older_than_s=ABANDONED_S)

    def remove_all(self) -> None:
        """Deletes the job's versions, but for one that records; a store that is away keeps them, and the job ends all
        the same."""
        if self._stays:
            return
        self._lists = None
        try:
            open_blobs(self._settings, self.folder.job_id, "weights", deadline_s=LAST_S).drop_versions()
        except Unavailable as error:
            log.warning("the versions of job %s stay in the object store: %s", self.folder.job_id, error)

    def _known(self) -> dict[str, list[str]]:
        if self._lists is None:
            bucket = self._blobs.bucket
            keys = bucket.objects(f"{self.folder.job_id}/versions")
            self._lists = {key: _digests(files_in(bucket, key)) for key in keys}
        return self._lists

    def _listed(self) -> set[str]:
        return {digest for digests in self._known().values() for digest in digests}

    def _remove(self, goes: Callable[[int, str], bool]) -> None:
        """Removes versions: first the objects that no list of another version names, then the lists.

        Args:
            goes: Takes a version's number and its name. The base of adapters has no number, and stays.
        """
        lists = self._known()
        names = {key: key.rpartition("/")[2].partition(".")[0] for key in lists}
        numbers = {key: number_of(name, VERSION) for key, name in names.items()}
        going = [key for key, number in numbers.items() if number is not None and goes(number, names[key])]
        gone = {digest for key in going for digest in lists.pop(key)}
        # The lists go last: a trainer that is killed in between leaves its successor what to delete.
        self._blobs.drop(gone - self._listed() - self._sent)
        self._blobs.bucket.delete(going)


class ObjectFiles(CopiedFiles):
    """The VersionFiles of the object store. Raises ObjectsUnavailable for a store that is away, which says nothing
    about the version.
    """

    announces_early = True

    def __init__(self, settings: StackSettings) -> None:
        super().__init__("the object store", self._bytes_of, bases=self)
        self._blobs_of = lru_cache(maxsize=8)(
            lambda job_id: open_blobs(settings, job_id, "weights", deadline_s=RECEIVER_S)
        )

    def whole(self, step: WeightStep) -> list[VersionFile]:
        """Returns the files of the list that was written last; the version's digest shows whether they are that
        version.
        """
        blobs = self._blobs_of(step.directory.partition("/")[0])
        lists = _lists_of(step.directory)
        there = blobs.bucket.objects(lists.rpartition("/")[0])
        wholes = {key: at for key, at in there.items() if key.startswith(f"{lists}.") and key.endswith(WHOLE)}
        if not wholes:
            return []
        return version_files(replace(step, files=files_in(blobs.bucket, max(wholes, key=wholes.__getitem__))))

    def _bytes_of(self, file: VersionFile) -> bytes:
        version = f"version {file.policy_version}"
        try:
            # Another store's name opens nothing: a process whose stack has no object store is asked for those, too.
            digest = digest_in(file.name)
            return self._blobs_of(file.job_id).get(digest, num_bytes=file.num_bytes)
        except ContractViolation as error:
            raise WeightsRejected(f"{file.name} of {version} isn't in the object store: {error}") from error
        except NotFound as error:
            raise WeightsRejected(f"{version} is not in the object store: {error}") from error


def files_in(bucket: Bucket, key: str) -> tuple[WeightFile, ...]:
    """Returns the files of a list; () of a list that is gone, or can't be read."""
    try:
        files = decode_json(bucket.get(key, most_bytes=2**24), tuple[WeightFile, ...])
        _digests(files)  # names of another kind would be keys
        return files
    except (NotFound, InvalidInput, ContractViolation) as error:
        log.warning("%s can't be read: %s", key, error)
        return ()


def _lists_of(directory: str) -> str:
    """Returns the prefix of the keys of a version's lists."""
    job_id, _, rest = directory.partition("/")
    return f"{job_id}/versions/{rest.rpartition('/')[2]}"


def _digests(files: tuple[WeightFile, ...]) -> list[str]:
    return [digest_in(file.name) for file in files]


def digest_in(name: str) -> str:
    """Returns the digest in a file's name. Raises ContractViolation for a name of another store."""
    match = NAME.fullmatch(name)
    if match is None:
        raise ContractViolation("has no digest in its name", field=name)
    return match["digest"]
