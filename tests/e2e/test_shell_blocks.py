"""The shell commands of README and docs are typed as they stand there, in one session over one stack."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.encoding.wire import encode_json
from tests.builders import tiny_model_folder
from tests.forked import forking

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:console|sh|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^## Commands\n(.*?)^## ", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
DEADLINE_S = 700.0
MARK = re.compile(r"^=== (\d+) ended with (\d+) ===$", re.MULTILINE)

NOT_HERE = {
    "git clone <this repository>": "a checkout is what the tests run in; .ci/run sets it up",
    "docker run --rm --user 0": "a Docker daemon; tests/rooms/backup/test_nightly.py starts from the same files",
    "make setup-trl": "it asks a package registry; tests/contract/test_trl_job.py runs in what it makes",
    "python configs/models/make_": "they need the weights of a package that the tests don't have",
    "make test": "this is a part of it",
    "make test-fast": "this runs after it",
    "make lint": ".ci/run does it",
    "make mutants": "hours",
    "make fuzz": "ten minutes",
    "onbeat chaos": "minutes for each round; `make chaos` does it",
    "python -m benchmarks chaos": "the same",
    "docker compose": "there is no Docker engine; tests/unit/test_compose.py reads the file",
    "docker tag": "the same",
    "(cd deploy/kubernetes/base && kustomize": "there is no kustomize",
    "(cd deploy/kubernetes/redis && kustomize": "the same",
    "kubectl": "there is no cluster; tests/unit/test_kubernetes.py reads the manifests",
    "sh deploy/kubernetes/make-secrets.sh | kubectl": "the same",
    "tasks=$(openssl rand -hex 32)": "words for the next line, of kubectl",
    "pip install": "it asks a package registry",
    "export AWS_REGION=…": "an account of yours",
    "export AWS_ENDPOINT_URL=": "the same; tests/rooms/objects has a server of its own",
    "export ONBEAT_OBJECTS=": "the same",
    "python3 -m venv": "the tests have an environment",
    "onbeat setup vllm": "hundreds of MB of packages; `make test-vllm` uses what it makes",
    "onbeat up --profile configs/stacks/mixed.toml": "needs vLLM: tests/e2e/test_vllm_stack.py",
    "onbeat demo --profile configs/stacks/vllm.toml": "the same",
    "VLLM_SERVER_DEV_MODE=1": "the same: tests/contract/engine_rigs.py",
    "ONBEAT_ENGINE=openai": "the same",
    "ONBEAT_ENGINE=vllm ONBEAT_ENGINE_TENSOR_PARALLEL_SIZE=4": "needs eight GPUs and vLLM",
    "vllm serve my-model": "needs vLLM",
    "ONBEAT_JUDGE_URL=": "needs a judge: tests/e2e/test_stage_workers.py has one of its own",
}
"""How commands begin that this machine can't run, or not in the time of a test → the reason."""
ELSEWHERE = {
    "onbeat demo": ("tests/rooms/runs/test_demo_process.py", "--iterations"),
    "onbeat up --generators 2 --stage-workers 1": ("tests/e2e/test_embedded_stack.py", "stage_workers"),
    "onbeat up --stage-workers 2": ("tests/e2e/test_stage_workers.py", "stage"),
    "onbeat up --metrics --generators 2": ("tests/e2e/test_prometheus.py", "generators=2, threads=1, metrics=True"),
    "prometheus --config.file=": ("tests/e2e/test_prometheus.py", "embedded.yml"),
    "promtool test rules": ("tests/integration/test_prometheus_rules.py", "promtool"),
    "onbeat init my-project && cd my-project": ("tests/rooms/projects/test_tutorial.py", "## Your first run"),
    "python train.py": ("tests/rooms/projects/test_tutorial.py", "train.py"),
    "python make_rows.py && python -m pytest": ("tests/rooms/projects/test_tutorial.py", "make_rows.py"),
    "onbeat plan configs/demo.toml": ("tests/rooms/planning/test_plan.py", '["plan", str(DEMO)'),
    "python -m benchmarks": ("tests/unit/benchmarks/test_benchmarks.py", 'run("control-plane", "--help")'),
    "onbeat doctor": ("tests/rooms/doctor/test_doctor.py", '"doctor"'),
    "onbeat doctor configs/models/two-digit-addition": ("tests/rooms/doctor/test_doctor_model.py", '"configs/models'),
    "onbeat samples JOB --held-out": ("tests/rooms/replay/test_samples.py", "held_out=True, iteration=5"),
    "onbeat evaluate configs/models/two-digit-addition configs/demo.toml": (
        "tests/unit/onbeat/test_cli.py",
        '"evaluate"',
    ),
    "onbeat resume JOB --set optimizer.learning_rate=1e-5 --iterations": (
        "tests/unit/onbeat/test_cli.py",
        '"--set", "optimizer.learning_rate=1e-5"',
    ),
    "onbeat replay JOB": ("tests/rooms/replay/test_replay.py", '"replay"'),
    "onbeat resume JOB --wider-sums": ("tests/chaos/test_resume.py", "wider_sums=int("),
    "onbeat watch JOB --log": ("tests/unit/onbeat/test_watch_log.py", '"--log"'),
    "onbeat export JOB my-adapters --adapters": ("tests/rooms/runs/test_export.py", "adapters"),
    "(umask 077; sh deploy/make-env.sh": ("tests/unit/test_compose.py", "make-env.sh"),
    "CONSUMERS=2 PRODUCERS=4 sbatch": ("tests/e2e/test_slurm.py", "onbeat.sbatch"),
    "sh deploy/own-redis.sh": ("tests/e2e/test_own_redis.py", "own-redis.sh"),
    "onbeat fetch": ("tests/rooms/hub/test_fetch_command.py", '"fetch"'),
    "onbeat jobs --tasks": ("tests/rooms/tasks/test_task_commands.py", '"--tasks"'),
    "onbeat export JOB ./my-model": ("tests/rooms/tasks/test_task_commands.py", '"export"'),
    "export ONBEAT_GATEWAY_URL=http://127.0.0.1:8000": (
        "tests/rooms/tasks/test_task_commands.py",
        "ONBEAT_GATEWAY_URL",
    ),
    "python -m onbeat.tasks check": ("tests/rooms/tasks/test_flower.py", '"onbeat.tasks"'),
    "FLOWER_BASIC_AUTH=": ("tests/rooms/tasks/test_flower.py", "FLOWER_BASIC_AUTH="),
    "redis-server --port 0 --tls-port": ("tests/e2e/test_own_redis.py", "--tls-port"),
    ". made/redis.env && redis-cli": ("tests/e2e/test_own_redis.py", "FUNCTION"),
}
"""How commands begin, or the whole of one that begins as another does → the test that runs it, and a word of that."""
TYPED = {
    "onbeat up": "onbeat up --detach",
    "onbeat submit my-job.toml --wait": "onbeat submit my-job.toml --wait; FIRST=$(newest); JOB=$FIRST",
    "onbeat samples JOB": "onbeat samples $FIRST",
    "onbeat samples JOB --worst -n 20": "onbeat samples $FIRST --worst -n 20",
    "onbeat resume JOB --set optimizer.learning_rate=1e-5": (
        "onbeat resume $FIRST --set optimizer.learning_rate=1e-5 --iterations 4 --wait"
    ),
    "onbeat evaluate MODEL SPEC": "onbeat evaluate models/my-model my-job.toml",
    "onbeat sweep SPEC --set seed=1,2": "onbeat sweep my-job.toml --set seed=1,2",
    "onbeat resume JOB --iterations 300": "onbeat resume $JOB --iterations 3 --wait",
    "onbeat cancel JOB": (
        # The one trainer is at work on a long job, so the job that is cancelled has not ended yet.
        "onbeat submit my-job.toml --set iterations=2000 && LONG=$(newest) && "
        "onbeat submit my-job.toml && JOB=$(newest) && onbeat cancel $JOB && onbeat cancel $LONG && "
        "onbeat watch $FIRST && (onbeat watch $JOB || [ $? = 1 ])"
    ),
    "onbeat verify JOB": "onbeat verify $FIRST",
    "onbeat export JOB my-model --run-dir runs/demo-<time>": "onbeat export $JOB my-model --run-dir runs",
    "onbeat export JOB my-model": "onbeat export $JOB my-model --run-dir runs",
    "onbeat restore DIR": "onbeat restore DIR --run-dir restored",
    "onbeat backup /backups/monday": "onbeat backup monday",
    "onbeat restore /backups/monday --run-dir runs && onbeat up": (
        "mv runs lost && onbeat restore monday --run-dir runs && onbeat export $JOB restored-model"
    ),
    "onbeat up --detach; onbeat jobs; onbeat down": "onbeat jobs; onbeat down",
}
"""Command of a page → what is typed in its place: a stack in the background, numbers of a small job, a folder here."""
SESSION = (
    ("commands.md", "A job on a stack that stays"),
    ("commands.md", "Commands"),
    ("commands.md", "The demo"),
    ("run-folder.md", "The trained model"),
    ("run-folder.md", "Recording"),
    ("http.md", "Keys"),
    ("operate.md", "Backup, restore, upgrade"),
    ("operate.md", "On one machine"),
)
"""Sections in the order in which the session types their commands."""
SMALLER = {
    "iterations = 200": "iterations = 2",
    "batches_per_iteration = 16": "batches_per_iteration = 1",
    "prompts_per_batch = 4": "prompts_per_batch = 2",
    "group_size = 8": "group_size = 2",
    "max_new_tokens = 256": "max_new_tokens = 4",
}
"""Keys of docs/commands.md's job → those of a job of seconds."""


