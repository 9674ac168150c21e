"""Ranks that talk to each other for real, two processes over gloo: what they agree on, and what ends them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consumer.gradient.learner import Learner
from consumer.model.checkpoint import MODEL_FILE, OPTIMIZER_FILE, Checkpoint, file_of_rank
from consumer.model.rows import local_rows
from consumer.model.shared_prompt.passes import Passes
from consumer.ranks.processes.orders import Begin, Done, End, Exchange, Failed, Save, TrainBatch, join
from consumer.ranks.processes.rank import Rank, checksum, state_tensors
from consumer.ranks.processes.rank_learner import make_rank_learner
from contracts.checkpoints import CheckpointState
from contracts.errors import ContractViolation, FenceViolation
from contracts.settings import StackSettings
from onbeat.weights.files.stored_tensors import StoredTensors
from tests.builders import batch_of, job_spec, rollout, step_on_grads, tiny_model_folder
from tests.rooms.ranks.two_ranks import run_two_ranks

DEADLINE_S = 120.0


def be_rank(rank: int, folder: Path, *, of: str = "", **changes: Any) -> None:
    """The last of rank 1's parameters whose names begin with `of` is off by 1e-6; the store's server is rank 0's."""
    spec = job_spec(trainer__world_size=2, timeouts__ranks_s=60.0, **changes)
    member = join(spec if rank == 0 else None, device="cpu")
    learner = make_rank_learner(StackSettings(model_root=str(folder)), member.spec, member.place)
    with torch.no_grad():
        named = learner.policy.trained_parameters()
        named[max(name for name in named if name.startswith(of))].view(-1)[0] += rank * 1e-6
    this = Rank(member.exchange.for_another_thread(), learner, patience_s=DEADLINE_S)
    if rank == 0:
        give_orders(member.exchange)
    this.run()
    if rank == 0:
        say_what_came(member.exchange, folder)


def give_orders(exchange: Exchange) -> None:
    alien = batch_of([([5], [rollout([1], 1.0), rollout([10_000], 0.0)])])
    exchange.order(TrainBatch(batch=alien))
    exchange.order(Begin(checkpoint=""), copies=2)
    exchange.order(End(), copies=2)


def say_what_came(exchange: Exchange, folder: Path) -> None:
    answers = [exchange.next_answer(DEADLINE_S) for _ in range(3)]
    failures = [answer.error() for answer in answers if isinstance(answer, Failed)]
    kinds = sorted(f"{type(error).__name__}: {error}" for error in failures)
    lines = [*kinds, f"{sum(isinstance(answer, Done) for answer in answers)} done"]
    (folder / "answers").write_text("\n".join(lines))


