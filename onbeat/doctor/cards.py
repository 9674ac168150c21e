"""The GPUs of this machine, as its driver and torch see them: what would keep a job from them, with the cure.

    nvidia-smi ─▶ cards, their free memory, the processes on them ─┐
    torch      ─▶ its build, the cards that it sees               ─┴▶ findings

`Ask` is the seam: a test on a machine without a GPU hands another answer of nvidia-smi in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

from msgspec.structs import replace

from contracts.encoding.wire import Record, decode_json
from contracts.engines import Engine, VllmOptions
from contracts.errors import InvalidInput
from onbeat.doctor.finding import GIB, MIB, Finding, Level, bad, gib, ok, warn

Ask: TypeAlias = Callable[[Sequence[str]], str | None]
"""Runs nvidia-smi with arguments; returns what it prints, None where it isn't there or fails."""
DRIVER_TIMEOUT_S = 5.0
TORCH_TIMEOUT_S = 60.0
"""A first import of torch from a cold disk takes a while."""
ASK_TORCH = """
import json, torch
seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
capability = torch.cuda.get_device_capability(0) if seen else (0, 0)
print(json.dumps(dict(version=torch.__version__, cuda=torch.version.cuda or "", num_seen=seen, capability=capability)))
"""
CARD_COLUMNS = "index,name,driver_version,memory.total,memory.free"
PROCESS_COLUMNS = "pid,used_memory"
LEAST_FREE = 4 * GIB
"""Less than this isn't enough for weights of half a billion parameters and their sums."""
SHARED_CACHE_SHARE = 0.2
"""The share of a card, which trainer and vLLM use in turns, that vLLM's cache gets where its size isn't set. By itself
vLLM starts only where nine tenths of the card are free, and a trainer that came first has part of them."""
USED_SHARE = 0.1
"""A card of whose memory more is used has another process on it, also where the driver names no process."""
WITHOUT_UNITS = "--format=csv,noheader,nounits"


class Card(Record, frozen=True, kw_only=True):
    """A GPU, as its driver sees it."""

    index: int
    name: str
    driver: str
    """The driver's version."""
    total_bytes: int
    free_bytes: int


class TorchBuild(Record, frozen=True, kw_only=True):
    """The build of this process's torch, and the GPUs that it sees."""

    version: str
    cuda: str = ""
    """The version of CUDA that it is built for; "" for none."""
    num_seen: int = 0
    """GPUs that it sees."""
    capability: tuple[int, int] = (0, 0)
    """The compute capability of the first card."""


