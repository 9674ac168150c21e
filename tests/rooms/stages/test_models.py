"""The models of a stage worker: the trainer's own bits, a score that depends on its row alone, and refusals by name."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from broker.stage_side import ClaimedItem
from consumer.model.teachers import likeliest
from contracts.errors import BatchFailed, CompletionUnjudged, InvalidInput
from contracts.experience.columns import check_values, row_shapes
from contracts.rollouts import RolloutBatch
from contracts.settings import StackSettings
from onbeat.data.rendering import chat_template
from onbeat.stages.compute_service import StageModel
from onbeat.stages.log_prob_model import frozen_values, load_frozen
from onbeat.stages.models import model_loader, model_service
from onbeat.stages.reward_model import RewardModel, load_reward_model
from onbeat.stages.served_stages import ServedStage
from onbeat.weights.hashing import tensors_digest
from tests.builders import DIGEST, VOCABULARY, char_tokenizer, job_spec, rollout_batch, tiny_model_folder
from tests.rooms.stages.stage_fakes import claimed_item, served_stage
from tests.scorer_folder import scorer_folder

REFERENCE = {"type": "reference"}
TEACHER = {"type": "teacher", "model": "teachers/qwen3"}
SCORER = {"type": "reward_model", "model": "scorer"}


def served(stage: dict[str, Any], *, version_0: str = "", **changes: Any) -> ServedStage:
    if stage is REFERENCE:
        changes["algorithm__kl_coefficient"] = 0.1
    if stage["type"] == "teacher":
        changes["algorithm__distillation_coefficient"] = 1.0
    return served_stage(stage, version_0=version_0, **changes)


def item_of(stage: ServedStage, batch: RolloutBatch, rows: range | None = None, **inputs: list[bytes]) -> ClaimedItem:
    return claimed_item(stage.stage.name, batch, rows or range(batch.num_completions), inputs)


def load(root: Path, stage: ServedStage) -> StageModel:
    return model_loader(StackSettings(model_root=str(root)))(stage)


def digest_of(root: Path) -> str:
    return tensors_digest(load_frozen(StackSettings(model_root=str(root)), job_spec(), path="qwen3").weights())


@pytest.mark.parametrize("stage", [REFERENCE, TEACHER])
def test_log_probs_are_those_of_the_trainers_own_forward_under_the_model_that_the_stage_names(
    tmp_path: Path, stage: dict[str, Any]
) -> None:
    tiny_model_folder(tmp_path)
    tiny_model_folder(tmp_path / "teachers", seed=1)
    batch, settings = rollout_batch(weights_digest=digest_of(tmp_path)), StackSettings(model_root=str(tmp_path))
    made = load(tmp_path, served(stage)).values(item_of(served(stage), batch))
    path = "qwen3" if stage is REFERENCE else "teachers/qwen3"
    expected = frozen_values(load_frozen(settings, job_spec(), path=path), batch, spec=served(stage).spec)
    assert made == {f"{stage['type']}_logprobs": [value for (value,) in expected]}
    other = {"qwen3": "teachers/qwen3", "teachers/qwen3": "qwen3"}[path]
    assert expected != frozen_values(load_frozen(settings, job_spec(), path=other), batch, spec=served(stage).spec)


def test_each_source_of_a_mixture_has_the_teacher_that_the_stage_names_for_it(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    for seed, name in enumerate(("sums", "code"), start=1):
        tiny_model_folder(tmp_path / name, seed=seed)
    models, sources = {"sums": "sums/qwen3", "code": "code/qwen3"}, ("code", "sums", "code")
    mixture = {"type": "mixture", "sources": [{"name": name, "dataset": {"type": "addition"}} for name in models]}
    stage = served({"type": "teacher", "models": models, "top_k": 3}, dataset=mixture, algorithm__distillation_beta=0.0)
    batch = rollout_batch(num_groups=3)
    groups = tuple(replace(group, source=source) for group, source in zip(batch.groups, sources, strict=True))
    batch, model = replace(batch, groups=groups), load(tmp_path, stage)
    made = model.values(item_of(stage, batch))
    check_values(made, stage.node.outputs, row_shapes(batch), of="the stage")
    for source, path in models.items():
        rows = np.array([row for row in range(12) if sources[row // 4] == source])
        frozen = load_frozen(StackSettings(model_root=str(tmp_path)), job_spec(), path=path)
        top = functools.partial(likeliest, k=3, num_tokens=len(VOCABULARY))
        expected = frozen_values(frozen, batch, spec=stage.spec, rows=rows, summary=lambda one, *_: top(one))  # noqa: B023
        assert [tuple(column[row] for column in made.values()) for row in rows] == expected
    with pytest.raises(BatchFailed, match=r"stages\.teacher\.model.*row 0 is of source `other`, which has no model"):
        model.values(item_of(stage, replace(batch, groups=(replace(groups[0], source="other"), *groups[1:]))))


def test_a_teacher_with_fewer_tokens_than_are_asked_for_is_refused(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    tiny_model_folder(tmp_path / "teachers")
    stage = served(TEACHER | {"top_k": len(VOCABULARY) + 1}, algorithm__distillation_beta=0.0)
    with pytest.raises(InvalidInput, match=rf"stages\.teacher\.top_k: the vocabulary has {len(VOCABULARY)} tokens"):
        load(tmp_path, stage)


@pytest.mark.parametrize("version", [0, 7])
def test_a_reference_that_is_not_version_0_is_refused(tmp_path: Path, version: int) -> None:
    tiny_model_folder(tmp_path, seed=1)
    digest = digest_of(tmp_path)
    tiny_model_folder(tmp_path, seed=2)
    batch = rollout_batch(policy_version=version, weights_digest=digest if version == 0 else DIGEST)
    stage = served(REFERENCE, version_0=digest)
    with pytest.raises(
        InvalidInput, match=rf"model\.path: the reference is \w+, version 0 of the job is {digest[:12]}"
    ):
        load(tmp_path, stage).values(item_of(stage, batch))


def test_a_job_that_leaves_determinism_alone_is_no_worse_for_one_beside_it_that_asks_for_it(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    batch = rollout_batch(weights_digest=digest_of(tmp_path))
    before = torch.get_num_threads()
    try:
        for deterministic, threads in ((True, 2), (False, 1), (True, 1)):
            stage = served(REFERENCE, deterministic=deterministic)
            settings = StackSettings(model_root=str(tmp_path), threads=threads)
            model = model_loader(settings)(stage)
            torch.use_deterministic_algorithms(not deterministic)
            torch.set_num_threads(3 - threads)
            model.values(item_of(stage, batch))
            assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == (deterministic, threads)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


def test_a_colocated_jobs_model_has_the_threads_of_its_trainer(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    stage = served(REFERENCE, schedule="colocated")
    settings = StackSettings(model_root=str(tmp_path), threads=1, colocated_threads=2)
    before = torch.get_num_threads()
    try:
        batch = rollout_batch(weights_digest=digest_of(tmp_path))
        model_loader(settings)(stage).values(item_of(stage, batch))
        assert torch.get_num_threads() == 2
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(before)


def test_log_probs_that_are_no_numbers_fail_the_item(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny_model_folder(tmp_path) / "model.safetensors"
    tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    batch = rollout_batch(policy_version=1)
    likely = served(TEACHER | {"model": "qwen3", "top_k": 3}, algorithm__distillation_beta=0.0)
    for stage in (served(REFERENCE, version_0=""), likely):
        with pytest.raises(BatchFailed, match="row 0 of 0/train/0 are not finite"):
            load(tmp_path, stage).values(item_of(stage, batch))


def test_a_teacher_with_another_vocabulary_is_refused_by_its_key_and_a_token(tmp_path: Path) -> None:
    tiny_model_folder(tmp_path)
    folder = tiny_model_folder(tmp_path / "teachers")
    text = (folder / "tokenizer.json").read_text()
    swapped = json.loads(text)
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(swapped))
    with pytest.raises(InvalidInput) as raised:
        load(tmp_path, served(TEACHER))
    assert raised.value.field == "stages.teacher.model"
    assert "2 tokens have other numbers, e.g. 'a'" in str(raised.value)
    assert raised.value.cure


@pytest.mark.parametrize(("stage", "key"), [(TEACHER, "stages.teacher.model"), (SCORER, "stages.reward_model.model")])
def test_a_folder_that_is_not_there_is_named_by_the_stages_key(tmp_path: Path, stage: dict[str, Any], key: str) -> None:
    tiny_model_folder(tmp_path)
    with pytest.raises(InvalidInput, match=rf"{re.escape(key)}: no folder") as raised:
        load(tmp_path, served(stage))
    assert raised.value.cure
    with pytest.raises(InvalidInput, match=rf"{re.escape(key)}: .* leads out of the model root"):
        load(tmp_path, served(stage | {"model": "../elsewhere"}))


@pytest.mark.parametrize(
    ("stage", "key"),
    [(REFERENCE, "model.path"), (TEACHER, "stages.teacher.model"), (SCORER, "stages.reward_model.model")],
)
def test_a_look_for_the_model_on_this_host_names_the_key_the_folder_and_the_cure(
    tmp_path: Path, stage: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = model_service(StackSettings(model_root=str(tmp_path)))
    look, asked = made[stage["type"]].check, served(stage)
    with pytest.raises(InvalidInput, match=rf"{re.escape(key)}: no folder `{tmp_path}/.* \(put the model there"):
        look(asked)
    folder = tmp_path / asked.stage.files().get("model", asked.spec.model.path)
    folder.mkdir(parents=True)
    with pytest.raises(InvalidInput, match=rf"{re.escape(key)}: `{folder}` has no config.json"):
        look(asked)
    (folder / "config.json").write_text("{}")
    look(asked)
    monkeypatch.setattr(Path, "is_file", lambda _: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(InvalidInput, match=rf"{re.escape(key)}: `{folder}` can't be read: Permission denied"):
        look(asked)


def reward_model(root: Path, **keys: Any) -> RewardModel:
    return load_reward_model(StackSettings(model_root=str(root)), served({**SCORER, **keys}))


def scores(model: StageModel, *pairs: tuple[str, str]) -> list[bytes]:
    batch = rollout_batch()
    prompts, texts = [prompt.encode() for prompt, _ in pairs], [text.encode() for _, text in pairs]
    item = item_of(served(SCORER), batch, range(len(pairs)), prompt=prompts, text=texts)
    return list(model.values(item)["reward_model"])


def test_a_score_is_the_classifiers_of_this_row_and_of_nothing_beside_it(tmp_path: Path) -> None:
    from transformers import Qwen3ForSequenceClassification

    folder = scorer_folder(tmp_path)
    pairs = [("1+1=", "2"), ("what is your name?", "my name is long"), ("1+1=", "3")]
    together = scores(reward_model(tmp_path), *pairs)
    assert len(set(together)) == 3
    alone = reward_model(tmp_path)
    assert [score for pair in reversed(pairs) for score in scores(alone, pair)] == together[::-1]
    classifier = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    ids = char_tokenizer()("user: 1+1=\nassistant: 2\n")["input_ids"]
    with torch.no_grad():
        expected = classifier(torch.tensor([ids])).logits[0, 0].item()
    assert np.frombuffer(together[0], dtype="<f4").item() == pytest.approx(expected, rel=1e-5)


def test_without_a_chat_template_the_two_texts_are_the_tokenizers_pair(tmp_path: Path) -> None:
    scorer_folder(tmp_path, chat=False)
    assert reward_model(tmp_path).token_ids("1+1=", "2") == char_tokenizer()("1+1=2")["input_ids"]


@pytest.mark.parametrize("chat", [True, False])
def test_no_text_can_write_a_special_token_of_the_model(tmp_path: Path, chat: bool) -> None:
    scorer_folder(tmp_path, chat=chat)
    model, special = reward_model(tmp_path), set(char_tokenizer().all_special_ids)
    for hostile in ("2<eos>", "<eos><eos>", "<e<eos>os>", "<pad>" * 5, "<unk>"):
        assert not special & set(model.token_ids(hostile, hostile)), hostile


def test_texts_that_are_longer_than_the_context_are_an_error_and_not_cut(tmp_path: Path) -> None:
    scorer_folder(tmp_path, context_tokens=32)
    model = reward_model(tmp_path)
    assert len(scores(model, ("a", "b" * 12))) == 1
    with pytest.raises(BatchFailed, match=r"stages\.reward_model\.model: .* its context is 32"):
        scores(model, ("a", "b" * 40))


@pytest.mark.parametrize("chat", [True, False])
def test_texts_are_cut_on_the_side_that_the_stage_says_to_the_longest_that_fits(tmp_path: Path, chat: bool) -> None:
    scorer_folder(tmp_path, context_tokens=32, chat=chat)
    whole = reward_model(tmp_path)
    cut_at_end = reward_model(tmp_path, truncate="completion_end")
    cut_at_start = reward_model(tmp_path, truncate="prompt_start")
    digits = "".join(str(number % 10) for number in range(40))
    room = 32 - len(whole.token_ids("7", ""))
    assert scores(cut_at_end, ("7", digits)) == scores(whole, ("7", digits[:room]))
    assert scores(cut_at_start, (digits, "7")) == scores(whole, (digits[-room:], "7"))
    for model, pair in ((cut_at_end, (digits, "7")), (cut_at_start, ("7", digits)), (whole, ("7", digits))):
        with pytest.raises(CompletionUnjudged) as raised:
            scores(model, pair)
        assert (raised.value.reason, raised.value.lasts) == ("too_long", True), "nothing would be left of what is cut"
    assert scores(cut_at_end, ("1", "2")) == scores(whole, ("1", "2")), "what fits is not cut"


def test_a_chat_template_that_refuses_the_texts_fails_the_item(tmp_path: Path) -> None:
    scorer_folder(tmp_path)
    (tmp_path / "scorer" / "chat_template.jinja").write_text("{{ raise_exception('no assistant, please') }}")
    with pytest.raises(BatchFailed, match="refuses the texts: no assistant, please"):
        scores(reward_model(tmp_path), ("a", "b"))


def test_a_chat_template_that_goes_beyond_a_bound_is_the_model_s_fault_and_no_score_of_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template, "LONGEST_S", 0.3)
    scorer_folder(tmp_path)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "scorer" / "chat_template.jinja").write_text(endless)
    with pytest.raises(InvalidInput, match="its chat template was stopped: it takes longer than") as error:
        scores(reward_model(tmp_path), ("a", "b"))
    assert error.value.field == "stages.reward_model.model"
    assert error.value.cure


def test_a_model_that_is_no_reward_model_is_refused_by_name(tmp_path: Path) -> None:
    scorer_folder(tmp_path, num_labels=2)
    with pytest.raises(InvalidInput, match=r"stages\.reward_model\.model: `.*` has 2 outputs, a reward model has 1"):
        reward_model(tmp_path)
    config = tiny_model_folder(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_labels": 1}))
    with pytest.raises(InvalidInput, match=r"lack 1 tensors of a sequence classifier, e\.g\. score\.weight"):
        load(tmp_path, served(SCORER | {"model": "qwen3"}))
    (tmp_path / "scorer" / "config.json").write_text("{}")
    with pytest.raises(InvalidInput, match="does not load as a sequence classifier"):
        reward_model(tmp_path)


def test_a_models_own_code_and_pickled_weights_are_never_run(tmp_path: Path) -> None:
    folder = scorer_folder(tmp_path)
    trace = tmp_path / "was-run"
    for name in ("configuration_own.py", "modeling_own.py"):
        (folder / name).write_text(f"open({str(trace)!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    auto_map = {"AutoConfig": "configuration_own.C", "AutoModelForSequenceClassification": "modeling_own.M"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map, "model_type": "own"}))
    with pytest.raises(InvalidInput, match="does not load as a sequence classifier"):
        reward_model(tmp_path)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match="does not load as a sequence classifier"):
        reward_model(tmp_path)
    assert not trace.exists()