def commands_of(text: str) -> Iterator[str]:
    """Commands of the blocks, without comments and answers; then those of the table of commands."""
    for block in BLOCK.findall(text):
        for line in re.findall(r"^\$ (.*(?:\\\n.*)*)", block, re.MULTILINE):
            yield re.sub(r" +# .*$", "", line.replace("\\\n", ""), flags=re.MULTILINE).strip()
    for table in TABLE.findall(text):
        for row in table.splitlines():
            cell, bar, _ = row.partition(" | ")
            # A row says "onbeat" once.
            for command in CODE.findall(cell) if bar and cell.startswith("`onbeat ") else ():
                yield f"onbeat {command.removeprefix('onbeat ')}"


def sections(page: Path) -> Iterator[tuple[str, str]]:
    """Yields (heading, its text up to the next one); tests/integration/test_http_page.py types those of http.md."""
    for part in re.split(r"^##+ ", page.read_text(), flags=re.MULTILINE):
        heading, _, text = part.partition("\n")
        if heading != "Every route":
            yield heading, f"## {heading}\n{text}\n## "


def listed(command: str) -> str | None:
    """The longest key of what isn't typed here that a command is, or begins with."""
    keys = {*NOT_HERE, *ELSEWHERE}
    begun = (key for key in keys if command == key or command.startswith(f"{key} " if key[-1].isalnum() else key))
    return max(begun, key=len, default=None)


