"""A hub on loopback, with a model and a data set, and the settings of a host that has fetched nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.settings import StackSettings
from tests.rooms.hub.hub_server import HubRepository, HubServer, serving_hub

MODEL = Path(__file__).resolve().parents[3] / "configs" / "models" / "two-digit-addition"
MODEL_NAME = "onbeat/two-digit-addition"
SUMS = "onbeat/sums"
README = b"""---
license: apache-2.0
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: hard
  data_files: hard/*.jsonl
---
# Sums
"""


def lines(first: int, number: int) -> bytes:
    """Rows in the columns `question` and `answer`; the demo's model writes the digits of an answer in reverse."""
    rows = [
        {"question": f"{place}+11=", "answer": f"so it is\n#### {str(place + 11)[::-1]}"}
        for place in range(first, first + number)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def model_files() -> dict[str, bytes]:
    """The demo's model, with files that a repository often has next to it and that no process reads here."""
    files = {path.name: path.read_bytes() for path in MODEL.iterdir() if path.is_file()}
    others = {"README.md": b"# a model", "pytorch_model.bin": b"\x80\x02pickled" * 1000, "modeling_own.py": b"raise 1"}
    return files | others


def rows_files() -> dict[str, bytes]:
    """A data set of two configurations; one of them has two splits, and one split two files."""
    return {
        "README.md": README,
        "main/train-00000-of-00002.jsonl": lines(10, 30),
        "main/train-00001-of-00002.jsonl": lines(40, 30),
        "main/test-00000-of-00001.jsonl": lines(70, 16),
        "hard/rows.jsonl": lines(86, 4),
        "script.py": b"raise SystemExit",
    }


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """The hub that huggingface_hub asks in this test, in this process and in those that it starts."""
    with serving_hub() as server:
        server.models[MODEL_NAME] = HubRepository()
        server.models[MODEL_NAME].push(model_files())
        server.datasets[SUMS] = HubRepository()
        server.datasets[SUMS].push(rows_files())
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        yield server


@pytest.fixture
def host(tmp_path: Path) -> StackSettings:
    """The settings of a host."""
    return StackSettings(hub_root=str(tmp_path / "fetched"))
