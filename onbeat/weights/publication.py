"""A version on its way out: tensors come one by one, and threads hash and write them while the caller goes on.

    add(name, tensor) ─┬─▶ hashed ──────────────────────┬─▶ finish() ─▶ WeightManifest ─▶ announced by the trainer
                       └─▶ sink: files, delta, chunks,  ┘
                           adapters

    with publisher.begin(layout, policy_version=4) as publication:
        for name, tensor in ...: publication.add(name, tensor)
        manifest = publication.finish()

A publication that ends without `finish` takes everything back, and no generator is told of a version.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, UnsetType
from torch import Tensor

from contracts.errors import ContractViolation
from contracts.probes import Probe
from contracts.versions import WeightManifest
from onbeat.base.process.waiting import Waiting
from onbeat.weights.hashing import TOGETHER_BYTES, HashingThreads, Named
from onbeat.weights.layout import Layout, TensorLayout
from onbeat.weights.stores import VersionStore

PASSING_BYTES = 64 * 1024**2
"""Bytes of tensors, living for the publication alone, that wait to be hashed and written; one tensor may be larger."""
POKE_S = 1.0


class TensorSink(Protocol):
    """A receiver of a version's tensors, which come one by one: a Publication, or a rank that only keeps step."""

    def make_room(self, num_bytes: int) -> None:
        """Returns when a tensor that lives for the publication alone may be made."""

    def add(self, name: str, tensor: Tensor) -> None: ...


class VersionSink(Protocol):
    """The part of a transport that writes a version's tensors. One thread at a time calls it."""

    def put(self, name: str, tensor: Tensor) -> None:
        """Takes a tensor, contiguous and on the CPU; it may be gone after the call."""

    def close(self, weights_digest: str) -> WeightManifest:
        """Makes the version loadable, complete or not at all, once all tensors were put."""
        ...

    def discard(self) -> None:
        """Takes back what was written of a version that will not be."""


@dataclass(frozen=True, kw_only=True)
class StoredVersion:
    """A version that was published once, with the tensors that its files held then."""

    policy_version: int
    weights_digest: str
    tensors: Mapping[str, Tensor]
    """The weights, or the matrices where the job publishes adapters alone; each is read when it is asked for."""
    tensors_digest: str
    """Digest of `tensors`: of weights it is weights_digest."""
    probe: Probe | UnsetType = UNSET
    """The probe that it was published with; left out where it had none."""


class WeightPublisher(Protocol):
    """The publisher of one trainer's versions. The trainer creates it; tests/unit/onbeat/weights/test_weight_store.py
    runs over every implementation.
    """

    store: VersionStore
    """Where they are, and what removes them but for `remove_before`."""

    def begin(self, layout: Layout, *, policy_version: int, is_again: bool = False) -> Publication:
        """Begins a version. It is finished when it is loadable by its manifest, complete or not at all. Safe to repeat.

        Args:
            layout: The version's layout.
            policy_version: The version.
            is_again: True for a version that was published, and that receivers refuse: it is written again if it is
                damaged, so that the manifest it was published under holds.
        """
        ...

    def publish_stored(self, stored: StoredVersion, layout: Layout) -> WeightManifest:
        """Publishes a version again that the policy has moved on from.

        Args:
            stored: The version.
            layout: Its layout, as for `begin`.

        Raises:
            WeightsRejected: The tensors aren't the version. Other errors are those of `begin` and `Publication.finish`.
        """
        ...

    def remove_before(self, policy_version: int, *, in_use: Collection[str] = ()) -> None:
        """Removes older versions, as the store does, but for those that kept ones stand on."""


