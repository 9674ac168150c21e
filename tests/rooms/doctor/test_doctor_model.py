"""`onbeat doctor MODEL`: its answers about a folder are what then happens to a job, loaded or by a small twin."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer

from consumer.gradient.assembly import make_learner
from consumer.gradient.saved_state import adapter_state
from consumer.model.checkpoint import write_checkpoint
from contracts.engines import OpenaiOptions, TransformersOptions
from contracts.errors import InvalidInput
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from onbeat.base import group_cache
from onbeat.cli import run
from onbeat.doctor.finding import Finding, Level
from onbeat.doctor.model.look import look
from onbeat.doctor.model.report import ModelReport
from onbeat.export.export import export, exported_names
from onbeat.weights.base_model.checkpoint_names import names_of_family
from onbeat.weights.base_model.text_model import TextModel
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.layout import FileLayout, layout_of
from onbeat.weights.model_folder import empty_model, weight_tensors
from producer.engine.transformers.engine import TransformersEngine
from tests.builders import char_tokenizer, engine_setup, job_spec
from tests.contract.engine_rigs import transformers_rig
from tests.families import EXPERTS, SIZES, family_folder

FAMILIES = (
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "llama4_text",
    "glm_moe_dsa",
    "nemotron_h",
    "qwen3_5",
    "qwen3_vl",
)
"""They take each way: packed attention, the cache; experts, indexers, states; a text's own class, and towers."""
LORA = {"rank": 2}


def report_of(root: Path, spec: JobSpec, *, load: bool | None = None) -> ModelReport:
    return look(spec, settings_of(root), TransformersOptions(), load=load)


def settings_of(root: Path) -> StackSettings:
    return StackSettings(run_root=str(root / "runs"), model_root=str(root))


def finding(report: ModelReport, subject: str) -> Finding:
    (answer,) = [finding for finding in report.findings if finding.subject == subject]
    return answer


@pytest.mark.parametrize("family", FAMILIES)
def test_what_it_says_of_a_family_is_what_a_trainer_then_chooses(family: str, tmp_path: Path) -> None:
    family_folder(tmp_path, family)
    spec = job_spec(model__path=family)
    policy = make_learner(settings_of(tmp_path), spec).policy
    assert policy.passes is not None
    for load in (True, False):
        report = report_of(tmp_path, spec, load=load)
        assert not report.is_refused, report.findings
        assert report.architecture == type(policy.model).__name__
        assert report.packing == policy.passes.packing
        assert finding(report, "lays out").says == str(policy.passes)
        assert frozenset(report.out_of_reach) == policy.out_of_reach
        trained = policy.trained_parameters().values()
        assert report.num_trained == sum(parameter.numel() for parameter in trained)
        assert ("twin" in report.tried_on) is not load


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "glm_moe_dsa", "qwen3_5"])
def test_the_share_of_adapters_is_that_of_a_job_with_them(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    family_folder(tmp_path, family)
    spec = job_spec(model__path=family, trainer__lora=LORA)
    policy = make_learner(settings_of(tmp_path), spec).policy
    assert policy.adapters is not None
    # What the trainer warns of, if anything stays frozen.
    warnings = [record.getMessage() for record in caplog.records if record.name == "consumer.model.adapters"]
    frozen = [warning.partition(": ")[2] for warning in warnings]
    for load in (True, False):
        report = report_of(tmp_path, spec, load=load)
        assert report.num_trained == report.num_adapted
        assert report.num_trained == sum(parameter.numel() for parameter in policy.trained_parameters().values())
        says = finding(report, "adapts").says
        num_parameters = f"{report.num_trained:,} parameters at rank 2"
        assert says == "; ".join([f"{len(policy.adapters.layers)} layers take adapters, of {num_parameters}", *frozen])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_moe", "qwen3_5_text"])
def test_it_says_how_the_engine_then_decodes(family: str, tmp_path: Path) -> None:
    family_folder(tmp_path, family)
    says = finding(report_of(tmp_path, job_spec(model__path=family), load=True), "samples").says
    policy = make_learner(settings_of(tmp_path), job_spec(model__path=family)).policy
    rig = transformers_rig(family, tmp_path, tmp_path / "sampled")
    try:
        tensors = {name: np.array(tensor.numpy()) for name, tensor in policy.weights().items()}
        rig.load(1, tensors)
        shares_steps = rig.engine.max_concurrent_completions > 1
    finally:
        rig.close()
    assert ("in shared steps" in says) is shares_steps
    assert ("one batch at a time" in says) is not shares_steps


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen3_5"])
def test_an_export_has_as_many_tensors_as_it_says_by_those_names(family: str, tmp_path: Path) -> None:
    model_folder = family_folder(tmp_path, family)
    report = report_of(tmp_path, job_spec(model__path=family), load=False)
    learner = make_learner(settings_of(tmp_path), job_spec(model__path=family))
    policy = learner.policy
    run_folder = RunFolder(tmp_path / "runs", "job")
    write_checkpoint(
        run_folder.checkpoint_after(0),
        job_id="job",
        iteration=0,
        weights_digest=tensors_digest(policy.weights()),
        save=learner.save,
        adapters=adapter_state(policy),
    )
    export(run_folder, learner.spec, tmp_path / "export", model_folder=model_folder, versions=None)
    with safe_open(tmp_path / "export" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert report.num_exported_tensors == len(names)
    assert exported_names(model_folder, layout_of(policy.base_tensors())).layout.keys() <= names
    assert finding(report, "vLLM").says.startswith(f"is asked for {report.architecture}")


def test_a_family_that_a_trainer_refuses_is_refused_in_the_same_words(tmp_path: Path) -> None:
    family_folder(tmp_path, "deepseek_v4")
    spec = job_spec(model__path="deepseek_v4")
    with pytest.raises(InvalidInput) as refusal:
        make_learner(settings_of(tmp_path), spec)
    for load in (True, False):
        report = report_of(tmp_path, spec, load=load)
        assert report.is_refused
        refused = finding(report, "lays out")
        assert refused.level is Level.BAD
        assert refused.says == f"model.path: {refusal.value.problem}"
        assert refused.cure == refusal.value.cure


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"trainer__packing": "as_sampled"}, "lays out"),
        ({"trainer__lora": {"target_modules": ["no_layer"]}}, "adapts"),
        ({"trainer__lora": {"target_modules": ["embed_tokens"]}}, "adapts"),
        ({"optimizer__groups": [{"parameters": ["*.no_layer.*"]}]}, "job"),
    ],
)
def test_a_key_that_the_model_cannot_have_is_refused_as_the_trainer_refuses_it(
    changes: dict[str, Any], subject: str, tmp_path: Path
) -> None:
    family_folder(tmp_path, "mistral")
    spec = job_spec(model__path="mistral", **changes)
    with pytest.raises(InvalidInput) as refusal:
        make_learner(settings_of(tmp_path), spec)
    for load in (True, False):
        refused = finding(report_of(tmp_path, spec, load=load), subject)
        assert refused.level is Level.BAD
        assert refused.says == f"{refusal.value.field}: {refusal.value.problem}"


