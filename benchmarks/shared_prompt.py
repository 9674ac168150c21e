"""Compares shared prompts with padded rows: time and peak memory of a training pass, over P/R and G, and of the head.

    python -m benchmarks shared-prompt [--device cuda]

One process, one thread; the two layouts take turns, pass by pass, and their ratio is of one run. A pass is what a
rollout batch of one group costs before it is accumulated: decode, forward, log-probs, backward. Time is that of the
processor on a CPU, which the machine's other work stretches less than the clock's.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_utils import PreTrainedModel

from benchmarks._batches import one_group
from benchmarks._results import shown_path, write_result
from benchmarks._tensor_memory import peak_bytes
from consumer.gradient.log_probs import response_logprobs
from consumer.gradient.micro_batch import Packing, make_micro_batch
from consumer.model.language_head import chosen_values
from consumer.model.shared_prompt.trial import share_prompts
from contracts.rollouts import RolloutBatch

EXPECTED = (
    "Before the first run: at P = 8R, G = 16 a pass has 6.1 times fewer tokens, and the linear layers are some 85 % of "
    "a padded pass of this model; attention falls by 3.7 only, with copies of the prompt's keys and values beside it. "
    "So 5.0 to 5.8 times faster, which is at least 0.8 of the ratio of the tokens; at P = R, G = 4 the tokens fall by "
    "1.6 and the time by 1.4. Memory falls less than the tokens, by 3.5 to 4.5 at P = 8R, G = 16: each layer keeps the "
    "prompt's keys and values once for each response. The head alone: 0.5 GiB and a little more for each token in "
    "chunks, whatever the number of tokens; without chunks 2 GiB for every 1000 tokens."
)
TARGET_SHARE = 0.8
RATIOS, GROUP_SIZES = (1, 4, 8), (4, 16)
PACKINGS: tuple[Packing, Packing] = ("padded", "shared_prompt")
HEAD_VOCABULARY, HEAD_WIDTH = 151_936, 64


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of a Qwen2 whose linear layers are what a pass costs."""

    hidden_size: int
    layers: int
    vocabulary: int = 512

    def make(self, device: torch.device) -> PreTrainedModel:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden_size // 64,
            num_key_value_heads=self.hidden_size // 64,
            intermediate_size=3 * self.hidden_size,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
        model = Qwen2ForCausalLM(config).eval()
        nn.Module.to(model, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        share_prompts(model)
        return model


@dataclass(frozen=True, kw_only=True)
class Row:
    """One shape of a group, as measured."""

    prompt_tokens: int
    response_tokens: int
    group_size: int
    token_ratio: float
    """Padded over packed, of input tokens: what the linear layers do."""
    time_ratio: float
    share_of_token_ratio: float
    memory_ratio: float
    seconds: dict[str, list[float]]
    peak_mib: dict[str, float]


def train_pass(model: PreTrainedModel, batch: RolloutBatch, packing: Packing) -> None:
    """Runs one group forward and backward, and drops the gradients."""
    micro_batch = make_micro_batch(batch, advantages=np.ones((1, batch.group_size)), packing=packing)
    logprobs = response_logprobs(model, micro_batch, 1.0)
    (logprobs * micro_batch.generator_logprobs.to(logprobs)).sum().backward()
    model.zero_grad(set_to_none=True)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    started_s = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - started_s


def measure(model: PreTrainedModel, *, prompt_tokens: int, response_tokens: int, group_size: int, repeats: int) -> Row:
    batch = one_group(prompt_tokens=prompt_tokens, response_lengths=[response_tokens] * group_size)
    work = {packing: functools.partial(train_pass, model, batch, packing) for packing in PACKINGS}
    seconds: dict[str, list[float]] = {packing: [] for packing in PACKINGS}
    work["shared_prompt"]()
    for _ in range(repeats):
        for packing in PACKINGS:
            seconds[packing].append(round(seconds_of(work[packing], model.device), 4))
    peak_mib = {packing: round(peak_bytes(work[packing], model.device) / 2**20, 1) for packing in PACKINGS}
    padded_tokens = group_size * (prompt_tokens + response_tokens - 1)
    token_ratio = padded_tokens / (prompt_tokens + group_size * (response_tokens - 1))
    time_ratio = statistics.median(
        padded / packed for padded, packed in zip(seconds["padded"], seconds["shared_prompt"], strict=True)
    )
    return Row(
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        group_size=group_size,
        token_ratio=round(token_ratio, 2),
        time_ratio=round(time_ratio, 2),
        share_of_token_ratio=round(time_ratio / token_ratio, 2),
        memory_ratio=round(peak_mib["padded"] / peak_mib["shared_prompt"], 2),
        seconds=seconds,
        peak_mib=peak_mib,
    )


def head_peaks(device: torch.device) -> list[dict[str, Any]]:
    """Peak of forward and backward of a head of 151,936 tokens, in chunks and whole, over the number of tokens."""
    head = nn.Linear(HEAD_WIDTH, HEAD_VOCABULARY, bias=False, device=device)
    rows = []
    for num_tokens in (256, 512, 1024, 2048):
        states = torch.randn(num_tokens, HEAD_WIDTH, device=device, requires_grad=True)
        chosen = torch.arange(num_tokens, device=device)
        chunked = functools.partial(
            chosen_values, head, states, chosen, vocabulary_size=HEAD_VOCABULARY, temperature=1.0, entropy=False
        )
        row: dict[str, Any] = {"tokens": num_tokens, "logits_mib": round(num_tokens * HEAD_VOCABULARY * 4 / 2**20)}
        row["chunked_mib"] = round(peak_bytes(lambda chunked=chunked: chunked()[0].sum().backward(), device) / 2**20)
        if num_tokens <= 512:
            whole = functools.partial(_whole_head, head, states, chosen)
            row["whole_mib"] = round(peak_bytes(whole, device) / 2**20)
        head.zero_grad(set_to_none=True)
        rows.append(row)
    return rows


def _whole_head(head: nn.Linear, states: torch.Tensor, chosen: torch.Tensor) -> None:
    head(states).log_softmax(dim=-1).gather(1, chosen[:, None]).sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks shared-prompt", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--hidden-size", type=int, default=512, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    shape = Model(hidden_size=arguments.hidden_size, layers=arguments.layers)
    model = shape.make(device)
    rows = []
    for ratio in RATIOS:
        for group_size in GROUP_SIZES:
            row = measure(
                model,
                prompt_tokens=ratio * arguments.response_tokens,
                response_tokens=arguments.response_tokens,
                group_size=group_size,
                repeats=arguments.repeats,
            )
            rows.append(row)
            print(asdict(row), flush=True)
    head = head_peaks(device)
    print(head, flush=True)
    reached = rows[-1].share_of_token_ratio
    result = {
        "expected": EXPECTED,
        "target_share_of_token_ratio": TARGET_SHARE,
        "reached_share_of_token_ratio": reached,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": asdict(shape),
        "rows": [asdict(row) for row in rows],
        "head": head,
    }
    path = write_result("shared-prompt" + ("-cuda" if device.type == "cuda" else ""), result)
    print(f"{reached:.2f} of the tokens' ratio (target {TARGET_SHARE}), written to {shown_path(path)}")


if __name__ == "__main__":
    main()
