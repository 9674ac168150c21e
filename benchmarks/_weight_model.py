"""The trainer and the engine between which the benchmark `weights` publishes: real shapes, random weights, a step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config

from benchmarks._results import REPOSITORY
from consumer.gradient.optimizer import GROUP_BYTES
from contracts.spec.job import ModelSpec
from contracts.spec.root import SpecRoot
from onbeat.weights.chunks import ChunkReader
from onbeat.weights.layout import TensorLayout, split_into_shards
from onbeat.weights.model_folder import empty_model, weight_tensors
from onbeat.weights.transports import make_stores
from producer.engine.base import EngineSetup
from producer.engine.transformers.engine import TransformersEngine

SIZES: dict[str, tuple[int, PreTrainedConfig]] = {
    "0.4M": (
        5,
        Qwen3Config(
            vocab_size=96, hidden_size=128, num_hidden_layers=2, intermediate_size=384, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
        ),
    ),
    "135M": (
        3,
        Qwen2Config(
            vocab_size=49152, hidden_size=576, num_hidden_layers=30, intermediate_size=1536, num_attention_heads=9,
            num_key_value_heads=3, tie_word_embeddings=True,
        ),
    ),
    "0.5B": (
        3,
        Qwen2Config(
            vocab_size=151936, hidden_size=896, num_hidden_layers=24, intermediate_size=4864, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True,
        ),
    ),
    "1.5B": (
        2,
        Qwen2Config(
            vocab_size=151936, hidden_size=1536, num_hidden_layers=28, intermediate_size=8960, num_attention_heads=12,
            num_key_value_heads=2, tie_word_embeddings=True,
        ),
    ),
}  # fmt: skip
"""Name → (rounds, shape): the demo's, SmolLM2's, Qwen2.5's two."""
TOKENIZER = REPOSITORY / "configs" / "models" / "two-digit-addition"
SHARE_CHANGED = 0.01
ADAMW_VALUES = 16 * 1024**2
"""256 MiB of parameters, gradients and moments: no cache holds them."""


class SharedAdamW:
    """torch's fused AdamW over any number of float32 values, which all share the memory of some, and their rounding."""

    def __init__(self, device: torch.device) -> None:
        self._values = torch.zeros(ADAMW_VALUES, device=device)
        self._first = torch.zeros_like(self._values)
        self._second = torch.zeros_like(self._values)
        self._gradient = torch.full_like(self._values, 1e-3)
        self._rounded = torch.zeros_like(self._values, dtype=torch.bfloat16)

    def step(self, num_values: int) -> None:
        for start in range(0, num_values, ADAMW_VALUES):
            part = slice(0, min(ADAMW_VALUES, num_values - start))
            parameter = nn.Parameter(self._values[part])
            parameter.grad = self._gradient[part]
            optimizer = torch.optim.AdamW([parameter], lr=1e-6, fused=True)
            optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": self._first[part],
                "exp_avg_sq": self._second[part],
            }
            optimizer.step()
            self._rounded[part].copy_(self._values[part])


class Model:
    """The trainer's tensors on a device, and an engine of the same shape on the same device."""

    def __init__(self, config: PreTrainedConfig, scratch: Path, device: torch.device) -> None:
        folder = scratch / "model"
        shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(folder)
        self.spec = ModelSpec(path=str(folder), dtype="bfloat16")
        draw = np.random.default_rng(0)
        block = torch.from_numpy(draw.standard_normal(1 << 20, dtype=np.float32) * 0.02).bfloat16().to(device)
        self.tensors: dict[str, Tensor] = {}
        for name, like in weight_tensors(empty_model(folder, dtype=torch.bfloat16, device="meta")):
            num_blocks = -(-like.numel() // len(block))
            self.tensors[name] = block.repeat(num_blocks)[: like.numel()].reshape(like.shape).clone()
        self.num_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        self.device = device
        self._draw = draw
        self._adamw = SharedAdamW(device)

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors.values())

    def step(self, publish: Callable[[str, Tensor], None]) -> None:
        """Publishes the tensors of a group when it has its new values."""
        for group in self._groups:
            self._adamw.step(sum(self.tensors[name].numel() for name in group))
            for name in group:
                self._change(self.tensors[name])
            for name in group:
                publish(name, self.tensors[name])

    @property
    def _groups(self) -> list[list[str]]:
        masters = {name: TensorLayout(dtype=torch.float32, shape=tuple(t.shape)) for name, t in self.tensors.items()}
        return [list(group) for group in split_into_shards(masters, shard_bytes=GROUP_BYTES[self.device.type])]

    def _change(self, tensor: Tensor) -> None:
        """Gives a hundredth of the values, at random places, another bit pattern: the next bfloat16 up or down."""
        bits = tensor.view(torch.int16).reshape(-1)
        at = self._draw.integers(0, len(bits), max(1, int(SHARE_CHANGED * len(bits))))
        up_or_down = self._draw.integers(0, 2, len(at), dtype=np.int16) * 2 - 1
        if self.device.type == "cpu":
            bits.numpy()[at] += up_or_down
        else:
            places = torch.from_numpy(at).to(self.device)
            bits[places] += torch.from_numpy(up_or_down).to(self.device)

    def engine(
        self, weight_root: Path, chunks: Callable[[str], ChunkReader] | None = None, *, held_weights_bytes: int = 0
    ) -> TransformersEngine:
        return TransformersEngine(
            EngineSetup(
                model=self.spec,
                model_root=SpecRoot(Path("/")),
                weight_root=weight_root,
                stores=make_stores(weight_root, chunks),
                deterministic=False,
                held_weights_bytes=held_weights_bytes,
                device=self.device.type,
            )
        )
