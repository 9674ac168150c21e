"""A prefix of an object store, by obstore: a request ends by itself, and is made again while the store is away.

    put, stream, size_of, … ─▶ _ask ─┬─ answered ──▶ the answer
                                     ├─ away: a pause, again, for deadline_s without a byte: ObjectsUnavailable
                                     └─ refused, no such bucket, or no account to ask with: InvalidInput

Away is a store that refuses connections, hangs, answers 5xx, or breaks off. What moves is never away, however slow.
"""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from contracts.errors import ContractViolation, DeadlineExceeded, InvalidInput, NotFound, ObjectsUnavailable, first_line
from onbeat.base.process.folders import make_missing
from onbeat.base.process.waiting import Waiting, backoff

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SETTING = "ONBEAT_OBJECTS"
FORMS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or file:///FOLDER"
SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "file")
PART_BYTES = 8 * 1024**2
"""Bytes of a request that writes, and of a piece that is read: a larger object goes in parts."""
MOST_PARTS = 10_000
"""Most parts of an object of S3."""
PARTS_AT_ONCE = 4
DELETED_AT_ONCE = 1000
MOST_READS = 3
"""Reads of bytes that come as others each time; those that come twice alike are stored so."""
STILL_S = 20.0
"""Longest that a request goes without an answer, or without a byte of it: a part is sent within it."""
CONNECT_S = 5.0
ACCOUNT_S = 20.0
"""Longest that the machine's own account is asked for, by a process that was given none."""
NO_ACCOUNT = re.compile(r"//169\.254\.|//metadata\.google|/latest/api/token")
"""Addresses in an error that came of asking for the machine's own account."""
PAUSE_S = 0.2
LONGEST_PAUSE_S = 2.0
"""Pauses between requests while the store is away, by chance up to the first, then up to twice as long each."""

T = TypeVar("T")


