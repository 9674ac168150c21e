"""One version on its way out: tensors come one by one, and are hashed and written by threads beside the caller.

    add(name, tensor) ─┬─▶ hashed ─────────────┬─▶ finish() ─▶ WeightManifest
                       └─▶ sink: file, delta,  ┘
                           chunks, adapter

    with publisher.begin(layout, policy_version=4) as publication:
        for name, tensor in ...: publication.add(name, tensor)
        manifest = publication.finish()

Left without `finish`, everything is taken back, and nobody is told of a version.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from types import TracebackType
from typing import Protocol

from torch import Tensor

from contracts.errors import ContractViolation
from contracts.versions import WeightManifest
from process.waiting import Waiting
from weight_store.hashing import HashingThreads
from weight_store.layout import Layout, check_layout

PASSING_BYTES = 64 * 1024**2
"""Of tensors that live for the publication alone: so many wait to be hashed and written, or one that is larger."""
POKE_S = 1.0


class TensorSink(Protocol):
    """Whoever takes a version's tensors one by one: a Publication, or a rank that only keeps step."""

    def make_room(self, num_bytes: int) -> None:
        """Before a tensor is made that lives for the publication alone: returns when it may be."""
        ...

    def add(self, name: str, tensor: Tensor) -> None: ...


class VersionSink(Protocol):
    """What a transport makes of a version's tensors. One thread at a time calls it."""

    def put(self, name: str, tensor: Tensor) -> None:
        """tensor: contiguous, on the CPU; it may be gone after the call."""
        ...

    def close(self, weights_digest: str) -> WeightManifest:
        """All tensors were put: the version becomes loadable, complete or not at all."""
        ...

    def discard(self) -> None:
        """Takes back what was written of a version that will not be."""
        ...


class Publication:
    """Used by one thread, as a context manager."""

    def __init__(self, layout: Layout, sink: VersionSink, *, wait_s: float) -> None:
        """wait_s: longest that the storage may take for one tensor."""
        self._layout = layout
        self._sink = sink
        self._wait_s = wait_s
        self._missing = set(layout)
        self._hashing = HashingThreads()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")
        self._puts: list[Future[None]] = []
        self._waiting_bytes = 0
        self._moved = threading.Condition()
        self._given_up = False
        self._is_over = False

    def __enter__(self) -> Publication:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def make_room(self, num_bytes: int) -> None:
        """Returns when what waits, and a tensor of num_bytes, are PASSING_BYTES at most, or nothing waits.

        Raises DeadlineExceeded where the storage takes nothing any more.
        """
        waiting = self._wait("room for the next tensor of a version")
        with self._moved:
            while self._waiting_bytes and self._waiting_bytes + num_bytes > PASSING_BYTES:
                waiting.poke()
                self._moved.wait(POKE_S)

    def add(self, name: str, tensor: Tensor) -> None:
        """The tensor must not change until `finish` has returned; one that nobody else holds is let go when it is
        written.

        Raises ContractViolation for a tensor that the layout does not have, or that was added before; what goes wrong
        in the threads is raised by `finish`, so that ranks that add tensors together stay in step.
        """
        check_layout(self._layout, name, tensor)
        if name not in self._missing:
            raise ContractViolation("was added twice", field=name)
        self._missing.discard(name)
        data = tensor.detach().cpu().contiguous()
        with self._moved:
            self._waiting_bytes += data.nbytes
        hashed = self._hashing.add_one(name, data)
        self._puts.append(self._writer.submit(self._put, name, [data], hashed))

    def finish(self) -> WeightManifest:
        """Raises ContractViolation while tensors are missing, and whatever ended the writing (OnbeatError that names a
        folder, FencedOff, BrokerUnavailable, DeadlineExceeded); then nothing of the version is left."""
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
        """Ends the threads; without `finish` nothing is left of the version. Safe to repeat."""
        self._given_up = True
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._hashing.close()
        if not self._is_over:
            self._is_over = True
            self._sink.discard()

    def _put(self, name: str, held: list[Tensor], hashed: Future[str]) -> None:
        """held: the tensor; emptied, so that it is gone before anybody is told that there is room."""
        data = held.pop()
        num_bytes = data.nbytes
        try:
            # One failure is enough: what comes after it is only let go.
            if not self._given_up:
                self._sink.put(name, data)
                hashed.result()
        except BaseException:
            self._given_up = True
            raise
        finally:
            del data
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
