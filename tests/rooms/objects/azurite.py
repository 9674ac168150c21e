"""Azurite, Azure's emulator of its object store, as a process of its own (`npm install -g azurite`)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
from email.utils import formatdate
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from onbeat.base.process.child_process import ChildProcess
from onbeat.stack.ports import free_port
from tests.rooms.objects.s3_server import LOOPBACK, ObjectServer

COMMAND = shutil.which("azurite-blob")
"""None where it isn't installed."""
CONTAINER = "tests"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The emulator's own, which its manual names: each Azurite has it."""


class Azurite(ObjectServer):
    """A context manager: it answers, and has the container. Its objects are in its memory."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        place = ("--blobHost", LOOPBACK, "--blobPort", str(self.port))
        self.child = ChildProcess(
            "azurite",
            command=(str(COMMAND), *place, "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"),
            environment=dict(os.environ),
            log_path=folder / "azurite.log",
        )

    @property
    def environment(self) -> dict[str, str]:
        """The provider's variables that lead a client to it."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://{LOOPBACK}:{self.port}/{ACCOUNT}",
        }

    def _has_place(self) -> bool:
        heads = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        # What is signed: the method, eleven headers that are empty here, its own, and the path with the account twice.
        own = "\n".join(f"{name}:{value}" for name, value in heads.items())
        signed = f"PUT{12 * chr(10)}{own}\n/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
        mark = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        heads["authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(mark).decode()}"
        try:
            connection = HTTPConnection(LOOPBACK, self.port, timeout=5.0)
            connection.request("PUT", f"/{ACCOUNT}/{CONTAINER}?restype=container", headers=heads)
            return connection.getresponse().status == 201
        except (OSError, HTTPException):
            return False