def run_nvidia_smi(arguments: Sequence[str]) -> str | None:
    """The `Ask` of this machine."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        query = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return query.stdout if query.returncode == 0 else None


def torch_build() -> TorchBuild:
    """Returns what this Python's torch can do.

    A process of its own asks it: one that has looked at a GPU keeps some of its memory.
    """
    command = [sys.executable, "-c", ASK_TORCH]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S, check=False)
        return decode_json(answer.stdout.encode(), TorchBuild)
    except (OSError, subprocess.TimeoutExpired, InvalidInput):
        return TorchBuild(version="that doesn't answer")


def cards_of(ask: Ask) -> list[Card]:
    """Returns the GPUs that the driver knows; none where no driver answers."""
    cards: list[Card] = []
    for values in _rows(ask([f"--query-gpu={CARD_COLUMNS}", WITHOUT_UNITS]), num_columns=5):
        index, name, driver, total, free = values
        try:
            card = Card(
                index=int(index),
                name=name,
                driver=driver,
                total_bytes=int(total) * MIB,
                free_bytes=int(free) * MIB,
            )
        except ValueError:
            # "[N/A]": the driver doesn't say it of this card, as of one that is lent in parts.
            continue
        cards.append(card)
    return cards


def processes_of(ask: Ask) -> list[tuple[int, int]]:
    """Returns (pid, bytes) of each process on a GPU. In a container the driver names none."""
    processes: list[tuple[int, int]] = []
    for pid, used in _rows(ask([f"--query-compute-apps={PROCESS_COLUMNS}", WITHOUT_UNITS]), num_columns=2):
        if pid.isdecimal():
            processes.append((int(pid), int(used) * MIB if used.isdecimal() else 0))
    return processes


def _rows(text: str | None, *, num_columns: int) -> Iterator[list[str]]:
    for line in (text or "").splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == num_columns:
            yield values


def look(
    device: str, engine: Engine, build: TorchBuild, ask: Ask = run_nvidia_smi, *, is_shared: bool = False
) -> Iterator[Finding]:
    """Yields the findings about GPUs.

    Args:
        device: ONBEAT_DEVICE, "cpu" or "cuda".
        engine: The engine of this machine's generators.
        build: This process's torch.
        ask: Runs nvidia-smi.
        is_shared: True where another process of the stack may be on the same card, in turns with this one.
    """
    cards = cards_of(ask)
    yield of_torch(device, build, cards)
    if device != "cuda":
        return
    for card in cards:
        yield of_card(card, engine, processes_of(ask), is_shared=is_shared)
    if isinstance(engine, VllmOptions) and engine.batch_invariant and build.num_seen and build.capability < (8, 0):
        major, minor = build.capability
        yield bad(
            "kernels",
            f"engine batch_invariant needs capability 8.0, and this card has {major}.{minor}",
            "leave batch_invariant out, and set deterministic = false in the spec",
        )


def of_torch(device: str, build: TorchBuild, cards: Sequence[Card]) -> Finding:
    """Judges whether torch can compute on what the driver has."""
    driver = cards[0].driver if cards else ""
    if build.num_seen:
        major, minor = build.capability
        says = f"torch {build.version} sees {build.num_seen}, CUDA {build.cuda}, capability {major}.{minor}"
        if device != "cuda":
            return warn("gpu", f"{says}: unused, since ONBEAT_DEVICE=cpu", "unset it, or set ONBEAT_DEVICE=cuda")
        return ok("gpu", says)
    if device != "cuda":
        if cards:
            return warn("gpu", f"driver {driver} is there, and torch {build.version} doesn't use it", _cure(build))
        return ok("gpu", "none: jobs run on the CPU")
    if not cards:
        cure = "install NVIDIA's driver, or start the container with its GPUs (docker run --gpus all)"
        return bad("gpu", "ONBEAT_DEVICE=cuda, and no driver answers (nvidia-smi)", cure)
    return bad("gpu", f"ONBEAT_DEVICE=cuda, driver {driver}, and torch {build.version} sees no card", _cure(build))


def _cure(build: TorchBuild) -> str:
    if not build.cuda:
        return "install torch's build for CUDA: this one is for CPUs alone"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides them: unset it, or name one that is there"
    return f"its CUDA {build.cuda} is newer than the driver takes: update the driver, or take an older build of torch"


def of_card(card: Card, engine: Engine, processes: Sequence[tuple[int, int]], *, is_shared: bool = False) -> Finding:
    """Judges the free memory of a card, and who has the rest.

    Of a shared card the whole memory is judged: what another process of the stack has now it gives back in its turn.
    """
    subject = f"card {card.index}"
    free = f"{card.name}, {gib(card.free_bytes)} of {gib(card.total_bytes)} free"
    room = card.total_bytes if is_shared else card.free_bytes
    cache_bytes = engine.kv_cache_mb * MIB if isinstance(engine, VllmOptions) else 0
    if cache_bytes and room < cache_bytes:
        cure = f"set kv_cache_mb to less than {room // MIB} (compose: KV_CACHE_MB), or free the card"
        return bad(subject, f"{free}: too little for a cache of {gib(cache_bytes)} (kv_cache_mb)", cure)
    used = card.total_bytes - card.free_bytes
    others = [f"{pid} ({gib(num_bytes)})" for pid, num_bytes in processes if pid != os.getpid()]
    cure = "end what runs there, or choose another card: CUDA_VISIBLE_DEVICES (compose: TRAINER_GPU, GENERATOR_GPU)"
    if room < LEAST_FREE:
        return bad(subject, f"{free}: too little for weights, sums and a cache", cure)
    if not is_shared and used > USED_SHARE * card.total_bytes:
        by = f"processes on this machine's cards: {', '.join(others)}" if others else "the driver doesn't name by whom"
        return warn(subject, f"{free}: another process has the rest; {by}", cure)
    return ok(subject, free)


def check_cards(cards: Collection[int], engine: Engine, build: TorchBuild, ask: Ask = run_nvidia_smi) -> list[str]:
    """Checks the cards of a stack before a process starts on them; others aren't judged.

    Args:
        cards: The numbers of the cards, by nvidia-smi.
        engine: The generators'.
        build: The trainer's torch.
        ask: Runs nvidia-smi.

    Returns:
        The warnings, a line each.

    Raises:
        InvalidInput: With the first thing that would keep a process from its card, and the cure.
    """
    known = {card.index for card in cards_of(ask)}
    others = {f"card {number}" for number in known - set(cards)}
    warnings: list[str] = []
    for finding in look("cuda", engine, build, ask):
        if finding.subject in others:
            continue
        if finding.level is Level.BAD:
            raise InvalidInput(f"{finding.subject}: {finding.says}", field="--gpu", cure=finding.cure)
        if finding.level is Level.WARN:
            warnings.append(f"{finding.subject}: {finding.says} ({finding.cure})")
    missing = sorted(set(cards) - known)
    if missing:
        listed = ", ".join(map(str, sorted(known)))
        raise InvalidInput(f"there is no card {missing[0]}", field="--gpu", cure=f"nvidia-smi lists {listed}")
    return warnings


def shared_engine(engine: Engine, cards: Sequence[Card]) -> Engine:
    """Returns the options of an engine that shares its card with the trainer, in turns.

    Args:
        engine: The engine; another one than vLLM stays as it is.
        cards: The cards that both see; the smallest decides.
    """
    if not isinstance(engine, VllmOptions):
        return engine
    kv_cache_mb = engine.kv_cache_mb
    if not kv_cache_mb and cards:
        kv_cache_mb = int(SHARED_CACHE_SHARE * min(card.total_bytes for card in cards)) // MIB
    return replace(engine, sleep_mode=True, kv_cache_mb=kv_cache_mb)


def driver_version(ask: Ask = run_nvidia_smi) -> str:
    """Returns the version of NVIDIA's driver; "" without one."""
    cards = cards_of(ask)
    return cards[0].driver if cards else ""
