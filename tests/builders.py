"""Builders that tests share: small, valid, real things."""

from __future__ import annotations

import functools
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from contracts.encoding.arrays import pack_float32, pack_int32
from contracts.encoding.wire import convert
from contracts.events import AuditRecord
from contracts.rollouts import BatchTimings, Completion, Prompt, PromptBatch, Rollout, RolloutBatch, RolloutGroup
from contracts.sampling import SamplingParams
from contracts.spec.job import JobSpec, ModelSpec
from contracts.spec.root import SpecRoot
from contracts.spec.rules import check_spec
from contracts.versions import WeightFile, WeightManifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from consumer.gradient.accumulation import GradientAccumulator
    from consumer.gradient.optimizer import PolicyOptimizer
    from producer.engine.base import EngineSetup

DEVICE = os.environ.get("TEST_DEVICE", "cpu")
"""What the processes and engines of these tests compute on: `make test-gpu` sets cuda."""
DIGEST = "ab" * 32
"""A well-formed digest where the test does not look at its value."""
CHARACTERS = " 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-*/=<>.,?!:\n"
CHANGED_LOGITS = {"max_new_tokens": 5, "min_new_tokens": 2, "logit_bias": {"5": 0.5}, "repetition_penalty": 1.2}
"""A sampling of which each setting changes logits."""
VOCABULARY = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, `<eos>` = 1, `<pad>` = 0, with a plain chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def stub_model(folder: Path) -> None:
    """What looks like a model to one who doesn't load it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    # The length of the head, and the head: no tensor.
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def tiny_model_folder(
    folder: Path,
    architecture: Literal["qwen3", "llama"] = "qwen3",
    *,
    hidden_size: int = 32,
    num_layers: int = 2,
    tied: bool = True,
    context_tokens: int = 128,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Saves a random model with its tokenizer, that of characters unless another is given; returns its folder,
    folder/architecture."""
    path = folder / architecture
    path.mkdir(parents=True, exist_ok=True)
    shape = (architecture, hidden_size, num_layers, tied, context_tokens, seed)
    files = _files_of_tiny_model(*shape) if tokenizer is None else _made_files(*shape, tokenizer)
    for name, content in files.items():
        # A model that was loaded from here before has the file mapped: it keeps its own.
        (path / name).unlink(missing_ok=True)
        (path / name).write_bytes(content)
    return path


@functools.cache
def _files_of_tiny_model(
    architecture: str, hidden_size: int, num_layers: int, tied: bool, context_tokens: int, seed: int
) -> dict[str, bytes]:
    """The files of a model of characters by their names: hundreds of tests ask for the same few."""
    return _made_files(architecture, hidden_size, num_layers, tied, context_tokens, seed, char_tokenizer())


def _made_files(
    architecture: str,
    hidden_size: int,
    num_layers: int,
    tied: bool,
    context_tokens: int,
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
) -> dict[str, bytes]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden_size // 4,
        "intermediate_size": 3 * hidden_size,
        "max_position_embeddings": context_tokens,
        "tie_word_embeddings": tied,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (
            LlamaForCausalLM(LlamaConfig(**shape))
            if architecture == "llama"
            else Qwen3ForCausalLM(Qwen3Config(**shape))
        )
    with tempfile.TemporaryDirectory() as name:
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        return {path.name: path.read_bytes() for path in Path(name).iterdir()}


def engine_setup(model_root: Path, weight_root: Path | None = None, **changes: Any) -> EngineSetup:
    """What an engine of the tiny model in a folder is made from; its versions are there as well, unless elsewhere."""
    from onbeat.weights.transports import make_stores
    from producer.engine.base import EngineSetup

    weights = weight_root or model_root
    fields: dict[str, Any] = {"model": ModelSpec(path="qwen3"), "stores": make_stores(weights)}
    return EngineSetup(model_root=SpecRoot(model_root), weight_root=weights, **(fields | changes))


def manifest(version: int, digest: str = DIGEST, **changes: Any) -> WeightManifest:
    """A version in one file, which isn't there; changes replace fields."""
    fields: dict[str, Any] = {
        "policy_version": version,
        "weights_digest": digest,
        "dtype": "float32",
        "directory": f"job/weights/v{version:06d}",
        "files": (WeightFile(name="a.safetensors", num_bytes=1),),
    }
    return WeightManifest(**(fields | changes))


def commit_record(iteration: int, batches: Mapping[str, str] | None = None, **changes: Any) -> AuditRecord:
    """A commit of the job's first trainer that abandons nothing; changes replace fields."""
    fields: dict[str, Any] = {
        "kind": "commit",
        "iteration": iteration,
        "policy_version": iteration,
        "weights_digest": DIGEST,
        "next_weights_digest": DIGEST,
        "trainer_epoch": 1,
        "batches": dict(batches or {}),
        "abandoned": {},
        "previous": "",
    }
    return AuditRecord(**(fields | changes))


def install(folder: Path, name: str, entry_points: str) -> None:
    """As pip leaves the metadata of a package's version 1.0 in a folder of modules."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def flip_a_bit(path: Path) -> None:
    """In the last tensor: the file keeps its size, its header and every name."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def completion(token_ids: Sequence[int], logprobs: Sequence[float] | None = None) -> Completion:
    """A completion that stopped by itself; log-probs default to -1.0 a token."""
    return Completion(
        token_ids=pack_int32(token_ids),
        generator_logprobs=pack_float32(logprobs if logprobs is not None else [-1.0] * len(token_ids)),
        finish_reason="stop",
    )


