"""A teacher's whole distributions: what its stage sends and the trainer's copy of its head makes are the teacher's own,
and states of another head are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import PreTrainedModel

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner
from consumer.gradient.log_probs import response_measures
from consumer.gradient.micro_batch import make_micro_batch
from consumer.gradient.terms.policy import num_clipped
from consumer.model import language_head
from consumer.model.teachers import WholeVocabulary, bits_of, divergence_of, head_digest
from contracts.errors import ContractViolation, InvalidInput
from contracts.experience.columns import check_values, row_shapes
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from onbeat.stages.log_prob_model import load_frozen
from onbeat.stages.models import model_loader
from onbeat.stages.served_stages import ServedStage
from tests.builders import CHANGED_LOGITS, VOCABULARY, char_tokenizer, rollout_batch, tiny_model_folder
from tests.contract.test_kept_sets import kept_iteration
from tests.rooms.stages.stage_fakes import claimed_item, served_stage

TEACHER: dict[str, Any] = {"type": "teacher", "model": "teachers/qwen3", "hidden_size": 48}
DISTILS: dict[str, Any] = {
    "algorithm__advantage": "none",
    "algorithm__distillation_coefficient": 1.0,
    "algorithm__distillation_beta": 0.0,
}
BFLOAT16: dict[str, Any] = {"model__dtype": "bfloat16"}


def served(stage: dict[str, Any], **changes: Any) -> ServedStage:
    return served_stage(stage, **(DISTILS | changes))


def settings_of(root: Path) -> StackSettings:
    return StackSettings(model_root=str(root))


def told(root: Path, stage: ServedStage, batch: RolloutBatch) -> RolloutBatch:
    """The batch with the columns that a stage worker makes on this host."""
    item = claimed_item(stage.stage.name, batch, range(batch.num_completions), {})
    values = model_loader(settings_of(root))(stage).values(item)
    check_values(values, stage.node.outputs, row_shapes(batch), of="the stage")
    return replace(batch, columns={name: tuple(of_rows) for name, of_rows in values.items()})


def models(root: Path, kind: str) -> Path:
    """Makes the job's model and a teacher, twice as wide; returns the teacher's folder."""
    tiny_model_folder(root)
    if kind == "softcapped":
        shape = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = Gemma2Config(
            **shape,
            attn_logit_softcapping=None,
            head_dim=12,
            intermediate_size=64,
            vocab_size=len(VOCABULARY),
            final_logit_softcapping=3.0,
        )
        return saved(Gemma2ForCausalLM(config), root)
    if kind == "of the body alone":
        gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=len(VOCABULARY)))
        folder = saved(gpt2, root)
        gpt2.transformer.save_pretrained(folder)
        return folder
    folder = tiny_model_folder(root / "teachers", hidden_size=48, tied=kind == "tied", seed=1)
    if kind == "in shards":
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="40KB")
        (folder / "model.safetensors").unlink()
        assert len([*folder.glob("*.safetensors")]) > 2
    return folder


def saved(model: PreTrainedModel, root: Path) -> Path:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in cast(nn.Module, model).parameters():
            parameter.normal_(0.0, 0.3)
    folder = root / "teachers/qwen3"
    model.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    return folder


def learner_of(root: Path, stage: ServedStage) -> Learner:
    return make_learner(settings_of(root), stage.spec)


def distributions(learner: Learner, batch: RolloutBatch, stage: ServedStage) -> Tensor:
    """The teacher's log-probs [N, V] as the trainer's loss gets them."""
    seen: list[Tensor] = []
    teacher = learner.policy.teacher
    assert isinstance(teacher, WholeVocabulary)
    teacher.check(batch)
    micro_batch = make_micro_batch(
        batch,
        advantages=np.zeros((len(batch.groups), batch.group_size)),
        packing=stage.spec.trainer.packing,
        sampling=stage.spec.rollout.sampling,
        end_ids=learner.policy.end_ids,
    )

    def look(distribution: Tensor, known: Tensor, drawn: language_head.Drawn) -> Tensor:
        seen.append(drawn(teacher._logits, known))
        return distribution[:, 0]

    response_measures(
        learner.policy.model,
        micro_batch,
        stage.spec.rollout.sampling.temperature,
        summary=look,
        known=teacher.known(micro_batch.columns),
    )
    return torch.cat(seen)


@pytest.mark.parametrize("kind", ["tied", "untied", "in shards", "softcapped", "of the body alone"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__matmul": "onednn"},
        BFLOAT16,
        BFLOAT16 | {"model__cast_lm_head_to_fp32": True},
        {"rollout__sampling": CHANGED_LOGITS},
    ],
)
def test_the_trainers_copy_of_the_head_makes_the_very_log_probs_that_the_stage_has(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    models(tmp_path, kind)
    stage, batch = served(TEACHER, **changes), rollout_batch(num_groups=3)
    if (kind, changes) == ("softcapped", BFLOAT16):
        # It softcaps in bfloat16, which the trainer's own projection, in float32, doesn't.
        with pytest.raises(InvalidInput, match=r"stages\.teacher\.model: .* makes logits of more than .*take top_k"):
            told(tmp_path, served(TEACHER, **changes, trainer__packing="padded"), batch)
        return
    batch = told(tmp_path, stage, batch)
    learner = learner_of(tmp_path, stage)
    q = distributions(learner, batch, stage)
    assert isinstance(batch.columns, dict)
    ids = np.frombuffer(
        b"".join(rollout.completion.token_ids for group in batch.groups for rollout in group.rollouts), "<i4"
    )
    own = np.frombuffer(b"".join(batch.columns["teacher_logprobs"]), "<f4")
    assert q[torch.arange(len(ids)), torch.from_numpy(ids.astype(np.int64))].numpy().tolist() == own.tolist()
    width = 48 * (2 if BFLOAT16.items() <= changes.items() else 4)
    assert sum(map(len, batch.columns["teacher_states"])) == width * len(ids)
    (head,) = cast(WholeVocabulary, learner.policy.teacher).heads.values()
    held = [one for one in cast(nn.Module, head).parameters() if one.device.type != "meta"]
    assert [one.shape for one in held] == [(len(VOCABULARY), 48)], "of the teacher's body there is nothing"
    assert not num_clipped(learner.train(batch).stats.term_sums)


def test_each_row_has_the_head_of_its_sources_teacher_in_whatever_company(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model_folder(tmp_path)
    for seed, name in enumerate(("sums", "code"), start=1):
        tiny_model_folder(tmp_path / name, hidden_size=48, seed=seed)
    paths, sources = {"sums": "sums/qwen3", "code": "code/qwen3"}, ("code", "sums", "code")
    mixture = {"type": "mixture", "sources": [{"name": name, "dataset": {"type": "addition"}} for name in paths]}
    stage = served({"type": "teacher", "models": paths, "hidden_size": 48}, dataset=mixture)
    batch = rollout_batch(num_groups=3)
    groups = tuple(replace(group, source=source) for group, source in zip(batch.groups, sources, strict=True))
    batch = told(tmp_path, stage, replace(batch, groups=groups))
    assert isinstance(batch.columns, dict)
    assert len(set(batch.columns["teacher_head"])) == 2
    own = np.frombuffer(b"".join(batch.columns["teacher_logprobs"]), "<f4").tolist()
    ids = [
        t for group in batch.groups for one in group.rollouts for t in np.frombuffer(one.completion.token_ids, "<i4")
    ]
    learner = learner_of(tmp_path, stage)
    for chunk in (1 << 25, 7 * len(VOCABULARY)):
        monkeypatch.setattr(language_head, "CHUNK_LOGITS", chunk)
        q = distributions(learner, batch, stage)
        assert q[torch.arange(len(ids)), torch.tensor(ids)].tolist() == pytest.approx(own, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_what_sampling_left_out_is_no_outcome_and_its_gradient_is_none(beta: float) -> None:
    draw = torch.Generator().manual_seed(1)
    policy, teacher = ((3.0 * torch.randn((6, 11), generator=draw, dtype=torch.float64)) for _ in range(2))
    left_out = torch.rand((6, 11), generator=draw) < 0.4
    left_out[0], left_out[0, 3] = True, False  # one token alone may be drawn
    policy.requires_grad_()
    p, q = (one.masked_fill(left_out, -torch.inf).log_softmax(dim=-1) for one in (policy, teacher))
    found = divergence_of(p, q, p > -torch.inf, beta=beta)
    (gradient,) = torch.autograd.grad(found.sum(), policy, retain_graph=True)
    for row in range(6):
        kept = (~left_out[row]).nonzero()[:, 0]
        a, b = policy[row, kept].log_softmax(-1), teacher[row, kept].log_softmax(-1)
        m = (beta * b.exp() + (1.0 - beta) * a.exp()).log()
        forward, reverse = (b.exp() * (b - m)).sum(), (a.exp() * (a - m)).sum()
        expected = {0.0: (b.exp() * (b - a)).sum(), 1.0: (a.exp() * (a - b)).sum()}.get(
            beta, beta * forward + (1.0 - beta) * reverse
        )
        (expected_gradient,) = torch.autograd.grad(expected, policy, retain_graph=True)
        torch.testing.assert_close(found[row], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradient[row], expected_gradient[row], rtol=1e-10, atol=1e-12)
    assert found[0].item() == 0.0


def test_truncated_sampling_and_states_give_numbers_alone(tmp_path: Path) -> None:
    models(tmp_path, "tied")
    stage = served(TEACHER)
    batch = told(tmp_path, stage, kept_iteration([rollout_batch()])[0])
    learner = learner_of(tmp_path, stage)
    q = distributions(learner, batch, stage)
    assert bool(q.isinf().any())
    assert np.isfinite(learner.train(batch).stats.loss_sum)


def test_the_bits_of_states_are_read_as_they_were_and_an_odd_one_has_a_zero_behind_it() -> None:
    states = torch.tensor([[1.5, -2.0, 0.25]])
    assert bits_of(states, torch.float32).view(torch.float32).tolist() == states.tolist()
    halves = bits_of(states, torch.bfloat16)
    assert halves.tolist() == [[0xC0003FC0 - 2**32, 0x3E80]]
    (column,) = (one for one in served(TEACHER | {"hidden_size": 3}, **BFLOAT16).node.outputs if one.type == "int32")
    assert column.width == halves.shape[1]


def test_states_for_another_head_are_refused_by_both_digests(tmp_path: Path) -> None:
    models(tmp_path, "tied")
    stage, batch = served(TEACHER), rollout_batch()
    batch = told(tmp_path, stage, batch)
    here = load_frozen(settings_of(tmp_path), stage.spec, path="teachers/qwen3").model
    tiny_model_folder(tmp_path / "teachers", hidden_size=48, seed=2)
    learner = learner_of(tmp_path, stage)
    (other,) = cast(WholeVocabulary, learner.policy.teacher).heads
    words = (
        rf"column teacher_head: batch .* hidden states for the head '{head_digest(here)[:12]}', .* has {other[:12]};"
    )
    with pytest.raises(ContractViolation, match=words):
        learner.train(batch)


@pytest.mark.parametrize("changes", [{}, BFLOAT16])
def test_a_state_that_is_no_number_is_refused_by_its_column(tmp_path: Path, changes: dict[str, Any]) -> None:
    models(tmp_path, "tied")
    stage = served(TEACHER, **changes)
    batch = told(tmp_path, stage, rollout_batch())
    assert isinstance(batch.columns, dict)
    first, *others = batch.columns["teacher_states"]
    # NaN in bfloat16, and in the float32 whose high half it is.
    hostile = (b"\xc0\x7f\xc0\x7f" + first[4:], *others)
    with pytest.raises(ContractViolation, match=r"column teacher_states: .* hidden state that is not finite"):
        learner_of(tmp_path, stage).train(replace(batch, columns=batch.columns | {"teacher_states": hostile}))


def scaled(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"final_logit_softcapping": 30.0}


def test_a_config_that_makes_other_logits_is_another_head(tmp_path: Path) -> None:
    folder = models(tmp_path, "tied")
    stage = served(TEACHER)
    batch = told(tmp_path, stage, rollout_batch())
    config = folder / "config.json"
    config.write_text(json.dumps(scaled(json.loads(config.read_text()))))
    with pytest.raises(ContractViolation, match="hidden states for the head"):
        learner_of(tmp_path, stage).train(batch)


Place = Literal["stage", "trainer"]


@pytest.mark.parametrize(
    ("place", "stage", "field", "problem"),
    [
        ("stage", {"hidden_size": 32}, "hidden_size", "is 32, the states of its model have 48 numbers"),
        ("trainer", {"hidden_size": 32}, "hidden_size", "is 32, the states of its model have 48 numbers"),
        ("trainer", {"model": "nowhere"}, "model", "no folder .*nowhere"),
        ("trainer", {"model": "wider/qwen3"}, "model", "its head has 101 outputs, that of model.path 100"),
    ],
)
def test_what_the_stage_or_the_trainer_cannot_take_is_refused_by_its_key(
    tmp_path: Path, place: Place, stage: dict[str, Any], field: str, problem: str
) -> None:
    models(tmp_path, "untied")
    wider = AutoModelForCausalLM.from_pretrained(tmp_path / "teachers/qwen3")
    wider.resize_token_embeddings(len(VOCABULARY) + 1)
    wider.save_pretrained(tmp_path / "wider/qwen3")
    asked = served(TEACHER | stage)
    with pytest.raises(
        InvalidInput, match=problem.replace("101", str(len(VOCABULARY) + 1)).replace("100", str(len(VOCABULARY)))
    ) as raised:
        model_loader(settings_of(tmp_path))(asked) if place == "stage" else learner_of(tmp_path, asked)
    assert raised.value.field == f"stages.teacher.{field}"
    assert raised.value.cure


def test_a_head_that_is_not_in_the_files_is_refused_by_its_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = models(tmp_path, "untied") / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"stages\.teacher\.model: .* have no lm_head\.weight"):
        learner_of(tmp_path, served(TEACHER))


def test_adapters_in_a_head_are_refused_where_the_stage_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Adapted(nn.Linear):
        """A head of another class, whose weight alone doesn't make the logits."""

    models(tmp_path, "untied")
    original = language_head.output_head
    monkeypatch.setattr(
        "consumer.model.teachers.output_head",
        lambda model: Adapted(4, 4) if model.device.type == "cpu" else original(model),
    )
    with pytest.raises(InvalidInput, match=r"stages\.teacher\.model: Qwen3ForCausalLM has no plain output head"):
        model_loader(settings_of(tmp_path))(served(TEACHER))
