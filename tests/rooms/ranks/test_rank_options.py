"""What a trainer's options make of several ranks: the weights of one rank, bit for bit (I7), whichever trains a batch.

Two processes over gloo go through every variant, one after the other; rank 0 trains each alone, too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed import PrefixStore

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import OptimizerStep
from consumer.model.rows import local_rows
from consumer.model.teachers import WholeVocabulary
from consumer.ranks.base import Ranks
from consumer.ranks.dry_pass import longest_row
from consumer.ranks.fsdp import sharded_loading
from consumer.ranks.processes.group import RankGroup
from consumer.ranks.processes.orders import Exchange, join
from consumer.ranks.processes.rank import Rank
from consumer.ranks.processes.rank_learner import make_rank_learner
from contracts.probes import FLOORS
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.weights.hashing import tensors_digest
from tests.builders import CHANGED_LOGITS, job_spec, rollout_batch, tiny_model_folder
from tests.chaos.short_job import IS_LONG
from tests.contract.test_distillation import taught
from tests.rooms.ranks.two_ranks import run_two_ranks
from tests.trajectories import ENVIRONMENT, played_batch
from tests.unit.consumer.gradient.test_probe import ROWS, plain_logprobs

DEADLINE_S = 300.0
ITERATIONS = 2
BATCHES = 3
KL: dict[str, Any] = {"algorithm__kl_coefficient": 0.1}
SYNC: dict[str, Any] = {"algorithm__ref_model_sync_iterations": 1, "algorithm__ref_model_mixup_alpha": 0.6}
SPLIT: dict[str, Any] = {"trainer__max_tokens_per_micro_batch": 24}
RECOMPUTED: dict[str, Any] = {"trainer__gradient_checkpointing": True}
PADDED: dict[str, Any] = {"trainer__packing": "padded"}
UPDATES: dict[str, Any] = {"algorithm__updates_per_iteration": 3, "algorithm__clip_low": 0.01}
PARTS: dict[str, Any] = {"algorithm__updates_per_iteration": 2, "algorithm__mini_batches": 3}
LORA: dict[str, Any] = {"trainer__lora": {"rank": 4}, "optimizer__learning_rate": 1e-2}
FSDP: dict[str, Any] = {"trainer__sharding": "fsdp"}
FLOAT32_HEAD: dict[str, Any] = {"model__dtype": "bfloat16", "model__cast_lm_head_to_fp32": True}
DECAY: dict[str, Any] = {
    "optimizer__weight_decay": 0.1,
    "optimizer__groups": [{"parameters": ["*norm*"], "learning_rate_factor": 2.0, "weight_decay": 0.2}],
}
LAGGING: dict[str, Any] = {
    "schedule": "delayed",
    "max_policy_lag": 1,
    "algorithm__correction": "decoupled_ppo",
    "algorithm__correction_high": 2.0,
}
CHANGED: dict[str, Any] = {"rollout__sampling": CHANGED_LOGITS}
PLAYED: dict[str, Any] = {"environment": ENVIRONMENT}
TAUGHT: dict[str, Any] = {
    "algorithm__distillation_coefficient": 0.5,
    "algorithm__distillation_beta": 0.5,
    "stages": [{"type": "teacher", "model": "qwen3", "top_k": 4}],
}
STATES: dict[str, Any] = TAUGHT | {"stages": [{"type": "teacher", "model": "llama", "hidden_size": 32}]}
UNTIED = "FSDP, bfloat16, untied"
ALL_VARIANTS: dict[str, dict[str, Any]] = {
    "updates, decoupled PPO, Muon, a teacher": UPDATES | LAGGING | TAUGHT | {"optimizer__type": "muon"} | DECAY,
    "trajectories, updates, KL": PLAYED | UPDATES | KL,
    "trajectories, updates, a critic in bfloat16, a reference that moves, split": PLAYED
    | UPDATES
    | SPLIT
    | KL
    | SYNC
    | {"algorithm__advantage": "gae", "algorithm__value_clip": 0.01, "model__dtype": "bfloat16"},
    "mini-batches, KL, split, changed logits": PARTS | KL | SPLIT | CHANGED,
    "FSDP, mini-batches, KL to a reference that moves, a teacher": FSDP | PARTS | KL | SYNC | TAUGHT,
    "FSDP, trajectories, split, changed logits": FSDP | PLAYED | SPLIT | CHANGED,
    "LoRA, KL, recomputed": LORA | KL | RECOMPUTED,
    "LoRA, padded, split, bfloat16, a teacher's states": LORA | PADDED | SPLIT | FLOAT32_HEAD | STATES,
    "FSDP, updates, KL, weight decay": FSDP | UPDATES | KL | DECAY,
    "FSDP, updates, decoupled PPO by sequence": FSDP
    | UPDATES
    | LAGGING
    | {"algorithm__correction_level": "sequence", "algorithm__correction_high": 1000.0},
    "FSDP, recomputed, padded, split, KL in the reward": FSDP
    | RECOMPUTED
    | PADDED
    | SPLIT
    | KL
    | {"algorithm__kl_placement": "reward", "algorithm__kl_estimator": "k1"},
    "FSDP, LoRA, KL, updates, bfloat16": FSDP | LORA | KL | UPDATES | {"model__dtype": "bfloat16"},
    "FSDP, LoRA, split, padded, recomputed, bfloat16, a teacher's states": FSDP
    | LORA
    | STATES
    | SPLIT
    | PADDED
    | RECOMPUTED
    | {"model__dtype": "bfloat16"},
    UNTIED: FSDP | DECAY | {"model__path": "llama", **FLOAT32_HEAD},
}
OF_CAMPAIGN = {
    "trajectories, updates, KL",
    "LoRA, KL, recomputed",
    "FSDP, updates, KL, weight decay",
    "FSDP, LoRA, KL, updates, bfloat16",
}
"""Variants of which each option is in another one: `make chaos` has them."""
VARIANTS = {name: options for name, options in ALL_VARIANTS.items() if IS_LONG or name not in OF_CAMPAIGN}


def spec_of(variant: str, **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "optimizer__learning_rate": 1e-3,
        "rollout__batches_per_iteration": BATCHES,
        "trainer__world_size": 2,
        "timeouts__ranks_s": 60.0,
    }
    return job_spec(**(fields | VARIANTS[variant] | changes))


class Trained(NamedTuple):
    """What ranks hold after some iterations on random batches."""

    digest: str
    """The digest of the weights that they publish."""
    measured: list[float]
    """Their log-probs of a probe's rows."""
    expected: list[float]
    """The log-probs of a plain forward of the weights that they publish."""