def test_sharding_that_a_family_cannot_have_is_refused_for_a_job_with_it_and_a_warning_for_others(
    tmp_path: Path,
) -> None:
    family_folder(tmp_path, "qwen3_vl_moe")
    alone = report_of(tmp_path, job_spec(model__path="qwen3_vl_moe"), load=False)
    assert not alone.is_refused
    assert finding(alone, "shards").level is Level.WARN
    sharding = {"trainer__sharding": "fsdp", "trainer__world_size": 2}
    shared = report_of(tmp_path, job_spec(model__path="qwen3_vl_moe", **sharding), load=False)
    assert finding(shared, "shards").level is Level.BAD
    assert "aren't laid out by the rows of its parameters" in finding(shared, "shards").says


def test_a_model_that_our_engine_cannot_sample_is_refused_unless_another_engine_samples_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No family of today has such a cache: one of the known kinds is taken out."""
    family_folder(tmp_path, "qwen3_5_text")
    monkeypatch.setattr(group_cache, "KNOWN_LAYERS", (DynamicLayer,))
    monkeypatch.delattr(group_cache.StateLayer, "batch_repeat_interleave")
    spec = job_spec(model__path="qwen3_5_text", trainer__packing="padded")
    with pytest.raises(InvalidInput) as refusal:
        TransformersEngine(engine_setup(tmp_path, model=spec.model))
    refused = finding(report_of(tmp_path, spec, load=False), "samples")
    assert (refused.level, refused.says) == (Level.BAD, f"model.path: {refusal.value.problem}")
    by_server = look(spec, settings_of(tmp_path), OpenaiOptions(url="http://127.0.0.1:1"), load=False)
    assert finding(by_server, "samples").level is Level.WARN
    assert not by_server.is_refused


def test_tokens_and_lengths_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    family_folder(tmp_path, "llama")
    sampling = {"max_new_tokens": 128, "stop_token_ids": [500]}
    report = report_of(tmp_path, job_spec(model__path="llama", rollout__sampling=sampling), load=False)
    says = [finding.says for finding in report.findings if finding.subject == "job"]
    assert says == [
        "rollout.sampling.stop_token_ids: no token 500 is in a vocabulary of 79",
        "rollout.sampling.max_new_tokens: 128 tokens and a prompt don't fit into the model's context of 128",
    ]


DEEP: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": EXPERTS | {"num_experts": 32},
    "mixtral": {"num_local_experts": 16, "num_experts_per_tok": 2},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": None},
    "gpt_oss": {"num_local_experts": 16, "num_experts_per_tok": 2, "sliding_window": 4},
}


@pytest.mark.parametrize("family", DEEP)
def test_a_twin_of_few_layers_and_experts_tells_what_the_whole_model_does(family: str, tmp_path: Path) -> None:
    """Six layers, wide MLPs and a vocabulary above the twin's."""
    options = {name: value for name, value in DEEP[family].items() if value is not None}
    sizes = SIZES | {"num_hidden_layers": 6, "intermediate_size": 128, "vocab_size": 600} | options
    config = AutoConfig.for_model(family, pad_token_id=590, eos_token_id=1, tie_word_embeddings=False, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
    char_tokenizer().save_pretrained(tmp_path / family)
    spec = job_spec(model__path=family)
    loaded = report_of(tmp_path, spec, load=True)
    by_twin = report_of(tmp_path, spec, load=False)
    assert by_twin.tried_on.startswith("a twin with random weights: ")
    assert "6 of 6 layers" not in by_twin.tried_on or family == "gemma3_text"
    assert (by_twin.packing, by_twin.out_of_reach) == (loaded.packing, loaded.out_of_reach)
    assert finding(by_twin, "lays out") == finding(loaded, "lays out")
    assert by_twin.memory == loaded.memory


def sparse_folder(folder: Path, config: Any) -> int:
    """Makes a folder whose files of weights have heads and lengths, and no byte on the disk behind the heads.

    Returns:
        The bytes that the tensors of bfloat16 would take.
    """
    import torch

    config.save_pretrained(folder)
    char_tokenizer().save_pretrained(folder)
    model = empty_model(folder, dtype=torch.bfloat16, device="meta")
    layout = dict(names_of_family(model, layout_of(dict(weight_tensors(model)))).layout)
    names = list(layout)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, first in enumerate(range(0, len(names), 5000)):
        part = {name: layout[name] for name in names[first : first + 5000]}
        file_layout = FileLayout(part)
        file_name = f"model-{number:05d}.safetensors"
        with (folder / file_name).open("wb") as file:
            file.write(file_layout.header)
            file.truncate(file_layout.num_bytes)
        weight_map |= dict.fromkeys(part, file_name)
        num_bytes += sum(tensor.num_bytes for tensor in part.values())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return num_bytes


def qwen3_30b_a3b() -> Any:
    """The shape of Qwen3-30B-A3B."""
    return AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        intermediate_size=6144,
        vocab_size=151936,
        tie_word_embeddings=False,
        eos_token_id=1,
    )


