"""Environments of a package that is installed beside Onbeat: honest ones, and some that are not."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from onbeat.environments.author import BadTask, Environment, InitialObservation, Message, Reply

COUNTER = itertools.count()


class Echo(Environment):
    """Rewards the number that it says; each reply says all that came before."""

    def __init__(self, *, turns: int = 50) -> None:
        self.turns = turns

    def reset(self, task: dict[str, Any], seed: int) -> InitialObservation | str:
        if "bad" in task:
            raise BadTask("it is bad")
        self.number = seed % 10
        self.said: list[str] = []
        return f"say {self.number}"

    def step(self, message: Message, turn: int) -> Reply:
        self.said.append(message.content)
        is_right = message.content == str(self.number)
        return Reply(
            " ".join(self.said),
            reward=float(is_right),
            done=len(self.said) >= self.turns,
            metrics={"right": self.said.count(str(self.number))},
        )


class Nasty(Echo):
    """Does what the message says."""

    def step(self, message: Message, turn: int) -> Any:
        act: Callable[[], Any] | None = getattr(self, f"do_{message.content.partition(' ')[0]}", None)
        if act is not None:
            self.argument = message.content.partition(" ")[2]
            self.given = message
            found = act()
            if found is not None:
                return found
        return super().step(message, turn)

    def do_hang(self) -> None:
        threading.Event().wait()

    def do_die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def do_leave(self) -> None:
        os._exit(3)

    def do_exit(self) -> None:
        sys.exit(4)

    def do_raise(self) -> None:
        raise ValueError("no")

    def do_nan(self) -> Reply:
        return Reply("x", reward=float("nan"))

    def do_assistant(self) -> Reply:
        return Reply([{"role": "assistant", "content": "I was wrong"}])

    def do_number(self) -> Any:
        return 5

    def do_wrong_content(self) -> Reply:
        return Reply([{"role": "user", "content": 5}])

    def do_wrong_record(self) -> Reply:
        return Reply(Message(role="user", content=5))  # pyright: ignore[reportArgumentType]

    def do_surrogate(self) -> Reply:
        return Reply("\ud800")

    def do_huge(self) -> Reply:
        return Reply("x" * 10_000_000)

    def do_evil(self) -> Reply:
        class Evil(dict):  # type: ignore[type-arg]
            def items(self) -> Any:
                sys.exit(5)

        return Reply("x", metrics=Evil(a=1.0))

    def do_print(self) -> None:
        sys.stdout.write("noise" * 1000)
        os.write(1, b"noise")

    def do_fork(self) -> None:
        os.fork()

    def do_thread(self) -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    def do_timer(self) -> None:
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)

    def do_close(self) -> None:
        os.closerange(3, 256)

    def do_memory(self) -> None:
        self.kept = bytearray(2**40)

    def do_mutate(self) -> None:
        try:
            self.given.content = "another"  # pyright: ignore[reportAttributeAccessIssue]
        except AttributeError:
            return
        raise AssertionError("a message changed")

    def do_connect(self) -> None:
        socket.create_connection(("127.0.0.1", 9))

    def do_read(self) -> None:
        with open(self.argument) as file:
            file.read()

    def do_environment(self) -> Reply:
        with open("/proc/self/environ") as file:
            known = [*os.environ, *file.read().split("\0")]
        return Reply(f"{sum('ONBEAT' in one for one in known)} variables of Onbeat")

    def do_babble(self) -> None:
        for handle in range(3, 64):
            try:
                os.write(handle, b"\xff" * 4096)
            except OSError:
                continue

    def do_child(self) -> None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", self.argument], start_new_session=True)
        self.do_hang()


class Clock(Echo):
    """Says that it is deterministic, and isn't."""

    def step(self, message: Message, turn: int) -> Reply:
        return Reply(f"{time.monotonic_ns()}")


class HonestClock(Nasty):
    deterministic = False

    def step(self, message: Message, turn: int) -> Any:
        found = super().step(message, turn)
        return Reply(f"{time.monotonic_ns()}") if isinstance(found, Reply) else found


class Shared(Echo):
    """Its sessions share a counter: alone it repeats itself, in company it doesn't."""

    def step(self, message: Message, turn: int) -> Reply:
        return Reply(str(next(COUNTER)))


class OwnRandom(Echo):
    """Draws from the global generator, and says so."""

    global_random = True

    def step(self, message: Message, turn: int) -> Reply:
        return Reply(str(random.random()))


class Later(Echo):
    """Is asynchronous."""

    async def step(self, message: Message, turn: int) -> Reply:  # pyright: ignore[reportIncompatibleMethodOverride]
        await asyncio.sleep(0)
        return super().step(message, turn)


class Strict(Echo):
    """Takes one of two levels."""

    def __init__(self, *, level: str) -> None:
        if level not in ("easy", "hard"):
            raise ValueError(f"level is easy or hard, and not {level}")
        super().__init__()
