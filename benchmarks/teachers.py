"""What each way to learn from a teacher costs: its worker, the trainer's pass, and the bytes between the two.

    onbeat bench teachers [--repeats 5]

Student and teacher have one shape and a vocabulary of 49,152, whose head is most of the work. The stage's own code
tells of a batch of 8 completions of random tokens, which is then trained: processor seconds on one thread, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks._random_models import save_with_tokenizer
from benchmarks._results import REPOSITORY, write_result
from benchmarks.passes import Case, batch_of, start_anew
from consumer.gradient.assembly import make_learner
from consumer.model.language_head import Summary
from consumer.model.policy import Policy, load_policy
from consumer.model.teachers import bits_of, head_digest, likeliest
from contracts.encoding.wire import convert
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from onbeat.stages.log_prob_model import frozen_values

HIDDEN_SIZE = 256
VOCABULARY = 49_152
CASE = Case(
    num_batches=1,
    num_prompts=1,
    group_size=8,
    prompt_tokens=16,
    response_tokens=(48, 64),
    num_ids=VOCABULARY,
    make=lambda folder: folder / "teacher",
)
WAYS: dict[str, dict[str, int]] = {
    "sampled token": {},
    "top_k = 64": {"top_k": 64},
    "top_k = 4,096": {"top_k": 4096},
    "hidden_size": {"hidden_size": HIDDEN_SIZE},
}
BETAS = {"forward": 0.0, "Jensen-Shannon": 0.5}
EXPECTED = (
    "over the sampled token's, processor time of a trainer's pass: top_k = 64 at most 1.4 times forward and 1.5 by "
    "Jensen-Shannon, 4,096 at most 0.1 more; hidden_size 1.6 to 1.9 forward, since the teacher's head is one more "
    "product of four, and 1.9 to 2.5 by Jensen-Shannon, whose terms are each as wide as the vocabulary. The worker's: "
    "1.0 with hidden_size, 1.5 to 2 with top_k = 64, 2 to 3 with 4,096. Bytes of a token: 4, 520, 32,776, and 1,028 "
    "with a digest"
)


def make_model(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HIDDEN_SIZE // 4,
        intermediate_size=3 * HIDDEN_SIZE,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    save_with_tokenizer(Qwen3ForCausalLM(config), folder)


def spec_of(way: dict[str, int], beta: float) -> JobSpec:
    algorithm = {"advantage": "none", "distillation_coefficient": 1.0} | ({"distillation_beta": beta} if way else {})
    return convert(
        {
            "name": "bench",
            "iterations": 1,
            "model": {"path": "student"},
            "dataset": {"type": "addition"},
            "reward": {"components": [{"type": "exact"}]},
            "rollout": {
                "batches_per_iteration": 1,
                "prompts_per_batch": 1,
                "group_size": CASE.group_size,
                "sampling": {"max_new_tokens": CASE.response_tokens[1]},
            },
            "algorithm": algorithm,
            "stages": [{"type": "teacher", "model": "teacher"} | way],
            "limits": {"max_batch_bytes": 2**25},
        },
        JobSpec,
    )


def told_by(teacher: Policy, batch: RolloutBatch, spec: JobSpec, way: dict[str, int]) -> RolloutBatch:
    """The batch with the columns that a stage makes of the teacher."""
    summaries: dict[str, Summary] = {
        "top_k": lambda distribution, *_: likeliest(distribution, way["top_k"], num_tokens=VOCABULARY),
        "hidden_size": lambda _, states, __: bits_of(states, torch.float32),
    }
    values = frozen_values(teacher, batch, spec=spec, summary=summaries[next(iter(way))] if way else None)
    if "hidden_size" in way:
        values = [(*of_row, head_digest(teacher.model).encode()) for of_row in values]
    names = [column.name for column in spec.stage_plan.outputs]
    return replace(batch, columns=dict(zip(names, zip(*values, strict=True), strict=True)))


def timed(call: Any) -> tuple[Any, float]:
    started_s = time.process_time()
    return call(), time.process_time() - started_s


def measure(repeats: int) -> list[dict[str, Any]]:
    """Each way's seconds, and their median over those of the sampled token in the same turn."""
    with tempfile.TemporaryDirectory(prefix="onbeat-bench-") as scratch:
        root = Path(scratch)
        make_model(root / "student", 0)
        make_model(root / "teacher", 1)
        settings, batch = StackSettings(model_root=str(root), threads=1), batch_of(CASE, 0)
        arms = {
            f"{name}, {divergence}" if way else name: (way, spec_of(way, beta))
            for name, way in WAYS.items()
            for divergence, beta in BETAS.items()
        }
        learners = {arm: make_learner(settings, spec) for arm, (_, spec) in arms.items()}
        model = replace(spec_of({}, 0.0).model, path="teacher")
        teacher = load_policy(model, model_root=SpecRoot(root), gradient_checkpointing=False)
        seconds: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
        num_bytes: dict[str, float] = {}
        for _ in range(1 + repeats):
            for arm, (way, spec) in arms.items():
                told, of_worker = timed(lambda spec=spec, way=way: told_by(teacher, batch, spec, way))
                stats, of_trainer = timed(lambda arm=arm, told=told: learners[arm].train(told).stats)
                seconds[arm].append((round(of_worker, 4), round(of_trainer, 4)))
                num_bytes[arm] = sum(len(value) for of in told.columns.values() for value in of) / stats.num_tokens
                start_anew(learners[arm])
    base = seconds[next(iter(arms))]
    return [
        {
            "way": arm,
            # The first turn warms up.
            "worker_ratio": round(statistics.median(a[0] / b[0] for a, b in zip(of[1:], base[1:], strict=True)), 3),
            "trainer_ratio": round(statistics.median(a[1] / b[1] for a, b in zip(of[1:], base[1:], strict=True)), 3),
            "bytes_per_token": round(num_bytes[arm], 1),
            "worker_and_trainer_s": of,
        }
        for arm, of in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="onbeat bench teachers", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.repeats)
    for row in rows:
        print({key: value for key, value in row.items() if not isinstance(value, list)}, flush=True)
    path = write_result("teachers", {"expected": EXPECTED, "ways": rows})
    print(f"written to {path.relative_to(REPOSITORY)}")


if __name__ == "__main__":
    main()
