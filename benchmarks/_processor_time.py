"""Where processor time goes: of each process as the system counts it, and of Python by py-spy's stacks."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

LOOK_S = 0.5
RATE = 100
"""Looks a second."""
OTHER = "other Python"
WAITS = ("selectors.py:", "Condition.wait", "Event.wait", "_worker (", "poll (")
OF_OURS = ("producer", "consumer", "reward_service", "gateway", "onbeat")
ENDS_S = 600.0
"""By then py-spy has written what it saw."""

RULES: Sequence[tuple[str, str]] = (
    ("packed_products.py:", "sampling: products"),
    ("lean_step.py:_attended", "sampling: attention"),
    ("row_cache.py:", "sampling: attention"),
    ("lean_step.py:", "sampling: norms, rotation, activation"),
    ("producer/engine/sampling.py:", "sampling: draws"),
    ("sampled_values.py:", "sampling: draws"),
    ("held_rows.py:", "sampling: books of rows"),
    ("shared_decoding.py:", "sampling: books of rows"),
    ("decode_loop.py:", "sampling: books of rows"),
    ("row_steps.py:", "sampling: prompts"),
    ("canary.py:", "sampling: canary"),
    ("onbeat/weights/", "weights: published, received"),
    ("producer/receipt.py:", "weights: published, received"),
    ("consumer/gradient/accumulation.py:", "passes: exact sums"),
    ("consumer/ranks/fsdp/sharded_sums.py:", "passes: exact sums"),
    ("consumer/gradient/optimizer.py:", "optimizer"),
    ("torch/autograd/graph.py:_engine_run_backward", "passes: backward"),
    ("consumer/model/published_weights.py:", "weights: published, received"),
    ("consumer/model/checkpoint.py:", "checkpoint"),
    ("consumer/gradient/losses/", "passes: loss"),
    ("consumer/gradient/terms/", "passes: loss"),
    ("consumer/gradient/statistics.py:", "passes: loss"),
    ("consumer/gradient/micro_batch.py:", "passes: rows"),
    ("consumer/model/rows.py:", "passes: rows"),
    ("consumer/gradient/log_probs.py:", "passes: forward"),
    ("consumer/gradient/micro_step.py:", "passes: loss"),
    ("consumer/gradient/", "passes: rest"),
    ("contracts/encoding/", "serialisation and digests"),
    ("redis/", "Redis: clients"),
    ("broker/", "Redis: clients"),
    ("onbeat/scoring/", "rewards"),
    ("reward_service/", "rewards"),
    ("httpx", "rewards"),
    ("producer/detokenizer.py:", "serialisation and digests"),
    ("onbeat/data/prompts/", "prompts: read and tokenized"),
    ("consumer/trainer/", "trainer: books and metrics"),
    ("onbeat/loop/", "trainer: books and metrics"),
    ("onbeat/base/telemetry/", "trainer: books and metrics"),
    ("producer/", "generator: books"),
    ("asyncio/", "event loops"),
    ("selectors.py:", "event loops"),
    ("threading.py:", "threads: wake-ups"),
    ("concurrent/futures/", "threads: wake-ups"),
    ("consumer/ranks/", "passes: rest"),
    ("consumer/ranks/processes/", "passes: rest"),
    ("gateway/", "gateway"),
    ("uvicorn", "gateway"),
    ("starlette", "gateway"),
)
"""Part of "folder/file.py:function" → where its time belongs; the innermost frame that has one decides."""


class ProcessTimes:
    """A context manager that looks at the processor time of all descendants, by a thread."""

    def __enter__(self) -> ProcessTimes:
        self.looks: list[tuple[float, dict[tuple[int, str], float]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        me = psutil.Process(os.getpid())
        while not self._stop.wait(LOOK_S):
            found: dict[tuple[int, str], float] = {}
            for process in me.children(recursive=True):
                try:
                    times, command = process.cpu_times(), " ".join(process.cmdline())
                except psutil.Error:
                    continue
                found[process.pid, command] = times.user + times.system
            self.looks.append((time.time(), found))

    def between(self, from_s: float, to_s: float) -> dict[tuple[int, str], float]:
        """Process → seconds of a processor, of the looks that lie there, for the whole time."""
        kept = [look for look in self.looks if from_s <= look[0] <= to_s]
        (first_s, first), (last_s, last) = kept[0], kept[-1]
        stretch = (to_s - from_s) / (last_s - first_s)
        return {process: stretch * (spent - first.get(process, spent)) for process, spent in last.items()}


def place_of(stack: str) -> str:
    """stack: py-spy's, "function (file:line);…", the innermost last."""
    for frame in reversed(stack.split(";")):
        function, _, place = frame.partition(" (")
        name = f"{place.rpartition(':')[0]}:{function}"
        for part, found in RULES:
            if part in name:
                return found
    return OTHER


def waits_in(stack: str) -> bool:
    """Whether its thread has just been woken, or is about to be: such a one counts as computing where cores are few."""
    function = stack.rpartition(";")[2]
    return any(part in function for part in WAITS)


class Looked:
    """Stacks of all Python processes of a job, from now on for some seconds."""

    def __init__(self, py_spy: str, folder: Path, seconds: int) -> None:
        self._folder = folder
        self._spies: list[subprocess.Popen[bytes]] = []
        for process in psutil.Process(os.getpid()).children(recursive=True):
            command = process.cmdline()
            if len(command) > 2 and "-m" in command and command[command.index("-m") + 1].split(".")[0] in OF_OURS:
                to = folder / f"{process.pid}.raw"
                flags = [
                    "-d",
                    str(seconds),
                    "-r",
                    str(RATE),
                    "-f",
                    "raw",
                    "--full-filenames",
                    "--function",
                    "-o",
                    str(to),
                ]
                spy = [py_spy, "record", "-p", str(process.pid), *flags]
                self._spies.append(subprocess.Popen(spy, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        for one in self._spies:
            one.wait(seconds + ENDS_S)
        if not any(folder.glob("*.raw")):
            raise SystemExit("--py-spy: it saw none of the processes; it may look at others as root alone")

    def samples(self) -> tuple[dict[int, Counter[str]], Counter[str]]:
        """Process → place → samples; and the stacks that no rule knows."""
        found: dict[int, Counter[str]] = {}
        unknown: Counter[str] = Counter()
        for path in self._folder.glob("*.raw"):
            places = found.setdefault(int(path.stem), Counter())
            for line in path.read_text().splitlines():
                stack, _, count = line.rpartition(" ")
                if waits_in(stack):
                    continue
                places[place_of(stack)] += int(count)
                if place_of(stack) == OTHER:
                    unknown[";".join(stack.split(";")[-4:])] += int(count)
        return found, unknown


def role_of(command: str) -> str:
    """What a process without Python, or of which no look was kept, is for."""
    for part, role in (("valkey", "Redis: server"), ("redis", "Redis: server"), ("reward_service", "rewards")):
        if part in command:
            return role
    return "other processes"
