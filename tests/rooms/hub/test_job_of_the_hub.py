"""A job that names its model and its rows by the hub trains what the same files train, also once no hub is there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import onbeat
from contracts.errors import InvalidInput
from contracts.run_folder import RunFolder
from onbeat.audit.folder import read_spec
from onbeat.base.process import child_process
from tests.forked import FORKED_LOG, forked_and_running, forking
from tests.rooms.hub.conftest import MODEL, MODEL_NAME, SUMS, lines
from tests.rooms.hub.hub_server import HubServer, hang

TOKEN = "hf_a-token-that-nobody-may-see"
COLUMNS = {"reference": "answer", "reference_after": "####"}
SMALL: dict[str, Any] = {
    "iterations": 2,
    "reward": [{"type": "exact"}],
    "rollout": {
        "batches_per_iteration": 2,
        "prompts_per_batch": 2,
        "group_size": 4,
        "sampling": {"max_new_tokens": 6},
    },
    "evaluation": {"num_prompts": 8, "prompts_per_batch": 8},
    "generators": 1,
    "progress": False,
}


def trained(run_dir: Path, **job: Any) -> tuple[str, str, Path]:
    """Digest of the trained weights, the path of the model in the job's record, and the folder of all runs."""
    with onbeat.train(run_dir=run_dir, **SMALL, **job) as run:
        digest = run.result(timeout_s=300.0).weights_digest
        assert run.verify().verified
        run.save_model(run_dir / "exported")
        record = read_spec(RunFolder(run_dir.resolve(), run.id))
    return digest, record.model.path, run_dir


@pytest.mark.usefixtures("forked_services")
def test_a_job_by_names_trains_what_the_same_files_train_and_again_without_a_hub(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models[MODEL_NAME].token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    dataset = {
        "type": "huggingface",
        "path": f"hub:{SUMS}",
        "config": "main",
        "evaluation_split": "test",
        "prompt_template": "{question}",
        "columns": COLUMNS,
    }
    digest, path, run_dir = trained(tmp_path / "one", model=f"hub:{MODEL_NAME}", dataset=dataset)
    assert path == f"hub:{MODEL_NAME}@{hub.models[MODEL_NAME].refs['main']}"
    # No file of the run has the token: no log of a process, no record, no setting that is written down.
    with_token = [file for file in run_dir.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]
    assert with_token == []
    assert (run_dir / "exported" / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    # The branch moves, and then the hub is gone.
    hub.models[MODEL_NAME].push({"config.json": b"{}"})
    hub.shutdown()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    again, same_path, _ = trained(tmp_path / "two", model=f"hub:{MODEL_NAME}", dataset=dataset)
    assert (again, same_path) == (digest, path)
    # The same files by their paths.
    rows = {"train_path": lines(10, 60), "evaluation_path": lines(70, 16)}
    for name, data in rows.items():
        (tmp_path / f"{name}.jsonl").write_bytes(data)
    files = {name: f"{name}.jsonl" for name in rows}
    (tmp_path / "model").symlink_to(MODEL)
    local = {"type": "jsonl", **files, "columns": COLUMNS | {"prompt": "question"}}
    monkeypatch.setenv("ONBEAT_EXTRA_ROOTS", str(MODEL))
    from_files, _, _ = trained(tmp_path / "three", model="model", dataset=local, model_root=tmp_path)
    assert from_files == digest


def test_a_program_that_means_the_hub_and_writes_a_path_is_told_how() -> None:
    with pytest.raises(InvalidInput) as error:
        onbeat.train(model="x", dataset="openai/gsm8k", **SMALL)
    assert 'of the hub it is written as "hub:openai/gsm8k"' in str(error.value)


INTERRUPTED = f"""
import onbeat
onbeat.train(model="hub:{MODEL_NAME}", dataset={{"type": "addition"}}, iterations=1, reward=[{{"type": "exact"}}],
             generators=1, progress=True)
"""


def test_ctrl_c_while_a_name_is_fetched_ends_the_program_and_its_stack(hub: HubServer, tmp_path: Path) -> None:
    hub.faults["model.safetensors"] = hang
    (tmp_path / "program.py").write_text(INTERRUPTED)
    environment = {**os.environ, "ONBEAT_RUN_ROOT": str(tmp_path / "runs"), FORKED_LOG: str(tmp_path / "forked")}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=forking(environment),
    )
    assert process.stderr is not None
    while "is being fetched: " not in (line := process.stderr.readline()):
        assert line, "the program ended by itself"
    process.send_signal(signal.SIGINT)
    process.stderr.read()
    assert process.wait(90.0) != 0
    assert not child_process.marked("ONBEAT_RUN_ROOT", str(tmp_path / "runs"))
    assert not forked_and_running(tmp_path / "forked")