def kept_ids(packed: bytes) -> list[list[int]]:
    """The sets of onbeat/data/kept_sets.py, read one byte after another."""
    sets: list[list[int]] = []
    ids: list[int] = []
    number = shift = 0
    for byte in packed:
        number |= (byte & 127) << shift
        shift += 7
        if byte > 127:
            continue
        if number:
            ids.append((ids[-1] if ids else -1) + number)
        else:
            sets.append(ids)
            ids = []
        number = shift = 0
    return sets


def rollout(token_ids: Sequence[int], reward: float, *, logprobs: Sequence[float] | None = None) -> Rollout:
    return Rollout(
        completion=completion(token_ids, logprobs), text="", reward=reward, reward_breakdown={"exact": reward}
    )


def batch_of(groups: Sequence[tuple[Sequence[int], Sequence[Rollout]]], **changes: Any) -> RolloutBatch:
    """A rollout batch of (prompt token ids, rollouts) pairs."""
    fields: dict[str, Any] = {
        "job_id": "job",
        "batch_id": "0/train/0",
        "iteration": 0,
        "purpose": "train",
        "policy_version": 0,
        "weights_digest": DIGEST,
        "group_size": len(groups[0][1]),
        "generator_id": "generator-a",
        "attempt": 1,
        "timings": BatchTimings(
            generation_started_s=1.0, generation_ended_s=2.0, scoring_started_s=2.0, scoring_ended_s=2.5
        ),
        "groups": tuple(
            RolloutGroup(
                prompt_id=f"train/{index}",
                prompt_index=index,
                prompt_token_ids=pack_int32(prompt),
                rollouts=tuple(rollouts),
            )
            for index, (prompt, rollouts) in enumerate(groups)
        ),
    }
    return RolloutBatch(**(fields | changes))


def rollout_batch(
    *,
    seed: int = 0,
    num_groups: int = 2,
    group_size: int = 4,
    prompt_tokens: tuple[int, int] = (3, 6),
    response_tokens: tuple[int, int] = (1, 5),
    rewards: Sequence[float] = (0.0, 1.0),
    vocabulary_size: int = len(VOCABULARY),
    **changes: Any,
) -> RolloutBatch:
    """A random valid batch: lengths are drawn from the inclusive ranges, rewards from `rewards`."""
    draw = random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return [draw.randrange(3, vocabulary_size) for _ in range(draw.randint(*bounds))]

    def one_rollout() -> Rollout:
        token_ids = tokens(response_tokens)
        return rollout(token_ids, draw.choice(rewards), logprobs=[draw.uniform(-5.0, -0.1) for _ in token_ids])

    groups = [(tokens(prompt_tokens), [one_rollout() for _ in range(group_size)]) for _ in range(num_groups)]
    return batch_of(groups, **changes)


def prompt_batch(prompts: Sequence[Sequence[int]], **changes: Any) -> PromptBatch:
    """Prompts given by their token ids, to be sampled under version 0; changes replace fields."""
    fields: dict[str, Any] = {
        "job_id": "job",
        "batch_id": "0/train/0",
        "iteration": 0,
        "purpose": "train",
        "policy_version": 0,
        "weights_digest": DIGEST,
        "group_size": 2,
        "sampling": SamplingParams(max_new_tokens=5),
        "seed": 0,
        "prompts": tuple(
            Prompt(
                prompt_id=f"train/{index}",
                index=index,
                token_ids=pack_int32(token_ids),
                text=f"prompt {index}",
                reference=str(index),
            )
            for index, token_ids in enumerate(prompts)
        ),
    }
    return PromptBatch(**(fields | changes))


def job_spec(**overrides: Any) -> JobSpec:
    """A small valid spec; overrides are keyed by dotted path with `__`: job_spec(algorithm__kl_coefficient=0.1)."""
    return convert(spec_values(**overrides), JobSpec)


def spec_values(**overrides: Any) -> dict[str, Any]:
    """Returns the plain values of `job_spec`."""
    values: dict[str, Any] = {
        "name": "test",
        "iterations": 4,
        "model": {"path": "qwen3"},
        "dataset": {"type": "addition"},
        "reward": {"components": [{"type": "exact"}]},
        "rollout": {
            "batches_per_iteration": 4,
            "prompts_per_batch": 2,
            "group_size": 4,
            "sampling": {"max_new_tokens": 5},
        },
        "evaluation": {"num_prompts": 8, "prompts_per_batch": 4},
    }
    for path, value in overrides.items():
        *parents, leaf = path.split("__")
        section = functools.reduce(lambda table, key: table.setdefault(key, {}), parents, values)
        section[leaf] = value
    return values


def judged_spec(**overrides: Any) -> JobSpec:
    """Returns `job_spec` where the judge has no refusal. Raises SpecRefused with all others."""
    spec = job_spec(**overrides)
    check_spec(spec)
    return spec


def give_totals(accumulator: GradientAccumulator, divisor: float) -> None:
    """Ends the sums, and puts sum / divisor into `.grad` of what they are of."""
    gradients = accumulator.gradients(divisor)
    for name, target in accumulator._targets.items():
        target.grad = gradients.pop(name)
    accumulator.finish()


def step_on_grads(optimizer: PolicyOptimizer, learning_rate: float, **options: Any) -> float:
    """Steps on what stands in `.grad` of what the optimizer steps, which has none afterwards."""
    gradients = {name: stepped.grad for name, stepped in optimizer.stepped.items() if stepped.grad is not None}
    for stepped in optimizer.stepped.values():
        stepped.grad = None
    return optimizer.step(learning_rate, gradients, **options)
