"""The facts of this machine's processor by which numeric libraries choose their kernels."""

from __future__ import annotations

import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
VECTOR_FLAGS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "bf16", "asimd", "sve", "sme", "fphp", "i8mm")
"""Prefixes of the CPU flags that libraries choose their kernels by."""


def model_and_vector_flags() -> tuple[str, list[str]]:
    """Returns the name of the first processor's model, and its vector flags in order; ("x86_64", []) where untold."""
    fields: dict[str, str] = {}
    text = CPU_INFO.read_text() if CPU_INFO.is_file() else ""
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    by_parts = " ".join(filter(None, (fields.get("CPU implementer"), fields.get("CPU part"))))
    model = fields.get("model name") or by_parts or platform.machine()
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return model, sorted(flag for flag in flags if flag.startswith(VECTOR_FLAGS))
