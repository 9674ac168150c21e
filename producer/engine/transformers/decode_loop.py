"""The loop that decodes: one thread, and all batches that are in the engine.

    generate() ─ put ─▶ waiting ─ join, where its rows fit ─▶ held rows ─ advance ─┬─▶ finished: its completions
                                                                 ▲                 │
                                                                 └─────────────────┘

run   consumes requests in their order; waits for nothing: it ends when no request is left, and the next `put` starts it
      again; produces an answer for each request. One whose answer was cancelled leaves at the next step.

Whatever is raised, each request is answered by name (onbeat/work/failures.py). What a batch may be the cause of
fails that batch. Anything else breaks the loop: all requests get the error of an engine that is gone, those that come
later too, and their generator ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch

from contracts.errors import BatchFailed, EngineUnavailable
from contracts.rollouts import Completion, PromptBatch
from onbeat.base.process.crash_points import reach
from onbeat.work.failures import ends_engine, is_of_the_gpu, named_failure
from producer.engine.base import Turn
from producer.engine.growing_rows import GrowingBatch
from producer.engine.sampling import not_finite

TORCH_ERRORS = (RuntimeError, IndexError)
"""torch's own: out of memory, a kernel that failed. A batch that fails of one as it joins leaves the others whole."""


class Request(GrowingBatch):
    """A batch in the engine, and the answer that its caller waits for."""

    def __init__(self, batch: PromptBatch, turn: Turn | None = None) -> None:
        super().__init__(batch=batch, turn=turn)
        self.answer: Future[list[list[Completion]]] = Future()

    @property
    def is_open(self) -> bool:
        """True while a caller waits for the answer."""
        return not self.answer.done()

    def succeed(self) -> None:
        completions = self.completions
        # From here on a caller that cancels is too late, and no error of the loop.
        if self.answer.set_running_or_notify_cancel():
            self.answer.set_result(completions)

    def fail(self, error: BatchFailed | EngineUnavailable) -> None:
        if self.is_open and self.answer.set_running_or_notify_cancel():
            self.answer.set_exception(error)

    def give_up(self) -> None:
        self.fail(BatchFailed(f"batch {self.batch.batch_id} was given up"))