def after_training(ranks: Ranks, folder: Path, *, passes_dry: bool = False) -> Trained:
    """Trains some iterations on random batches.

    Args:
        ranks: The ranks.
        folder: Of the models.
        passes_dry: Has the largest micro-batch go through the model before each iteration, which moves no bit.
    """
    ranks.begin(None)
    spec = ranks.learner.spec
    row = longest_row(spec, longest_prompt=4, context_tokens=ranks.learner.policy.context_tokens)
    parts = range(spec.algorithm.num_mini_batches)
    steps = [(update, part) for update in range(spec.algorithm.updates_per_iteration) for part in parts]
    for iteration in range(ITERATIONS):
        if passes_dry:
            assert ranks.dry_pass(row).peak_bytes > 0
        num_missing = BATCHES
        for number in range(BATCHES):
            make = rollout_batch if spec.environment is None else played_batch
            batch = make(seed=BATCHES * iteration + number, batch_id=f"{iteration}/train/{number}")
            if (teacher := ranks.learner.policy.teacher) is not None:
                states_for = teacher if isinstance(teacher, WholeVocabulary) else None
                batch = taught(batch, num_likely=0 if states_for else 4, states_for=states_for)
            num_missing -= len(ranks.train(batch))
        while num_missing:
            num_missing -= len(ranks.train(wait_s=1.0))
        for update, part in steps:
            if update or part:
                ranks.train_again(lambda: None, part)
            is_last = (update, part) == steps[-1]
            ranks.step(
                OptimizerStep(
                    iteration=iteration,
                    divisor=3.0,
                    learning_rate=spec.optimizer.learning_rate,
                    is_last=is_last,
                    syncs_reference=is_last and spec.algorithm.syncs_reference_after(iteration),
                )
            )
    measured = np.frombuffer(ranks.probe(ROWS), dtype="<f4").tolist()
    weights: Any = Collected()
    ranks.publish(weights)
    expected = plain_logprobs(folder / spec.model.path, weights, ROWS, getattr(torch, spec.model.dtype)).tolist()
    trained = Trained(digest=digest_of(ranks), measured=measured, expected=expected)
    ranks.close()
    return trained


class Collected(dict[str, Tensor]):
    """A TensorSink."""

    def make_room(self, num_bytes: int) -> None:
        """Does nothing: the memory suffices."""

    def add(self, name: str, tensor: Tensor) -> None:
        self[name] = tensor.clone()


