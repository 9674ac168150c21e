"""Exceptions of any kind, as a library or a model may raise them; each call makes a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch


class UnreadableError(Exception):
    """Its own text can't be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


class OwnEnd(BaseException):
    """A library's own, which is no Exception."""


OF_A_BATCH: dict[str, Callable[[], BaseException]] = {
    "ArithmeticError": lambda: ArithmeticError("an overflow"),
    "AssertionError": lambda: AssertionError("shapes differ"),
    "AttributeError": lambda: AttributeError("'LinearAttentionLayer' has no attribute 'batch_repeat_interleave'"),
    "EOFError": lambda: EOFError("the file ends"),
    "ExceptionGroup": lambda: ExceptionGroup("two problems", [KeyError("layers"), ValueError("a mask")]),
    "IndexError": lambda: IndexError("token 17"),
    "KeyError": lambda: KeyError("layers"),
    "NotImplementedError": lambda: NotImplementedError("this cache is not supported"),
    "OSError": lambda: OSError(28, "No space left on device"),
    "OutOfMemoryError": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
    "RuntimeError": lambda: RuntimeError("a kernel's shapes"),
    "StopAsyncIteration": lambda: StopAsyncIteration("the end"),
    "StopIteration": lambda: StopIteration("the end"),
    "TimeoutError": lambda: TimeoutError("the engine's own"),
    "TypeError": lambda: TypeError("forward() got an unexpected keyword argument 'attention_mask'"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "UnreadableError": UnreadableError,
    "ValueError": lambda: ValueError("a mask of rank 5"),
    "ZeroDivisionError": lambda: ZeroDivisionError("division by zero"),
}
"""Kinds that a batch may be the cause of: it fails, by their name."""
OF_THE_ENGINE: dict[str, Callable[[], BaseException]] = {
    "BaseExceptionGroup": lambda: BaseExceptionGroup("one of them ends", [ValueError("a mask"), OwnEnd("over")]),
    "CancelledError": lambda: asyncio.CancelledError("no caller cancelled"),
    "GeneratorExit": lambda: GeneratorExit("closed"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("in a thread"),
    "MemoryError": lambda: MemoryError("no memory is left"),
    "OwnEnd": lambda: OwnEnd("over"),
    "SystemExit": lambda: SystemExit(0),
}
"""Kinds after which there is no engine to go on with: its process starts anew."""
ALL = OF_A_BATCH | OF_THE_ENGINE
