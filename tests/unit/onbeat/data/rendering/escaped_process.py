"""A template process whose sandbox has holes: what is kept from a program all the same that gets out of Jinja's."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from jinja2.sandbox import ImmutableSandboxedEnvironment

from onbeat.data.rendering import template_process

sandboxed = template_process.environment


def with_holes() -> ImmutableSandboxedEnvironment:
    made = sandboxed()
    made.globals["read"] = lambda path: Path(path).read_text()
    made.globals["write"] = lambda path: Path(path).write_text("x")
    made.globals["connect"] = lambda: socket.create_connection(("127.0.0.1", 9), timeout=1.0)
    made.globals["start"] = lambda: subprocess.run(["/bin/true"], check=True)
    made.globals["variables"] = lambda: sorted(os.environ)
    return made


def main(control: int, rules: str) -> None:
    template_process.environment = with_holes
    template_process.main(control, rules)