class Bucket:
    """Thread-safe. Each method raises ObjectsUnavailable after `deadline_s` without a byte from the store, and
    InvalidInput that names ONBEAT_OBJECTS where no wait helps."""

    def __init__(self, url: str, *, deadline_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
        """Opens the bucket; sends no request to the store.

        Args:
            url: The bucket's URL.
            deadline_s: The longest that a call goes on without a byte from the store, in seconds.
            sleep: Pauses while the store is away; it may raise.

        Raises:
            InvalidInput: It is no URL of a store, or obstore isn't installed.
        """
        self.url = url
        self._deadline_s = deadline_s
        self._sleep = sleep
        self._store = open_store(url, still_s=min(STILL_S, deadline_s / 2))
        self.traffic: Counter[str] = Counter()
        """Requests, failed ones among them; bytes that were sent and received."""

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Writes an object whole, over one of that name."""
        view = memoryview(data)
        self.put_parts(
            key, lambda size: (view[at : at + size] for at in range(0, len(view), size)), num_bytes=len(view)
        )

    def put_parts(self, key: str, parts: Callable[[int], Iterator[bytes | memoryview]], *, num_bytes: int) -> None:
        """Writes an object of several parts, whole or not at all.

        Args:
            key: The object's key.
            parts: Takes the size of a part, and yields all parts from the first one on; called again for another try.
            num_bytes: The object's size.
        """
        part_bytes = max(PART_BYTES, -(-num_bytes // MOST_PARTS))
        furthest = 0

        def put(waiting: Waiting) -> None:
            def sent() -> Iterator[bytes | memoryview]:
                nonlocal furthest
                for number, part in enumerate(parts(part_bytes)):
                    # The first ones are asked for before the store has taken any; so is each again after a failure.
                    if number > furthest:
                        furthest = number
                        waiting.progress()
                    self.traffic["sent"] += len(part)
                    yield part

            is_whole = num_bytes <= part_bytes
            data: Any = b"".join(sent()) if is_whole else sent()
            self._store.put(key, data, use_multipart=not is_whole, chunk_size=part_bytes, max_concurrency=PARTS_AT_ONCE)

        try:
            self._ask(f"take {num_bytes} bytes", key, put)
        except NotFound as error:
            problem = f"`{self.url[:200]}` names a bucket that isn't there"
            raise InvalidInput(problem, field=SETTING, cure="make it, or name another") from error

    def create(self, key: str, data: bytes) -> bool:
        """Writes an object where there is none; False where there is one of other bytes, which stays."""
        from obstore.exceptions import AlreadyExistsError

        def put(_waiting: Waiting) -> bool:
            try:
                self._store.put(key, data, mode="create")
                return True
            except AlreadyExistsError:
                # The store may have taken the name, and only its answer was lost.
                return bytes(self._store.get(key).bytes()) == data

        return self._ask("take a name", key, put)

    def stream(self, key: str, take: Callable[[memoryview], None], *, most_bytes: int) -> int:
        """Hands on an object's bytes in order, and answers how many came: `most_bytes` + 1 for a larger one.

        A stream that breaks off goes on where it was. Raises NotFound.
        """
        num_taken = 0

        def read(waiting: Waiting) -> int:
            nonlocal num_taken
            if num_taken and num_taken >= most_bytes:
                return num_taken
            rest = self._store.get(key, options={"range": {"offset": num_taken}} if num_taken else None)
            for piece in rest.stream(min_chunk_size=1024**2):
                data = memoryview(piece)
                self.traffic["received"] += len(data)
                if num_taken + len(data) > most_bytes:
                    return most_bytes + 1
                take(data)
                num_taken += len(data)
                waiting.progress()
            return num_taken

        return self._ask(f"give {most_bytes} bytes", key, read)

    def get(self, key: str, *, most_bytes: int) -> bytes:
        """Returns the bytes of an object, cut after `most_bytes`. Raises NotFound."""
        data = bytearray()
        self.stream(key, data.extend, most_bytes=most_bytes)
        return bytes(data)

    def size_and_age(self, key: str) -> tuple[int, datetime]:
        """Returns the bytes of an object, and the time at which the store says that it was written. Raises NotFound."""
        meta = self._ask("say what it has", key, lambda _: self._store.head(key))
        return meta["size"], meta["last_modified"]

    def objects(self, prefix: str) -> dict[str, datetime]:
        """Lists the objects below a prefix that ends where a name does: key → time of writing, by the store's clock."""
        return {key: written_at for key, (_, written_at) in self.sizes_and_ages(prefix).items()}

    def sizes_and_ages(self, prefix: str) -> dict[str, tuple[int, datetime]]:
        """Lists objects as `objects` does: key → size in bytes, and time of writing."""
        furthest = 0

        def listed(waiting: Waiting) -> dict[str, tuple[int, datetime]]:
            nonlocal furthest
            objects: dict[str, tuple[int, datetime]] = {}
            for part in self._store.list(prefix=prefix):
                objects |= {meta["path"]: (meta["size"], meta["last_modified"]) for meta in part}
                if len(objects) > furthest:
                    furthest = len(objects)
                    waiting.progress()
            return objects

        return self._ask("say what it has", prefix, listed)

    def folders(self) -> list[str]:
        """Returns the first parts of the keys of all objects that lie in a folder, sorted."""
        return self._ask(
            "say which folders it has",
            "",
            lambda _: sorted(prefix.strip("/") for prefix in self._store.list_with_delimiter()["common_prefixes"]),
        )

    def delete(self, keys: Collection[str]) -> None:
        """Deletes those that are there."""
        left = list(keys)

        def delete_each(waiting: Waiting) -> None:
            while left:
                batch = left[:DELETED_AT_ONCE]
                try:
                    self._store.delete(batch)
                except FileNotFoundError:
                    # A store of local files stops at the first key that isn't there, so the keys are tried singly.
                    for key in batch:
                        with contextlib.suppress(FileNotFoundError):
                            self._store.delete(key)
                del left[: len(batch)]
                waiting.progress()

        self._ask(f"delete {len(keys)} objects", "", delete_each)

    def delete_below(self, *prefixes: str) -> None:
        """Deletes what is below them."""
        self.delete([key for prefix in prefixes for key in self.objects(prefix)])

    def now(self, prefix: str) -> datetime:
        """Reads the store's clock from an object that it writes below the prefix, reads back and deletes.

        Raises:
            ObjectsUnavailable: Other bytes come back each time: a proxy answers, and not the store.
        """
        key = f"{prefix}/.{uuid.uuid4().hex}"
        self.put(key, key.encode())
        try:
            if all(self.get(key, most_bytes=len(key)) != key.encode() for _ in range(MOST_READS)):
                raise ObjectsUnavailable(
                    "returns other bytes than were stored: check that no proxy answers in its place", field=SETTING
                )
            return self.size_and_age(key)[1]
        finally:
            self.delete([key])

    def _ask(self, what: str, key: str, request: Callable[[Waiting], T]) -> T:
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        waiting = Waiting(f"the object store to {what}", deadline_s=self._deadline_s)
        pauses = backoff(base_s=PAUSE_S, cap_s=LONGEST_PAUSE_S)
        while True:
            self.traffic["requests"] += 1
            try:
                return request(waiting)
            except FileNotFoundError as error:
                raise NotFound("is not in the object store", field=key) from error
            except (BaseError, OSError) as error:
                last = error
                self.traffic["failures"] += 1
            is_new = self.traffic["failures"] == self.traffic["requests"]  # an account that it had comes back
            lacks_account = is_new and NO_ACCOUNT.search(str(last)) is not None and waiting.waited_s >= ACCOUNT_S
            if lacks_account or isinstance(last, PermissionDeniedError | UnauthenticatedError):
                problem = f"the store refuses to {what}: {first_line(last)}"
                raise InvalidInput(problem, field=SETTING, cure="set an account that may, by the provider's variables")
            try:
                waiting.poke()
            except DeadlineExceeded as over:
                raise ObjectsUnavailable(f"{over.problem}: {first_line(last)}", field=SETTING) from last
            self._sleep(min(next(pauses), waiting.left_s))


def open_store(url: str, *, still_s: float) -> ObjectStore:
    """Opens the store of a URL; credentials and an endpoint come from the provider's own variables.

    Args:
        url: The URL.
        still_s: The longest that a request waits for a byte, in seconds. No request is repeated below this module.

    Raises:
        InvalidInput: It is no URL of a store.
    """
    if not url:
        raise InvalidInput("no object store is named", field=SETTING, cure=FORMS)
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise InvalidInput("needs obstore", field=SETTING, cure='pip install "onbeat[objects]"') from error
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES or not rest.strip("/") or (scheme == "file" and rest[0] != "/"):
        raise InvalidInput(f"`{url[:200]}` names no object store", field=SETTING, cure=FORMS)
    try:
        if scheme == "file":
            make_missing(Path(unquote(urlsplit(url).path)))
            return from_url(url, automatic_cleanup=True)
        return from_url(
            url,
            client_options={
                # An endpoint without TLS is the operator's word: its URL says so.
                "allow_http": True,
                "connect_timeout": timedelta(seconds=min(CONNECT_S, still_s)),
                "read_timeout": timedelta(seconds=still_s),
                # A day: obstore would end what is large and slow after half a minute.
                "timeout": timedelta(days=1),
            },
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=still_s)},
        )
    except (BaseError, ValueError, OSError) as error:
        raise InvalidInput(f"`{url[:200]}` can't be opened: {first_line(error)}", field=SETTING, cure=FORMS) from error


def check_name(name: str, form: str) -> str:
    """Returns a name that becomes a key.

    Args:
        name: The name.
        form: A regular expression that the whole name must match.

    Raises:
        ContractViolation: It has another form.
    """
    if not re.fullmatch(form, name):
        raise ContractViolation(f"`{name[:80]!a}` is no name of an object", field="name")
    return name
