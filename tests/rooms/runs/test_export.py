"""What is exported loads with Hugging Face's libraries, is the version bit for bit, and is complete or not there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import onbeat.export.export as exporting
from consumer.gradient.optimizer import PolicyOptimizer
from consumer.gradient.saved_state import adapter_state, save_state
from consumer.model.adapters import base_name
from consumer.model.checkpoint import write_checkpoint
from consumer.model.policy import Policy, load_policy
from contracts.encoding.wire import decode_json, encode_json
from contracts.errors import ContractViolation, InvalidInput, NotFound, OnbeatError, WeightsRejected
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder
from contracts.spec.job import JobSpec, ModelSpec
from contracts.spec.root import SpecRoot
from contracts.spec.trainer import LoraSpec
from onbeat import cli
from onbeat.audit.weights import digest_of
from onbeat.export.export import Exported, _check_peft_reads, export
from onbeat.weights.hashing import tensors_digest
from onbeat.weights.transports import make_publisher
from tests.builders import job_spec, tiny_model_folder
from tests.e2e.stand_in_gateway import KEY, fake_gateway
from tests.families import MIXTURES, family_folder
from tests.publishing import publish
from tests.refusals import refusal_of

LORA = {"trainer__lora": {"rank": 4, "alpha": 8.0}}


class Run:
    """A run folder with versions of a tiny policy, as a trainer leaves them; no stack is up."""

    def __init__(self, root: Path, spec: JobSpec) -> None:
        self.root, self.spec = root, spec
        self.folder = RunFolder(root / "runs", "job-1")
        self.folder.path.mkdir(parents=True)
        self.folder.spec.write_bytes(encode_json(spec))
        self.policy: Policy = load_policy(spec.model, model_root=SpecRoot(root), gradient_checkpointing=False)
        if spec.trainer.lora is not None:
            self.policy = self.policy.with_adapters(spec.trainer.lora, seed=0)
        self.publisher = make_publisher(
            spec,
            self.folder,
            chunks=None,  # type: ignore[arg-type]
            announce=lambda shard: None,
            pause=lambda seconds: None,
            adapters=self.policy.adapter_source(self.policy.publish_base) if spec.trainer.lora else None,
        )
        self.digests: dict[int, str] = {}

    def train(self, version: int) -> dict[str, Tensor]:
        """Moves the policy; the tensors of the version that it is now."""
        draw = torch.Generator().manual_seed(version)
        for parameter in self.policy.trained_parameters().values():
            parameter.data[:1] += 0.1 * torch.randn(parameter[:1].shape, generator=draw)
        tensors = {name: tensor.clone() for name, tensor in self.policy.weights().items()}
        self.digests[version] = tensors_digest(tensors)
        return tensors

    def save(self, version: int) -> Path:
        target = self.folder.checkpoint_after(version - 1)
        optimizer = PolicyOptimizer(self.policy.trained_parameters(), self.spec.optimizer)
        write_checkpoint(
            target,
            job_id="job-1",
            iteration=version - 1,
            weights_digest=self.digests[version],
            save=lambda scratch: save_state(scratch, self.policy, optimizer),
            adapters=adapter_state(self.policy),
        )
        return target

    def export(self, target: Path, *, chain: bool = True, **options: object) -> Exported:
        return export(
            self.folder,
            self.spec,
            target,
            model_folder=self.root / "qwen3",
            versions=self.digests if chain else None,
            **options,  # type: ignore[arg-type]
        )


def make_run(root: Path, **changes: object) -> Run:
    tiny_model_folder(root)
    return Run(root, job_spec(**changes))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path)


def loaded(folder: Path) -> dict[str, Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def are_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def as_one_file(run: Run) -> None:
    run.save(1)


def as_rows_of_ranks(run: Run) -> None:
    """Writes the checkpoint's files again as FSDP's ranks write them."""
    folder = run.save(1)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for rank in range(2):
        rows = {name: tensor.tensor_split(2)[rank].clone() for name, tensor in tensors.items()}
        save_file(rows, folder / f"model-{rank + 1:05d}-of-00002.safetensors")


def as_a_version(run: Run) -> None:
    publish(run.publisher, run.policy.weights(), policy_version=1)


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("keep", [as_one_file, as_rows_of_ranks])
def test_the_newest_checkpoint_becomes_a_model_that_transformers_loads(
    run: Run, tmp_path: Path, keep: Callable[[Run], None], chain: bool
) -> None:
    expected = run.train(1)
    keep(run)
    exported = run.export(tmp_path / "out", chain=chain)
    assert (exported.policy_version, exported.weights_digest) == (1, run.digests[1])
    assert digest_of([tmp_path / "out" / "model.safetensors"]) == run.digests[1]
    assert are_same(loaded(tmp_path / "out"), expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([5]) == run.policy.tokenizer.decode([5])
    assert json.loads((tmp_path / "out" / "onbeat.json").read_text())["weights_digest"] == run.digests[1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == list(exported.files)
    assert "generation_config.json" in exported.files
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def score(version: int, sampled: float) -> bytes:
    return encode_json(EvaluationScore(iteration=version, policy_version=version, sampled=sampled, num_prompts=8))


def test_the_best_version_is_that_of_the_best_held_out_score_among_those_that_are_kept(
    run: Run, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        run.train(version)
        run.save(version)
    with pytest.raises(NotFound, match="--best: no version of job-1 that is kept has a held-out score"):
        run.export(tmp_path / "none", best=True)
    scores = [score(0, 0.9), score(1, 0.1), score(2, 0.5), score(1, 0.5), score(3, 0.4)]
    run.folder.evaluations.write_bytes(b"".join(line + b"\n" for line in scores))
    assert run.export(tmp_path / "best", best=True).policy_version == 1
    assert digest_of([tmp_path / "best" / "model.safetensors"]) == run.digests[1]
    assert run.export(tmp_path / "newest").policy_version == 3
    with pytest.raises(InvalidInput, match="--version: it names another version than --best"):
        run.export(tmp_path / "both", best=True, version=2)


@pytest.mark.parametrize("transport", ["file", "delta"])
def test_any_version_that_is_kept_is_exported_whole_or_from_its_delta(tmp_path: Path, transport: str) -> None:
    run = make_run(tmp_path, weights={"transport": transport})
    versions = {}
    for version in (1, 2, 3):
        versions[version] = run.train(version)
        publish(run.publisher, versions[version], policy_version=version)
    assert len(list(run.folder.weights_of(3).glob("delta-*"))) == (transport == "delta")
    for version in (2, 3):
        run.export(tmp_path / str(version), version=version)
        assert are_same(loaded(tmp_path / str(version)), versions[version])
    assert run.export(tmp_path / "newest").policy_version == 3
    with pytest.raises(NotFound, match=r"there is no version 7 of job-1 .*kept are 1, 2, 3"):
        run.export(tmp_path / "seven", version=7)
    with pytest.raises(NotFound, match="none is kept there"):
        run.export(tmp_path / "unknown", chain=False)


def test_a_large_model_is_cut_into_shards_with_an_index(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "SHARD_BYTES", 10_000)
    expected = run.train(1)
    run.save(1)
    exported = run.export(tmp_path / "out")
    assert sum(name.endswith(".safetensors") for name in exported.files) > 2
    assert are_same(loaded(tmp_path / "out"), expected)


@pytest.mark.parametrize("keep", [as_one_file, as_a_version])
def test_adapters_are_exported_merged_or_as_peft_loads_them(tmp_path: Path, keep: Callable[[Run], None]) -> None:
    from peft import PeftModel

    run = make_run(tmp_path, **LORA, trainer__packing="padded")
    expected = run.train(1)
    keep(run)
    run.export(tmp_path / "merged")
    assert are_same(loaded(tmp_path / "merged"), expected)
    exported = run.export(tmp_path / "adapters", adapters=True)
    assert exported.weights_digest == run.digests[1]
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "qwen3")
    base = AutoModelForCausalLM.from_pretrained(config["base_model_name_or_path"])
    model = PeftModel.from_pretrained(base, tmp_path / "adapters")
    matrices = {
        base_name(name).replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    assert are_same(matrices, run.policy.state_tensors())
    tokens = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(model(tokens).logits, run.policy.model(tokens).logits)


TRANSLATED = frozenset({"glm4_moe", "glm4_moe_lite", "deepseek_v2", "deepseek_v3", "ernie4_5_moe"})
"""Mixtures with dense layers too, whose names peft takes for those of the experts."""


@pytest.mark.parametrize("family", [*sorted(MIXTURES), "llama", "gemma4_text"])
def test_adapters_that_peft_would_put_into_other_layers_are_not_exported(tmp_path: Path, family: str) -> None:
    folder = family_folder(tmp_path, family)
    policy = load_policy(ModelSpec(path=family), model_root=SpecRoot(tmp_path), gradient_checkpointing=False)
    adapters = policy.with_adapters(LoraSpec(rank=2), seed=0).adapters
    assert adapters is not None
    check = partial(_check_peft_reads, sorted(adapters.layers), rank=2, model_folder=folder)
    if family not in TRANSLATED:
        check()
        return
    with refusal_of("--adapters") as refusal:
        check()
    assert "peft would not load the adapters into the layers that they were trained in" in str(refusal.value)


def test_a_model_has_no_adapters_to_export(run: Run, tmp_path: Path) -> None:
    run.train(1)
    run.save(1)
    with pytest.raises(InvalidInput, match=r"--adapters: .* holds no adapters"):
        run.export(tmp_path / "out", adapters=True)
    assert not (tmp_path / "out").exists()


def test_adapters_on_another_base_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, **LORA, trainer__packing="padded")
    run.train(1)
    run.save(1)
    tiny_model_folder(tmp_path, seed=1)
    with pytest.raises(WeightsRejected, match="is not the model that the adapters were trained on"):
        run.export(tmp_path / "out")


def test_damaged_weights_are_not_exported_and_nothing_is_left(run: Run, tmp_path: Path) -> None:
    run.train(1)
    folder = run.save(1)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ContractViolation, match=r"holds the weights .*, version 1 is "):
        run.export(tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_a_checkpoint_that_the_chain_contradicts_is_no_version(run: Run, tmp_path: Path) -> None:
    run.train(1)
    run.save(1)
    run.train(2)
    run.save(2)
    run.digests[2] = "0" * 64
    assert run.export(tmp_path / "out").policy_version == 1


@pytest.mark.parametrize("kind", ["a full folder", "a file"])
def test_what_is_in_the_way_stays(run: Run, tmp_path: Path, kind: str) -> None:
    run.train(1)
    run.save(1)
    target = tmp_path / "out"
    if kind == "a file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    with pytest.raises(InvalidInput, match="DIR: "):
        run.export(target)
    assert (target if kind == "a file" else target / "mine").read_text() == "mine"


def test_what_came_in_the_way_while_it_was_written_stays(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.train(1)
    run.save(1)
    target = tmp_path / "out"
    write = exporting._write_json

    def write_and_race(path: Path, value: object) -> None:
        write(path, value)
        target.mkdir(exist_ok=True)
        (target / "mine").write_text("mine")

    monkeypatch.setattr(exporting, "_write_json", write_and_race)
    with pytest.raises(OnbeatError, match="out: cannot write"):
        run.export(target)
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_the_command_works_from_the_run_folder_of_a_stack_that_is_down(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ONBEAT_GATEWAY_URL", "ONBEAT_RUN_ROOT", "ONBEAT_MODEL_ROOT"):
        monkeypatch.delenv(name, raising=False)
    run.train(1)
    run.save(1)
    flags = ["--run-dir", str(run.folder.run_root), "--model-root", str(tmp_path)]
    assert cli.run(["export", "job-1", str(tmp_path / "out"), *flags, "--json"]) == 0
    answer = decode_json(capsys.readouterr().out.encode(), dict)
    assert (answer["policy_version"], answer["weights_digest"]) == (1, run.digests[1])
    assert cli.run(["export", "job-1", str(tmp_path / "out"), *flags]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert cli.run(["export", "job-1", str(tmp_path / "again"), *flags]) == 0
    assert "no audit chain is at hand" in capsys.readouterr().out
    assert cli.run(["export", "job-1", str(tmp_path / "best"), "--best", *flags]) == 2
    assert "has a held-out score" in capsys.readouterr().err


def test_the_command_works_for_a_job_that_a_running_stack_has_forgotten(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train(1)
    run.save(1)
    monkeypatch.setenv("ONBEAT_RUN_ROOT", str(run.folder.run_root))
    with fake_gateway() as gateway:
        monkeypatch.setenv("ONBEAT_GATEWAY_URL", gateway.url)
        monkeypatch.setenv("ONBEAT_API_KEY", KEY)
        assert cli.run(["export", "job-1", str(tmp_path / "out"), "--model-root", str(tmp_path), "--json"]) == 0
        answer = decode_json(capsys.readouterr().out.encode(), dict)
        assert answer["weights_digest"] == run.digests[1]
        assert cli.run(["export", "job-2", str(tmp_path / "none"), "--json"]) == 2
    assert "there is no such job" in capsys.readouterr().out


def test_a_spec_that_leads_out_of_the_model_root_is_not_followed(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.train(1)
    run.save(1)
    flags = ["--run-dir", str(run.folder.run_root), "--model-root", str(tmp_path / "elsewhere")]
    for path in ("../qwen3", str(tmp_path / "qwen3"), "/etc"):
        spec = replace(run.spec, model=replace(run.spec.model, path=path))
        run.folder.spec.write_bytes(encode_json(spec))
        assert cli.run(["export", "job-1", str(tmp_path / "out"), *flags]) == 2
        assert "leads out of the model root" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shard_bytes", [2**31, 10_000], ids=["one file", "shards"])
@pytest.mark.parametrize("family", sorted(MIXTURES))
def test_an_export_is_what_transformers_saves_of_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, shard_bytes: int
) -> None:
    monkeypatch.setattr(exporting, "SHARD_BYTES", shard_bytes)
    folder = family_folder(tmp_path, family)
    run = Run(tmp_path, job_spec(model__path=family, trainer__packing="padded"))
    version = run.train(1)
    run.save(1)
    exported = export(run.folder, run.spec, tmp_path / "out", model_folder=folder, versions=run.digests)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict(version, strict=True)
    model.save_pretrained(tmp_path / "saved")
    assert are_same(stored(tmp_path / "out"), stored(tmp_path / "saved"))
    assert are_same(loaded(tmp_path / "out"), loaded(tmp_path / "saved"))
    assert exported.weights_digest == run.digests[1]
    assert exported.files_digest == digest_of(sorted((tmp_path / "out").glob("*.safetensors")))
    assert json.loads((tmp_path / "out" / "onbeat.json").read_text())["files_digest"] == exported.files_digest


def test_damaged_weights_of_other_names_are_not_exported(tmp_path: Path) -> None:
    family_folder(tmp_path, "mixtral")
    run = Run(tmp_path, job_spec(model__path="mixtral", trainer__packing="padded"))
    run.train(1)
    folder = run.save(1)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ContractViolation, match=r"holds the weights .*, version 1 is "):
        export(run.folder, run.spec, tmp_path / "out", model_folder=tmp_path / "mixtral", versions=run.digests)
    assert not (tmp_path / "out").exists()