def session() -> list[str]:
    found = {(page.name, heading): text for page in PAGES for heading, text in sections(page)}
    typed = []
    for place in SESSION:
        for command in commands_of(found[place]):
            if command in TYPED or not listed(command):
                typed.append(TYPED.get(command) or re.sub(r"\bJOB\b", "$JOB", command))
    return list(dict.fromkeys(typed))


def test_each_command_is_in_the_session_or_is_run_elsewhere_or_has_a_reason() -> None:
    lost: list[str] = []
    used: set[str] = set()
    for page in PAGES:
        for heading, text in sections(page):
            for command in commands_of(text):
                key = command if command in TYPED else listed(command)
                used |= {key} if key else set()
                if key is None and (page.name, heading) not in SESSION:
                    lost.append(f"{page.name}, {heading}: {command}")
    assert lost == []
    assert {*TYPED, *ELSEWHERE, *NOT_HERE} - used == set(), "no page has it any more"
    for path, word in ELSEWHERE.values():
        assert word in (ROOT / path).read_text(), path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a reader of docs/commands.md is: with configs/, the job of the page, a model and data for it."""
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (job,) = re.findall(r"```toml\n(name = .*?)```", (ROOT / "docs" / "commands.md").read_text(), re.DOTALL)
    for shown, small in SMALLER.items():
        assert job.count(shown) == 1, shown
        job = job.replace(shown, small)
    (tmp_path / "my-job.toml").write_text(job)
    made = tiny_model_folder(tmp_path / "models", context_tokens=256)
    made.rename(tmp_path / "models" / "my-model")
    (tmp_path / "data").mkdir()
    rows = [{"prompt": f"What is {n} + {n}?", "reference": str(2 * n)} for n in range(80)]
    (tmp_path / "data" / "train.jsonl").write_bytes(b"".join(encode_json(row) + b"\n" for row in rows))
    return tmp_path


def test_what_the_pages_tell_a_reader_to_type_works(folder: Path) -> None:
    commands = session()
    lines = ['newest() { onbeat jobs --limit 1 --json | grep -o "job-[0-9a-f]*" | head -1; }']
    for number, command in enumerate(commands):
        lines.append(f'{command}\necho "=== {number} ended with $? ==="')
    environment = forking({name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")})
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    try:
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
    finally:
        subprocess.run(["onbeat", "down"], cwd=folder, env=environment, capture_output=True, check=False, timeout=60)
    codes = {int(number): int(code) for number, code in MARK.findall(done.stdout)}
    assert len(codes) == len(commands), done.stdout + done.stderr
    wrong = [f"{codes[number]}: {command}" for number, command in enumerate(commands) if codes[number]]
    assert wrong == [], done.stdout + done.stderr
    models = [json.loads((folder / name / "onbeat.json").read_bytes()) for name in ("my-model", "restored-model")]
    assert [model["policy_version"] for model in models] == [3, 3]
    assert models[0]["weights_digest"] == models[1]["weights_digest"]