def digest_of(ranks: Ranks) -> str:
    """The digest of the weights that a generator would get; those that adapters stand on are the model's."""
    weights: Any = Collected()
    ranks.publish(weights)
    if ranks.learner.policy.adapters is not None:
        base: Any = Collected()
        ranks.publish(base, base=True)
        assert tensors_digest(base) == ranks.learner.policy.base_digest
    return tensors_digest(weights)


class CountingSlice:
    """A tensor of a safetensors file, of which the items that are read are counted."""

    def __init__(self, stored: Any, reads: list[int]) -> None:
        self._stored = stored
        self._reads = reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, where: Any) -> Tensor:
        values = self._stored[where]
        self._reads.append(values.numel())
        return values


def count_reads(reads: list[int]) -> None:
    """Records, in this process from now on, how many items each read of a model's files takes."""

    def counting_open(*arguments: Any, **options: Any) -> Any:
        file = safe_open(*arguments, **options)
        return CountingFile(file, reads)

    sharded_loading.safe_open = counting_open  # type: ignore[assignment]


class CountingFile:
    def __init__(self, file: Any, reads: list[int]) -> None:
        self._file = file
        self._reads = reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> CountingFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self._file.get_slice(name), self._reads)


def be_rank(rank: int, folder: Path) -> None:
    """Rank 0 writes {variant: [digest before training, after it by two ranks, by one]}."""
    settings = StackSettings(model_root=str(folder))
    first = spec_of(next(iter(VARIANTS)))
    member = join(first if rank == 0 else None, device="cpu")
    digests: dict[str, list[str]] = {}
    probes: dict[str, list[list[float]]] = {}
    reads: list[int] = []
    count_reads(reads)
    for variant in VARIANTS:
        exchange = Exchange(PrefixStore(variant, member.exchange._store))
        here = replace(member, spec=spec_of(variant), exchange=exchange)
        reads.clear()
        learner = make_rank_learner(settings, here.spec, here.place)
        if variant == UNTIED:
            parameters = learner.policy.trained_parameters().values()
            items = [sum(map(Tensor.numel, parameters)), sum(local_rows(one).numel() for one in parameters), sum(reads)]
            (folder / f"items-{rank}.json").write_text(json.dumps(items))
        if rank:
            Rank(exchange, learner, patience_s=DEADLINE_S).run()
            continue
        group = RankGroup(exchange, learner, answer_s=DEADLINE_S, patience_s=DEADLINE_S)
        one = Ranks(make_learner(settings, spec_of(variant, trainer__world_size=1, trainer__sharding="none")))
        before = digest_of(one)
        of_two = after_training(group, folder, passes_dry=True)
        of_one = after_training(one, folder)
        digests[variant] = [before, of_two.digest, of_one.digest]
        probes[variant] = [of_two.measured, of_one.measured, of_two.expected]
    if rank == 0:
        (folder / "probes.json").write_text(json.dumps(probes))
        (folder / "digests.json").write_text(json.dumps(digests))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of models, in which both ranks have left their results."""
    folder = tmp_path_factory.mktemp("ranks")
    tiny_model_folder(folder)
    tiny_model_folder(folder, "llama", tied=False)
    run_two_ranks(be_rank, folder)
    return folder


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_end_with_the_weights_of_one_that_makes_no_dry_pass(folder: Path, variant: str) -> None:
    before, of_two, of_one = json.loads((folder / "digests.json").read_text())[variant]
    assert of_two == of_one
    assert of_one != before


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_log_probs_of_a_probe_are_those_of_a_plain_forward_of_the_published_weights(
    folder: Path, variant: str
) -> None:
    of_two, of_one, expected = np.array(json.loads((folder / "probes.json").read_text())[variant])
    floor = FLOORS[spec_of(variant).model.dtype]
    for measured in (of_two, of_one):
        assert np.max(np.abs(measured - expected) / (1 + np.abs(expected))) <= floor


def test_a_rank_that_shares_the_model_reads_its_own_rows_and_nothing_else(folder: Path) -> None:
    of_ranks = [json.loads((folder / f"items-{rank}.json").read_text()) for rank in range(2)]
    (all_items, *_), _ = of_ranks
    for _, kept, read in of_ranks:
        assert read == kept
        assert kept == pytest.approx(all_items / 2, rel=0.02)
    assert sum(read for *_, read in of_ranks) == all_items
