"""Engines under test, each with the weights that it may be given and a full forward pass to check it against."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from transformers import PreTrainedModel

from contracts.engines import Engine, OpenaiOptions, TransformersOptions, VllmOptions
from contracts.errors import WeightsRejected
from contracts.rollouts import Completion, PromptBatch
from contracts.spec.job import ModelSpec
from contracts.versions import WeightFile, WeightManifest, weights_digest
from onbeat.base.process.launcher import end_with_launcher
from onbeat.stack.ports import free_port
from onbeat.weights.base_model.text_model import text_model
from onbeat.weights.model_folder import model_config
from producer.engine.base import EngineSetup, GenerationEngine
from producer.engine.factory import engine_class
from producer.engine.transformers.engine import TransformersEngine
from producer.engine.vllm.extension import CLASS as VERIFIED_LOADER
from tests.builders import DEVICE, engine_setup, prompt_batch, tiny_model_folder
from tests.fake_engine import FakeEngine

T = TypeVar("T")
Tensors = dict[str, np.ndarray]

REPRODUCIBLE = ("fake", "qwen3", "llama")
VLLM = ("vllm qwen3", "vllm llama")
"""qwen3 is tied, llama is not: vLLM reloads them by different paths."""
SERVER = ("openai qwen3",)
"""A server of vLLM, as a user starts it."""
SHARED = (*VLLM, *SERVER)
MODELS = ("qwen3", "llama", *SHARED)
"""The kinds with a Hugging Face model inside."""
KINDS = ("fake", *MODELS)
VLLM_OPTIONS = VllmOptions(kv_cache_mb=64, timeout_s=120.0)
TIED = {"qwen3": True, "llama": False}


@dataclass
class Rig:
    kind: str
    engine: GenerationEngine
    run_root: Path
    tensors: Tensors
    full_logits: Callable[[list[int]], torch.Tensor]
    """Tokens so far [S] → float32 logits [V] of the next one, under the tensors of version 0."""
    folder: Path | None = None
    """The model's folder, where there is one."""
    server: subprocess.Popen[bytes] | None = None
    runner: asyncio.Runner = field(default_factory=asyncio.Runner)
    """One event loop for all calls, as in a generator."""

    @property
    def eos(self) -> int:
        return 0 if self.kind == "fake" else 1

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def publish(self, version: int, tensors: Tensors | None = None) -> WeightManifest:
        return publish(self.run_root, version, self.tensors if tensors is None else tensors)

    def load(self, version: int = 0, tensors: Tensors | None = None) -> WeightManifest:
        manifest = self.publish(version, tensors)
        self.run(self.engine.load_weights(manifest))
        return manifest

    def generate(
        self, manifest: WeightManifest, prompts: Sequence[Sequence[int]], **changes: Any
    ) -> list[list[Completion]]:
        return self.run(self.engine.generate(under(manifest, prompts, **changes)))

    def forget(self) -> None:
        """Makes an engine that several tests share hold nothing, as a new one does."""
        missing = self.publish(0)
        (self.run_root / missing.directory / missing.files[0].name).unlink()
        with contextlib.suppress(WeightsRejected):
            self.run(self.engine.load_weights(missing))

    def close(self) -> None:
        self.run(self.engine.aclose())
        self.runner.close()
        if self.server is not None:
            self.server.terminate()
            self.server.wait(60.0)


def untrained_model(make: Callable[[], Any]) -> PreTrainedModel:
    """A model with random weights, the same at each call; also its biases are no zeros."""
    torch.manual_seed(0)
    model: PreTrainedModel = make().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def under(manifest: WeightManifest, prompts: Sequence[Sequence[int]], **changes: Any) -> PromptBatch:
    version, digest = manifest.policy_version, manifest.weights_digest
    return prompt_batch(prompts, policy_version=version, weights_digest=digest, **changes)