def test_a_model_of_30_b_is_answered_for_without_reading_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes = sparse_folder(tmp_path / "large", qwen3_30b_a3b())

    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("the model's weights are read")

    monkeypatch.setattr(TextModel, "load", refuse)
    options = {"model__path": "large", "model__dtype": "bfloat16"}
    report = report_of(tmp_path, job_spec(**options))
    assert not report.is_refused
    assert report.num_parameters == 30_532_122_624
    assert report.memory is not None
    kept = {part.name: part.num_bytes for part in report.memory.permanent}
    # 2 + 4 + 8 + 8 bytes a parameter, as the table of docs/hardware.md has it.
    assert kept["weights"] == num_bytes == 2 * report.num_parameters
    assert report.kept_bytes == 22 * report.num_parameters
    assert report.packing == "shared_prompt"
    assert "2 of 48 layers, 16 experts" in report.tried_on
    # 48 layers of four matrices of attention: routers and experts take none.
    assert finding(report, "adapts").says.startswith("192 layers take adapters")
    assert "95% of the parameters stay as they are" in finding(report, "adapts").says
    # Three matrices of each expert, in place of two for all of a layer.
    assert report.num_exported_tensors == 531 + 48 * (3 * 128 - 2)
    sharded = job_spec(**options, trainer__world_size=8, trainer__sharding="fsdp")
    assert report_of(tmp_path, sharded).kept_bytes == pytest.approx(22 / 8 * report.num_parameters, rel=0.01)
    adapted = report_of(tmp_path, job_spec(**options, trainer__lora={"rank": 16}))
    assert adapted.num_trained == 13_369_344
    assert adapted.kept_bytes < 0.11 * report.kept_bytes