class Decoder(Protocol):
    """The rows in the model: of several batches (shared_decoding.py), or of one (decoding.py)."""

    def fits(self, batch: PromptBatch) -> bool:
        """Returns True where a batch may join those that are decoded now."""
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

    def __init__(self, start: Callable[[Callable[[], None]], Future[None]]) -> None:
        """Begins without requests.

        Args:
            start: Has the engine's thread do some work. Raises RuntimeError where that thread was ended.
        """
        self._start = start
        self._lock = threading.Lock()
        self._waiting: deque[Request] = deque()
        self._suspects: deque[Request] = deque()
        """Requests whose shared step failed: decoding each by itself shows which of them is at fault."""
        self._joining: Request | None = None
        """The request that is put into the model now."""
        self._requests: list[Request] = []
        self._is_running = False
        self._is_closing = False
        self._broken: EngineUnavailable | None = None
        """The error that ended the loop for good; None while it decodes."""
        self._decoder: Decoder | None = None

    def use(self, decoder: Decoder) -> None:
        """Decodes with it from now on; called in the engine's thread, where no batch is in the engine."""
        self._decoder = decoder

    def put(self, request: Request) -> None:
        with self._lock:
            broken = self._broken
            if broken is None:
                self._waiting.append(request)
            starts = broken is None and not self._is_running
            self._is_running = self._is_running or starts
        if broken is not None:
            request.fail(broken)
        elif starts:
            try:
                running = self._start(self._run)
            except RuntimeError as error:
                self._unstarted(error)
            else:
                running.add_done_callback(self._after_run)

    def close(self) -> None:
        """Has the batches that are decoded end at their next token."""
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
        while True:
            self._admit()
            self._let_go()
            if self._requests:
                self._advance()
            elif self._is_over():
                return

    def _after_run(self, running: Future[None]) -> None:
        """Answers every request where the engine's thread died of something, or never came to `_run`."""
        if running.cancelled():
            # The engine was closed before its thread came to this work: `end` answers the requests.
            return
        error = running.exception()
        if error is not None:
            self._break(error)

    def _unstarted(self, error: RuntimeError) -> None:
        """Answers what was put where the engine's thread takes no work: it was ended, or could not be started."""
        if self._is_closing:
            self.end()
        else:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        failure = named_failure(error, what="the engine's loop")
        if not isinstance(failure, EngineUnavailable):
            failure = EngineUnavailable(f"{failure}; the engine's process starts anew")
            failure.__cause__ = error
        with self._lock:
            self._broken = failure
        for request in self._all():
            request.fail(failure)

    def _is_over(self) -> bool:
        with self._lock:
            self._is_running = bool(self._waiting or self._suspects)
            return not self._is_running

    def _all(self) -> list[Request]:
        """Takes every request out."""
        with self._lock:
            joining = [self._joining] if self._joining is not None else []
            requests = [*joining, *self._requests, *self._suspects, *self._waiting]
            self._suspects.clear()
            self._waiting.clear()
        self._joining = None
        self._requests = []
        return requests

    def _let_go(self) -> None:
        """Drops what no caller waits for any more."""
        for request in self._requests:
            if self._is_closing:
                request.give_up()
            if not request.is_open:
                self._rows.drop(request)
        self._requests = [request for request in self._requests if request.is_open]

    def _admit(self) -> None:
        """Takes in what has room, in the order of the requests."""
        while (request := self._next()) is not None:
            self._joining = request
            if self._is_closing:
                request.give_up()
            if request.is_open:
                self._join(request)
            self._joining = None

    def _join(self, request: Request) -> None:
        try:
            self._rows.join(request)
        except BatchFailed as error:
            request.fail(error)
        except TORCH_ERRORS as error:
            self._suspect([request], error, is_alone=not self._requests)
        except Exception as error:
            # How far it came is unknown: those that were held can't be trusted to be whole.
            self._fail_together([request, *self._requests], error)
        else:
            self._requests.append(request)
            self._answer_finished()

    def _next(self) -> Request | None:
        with self._lock:
            if not self._requests:
                queue = self._suspects or self._waiting
                return queue.popleft() if queue else None
            # A suspect has no company: it may be what all of them would fail of.
            if self._suspects or not self._waiting:
                return None
            if self._rows.fits(self._waiting[0].batch):
                return self._waiting.popleft()
            return None

    def _advance(self) -> None:
        if len(self._requests) > 1:
            reach("producer.sharing_steps")
        try:
            diverged = self._rows.advance()
        except Exception as error:
            # The batches share this step, so none of them can be trusted; the loop's thread goes on for others.
            self._fail_together(self._requests, error)
            return
        if diverged:
            for request in self._requests:
                if request in diverged:
                    request.fail(not_finite())
            self._requests = [request for request in self._requests if request not in diverged]
        self._answer_finished()

    def _answer_finished(self) -> None:
        if any(request.finished for request in self._requests):
            for request in self._requests:
                if request.finished:
                    request.succeed()
            self._requests = [request for request in self._requests if not request.finished]

    def _fail_together(self, requests: list[Request], error: Exception) -> None:
        """Lets all rows go after an error that any of these batches may be the cause of."""
        self._rows.reset()
        self._requests = []
        self._suspect(requests, error, is_alone=len(requests) == 1)

    def _suspect(self, requests: list[Request], error: Exception, *, is_alone: bool) -> None:
        """Fails a batch that the engine failed at alone; those that shared a step begin again, each by itself.

        Raises the error where no batch is to blame for it.
        """
        if ends_engine(error):
            with self._lock:
                self._suspects.extend(requests)
            raise error
        for request in requests:
            if is_of_the_gpu(error) or is_alone:
                request.fail(named_failure(error, what=f"batch {request.batch.batch_id}: the engine"))
                continue
            request.ended.clear()
            with self._lock:
                self._suspects.append(request)

    @property
    def _rows(self) -> Decoder:
        if self._decoder is None:
            raise AssertionError("an engine without verified weights decodes nothing")
        return self._decoder