@pytest.mark.parametrize("changes", [{}, {"of": "critic.", "algorithm__advantage": "gae"}], ids=["policy", "critic"])
def test_errors_of_ranks_and_weights_that_differ_reach_rank_0_as_what_they_are(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    tiny_model_folder(tmp_path)
    run_two_ranks(be_rank, tmp_path, **changes)
    refused, *differing, done = (tmp_path / "answers").read_text().splitlines()
    assert refused.startswith(f"{ContractViolation.__name__}: token_ids: batch 0/train/0 has a token outside")
    assert len(differing) == 2
    for failure in differing:
        assert failure.startswith(f"{FenceViolation.__name__}: ranks: the ranks hold different weights")
    assert done == "0 done"


def be_rank_of_another_layout(rank: int, folder: Path) -> None:
    """Rank 1 pads its rows, rank 0 packs them; the weights are the same."""
    spec = job_spec(trainer__world_size=2, timeouts__ranks_s=60.0)
    member = join(spec if rank == 0 else None, device="cpu")
    learner = make_rank_learner(StackSettings(model_root=str(folder)), member.spec, member.place)
    if rank == 1:
        padded = Passes(packing="padded", reason="its trial was another")
        learner = replace(learner, policy=replace(learner.policy, passes=padded))
    this = Rank(member.exchange.for_another_thread(), learner, patience_s=DEADLINE_S)
    if rank == 0:
        member.exchange.order(Begin(checkpoint=""), copies=2)
        member.exchange.order(End(), copies=2)
    this.run()
    if rank == 0:
        answers = [member.exchange.next_answer(DEADLINE_S) for _ in range(2)]
        (folder / "answers").write_text(
            "\n".join(str(answer.error()) for answer in answers if isinstance(answer, Failed))
        )


def test_ranks_that_lay_their_passes_out_differently_end_before_the_first_gradient(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    run_two_ranks(be_rank_of_another_layout, tmp_path)
    failures = (tmp_path / "answers").read_text().splitlines()
    assert len(failures) == 2
    for failure in failures:
        assert failure.startswith("trainer.packing: the ranks lay their passes out differently")


def test_the_checksum_sees_every_bit_and_where_it_is() -> None:
    tensors = [torch.arange(6, dtype=torch.float32), torch.ones(3, dtype=torch.bfloat16)]
    assert checksum(tensors) == checksum([tensor.clone() for tensor in tensors])
    smallest = tensors[0].clone()
    smallest[5] = torch.nextafter(smallest[5], torch.tensor(9.0))
    assert checksum([smallest, tensors[1]]) != checksum(tensors)
    assert checksum([torch.zeros(2), torch.ones(2)]) != checksum([torch.ones(2), torch.zeros(2)])


def be_a_host(rank: int, folder: Path) -> None:
    """Both ranks step once by rows, rank 0 alone saves, and what it restores moves both back."""
    sharded = job_spec(trainer__world_size=2, trainer__sharding="fsdp", timeouts__ranks_s=60.0)
    member = join(sharded if rank == 0 else None, device="cpu")
    learner = make_rank_learner(StackSettings(model_root=str(folder)), member.spec, member.place)
    this = Rank(member.exchange.for_another_thread(), learner, patience_s=DEADLINE_S)
    this.folder = folder / f"of rank {rank}"
    this.folder.mkdir()
    step_once(learner)
    saved = own_rows(learner)
    if rank == 0:
        member.exchange.order(Save(folder=""), copies=2)
        member.exchange.order(End(), copies=2)
    this.run()
    if rank == 0:
        model, optimizer = (
            StoredTensors([this.folder / file_of_rank(name, one, 2) for one in range(2)])
            for name in (MODEL_FILE, OPTIMIZER_FILE)
        )
        state = CheckpointState(
            **{"format_version": 1, "job_id": "job", "iteration": 0, "policy_version": 1, "weights_digest": "0" * 64},
            **{"adapters": None, "files": {}, "torch_random_state": torch.get_rng_state().numpy().tobytes().hex()},
        )
        this.checkpoint = Checkpoint(folder=this.folder, state=state, model_tensors=model, optimizer_tensors=optimizer)
        begin = Begin(checkpoint="", state=state, model=state_tensors(model), optimizer=state_tensors(optimizer))
        member.exchange.order(begin, copies=2)
        member.exchange.order(End(), copies=2)
    step_once(learner)
    assert own_rows(learner) != saved
    torch.rand(1)
    this.run()
    assert own_rows(learner) == saved
    (folder / f"random {rank}").write_bytes(torch.get_rng_state().numpy().tobytes())
    (folder / f"files {rank}").write_text(" ".join(sorted(path.name for path in this.folder.iterdir())))


def step_once(learner: Learner) -> None:
    for name, stepped in learner.optimizer.stepped.items():
        stepped.grad = torch.full_like(stepped, 1 + len(name) % 3)
    step_on_grads(learner.optimizer, 1e-2)


def own_rows(learner: Learner) -> list[bytes]:
    tensors = [*learner.policy.state_tensors().values(), *learner.optimizer.state_tensors().values()]
    return [local_rows(one).contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in tensors]


def test_a_rank_on_another_host_sends_its_rows_to_be_saved_and_takes_them_back(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    run_two_ranks(be_a_host, tmp_path)
    files = [file_of_rank(name, rank, 2) for name in (MODEL_FILE, OPTIMIZER_FILE) for rank in range(2)]
    assert (tmp_path / "files 0").read_text() == " ".join(sorted(files))
    assert (tmp_path / "files 1").read_text() == ""
    assert (tmp_path / "random 0").read_bytes() == (tmp_path / "random 1").read_bytes()