def test_a_tensor_that_no_file_has_is_named_without_loading(tmp_path: Path) -> None:
    folder = tmp_path / "large"
    sparse_folder(folder, qwen3_30b_a3b())
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_bytes())
    del values["weight_map"]["model.layers.7.self_attn.q_proj.weight"]
    index.write_text(json.dumps(values))
    report = report_of(tmp_path, job_spec(model__path="large"), load=False)
    lacking = [finding for finding in report.findings if finding.level is Level.BAD]
    assert [(finding.subject, finding.says) for finding in lacking] == [
        ("loads", "the safetensors lack 1 tensors of the model, e.g. model.layers.7.self_attn.q_proj.weight")
    ]


def test_the_command_prints_one_object_and_ends_with_1_where_the_job_would_be_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = family_folder(tmp_path, "qwen3_moe")
    assert run(["doctor", str(folder), "--set", "rollout.sampling.max_new_tokens=8", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["healthy"] is True
    assert answer["model"]["architecture"] == "Qwen3MoeForCausalLM"
    assert answer["model"]["kept_bytes"] == 20 * answer["model"]["num_parameters"]
    flags = ["--model-root", str(tmp_path), "--no-load", "--set", 'trainer.lora.target_modules=["gate"]']
    assert run(["doctor", "qwen3_moe", *flags]) == 1
    text = capsys.readouterr().out
    assert "bad   adapts" in text
    assert "adapters go into nn.Linear" in text
    assert "of 2 layers" in text


def test_a_model_of_the_repository_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "configs/models/two-digit-addition"]) == 0
    text = capsys.readouterr().out
    assert "kept for the whole job" in text
    assert all(line.split()[0] in ("ok", "warn") for line in text.partition("\n\n")[0].splitlines()[1:])


def test_the_job_of_a_spec_is_answered_for_and_a_spec_that_is_refused_says_all_its_refusals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["doctor", "--spec", "configs/demo.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["packing"] == "shared_prompt"
    refused = ["--set", "trainer.sharding=fsdp", "--set", "trainer.world_size=2", "--set", "optimizer.type=adamw_8bit"]
    assert run(["doctor", "--spec", "configs/demo.toml", *refused, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert {finding["subject"] for finding in answer["model"]["findings"]} == {"job"}
    assert answer["healthy"] is False


def test_a_folder_that_no_trainer_could_load_is_one_line_with_the_cure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = family_folder(tmp_path, "llama")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert run(["doctor", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "are pickled (pytorch_model.bin), and to read them would run what they hold" in lines[1]
    assert run(["doctor", str(tmp_path / "nowhere")]) == 1
    nowhere = f"model.path: there is no {tmp_path / 'nowhere'} on this machine (name a path that is there)"
    assert nowhere in capsys.readouterr().out


def test_of_a_folder_without_weights_the_shapes_of_config_json_are_answered_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = family_folder(tmp_path, "llama")
    to_come = tmp_path / "to-come"
    to_come.mkdir()
    shutil.copyfile(whole / "config.json", to_come / "config.json")

    def answer(folder: Path, *flags: str) -> dict[str, Any]:
        run(["doctor", str(folder), *flags, "--set", "rollout.sampling.max_new_tokens=8", "--json"])
        return json.loads(capsys.readouterr().out)

    of_config = answer(to_come)
    of_weights = answer(whole, "--no-load")
    for key in ("architecture", "num_parameters", "num_adapted", "kept_bytes"):
        assert of_config["model"][key] == of_weights["model"][key], key
    assert of_config["healthy"] is True
    findings = {finding["subject"]: finding for finding in of_config["model"]["findings"]}
    assert (findings["files"]["level"], findings.keys() & {"loads", "trains", "samples", "exports"}) == ("warn", set())
    assert "the folder has no weights yet, so nothing is tried" in findings["files"]["says"]
    assert of_config["model"]["num_trained"] == of_weights["model"]["num_parameters"]

    (refused,) = answer(to_come, "--load")["model"]["findings"]
    assert "has no tokenizer files" in refused["says"], "a person who asks for a trial takes the model to be there"
    (to_come / "config.json").write_text('{"model_type": "of-another-planet"}')
    (unknown,) = answer(to_come)["model"]["findings"]
    assert (unknown["level"], "makes no language model" in unknown["says"]) == ("bad", True)


def test_flags_of_a_model_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--no-load"]) == 2
    assert "name a model's folder, or a job spec by --spec" in capsys.readouterr().err


def test_a_doctor_of_the_machine_imports_no_torch_for_models() -> None:
    code = "import sys, onbeat.commands.doctor; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
