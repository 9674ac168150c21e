"""The loop that decodes: one thread, and all batches that are in the engine.

    generate() ─ put ─▶ waiting ─ join, where its rows fit ─▶ held rows ─ advance ─┬─▶ finished: its completions
                                                                 ▲                 │
                                                                 └─────────────────┘

run   consumes requests in their order; waits for nothing: it ends when no request is left, and the next `put` starts it
      again; produces an answer for each request. One whose answer was cancelled leaves at the next step.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from contracts.errors import BatchFailed, EngineUnavailable
from contracts.rollouts import Completion, PromptBatch
from onbeat.process.crash_points import reach
from producer.engine.base import Turn
from producer.engine.held_rows import GrowingBatch
from producer.engine.sampling import not_finite

TORCH_ERRORS = (RuntimeError, IndexError)
"""torch's own: out of memory, a kernel that failed."""


class Request(GrowingBatch):
    """A batch in the engine, and the answer that its caller waits for."""

    def __init__(self, batch: PromptBatch, turn: Turn | None = None) -> None:
        super().__init__(batch=batch, turn=turn)
        self.answer: Future[list[list[Completion]]] = Future()

    @property
    def is_open(self) -> bool:
        """Whether a caller still waits for the answer."""
        return not self.answer.done()

    def succeed(self) -> None:
        # From here on a caller that cancels is too late, and no error of the loop.
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_result(self.completions)

    def fail(self, error: BaseException) -> None:
        if self.is_open and self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)

    def give_up(self) -> None:
        self.fail(BatchFailed(f"batch {self.batch.batch_id} was given up"))


def is_of_the_gpu(error: Exception) -> bool:
    """Whether a kernel has failed; torch's libraries say so in words alone. Memory that ran out comes back."""
    is_said = any(word in str(error) for word in ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS"))
    return not isinstance(error, torch.OutOfMemoryError) and (isinstance(error, torch.AcceleratorError) or is_said)


def gpu_is_lost(error: Exception) -> EngineUnavailable:
    """The error of an engine whose GPU refuses this process all further work, as it does after a kernel that failed."""
    return EngineUnavailable(f"the GPU is lost to this process, which has to be started anew: {error}")


class Decoder(Protocol):
    """The rows in the model: of several batches (shared_decoding.py), or of one (decoding.py)."""

    def fits(self, batch: PromptBatch) -> bool:
        """Whether a batch may join those that are held."""
        ...

    def join(self, growing: GrowingBatch) -> None:
        """Takes a batch in, with the first token of each of its rows. Raises BatchFailed and what torch raises."""
        ...

    def advance(self) -> list[GrowingBatch]:
        """Samples a token for each row; answers the batches that had to leave, since their logits are not finite."""
        ...

    def drop(self, growing: GrowingBatch) -> None:
        """Lets a batch go before its end."""
        ...

    def reset(self) -> None:
        """Lets all rows go, and gives their memory back."""
        ...


class DecodeLoop:
    """`run` decodes in the engine's thread; `put` and `close` are called from others."""

    def __init__(self, start: Callable[[Callable[[], None]], Any]) -> None:
        """start: has the engine's thread do some work. Raises RuntimeError where that thread was ended."""
        self._start = start
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._suspects: deque[Request] = deque()
        """Those whose shared step failed: which of them is at fault shows when each is decoded by itself."""
        self._held: list[Request] = []
        self._is_running = False
        self._is_closing = False
        self._decoder: Decoder | None = None

    def use(self, decoder: Decoder) -> None:
        """Decodes with it from now on; called in the engine's thread, where no batch is in the engine."""
        self._decoder = decoder

    def put(self, request: Request) -> None:
        with self._lock:
            self._waiting.append(request)
            starts = not self._is_running
            self._is_running = True
        if starts:
            try:
                self._start(self._run)
            except RuntimeError:
                self.close()
                self.end()

    def close(self) -> None:
        """Has what is decoded end at its next token."""
        self._is_closing = True

    def end(self) -> None:
        """Answers what was never begun; the engine's thread is ended."""
        for request in self._all():
            request.give_up()

    def free(self) -> None:
        """Gives the memory of the rows back; called in the engine's thread, where no batch is in the engine."""
        if self._decoder is not None:
            self._decoder.reset()

    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while True:
                self._admit()
                self._let_go()
                if self._held:
                    self._advance()
                elif self._is_over():
                    return
        except BaseException as error:
            self._is_running = False
            for request in self._all():
                request.fail(error)
            raise

    def _is_over(self) -> bool:
        with self._lock:
            self._is_running = bool(self._waiting or self._suspects)
            return not self._is_running

    def _all(self) -> list[Request]:
        """Takes every request out."""
        with self._lock:
            requests = [*self._held, *self._suspects, *self._waiting]
            self._suspects.clear()
            self._waiting.clear()
        self._held = []
        return requests

    def _let_go(self) -> None:
        """Drops what no caller waits for any more."""
        for request in self._held:
            if self._is_closing:
                request.give_up()
            if not request.is_open:
                self._rows.drop(request)
        self._held = [request for request in self._held if request.is_open]

    def _admit(self) -> None:
        """Takes in what has room, in the order of the requests."""
        while (request := self._next()) is not None:
            if self._is_closing:
                request.give_up()
            if not request.is_open:
                continue
            try:
                self._rows.join(request)
            except BatchFailed as error:
                request.fail(error)
            except TORCH_ERRORS as error:
                self._suspect([request], error, is_alone=not self._held)
            else:
                self._held.append(request)
                self._answer_finished()

    def _next(self) -> Request | None:
        with self._lock:
            if not self._held:
                queue = self._suspects or self._waiting
                return queue.popleft() if queue else None
            # A suspect has no company: it may be what all of them would fail of.
            if self._suspects or not self._waiting:
                return None
            return self._waiting.popleft() if self._rows.fits(self._waiting[0].batch) else None

    def _advance(self) -> None:
        if len(self._held) > 1:
            reach("producer.sharing_steps")
        try:
            diverged = self._rows.advance()
        except TORCH_ERRORS as error:
            self._rows.reset()
            requests, self._held = self._held, []
            self._suspect(requests, error, is_alone=len(requests) == 1)
            return
        if diverged:
            for request in self._held:
                if request in diverged:
                    request.fail(not_finite())
            self._held = [request for request in self._held if request not in diverged]
        self._answer_finished()

    def _answer_finished(self) -> None:
        if any(request.finished for request in self._held):
            for request in self._held:
                if request.finished:
                    request.succeed()
            self._held = [request for request in self._held if not request.finished]

    def _suspect(self, requests: list[Request], error: Exception, *, is_alone: bool) -> None:
        """Fails a batch that the engine failed at alone; those that shared a step begin again, each by itself."""
        for request in requests:
            if is_of_the_gpu(error):
                request.fail(gpu_is_lost(error))
                continue
            if is_alone:
                failure = BatchFailed(f"batch {request.batch.batch_id}: the engine failed: {error}")
                failure.__cause__ = error
                request.fail(failure)
                continue
            request.ended.clear()
            with self._lock:
                self._suspects.append(request)

    @property
    def _rows(self) -> Decoder:
        if self._decoder is None:
            raise AssertionError("an engine without verified weights decodes nothing")
        return self._decoder