def publish(run_root: Path, version: int, tensors: Tensors) -> WeightManifest:
    """Two shards, and a manifest as the trainer writes it."""
    directory = f"job/weights/v{version:06d}"
    (run_root / directory).mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    files = []
    for number, shard in enumerate((names[::2], names[1::2])):
        path = run_root / directory / f"weights-{number}.safetensors"
        save_numpy({name: tensors[name] for name in shard}, path)
        files.append(WeightFile(name=path.name, num_bytes=path.stat().st_size))
    return WeightManifest(
        policy_version=version,
        weights_digest=weights_digest(
            (name, str(tensor.dtype), tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()
        ),
        dtype="float32",
        directory=directory,
        files=tuple(files),
    )


def scaled(tensors: Tensors, factor: float) -> Tensors:
    return {name: (tensor * factor).astype(np.float32) for name, tensor in tensors.items()}


def fake_rig(run_root: Path) -> Rig:
    tensors = {"scale": np.ones(3, dtype=np.float32), "bias": np.zeros((2, 2), dtype=np.float32)}
    engine = FakeEngine(run_root=run_root, tensor_names=frozenset(tensors))
    return Rig("fake", engine, run_root, tensors, lambda tokens: torch.from_numpy(engine.logits(tokens).copy()))


def transformers_rig(
    architecture: str, folders: Path, run_root: Path, options: TransformersOptions | None = None
) -> Rig:
    engine = TransformersEngine(
        engine_setup(folders, run_root, model=ModelSpec(path=architecture), held_weights_bytes=2**30, device=DEVICE),
        options,
    )
    return rig_of(architecture, engine, folders / architecture, run_root)


def vllm_rig(kind: str, root: Path) -> Rig:
    """An engine process of its own: started once for all tests of a module, since that takes long."""
    need_vllm()
    folder = vllm_folder(root, kind.split()[1])
    engine = engine_of(VLLM_OPTIONS, setup(folder))
    return rig_of(kind, engine, folder, root / "runs")


def server_rig(kind: str, root: Path) -> Rig:
    """`python -m vllm.entrypoints.openai.api_server`, started once for all tests of a module."""
    need_vllm()
    folder = vllm_folder(root, kind.split()[1])
    url = f"http://127.0.0.1:{free_port()}"
    server = start_vllm_server(folder, url, root / "server.log")
    try:
        engine = engine_of(OpenaiOptions(url=url, timeout_s=240.0), setup(folder))
        rig = rig_of(kind, engine, folder, root / "runs")
    except BaseException:
        server.kill()
        raise
    rig.server = server
    return rig


def need_vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vllm is not installed in this environment: make test-vllm")


def engine_of(options: Engine, of: EngineSetup) -> GenerationEngine:
    """An engine that is an extra."""
    make: Callable[[EngineSetup, Engine], GenerationEngine] = engine_class(type(options))
    return make(of, options)


def setup(folder: Path, weight_root: Path | None = None, **changes: Any) -> EngineSetup:
    """The setup of a model folder whose versions are in `runs` beside it, unless elsewhere."""
    return engine_setup(
        folder.parent, weight_root or folder.parent / "runs", model=ModelSpec(path=folder.name), **changes
    )


def start_vllm_server(
    folder: Path,
    url: str,
    log_path: Path,
    *,
    python: str = sys.executable,
    num_parts: int = 1,
    num_copies: int = 1,
    loader: str = VERIFIED_LOADER,
) -> subprocess.Popen[bytes]:
    """Starts it with the flags that docs/engines.md names; the other flags are for a CPU.

    Args:
        folder: The model's folder.
        url: Its address, on loopback.
        log_path: The file that its lines go to.
        python: The interpreter, which has vllm.
        num_parts: Workers that have a part of the model each.
        num_copies: Copies of the model.
        loader: Its worker extension.
    """
    flags = {
        "max-logprobs": -1,
        "model": folder,
        "host": "127.0.0.1",
        "port": url.rpartition(":")[2],
        "logprobs-mode": "processed_logprobs",
        "worker-extension-cls": loader,
        "dtype": "float32",
        "kv-cache-memory-bytes": 64 * 1024**2,
        "max-num-seqs": 256,
        "tensor-parallel-size": num_parts,
        "data-parallel-size": num_copies,
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--load-format", "dummy"]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if num_parts * num_copies > 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    with log_path.open("wb") as log_file:
        return subprocess.Popen(
            command, env=os.environ | environment, stdout=log_file, stderr=log_file, preexec_fn=end_with_launcher()
        )


def vllm_folder(root: Path, architecture: str) -> Path:
    """vLLM's attention on a CPU wants heads of 32 or more."""
    return tiny_model_folder(root, architecture, tied=TIED[architecture], hidden_size=128)  # type: ignore[arg-type]


def rig_of(kind: str, engine: GenerationEngine, folder: Path, run_root: Path) -> Rig:
    model = reference_model(folder)

    def full_logits(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([tokens])).logits[0, -1]

    return Rig(kind, engine, run_root, load_numpy(folder / "model.safetensors"), full_logits, folder)


def reference_model(folder: Path, tensors: Tensors | None = None) -> PreTrainedModel:
    """The folder's model, with other tensors in it where they are given."""
    model, _ = text_model(model_config(folder)).load(folder, torch.float32)
    model.eval()
    for name, tensor in (tensors or {}).items():
        model.get_parameter(name).data.copy_(torch.from_numpy(tensor))
    return model


def shared_rigs(root: Path) -> Iterator[Callable[[str], Rig]]:
    """Makes each expensive rig at its first use, and closes them all."""
    made: dict[str, Rig] = {}

    def rig(kind: str) -> Rig:
        if kind not in made:
            make = vllm_rig if kind in VLLM else server_rig
            made[kind] = make(kind, root / kind.replace(" ", "-"))
        made[kind].forget()
        return made[kind]

    yield rig
    for one in made.values():
        one.close()
