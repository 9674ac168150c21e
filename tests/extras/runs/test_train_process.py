"""Programs that train, each a real process over a real stack: the ten lines of README, and the one of examples/."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import onbeat
from contracts.encoding.digests import content_digest
from contracts.jobs import JobState
from contracts.rewards import PluginReward
from onbeat.audit.folder import read_audit, read_spec
from onbeat.audit.weights import digest_of
from onbeat.process import child_process

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 300.0
SMALL = 'iterations=2, rollout={"batches_per_iteration": 2}, evaluation={"num_prompts": 16, "prompts_per_batch": 16}'


def start(program: Path, *arguments: str, run_root: Path) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
    return subprocess.Popen(
        [sys.executable, str(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment | {"ONBEAT_RUN_ROOT": str(run_root)},
        start_new_session=True,
    )


def nothing_is_left(run_dir: Path) -> bool:
    return not child_process.marked("ONBEAT_RUN_ROOT", str(run_dir)) and not (run_dir / "redis").exists()


@pytest.mark.timeout(300)
def test_the_lines_of_the_readme_train_and_export_a_verified_model(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(import onbeat\n.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert "iterations=50)" in block
    program = tmp_path / "program.py"
    program.write_text(block.replace("iterations=50", SMALL).replace('"my-model"', repr(str(tmp_path / "my-model"))))
    process = start(program, run_root=tmp_path / "runs")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["0", "1"]
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert nothing_is_left(run_dir)
    (job,) = run_dir.glob("job-*")
    run = onbeat.attach(job.name, run_dir=run_dir)
    assert run.verify().verified
    assert digest_of([tmp_path / "my-model" / "model.safetensors"]) == run.result().weights_digest


@pytest.mark.timeout(300)
def test_the_cells_of_the_notebook_train_a_verified_model(tmp_path: Path) -> None:
    cells = json.loads((REPOSITORY / "examples" / "notebook.ipynb").read_bytes())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert "ITERATIONS = 30" in text
    program = tmp_path / "notebook.py"
    program.write_text(text.replace("ITERATIONS = 30", "ITERATIONS = 2"))
    process = start(program, run_root=tmp_path / "runs")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    state, first, _, verified = out.split()
    assert (state, verified) == ("succeeded", "True")
    assert 0.0 < float(first) < 1.0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert nothing_is_left(run_dir)


@pytest.mark.timeout(300)
def test_a_program_that_is_interrupted_leaves_a_cancelled_job_with_its_rewards_digest_and_no_process(
    tmp_path: Path,
) -> None:
    process = start(REPOSITORY / "examples" / "train_from_python.py", "100000", run_root=tmp_path / "runs")
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert first.startswith("0 0."), err
    assert process.returncode == -signal.SIGINT, err
    assert err.rstrip().endswith("KeyboardInterrupt")
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert nothing_is_left(run_dir)
    (job,) = run_dir.glob("job-*")
    run = onbeat.attach(job.name, run_dir=run_dir)
    assert run.status.state is JobState.CANCELLED
    assert run.verify().verified
    (component,) = read_spec(run.folder).reward.components
    assert isinstance(component, PluginReward)
    assert Path(component.file).read_text() == component.source
    for entry in read_audit(run.folder)[1]:
        assert entry.record.rewards == {"plugin": content_digest(component.source.encode())}
