"""deploy/slurm/onbeat.sbatch on a Slurm of one node: a job that is ended and requeued goes on to its end."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onbeat.base.process.waiting import Waiting
from onbeat.stack.ports import FIRST, is_free
from tests.chaos.short_job import long_variant

ROOT = Path(__file__).parents[2]
SRUN = """\
#!/bin/sh
nodes=1 tasks=1 started=
while :; do
  case $1 in
    --nodes=*) nodes=${1#*=} ;;
    --ntasks-per-node=*) tasks=${1#*=} ;;
    --relative=0 | --overlap | --no-kill | --kill-on-bad-exit=0) ;;
    -*) echo "srun: $1" >&2; exit 1 ;;
    *) break ;;
  esac
  shift
done
trap 'for one in $started; do kill -- -$one; done' TERM
for _ in $(seq $((nodes * tasks))); do setsid "$@" & started="$started $!"; done
wait
wait
"""
"""As many copies of a command as it has tasks; SIGTERM goes to all processes of each, as that of a step does."""
SCONTROL = """\
#!/bin/sh
case $1 in
  show) for node in $SLURM_JOB_NODELIST; do echo $node; done ;;
  requeue) echo "$2" >> "$REQUEUED" ;;
  *) exit 1 ;;
esac
"""
GATEWAY = 8000
"""The gateway's port, above that of Redis."""
SPEC = """\
name = "sums"
iterations = 120
model = { path = "configs/models/two-digit-addition" }
dataset = { type = "addition" }
reward = { components = [{ type = "exact" }] }
rollout = { batches_per_iteration = 2, prompts_per_batch = 4, group_size = 4, sampling = { max_new_tokens = 5 } }
trainer = { checkpoint_every_iterations = 2 }
"""


def start(folder: Path, port: int, *nodes: str, **more: str) -> subprocess.Popen[bytes]:
    """As Slurm starts it on nodes that are addresses of this machine; its words go to `said`."""
    environment = os.environ | {
        "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "REQUEUED": str(folder / "requeued"),
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NODELIST": " ".join(nodes),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "REDIS_PORT": str(port),
    }
    command = ["bash", ROOT / "deploy" / "slurm" / "onbeat.sbatch", folder / "spec.toml", folder / "shared"]
    with open(folder / "said", "ab") as said:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment | more, stdout=said, stderr=said, start_new_session=True
        )


def logs_of(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in [folder / "said", *(folder / "shared" / "logs").glob("*")])


def laid(folder: Path, spec: str) -> int:
    """Lays Slurm's commands and the spec into a folder. Returns a free port, below two others that are free."""
    if shutil.which("setsid") is None:
        pytest.skip("needs setsid")
    (folder / "bin").mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "spec.toml").write_text(spec)
    ports = random.SystemRandom().sample(range(FIRST, FIRST + 4000), 200)
    return next(port for port in ports if all(is_free(port + above) for above in (0, 4000, GATEWAY)))


def goes_on(folder: Path, spec: str, *nodes: str, **more: str) -> str:
    """What a job says that is ended after a checkpoint, requeued, and comes to its end then."""
    port = laid(folder, spec)
    slurm = start(folder, port, *nodes, **more)
    try:
        waiting = Waiting("an iteration", deadline_s=240.0)
        while b"checkpoint after iteration 1:" not in (folder / "said").read_bytes():
            assert slurm.poll() is None, logs_of(folder)
            waiting.poke()
            time.sleep(0.1)
        slurm.send_signal(signal.SIGTERM)
        assert slurm.wait(240.0) == 143, logs_of(folder)
        assert (folder / "requeued").read_text() == "4242\n"
        job_id = (folder / "shared" / "job").read_text().strip()
        (folder / "said").unlink()
        slurm = start(folder, port, *nodes, **more)
        assert slurm.wait(240.0) == 0, logs_of(folder)
        said = (folder / "said").read_text()
        assert f"{job_id}  succeeded" in said
        return said
    finally:
        slurm.terminate()
        slurm.wait(240.0)


@long_variant
def test_a_job_that_is_requeued_goes_on_to_its_end(tmp_path: Path) -> None:
    starts = re.findall(r"a trainer (?:starts|resumes) at iteration (\d+)", goes_on(tmp_path, SPEC, "127.0.0.1"))
    assert starts[0] == "0"
    assert int(starts[-1]) >= 2, "it went on from a checkpoint"


def test_a_gateway_whose_port_is_taken_ends_the_job_with_a_word(tmp_path: Path) -> None:
    port = laid(tmp_path, SPEC)
    with socket.create_server(("0.0.0.0", port + GATEWAY)):
        assert start(tmp_path, port, "127.0.0.1").wait(240.0) == 1, logs_of(tmp_path)
    log = tmp_path / "shared" / "logs" / "gateway.log"
    assert f"gateway: ended before the job began; {log} says why" in (tmp_path / "said").read_text()
    assert "Address already in use" in log.read_text()
    assert not (tmp_path / "requeued").exists()
