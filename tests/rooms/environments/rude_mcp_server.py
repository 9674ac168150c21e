"""What speaks just enough of MCP to be believed, and then does what its one tool is told."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

INFO = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "rude", "version": "1"}}
TOOL = {"name": "do", "inputSchema": {"type": "object", "properties": {"act": {"type": "string"}}}}


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **fields}) + "\n")
    sys.stdout.flush()


def do(act: str) -> str:
    match act.split():
        case ["hang", mark]:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", mark], start_new_session=True)
            time.sleep(600)
        case ["die"]:
            os._exit(3)
        case ["nonsense"]:
            sys.stdout.write("this is no JSON\n")
        case ["flood"]:
            while True:
                say(method="notifications/tools/list_changed")
        case ["connect"]:
            socket.create_connection(("127.0.0.1", 9), timeout=5)
        case ["read", path]:
            return Path(path).read_text()
        case ["see"]:
            return f"{sorted(name for name in os.environ if name.startswith('ONBEAT'))} {os.environ['OWN']}"
    return "done"


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        return {"result": INFO}
    if method == "tools/list":
        return {"result": {"tools": [TOOL]}}
    if method != "tools/call":
        return {"error": {"code": -32601, "message": "no such method"}}
    act = parameters["arguments"]["act"]
    if act == "lie":
        return {"result": {"content": 7}}
    try:
        return {"result": {"content": [{"type": "text", "text": do(act)}]}}
    except OSError as error:
        return {"error": {"code": -32000, "message": type(error).__name__}}


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            say(id=asked["id"], **answer(asked["method"], asked.get("params", {})))
