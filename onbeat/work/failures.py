"""Whatever foreign code raises, as an error that is answered by name: of the work in hand, or of the whole process.

    an error of ours                          as it is
    any other Exception                       BatchFailed: the work may be the cause, and has an attempt less
    a kernel that failed on the GPU           EngineUnavailable: the worker's process ends, and starts anew
    MemoryError, and what is no Exception     EngineUnavailable, too: SystemExit, KeyboardInterrupt, GeneratorExit, …

An engine, a stage's model, a tokenizer are a library's code: nothing bounds what they raise. An exception that no
handler names would lose the request that it belongs to, and its trainer would wait for a batch that no generator
samples. Two kinds would be lost on their way out of a thread: asyncio drops a StopIteration, and takes a CancelledError
for a cancellation.

The words of such an exception stay with the work (`OnbeatError.foreign`): where its next attempt fails by the same
ones, there is no third (broker/leases.py).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from contracts.errors import BatchFailed, EngineUnavailable, OnbeatError, fault_words, kind_and_text, text_of

T = TypeVar("T")

log = logging.getLogger(__name__)

GPU_WORDS = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS")
"""Torch's libraries say in words alone that a kernel has failed."""


def by_name(work: Callable[[], T], *, what: str) -> T:
    """Runs foreign code, in whatever thread; all that it raises is an OnbeatError.

    Args:
        work: is called without arguments.
        what: names the work in the error, as "loading version 3".
    """
    try:
        return work()
    except OnbeatError:
        raise
    except BaseException as error:
        raise named_failure(error, what=what) from error


def named_failure(error: BaseException, *, what: str) -> BatchFailed | EngineUnavailable:
    """Returns the error that answers a caller who waits for `what`: see the table above."""
    if isinstance(error, (BatchFailed, EngineUnavailable)):
        return error
    failure: BatchFailed | EngineUnavailable
    if isinstance(error, OnbeatError):
        failure = BatchFailed(f"{what} failed: {error}")
        failure.foreign = error.foreign
    elif is_of_the_gpu(error):
        failure = EngineUnavailable(f"the GPU is lost to this process, which has to be started anew: {text_of(error)}")
    elif ends_engine(error):
        failure = EngineUnavailable(f"{what} failed, and its process starts anew: {kind_and_text(error)}")
    else:
        failure = BatchFailed(f"{what} failed: {kind_and_text(error)}")
    failure.__cause__ = error
    if not isinstance(error, OnbeatError):
        failure.foreign = fault_words(error)
        # No handler has foreseen it: where it came from is in this line alone.
        log.warning("%s", failure, exc_info=error)
    return failure


def ends_engine(error: BaseException) -> bool:
    """Returns True for what leaves no engine to go on with; a group of exceptions is as bad as its worst member."""
    if isinstance(error, BaseExceptionGroup):
        return any(ends_engine(member) for member in error.exceptions)
    return isinstance(error, (MemoryError, EngineUnavailable)) or not isinstance(error, Exception)


def is_of_the_gpu(error: BaseException) -> bool:
    """Returns True where a kernel has failed: the GPU refuses this process all further work. Memory that ran out comes
    back."""
    # Not imported here, which takes seconds: where torch raised the error, it is there.
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(error, Exception) or isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or any(word in text_of(error) for word in GPU_WORDS)


def ends_caller(error: BaseException, caller: asyncio.Task[Any] | None) -> bool:
    """Returns True for what ends the task itself, and was raised by nothing that it called: its cancellation, and the
    end of a coroutine that no task runs any more.

    Args:
        caller: the task, as it was when the call began.
    """
    if isinstance(error, asyncio.CancelledError):
        return caller is not None and caller.cancelling() > 0
    return isinstance(error, GeneratorExit) and _running_task() is not caller


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
