"""Types what docs/redis.md and docs/deploy.md tell the operator of two hosts, over a network and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

from onbeat.base.process.waiting import Waiting
from tests.hosts.network import Network
from tests.until import until

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs" / name).read_text() for name in ("redis.md", "deploy.md")]
CERTIFICATE = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=one -keyout host.key -out host.pem"
PROGRAMS = ("redis-server", "redis-cli", "openssl", "bash")
SHELL = """\
exec 3>"$1" >log 2>&1
exec bash -s
"""


class Host:
    """A shell on a host, in a folder of its own. Lines are typed one after the other, as at a terminal."""

    def __init__(self, folder: Path, address: str, network: Network) -> None:
        self.folder = folder
        folder.mkdir()
        shutil.copytree(ROOT / "configs", folder / "configs")
        self._answers = folder / "answers"
        own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(folder), "LANG": "C.UTF-8"}
        own |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._shell = subprocess.Popen(
            [*network.entering(address), "bash", "-c", SHELL, "bash", self._answers],
            cwd=folder,
            env=own,
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def type(self, line: str, *, deadline_s: float = 120.0) -> None:
        """It ends with exit code 0; with `&` behind it, it stays."""
        assert self._shell.stdin is not None
        before = self._codes()
        self._shell.stdin.write(f"{{ {line}\n}} </dev/null\necho $? >&3\n")
        self._shell.stdin.flush()
        waiting = Waiting(f"`{line}`", deadline_s=deadline_s)
        while len(codes := self._codes()) == len(before):
            waiting.poke()
        assert codes[-1] == "0", f"{line}\n{self.said()}"

    def said(self) -> str:
        return (self.folder / "log").read_text()

    def _codes(self) -> list[str]:
        return self._answers.read_text().split("\n")[:-1] if self._answers.exists() else []

    def end(self) -> None:
        for way in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(self._shell.pid, way)
        self._shell.wait(30.0)


def is_answered(url: str) -> bool:
    return httpx.get(url, trust_env=False).is_success


def block(heading: str) -> list[str]:
    """Returns the lines of the section's commands, without what follows a `#`."""
    (section,) = [page.partition(f"\n## {heading}\n")[2] for page in PAGES if f"\n## {heading}\n" in page]
    text = section.partition("```console\n")[2].partition("```")[0]
    return [re.sub(r"  +#.*", "", line) for line in text.replace("\\\n", "").splitlines()]


def test_two_hosts_train_over_tls_with_what_the_page_says(tmp_path: Path) -> None:
    if missing := [one for one in PROGRAMS if shutil.which(one) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    with Network(2) as network:
        first, second = network.hosts
        one, two = (Host(tmp_path / name, at, network) for name, at in (("one", first), ("two", second)))
        (one.folder / "deploy").symlink_to(ROOT / "deploy")
        try:
            one.type(f"{CERTIFICATE} -addext subjectAltName=IP:{first} && cp host.pem ca.pem")
            for line in (line.removeprefix("$ ") for line in block("A server of your own")):
                line = line.replace("redis.example", first)
                one.type(f"{line} &" if line.startswith("redis-server") else line)
                if line.startswith("redis-server"):
                    until(lambda: "Ready to accept connections" in one.said(), "the server", deadline_s=60.0)
            typed = []
            for line in block("Two hosts"):
                name, _, command = line.partition("$ ")
                command = command.replace("10.0.0.1", first).replace(
                    "demo.toml", "demo.toml --set iterations=2 --set evaluation.num_prompts=0"
                )
                if command.startswith("onbeat submit"):
                    ready = f"http://{first}:8000/readyz"
                    until(partial(is_answered, ready), ready, away=(httpx.TransportError,))
                if name == "two" and "two" not in typed:
                    for file in ("ca.pem", "two.env"):
                        shutil.copy(one.folder / file, two.folder / file)
                typed.append(name)
                {"one": one, "two": two}[name].type(command)
            assert {"one", "two"} == set(typed)
            assert "job succeeded" in one.said()
            assert "holds version 1" in two.said()
            assert not (two.folder / "runs").exists(), "they share no folder"
        finally:
            one.end()
            two.end()
