"""Programs that train, each a real process over a real stack: the ten lines of README, and the one of examples/."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import onbeat
from contracts.encoding.digests import content_digest
from contracts.jobs import JobState
from contracts.rewards import PluginReward
from onbeat.audit.folder import read_spec
from onbeat.audit.weights import digest_of
from onbeat.base.process import child_process
from onbeat.commands.exports.audit_file import read_audit
from tests.builders import tiny_model_folder
from tests.chaos.short_job import long_variant
from tests.forked import FORKED_LOG, forked_and_running, forking
from tests.unit.onbeat.data.rendering.chat_models import CHATML, chat_tokenizer

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 600.0
SMALL = 'iterations=2, rollout={"batches_per_iteration": 2}, evaluation={"num_prompts": 16, "prompts_per_batch": 16}'


CELLS_IN_A_LOOP = """
import asyncio
import linecache

async def run_cells(cells):
    namespace = {"__name__": "__main__"}
    for number, text in enumerate(cells):
        asyncio.get_running_loop()  # an event loop runs while a cell does, as in a notebook's kernel
        name = f"<cell {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), namespace)

asyncio.run(run_cells(CELLS))
"""
"""A program that runs the cells of a notebook one after the other, each with its source as a kernel registers it."""


def plain_environment() -> dict[str, str]:
    """Returns the environment of this process without its settings of Onbeat."""
    return {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}


def start(program: Path, *arguments: str, run_root: Path, executes: bool = False) -> subprocess.Popen[str]:
    """Starts a program, which is executed or forked. Its services are forked; tests/e2e/test_wheel.py executes each."""
    settings = {"ONBEAT_RUN_ROOT": str(run_root), FORKED_LOG: str(run_root.parent / "forked")}
    environment = forking(plain_environment() | settings, executes=executes)
    return subprocess.Popen(
        [sys.executable, str(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment,
        start_new_session=True,
    )


def nothing_is_left(run_dir: Path) -> bool:
    """Returns True where no process and no server of the stack of a run root is left."""
    left = child_process.marked("ONBEAT_RUN_ROOT", str(run_dir))
    left |= forked_and_running(run_dir.parents[1] / "forked")
    return not left and not (run_dir / "redis").exists()


def test_the_lines_of_the_readme_train_and_export_a_verified_model(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(import onbeat\n.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    assert "iterations=50)" in block
    program = tmp_path / "program.py"
    program.write_text(block.replace("iterations=50", SMALL).replace('"my-model"', repr(str(tmp_path / "my-model"))))
    process = start(program, run_root=tmp_path / "runs", executes=True)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["0", "1"]
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert nothing_is_left(run_dir)
    (job,) = run_dir.glob("job-*")
    run = onbeat.attach(job.name, run_dir=run_dir)
    assert run.verify().verified
    assert digest_of([tmp_path / "my-model" / "model.safetensors"]) == run.result().weights_digest


def test_the_cells_of_the_notebook_train_a_verified_model(tmp_path: Path) -> None:
    cells = json.loads((REPOSITORY / "examples" / "notebook.ipynb").read_bytes())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sum("ITERATIONS = 30" in text for text in texts) == 1
    program = tmp_path / "notebook.py"
    small = [text.replace("ITERATIONS = 30", "ITERATIONS = 2") for text in texts]
    program.write_text(CELLS_IN_A_LOOP.replace("CELLS", repr(small)))
    process = start(program, run_root=tmp_path / "runs")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    state, first, _, verified = out.split()
    assert (state, verified) == ("succeeded", "True")
    assert 0.0 < float(first) < 1.0
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert nothing_is_left(run_dir)


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
        assert entry.record.rewards == {component.entry_point: content_digest(component.source.encode())}


OF_TRL = """
import onbeat
from helpers import same


def right(completions, solution, **kwargs):
    print("scores", len(completions))
    return [same(text, answer) for text, answer in zip(completions, solution)]


rows = [{"prompt": f"{a}+{b}=", "solution": str(a + b)[::-1]} for a in range(10, 30) for b in range(10, 14)]
shape = {"batches_per_iteration": 1, "prompts_per_batch": 2, "group_size": 2, "sampling": {"max_new_tokens": 4}}
evaluation = {"num_prompts": 4, "prompts_per_batch": 4}

tables = {"iterations": 1, "rollout": shape, "evaluation": evaluation}
with onbeat.train(model="models/sums", reward=right, dataset=rows, **tables) as run:
    print(run.result().state.value, list(run.metrics[0].reward_components), run.id, run.folder.run_root)
    run.save_model("saved")
