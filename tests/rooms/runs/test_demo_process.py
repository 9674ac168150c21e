"""`onbeat demo` as a user starts it: every service a real process, the job over HTTP, the verdict and the files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace
from transformers import AutoModelForCausalLM, AutoTokenizer

from consumer.model.checkpoint import read_checkpoint
from consumer.model.policy import load_policy
from contracts.run_folder import RunFolder
from contracts.spec.root import SpecRoot
from onbeat.audit.folder import read_spec
from onbeat.audit.weights import digest_of, digests_on_disk
from onbeat.base.process import child_process
from tests.chaos.short_job import long_variant
from tests.forked import FORKED_LOG, forked_and_running, forking
from tests.until import until

REPOSITORY = Path(__file__).resolve().parents[3]
DEADLINE_S = 600.0
SMALL = (
    *("--set", "rollout.batches_per_iteration=4"),
    *("--set", "rollout.prompts_per_batch=4"),
    *("--set", "evaluation.num_prompts=32"),
    *("--set", "evaluation.prompts_per_batch=32"),
)


def start_demo(run_dir: Path, flags: Sequence[str]) -> subprocess.Popen[str]:
    """Starts the demo in a session of its own, without this process's settings.

    It is forked, and its services too; tests/e2e/test_wheel.py executes each.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
    environment = forking(environment | {FORKED_LOG: str(forked_log(run_dir))})
    command = [sys.executable, "-m", "onbeat.cli", "demo", "--json", "--run-dir", str(run_dir), *SMALL, *flags]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment,
        start_new_session=True,
    )


def forked_log(run_dir: Path) -> Path:
    return run_dir.with_name("forked")


def processes_of(run_dir: Path) -> set[psutil.Process]:
    """Returns the processes that were started for this run folder, by their environment or the log of the forked."""
    forked = forked_and_running(forked_log(run_dir)) if forked_log(run_dir).exists() else set()
    return child_process.marked("ONBEAT_RUN_ROOT", str(run_dir.resolve())) | forked


def finish(demo: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = demo.communicate(timeout=DEADLINE_S)
    finally:
        if demo.poll() is None:
            demo.send_signal(signal.SIGTERM)
            demo.communicate(timeout=DEADLINE_S)
    return demo.returncode, out, err


def logs_of(run_dir: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted((run_dir / "logs").glob("*.log")))


def run_small_demo(run_dir: Path, *flags: str) -> dict[str, Any]:
    code, out, err = finish(start_demo(run_dir, flags))
    assert code == 0, f"{err}\n{out}\n{logs_of(run_dir)}"
    (line,) = out.splitlines()
    return json.loads(line)


def test_a_short_demo_succeeds_is_verified_and_leaves_no_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs"
    summary = run_small_demo(run_dir, "--iterations", "3", "--generators", "1", "--seed", "5", "--threads", "1")

    assert (summary["status"], summary["verified"], summary["gaps"]) == ("succeeded", True, [])
    assert (summary["schedule"], summary["iterations"], summary["seed"]) == ("periodic", 3, 5)
    assert summary["final_policy_version"] == 3
    assert summary["batches_trained"] == 3 * 4
    for name in ("eval_before", "eval_after", "eval_before_greedy", "eval_after_greedy", "reward_first", "reward_last"):
        assert 0.0 < summary[name] <= 1.0, name
    assert summary["eval_prompts"] == 32
    assert summary["wall_s"] > 0.0
    assert isinstance(summary["batches_rejected"], dict)

    folder = RunFolder(run_dir.resolve(), summary["job_id"])
    assert summary["run_dir"] == str(folder.path)
    assert json.loads((folder.path / "summary.json").read_text()) == summary
    assert [Path(figure).name for figure in summary["figures"]] == ["reward_curve.png", "timeline.png"]
    assert all(Path(figure).stat().st_size > 10_000 for figure in summary["figures"])
    versions = dict(digests_on_disk(folder).values())
    assert versions[3] == summary["final_weights_digest"]

    assert forked_log(run_dir).exists()
    assert not processes_of(run_dir)
    assert not (run_dir / "redis").exists()
    assert not (run_dir / "stack.json").exists()
    verify = subprocess.run(
        [sys.executable, "-m", "onbeat.cli", "verify", summary["job_id"], "--run-dir", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(verify.stdout)["verified"] is True
    assert_probes_are_computed_again(folder)
    assert_exported_model_answers_as_the_policy(folder, summary, tmp_path / "model")


def assert_probes_are_computed_again(folder: RunFolder) -> None:
    """On the machine that trained the run, by its number of threads, the log-probs have the same bits."""
    command = [sys.executable, "-m", "onbeat.cli", "verify", folder.job_id, "--run-dir", str(folder.run_root)]
    flags = ["--probe", "--threads", "1", "--model-root", str(REPOSITORY), "--json"]
    probed = subprocess.run([*command, *flags], env=forking(os.environ), capture_output=True, text=True, check=True)
    verdict = json.loads(probed.stdout)
    assert verdict["verified"] is True
    lines = [line for line in verdict["notes"] if line.startswith("version ")]
    assert lines[0] == "version 0, from the model's folder: the same bits"
    assert lines[-1].startswith(f"version 3, from {folder.job_id}/checkpoints/i000002: the same bits")


def assert_exported_model_answers_as_the_policy(folder: RunFolder, summary: dict[str, Any], target: Path) -> None:
    """Runs the command on the run folder alone: the stack is down."""
    command = [sys.executable, "-m", "onbeat.cli", "export", summary["job_id"], str(target)]
    flags = ["--run-dir", str(folder.run_root), "--model-root", str(REPOSITORY), "--json"]
    exported = subprocess.run([*command, *flags], env=forking(os.environ), capture_output=True, text=True, check=True)
    assert json.loads(exported.stdout)["weights_digest"] == summary["final_weights_digest"]
    assert digest_of([target / "model.safetensors"]) == summary["final_weights_digest"]
    # By torch's own products, as transformers computes the exported one.
    model = replace(read_spec(folder).model, matmul=UNSET)
    policy = load_policy(model, model_root=SpecRoot(REPOSITORY), gradient_checkpointing=False)
    policy.load_state_tensors(read_checkpoint(folder.checkpoint_after(2)).model_tensors)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    for question in ("12+34=", "58+67=", "99+1=", "7+8="):
        tokens = tokenizer(question, return_tensors="pt")["input_ids"]
        answer, expected = (
            network.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=5, do_sample=False)
            for network in (model, policy.model)
        )
        assert tokenizer.decode(answer[0]) == tokenizer.decode(expected[0])
        assert torch.equal(model(answer).logits, policy.model(answer).logits)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the processes through /proc")
@long_variant
def test_a_demo_that_is_interrupted_in_the_middle_stops_every_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs"
    demo = start_demo(run_dir, ("--iterations", "100000", "--generators", "2"))
    until(lambda: any(run_dir.glob("*/metrics.jsonl")) or demo.poll() is not None, "the first committed iteration")
    started = processes_of(run_dir)

    demo.send_signal(signal.SIGINT)
    code, out, err = finish(demo)

    assert code == 130, f"{err}\n{out}\n{logs_of(run_dir)}"
    assert out == ""
    assert "Traceback" not in err
    assert len(started) >= 6
    assert not child_process.living(started)
    assert not processes_of(run_dir)


def test_bad_input_is_one_object_that_names_the_field_and_leaves_no_process(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs"
    code, out, err = finish(start_demo(run_dir, ["--set", "model.path=absent"]))
    assert code in (1, 2)
    assert "model.path" in out
    assert "Traceback" not in err
    assert not processes_of(run_dir)
