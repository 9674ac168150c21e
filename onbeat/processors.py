"""Kinds of processors, as the bits of a computation depend on them (I7)."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
VECTOR_FLAGS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "bf16", "asimd", "sve", "sme", "fphp", "i8mm")
"""Prefixes of the CPU flags that libraries choose their kernels by."""
CHOOSERS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "OMP_THREAD_LIMIT")
"""Environment variables that they choose by, too; a limit of threads leaves the number that torch names as it is."""


def gpu_kind() -> str:
    """Its name with its compute capability, CUDA and cuDNN."""
    import torch

    if not torch.cuda.is_available():
        return "no GPU"
    major, minor = torch.cuda.get_device_capability()
    name, cuda, cudnn = torch.cuda.get_device_name(), torch.version.cuda, torch.backends.cudnn.version()
    return f"{name} ({major}.{minor}), CUDA {cuda}, cuDNN {cudnn}"


def cpu_kind() -> str:
    """Its model and vector instructions: by both, libraries choose kernels and how they cut a matrix product."""
    import torch

    name, flags = _model_and_flags(CPU_INFO.read_text() if CPU_INFO.is_file() else "")
    digest = hashlib.blake2b(" ".join(flags).encode(), digest_size=4).hexdigest()
    chosen = [f"{name}={os.environ[name]}" for name in CHOOSERS if name in os.environ]
    capability = torch.backends.cpu.get_cpu_capability()
    return ", ".join([f"{name or platform.machine()} ({capability}, flags {digest})", *chosen])


def _model_and_flags(info: str) -> tuple[str, list[str]]:
    """(model, sorted vector flags) of the first processor in the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in info.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    name = fields.get("model name") or " ".join(filter(None, (fields.get("CPU implementer"), fields.get("CPU part"))))
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return name, sorted(flag for flag in flags if flag.startswith(VECTOR_FLAGS))