class Publication:
    """A TensorSink, used by one thread as a context manager."""

    def __init__(self, layout: Layout, sink: VersionSink, *, wait_s: float) -> None:
        """Begins to take tensors.

        Args:
            layout: The version's layout.
            sink: The transport's part.
            wait_s: The longest that the storage may take for one tensor, in seconds.
        """
        self._layout = layout
        self._sink = sink
        self._wait_s = wait_s
        self._missing = set(layout)
        self._hashing = HashingThreads()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._puts: list[Future[None]] = []
        self._together: list[Named] = []
        """Tensors that are handed to the threads with the next ones."""
        self._waiting_bytes = 0
        self._moved = threading.Condition()
        self._given_up = False
        self._is_over = False

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *error: object) -> None:
        self.abandon()

    def make_room(self, num_bytes: int) -> None:
        """Returns when what waits, and a tensor of num_bytes, are PASSING_BYTES at most, or nothing waits.

        Raises DeadlineExceeded where the storage takes nothing any more.
        """
        waiting = self._wait("room for the next tensor of a version")
        if self._waiting_bytes + num_bytes > PASSING_BYTES:
            self._hand_over()
        with self._moved:
            while self._waiting_bytes and self._waiting_bytes + num_bytes > PASSING_BYTES:
                waiting.poke()
                self._moved.wait(POKE_S)

    def add(self, name: str, tensor: Tensor) -> None:
        """Hands a tensor to the threads: it must not change until `finish` has returned. One that nothing else holds
        is let go when it is written.

        Raises ContractViolation for a tensor that the layout does not have, or that was added before; what goes wrong
        in the threads is raised by `finish`, so that ranks that add tensors together stay in step.
        """
        announced = self._layout.get(name)
        if announced != TensorLayout(dtype=tensor.dtype, shape=tuple(tensor.shape)):
            raise ContractViolation(f"{tensor.dtype} {list(tensor.shape)} was not announced: {announced}", field=name)
        if name not in self._missing:
            raise ContractViolation("was added twice", field=name)
        self._missing.discard(name)
        data = tensor.detach().cpu().contiguous()
        with self._moved:
            self._waiting_bytes += data.nbytes
        self._together.append((name, data))
        if not self._missing or sum(tensor.nbytes for _, tensor in self._together) >= TOGETHER_BYTES:
            self._hand_over()

    def finish(self) -> WeightManifest:
        """Waits for the threads, and makes the version loadable.

        Raises ContractViolation while tensors are missing, and what ended the writing (OnbeatError that names a folder,
        FencedOff, BrokerUnavailable, DeadlineExceeded); then nothing of the version is left.
        """
        try:
            if self._missing:
                raise ContractViolation(f"{len(self._missing)} tensors are missing", field=min(self._missing))
            waiting = self._wait("a version to be written")
            for put in self._puts:
                self._result_of(put, waiting)
                waiting.progress()
            manifest = self._sink.close(self._hashing.digest())
            self._is_over = True
            return manifest
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Ends the threads; where `finish` has not returned, nothing is left of the version. Safe to repeat."""
        self._given_up = True
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._hashing.close()
        if not self._is_over:
            self._is_over = True
            self._sink.discard()

    def _hand_over(self) -> None:
        """Hands the tensors that were gathered to the hashing threads and to the writer's thread."""
        if self._together:
            tensors = self._together
            self._together = []
            hashed = self._hashing.add_together(tensors)
            # Reversed: the writer takes each from the list's end, so that the first one is written first.
            self._puts.append(self._writer.submit(self._put, tensors[::-1], hashed))

    def _put(self, tensors: list[Named], hashed: Future[dict[str, str]]) -> None:
        """Writes tensors, and lets each go; runs in the writer's thread.

        Args:
            tensors: The last one first; each is taken out, so that it is gone before `make_room` learns of it.
            hashed: Their hashes, awaited so that an error of the hashing threads is raised here.
        """
        num_bytes = sum(data.nbytes for _, data in tensors)
        try:
            # After a failure the tensors that follow are only let go.
            while tensors and not self._given_up:
                self._sink.put(*tensors.pop())
            if not self._given_up:
                hashed.result()
        except BaseException:
            self._given_up = True
            raise
        finally:
            # The tensors go first: `make_room` would let the next one be made while these are still in memory.
            tensors.clear()
            with self._moved:
                self._waiting_bytes -= num_bytes
                self._moved.notify_all()

    def _result_of(self, put: Future[None], waiting: Waiting) -> None:
        while True:
            try:
                return put.result(timeout=POKE_S)
            except NotYet:
                waiting.poke()
            except CancelledError:
                raise ContractViolation("a publication that was abandoned cannot be finished") from None

    def _wait(self, what: str) -> Waiting:
        return Waiting(what, deadline_s=self._wait_s, cure="is the storage of the weights there, and has it room?")
