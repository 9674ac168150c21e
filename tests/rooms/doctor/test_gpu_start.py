"""A container of compose's profile `gpu` begins: on a card that it shares, on its own, and with each mistake.

nvidia-smi is a script on PATH, and torch's answer is played. The program that begins is a real one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from contracts.engines import TransformersOptions, VllmOptions
from contracts.settings import engine_from
from onbeat.doctor.cards import Card, TorchBuild, shared_engine
from onbeat.doctor.finding import GIB, MIB
from onbeat.doctor.gpu_start import started_with
from tests.refusals import refusal_of
from tests.rooms.doctor.test_cards import BLIND, FOR_CPUS, FREE, SEES, played

ROOT = Path(__file__).parents[3]
SERVICES: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
VLLM = {"ONBEAT_ENGINE": "vllm", "ONBEAT_ENGINE_KV_CACHE_MB": "0"}
"""As compose gives it to producer_gpu, where .env says nothing else."""
HELD = "0, NVIDIA H200, 580.1, 143771, 2000\n"
"""The other container of the stack has the card, in its turn."""
TINY = "0, NVIDIA T400, 580.1, 2048, 2000\n"
PLAYED_TORCH = """
import json, sys
from onbeat.doctor import gpu_start
from onbeat.doctor.cards import TorchBuild
gpu_start.torch_build = lambda: TorchBuild(version="2.13.0+cu130", cuda="13.0", num_seen=1, capability=(9, 0))
sys.exit(gpu_start.main())
"""
SHOW = "import json, os; print(json.dumps([os.getpid(), dict(os.environ)]))"


def begin(
    folder: Path, *, cards: str, trainer: str, generator: str, program: str = SHOW
) -> subprocess.CompletedProcess[str]:
    """Begins producer_gpu's container with a program of the test's own."""
    smi = folder / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\ncase "$1" in --query-gpu*) printf %s "{cards}";; esac\n')
    smi.chmod(0o755)
    python, _, module, *flags = SERVICES["producer_gpu"]["entrypoint"]
    assert (python, module) == ("python", "onbeat.doctor.gpu_start")
    flags = [flag.replace("${TRAINER_GPU:-0}", trainer).replace("${GENERATOR_GPU:-0}", generator) for flag in flags]
    return subprocess.run(
        [sys.executable, "-c", PLAYED_TORCH, *flags, sys.executable, "-c", program],
        env={**os.environ, **VLLM, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_on_one_card_vllm_sleeps_in_the_trainers_turns_and_has_a_fifth_of_it_for_its_cache(tmp_path: Path) -> None:
    finished = begin(tmp_path, cards=HELD, trainer="0", generator="0")
    assert (finished.returncode, finished.stderr) == (0, "")
    _, environment = json.loads(finished.stdout)
    assert engine_from(environment) == VllmOptions(sleep_mode=True, kv_cache_mb=28754)


def test_on_a_card_of_its_own_vllm_stays_awake_and_takes_what_its_model_leaves(tmp_path: Path) -> None:
    finished = begin(tmp_path, cards=FREE, trainer="0", generator="1")
    assert finished.returncode == 0
    _, environment = json.loads(finished.stdout)
    assert engine_from(environment) == VllmOptions()


def test_a_card_that_another_has_keeps_a_container_from_its_own_card_with_one_line(tmp_path: Path) -> None:
    finished = begin(tmp_path, cards=HELD, trainer="0", generator="1")
    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert line.startswith("card 0: NVIDIA H200, 2.0 GiB of 140.4 GiB free: too little for weights")
    assert "choose another card: CUDA_VISIBLE_DEVICES (compose: TRAINER_GPU, GENERATOR_GPU)" in line


@pytest.mark.parametrize(
    ("cards", "build", "field", "says", "cure"),
    [
        (None, FOR_CPUS, "gpu", "no driver answers", "install NVIDIA's driver"),
        (FREE, FOR_CPUS, "gpu", "sees no card", "install torch's build for CUDA"),
        (FREE, BLIND, "gpu", "sees no card", "update the driver"),
        (TINY, SEES, "card 0", "too little for weights", "choose another card"),
    ],
    ids=["no driver", "a torch for CPUs", "an old driver", "a small card"],
)
def test_each_mistake_is_refused_with_its_cure_also_where_the_card_is_shared(
    cards: str | None, build: TorchBuild, field: str, says: str, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for environment in ({}, VLLM):
        with refusal_of(field, match=says) as refusal:
            started_with(environment, is_shared=True, build=build, ask=played(cards))
        assert cure in str(refusal.value.cure)


def test_a_cache_that_the_whole_card_has_no_room_for_is_refused_with_the_variable_that_sets_it() -> None:
    environment = VLLM | {"ONBEAT_ENGINE_KV_CACHE_MB": "150000"}
    with refusal_of("card 0", match="too little for a cache") as refusal:
        started_with(environment, is_shared=True, build=SEES, ask=played(FREE))
    assert "set kv_cache_mb to less than 143771 (compose: KV_CACHE_MB)" in str(refusal.value.cure)


def test_a_trainer_on_a_shared_card_begins_while_vllm_has_it() -> None:
    environment = {"ONBEAT_DEVICE": "cuda"}
    assert started_with(environment, is_shared=True, build=SEES, ask=played(HELD)) == environment


def test_a_size_that_is_set_stays_and_other_engines_stay_as_they_are() -> None:
    cards = [Card(index=0, name="L4", driver="580.1", total_bytes=24 * GIB, free_bytes=20 * GIB)]
    assert shared_engine(VllmOptions(), cards) == VllmOptions(sleep_mode=True, kv_cache_mb=24 * GIB // 5 // MIB)
    assert shared_engine(VllmOptions(kv_cache_mb=512), cards) == VllmOptions(sleep_mode=True, kv_cache_mb=512)
    assert shared_engine(TransformersOptions(), cards) == TransformersOptions()
