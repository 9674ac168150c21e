"""By which library a job's float32 products are multiplied: measured once for a machine, when a job is accepted.

    gateway ── a job without model.matmul ──▶ known? ── no ──▶ a child process times a product both ways
                                               │ yes                      │
                                               └──▶ "torch" or "onednn" ◀─┘  stands in the job's spec from then on

The two libraries add up in another order, so the choice is recorded and never made again for a job: its bits follow
from its spec alone (I7). This module imports no torch: the gateway has none. `python -m onbeat.base.machine_kernels` is
the child.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal

from contracts.encoding.wire import Record, decode_json, encode_json
from contracts.errors import OnbeatError
from contracts.settings import PREFIX
from onbeat.base.process.folders import make_missing, written_whole
from onbeat.base.process.launcher import with_own_packages
from onbeat.base.process.processor import model_and_vector_flags

if TYPE_CHECKING:
    import torch

Matmul = Literal["torch", "onednn"]
WIDTH = 512
"""Rows and columns of the product that is timed: some milliseconds."""
ROUNDS = 9
WORTH_IT = 1.3
"""How many times as fast oneDNN has to be. It is 2.2 times as fast where a library uses half of a CPU's vectors, and
0.9 to 1.1 elsewhere, so that another measurement of the same machine comes to the same choice."""
MEASURES_WITHIN_S = 60.0
"""Longest that the child may take, most of which is the import of torch."""

log = logging.getLogger(__name__)
_guard = Lock()
_known: dict[str, ProductSpeed | None] = {}
"""By kind of machine, what this process knows; None where a measurement failed, which isn't tried again."""


class ProductSpeed(Record, frozen=True, kw_only=True):
    """Speeds of a float32 product on one core of a machine, in floating-point operations a second.

    The child process creates it, the gateway reads it, and a file of the user's cache remembers it.
    """

    torch_flop_s: float
    """By the library that torch was built with."""
    onednn_flop_s: float
    """By oneDNN; 0.0 where torch has none for this CPU."""

    @property
    def matmul(self) -> Matmul:
        """The library that a job is multiplied by."""
        if self.onednn_flop_s > WORTH_IT * self.torch_flop_s:
            return "onednn"
        return "torch"


def matmul_of_machine(cache: Path | None = None) -> Matmul:
    """Returns the faster library of this machine, which is measured the first time: seconds, once.

    Args:
        cache: The file that remembers it; None is the user's, `~/.cache/onbeat/product-speed.json`.

    Returns:
        "torch" where nothing could be measured, which a log line says.
    """
    path = cache or _user_cache() / "product-speed.json"
    kind = kind_of_machine()
    with _guard:  # a second submission waits for the measurement of the first
        if kind not in _known:
            _known[kind] = _read(path).get(kind) or _measured_now(path, kind)
        speed = _known[kind]
    return "torch" if speed is None else speed.matmul


def _measured_now(path: Path, kind: str) -> ProductSpeed | None:
    """Measures by a child process, and remembers what came of it in the file; None where that fails."""
    speed = _measured_by_a_child()
    if speed is None:
        return None
    _write(path, {**_read(path), kind: speed})
    log.info(
        "float32 products: %.0f GFLOP/s a core by torch's library, %.0f by oneDNN; jobs multiply by %s",
        speed.torch_flop_s / 1e9,
        speed.onednn_flop_s / 1e9,
        speed.matmul,
    )
    return speed


def kind_of_machine() -> str:
    """Returns what the speed depends on: the processor, its vector instructions, and the version of torch."""
    model, flags = model_and_vector_flags()
    return f"{model}; {' '.join(flags)}; torch {_version_of_torch()}"


def measured(width: int = WIDTH, rounds: int = ROUNDS) -> ProductSpeed:
    """Times a product of [width, width] matrices on one core, in processor time. It imports torch."""
    import torch

    from onbeat.base.kernels import has_onednn, multiply

    left = torch.randn(width, width)
    right = torch.randn(width, width)

    def fastest(product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        seconds: list[float] = []
        for _ in range(rounds):
            # Processor time, which other processes of a busy machine don't lengthen.
            started_s = time.process_time()
            product(left, right)
            seconds.append(time.process_time() - started_s)
        # n^3 multiplications and as many additions. The fastest round: noise only ever makes one slower.
        return 2 * width**3 / min(seconds)

    num_threads = torch.get_num_threads()
    # On one core: with several, waiting threads would be counted as work.
    torch.set_num_threads(1)
    try:
        return ProductSpeed(
            torch_flop_s=fastest(torch.mm),
            onednn_flop_s=fastest(multiply) if has_onednn() else 0.0,
        )
    finally:
        torch.set_num_threads(num_threads)


def _version_of_torch() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "none"


def _user_cache() -> Path:
    """Returns the user's folder of caches. Of a user without a home, as in some containers, it can't be written."""
    caches = os.environ.get("XDG_CACHE_HOME")
    if not caches:
        home = os.path.expanduser("~")
        # "~" stays as it is for a user without a home; a folder below /dev/null can't be made.
        caches = os.devnull if home == "~" else f"{home}/.cache"
    return Path(caches) / "onbeat"


def _read(path: Path) -> dict[str, ProductSpeed]:
    """Returns what is remembered; a file that is absent or damaged remembers nothing."""
    try:
        return decode_json(path.read_bytes(), dict[str, ProductSpeed])
    except (OSError, OnbeatError):
        return {}


def _write(path: Path, speeds: dict[str, ProductSpeed]) -> None:
    """Remembers what was measured, as far as the folder can be written."""
    try:
        make_missing(path.parent)
        with written_whole(path, durable=False) as file:
            file.write(encode_json(speeds))
    except OSError as error:
        log.debug("the speed of products is measured again after a restart: %s", error)


def _measured_by_a_child() -> ProductSpeed | None:
    """Returns what a process of its own measures: torch's 300 MB stay out of the gateway. None where it fails."""
    command = [sys.executable, "-m", "onbeat.base.machine_kernels"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}  # no key, no password
    environment = with_own_packages({**plain, "OMP_NUM_THREADS": "1"})
    try:
        child = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            timeout=MEASURES_WITHIN_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return decode_json(child.stdout, ProductSpeed)
    except (OSError, subprocess.SubprocessError, OnbeatError) as error:
        log.warning("the speed of products can't be measured, so jobs multiply by torch's own library: %s", error)
        return None


if __name__ == "__main__":
    sys.stdout.buffer.write(encode_json(measured()))