"""


def test_a_program_names_files_next_to_it_has_trls_signature_and_an_export_needs_no_model_root(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "models").mkdir(parents=True)
    shutil.copytree(REPOSITORY / "configs" / "models" / "two-digit-addition", home / "models" / "sums")
    (home / "helpers.py").write_text("def same(text, answer):\n    return float(text.strip() == answer)\n")
    (home / "program.py").write_text(OF_TRL)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = forking(plain_environment())
    command = [sys.executable, str(home / "program.py")]
    ended = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    state, name, job, run_root = ended.stdout.split()
    assert (state, name) == ("succeeded", "['right']")
    assert (elsewhere / "saved" / "model.safetensors").is_file()
    assert f"{job} prints: scores 4" in (Path(run_root) / "logs" / "reward_service.log").read_text()

    exporting = [sys.executable, "-m", "onbeat", "export", job, "again", "--run-dir", run_root]
    again = subprocess.run(
        exporting, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert again.returncode == 0, again.stderr
    saved, exported = (elsewhere / name / "model.safetensors" for name in ("saved", "again"))
    assert digest_of([saved]) == digest_of([exported])

    shutil.rmtree(home / "models")
    refused = subprocess.run(
        command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert f"model.path: there is no models/sums in {home}, {elsewhere}, and the model root " in refused.stderr
    assert len(list((elsewhere / "runs").iterdir())) == 1, "nothing was started"


PLAYED = """
import sys

import onbeat
from onbeat.environments.author import Environment, Message, InitialObservation, Reply

DIGITS = "0123456789"


class Sums(Environment):
    def __init__(self, *, largest: int = 9) -> None:
        self.largest = largest

    def reset(self, task, seed):
        self.a, self.b = seed % self.largest, seed // 7 % self.largest
        return InitialObservation(f"{self.a}+{self.b}=")

    def step(self, message, turn):
        right = message.content == str(self.a + self.b)[::-1]
        return Reply(reward=sum(one in DIGITS for one in message.content) / 10 + right, done=True)


def remember(number: int) -> str:
    '''Tells a digit.'''
    return DIGITS[number]


JOB = {
    "model": "configs/models/two-digit-addition",
    "iterations": 2,
    "rollout": {
        "batches_per_iteration": 2,
        "prompts_per_batch": 4,
        "group_size": 4,
        "max_prompt_tokens": 8,
        "sampling": {"max_new_tokens": 5},
    },
    "evaluation": {"num_prompts": 8, "prompts_per_batch": 8},
}
TABLE = {"max_turns": 2, "max_tokens": 48}
ROWS = [{"prompt": f"{a}+{a}=", "reference": str(a + a)[::-1]} for a in range(40)]
TASKS = {"type": "environment", "num_train_prompts": 64}
OF_CLASS = {"dataset": TASKS, "environment": {"name": Sums, "params": {"largest": 8}, "renderer": "text", **TABLE}}
OF_TOOLS = {"dataset": ROWS, "environment": TABLE, "tools": [remember], "model": "qwen3", "model_root": sys.argv[2]}
KEYS = {"Sums": OF_CLASS, "ToolsOfProgram": OF_TOOLS}
name = sys.argv[1]
JOB["rollout"]["max_prompt_tokens"] = 8 if name == "Sums" else 900
with onbeat.train(**JOB | KEYS[name]) as run:
    print(run.result().state.value, run.verify().verified, run.id)
"""


@pytest.mark.parametrize("name", ["Sums", pytest.param("ToolsOfProgram", marks=long_variant)])
def test_a_class_or_tools_of_a_program_are_played_in_their_cage_and_their_digest_is_in_the_chain(
    tmp_path: Path, name: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PLAYED)
    tiny_model_folder(tmp_path, context_tokens=1024, tokenizer=chat_tokenizer(CHATML))
    process = start(program, name, str(tmp_path), run_root=tmp_path / "runs")
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    state, verified, job = out.split()
    assert (state, verified) == ("succeeded", "True")
    (folder,) = (tmp_path / "runs").glob(f"*/{job}")
    run = onbeat.attach(job, run_dir=folder.parent)
    environment = read_spec(run.folder).environment
    assert environment is not None
    assert Path(environment.file).read_text() == environment.source
    version = f"{name} {content_digest(environment.source.encode())}"
    records = [entry.record for entry in read_audit(run.folder)[1]]
    assert {record.environment for record in records} == {version}
    assert name == "ToolsOfProgram" or any(record.reward_mean > 0.0 for record in records)
