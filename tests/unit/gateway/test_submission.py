"""What the gateway refuses before it starts a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.errors import InvalidInput
from contracts.monitor import GeneratorSeen
from contracts.settings import StackSettings
from contracts.weights import RedisWeights
from gateway.submission import MAX_ROWS_BYTES, check_generators, check_paths
from tests.builders import job_spec, stub_model


def generators(*engines: str) -> list[GeneratorSeen]:
    """One for each name of an engine that is not reproducible, or ""."""
    return [GeneratorSeen(worker_id=f"g{number}", not_reproducible=engine) for number, engine in enumerate(engines)]


def test_a_deterministic_job_is_refused_where_no_live_generator_would_serve_it() -> None:
    with pytest.raises(InvalidInput) as caught:
        check_generators(job_spec(), generators("vllm", "vllm"))
    assert (caught.value.status, caught.value.field) == (422, "deterministic")
    assert "deterministic = false" in (caught.value.cure or "")


@pytest.mark.parametrize("engines", [(), ("vllm", ""), ("",)])
def test_it_is_taken_where_one_would_or_where_none_lives_yet(engines: tuple[str, ...]) -> None:
    check_generators(job_spec(), generators(*engines))


def test_truncated_sampling_is_refused_by_name_where_no_live_generator_says_what_it_kept() -> None:
    silent, able = (GeneratorSeen(worker_id=name, no_kept_sets=engine) for name, engine in (("g0", "vllm"), ("g1", "")))
    spec = job_spec(rollout__sampling__top_p=0.9)
    with pytest.raises(
        InvalidInput, match=r"sample with vllm, which doesn't report which tokens top_p = 0\.9"
    ) as caught:
        check_generators(spec, [silent, silent])
    assert (caught.value.status, caught.value.field) == (422, "rollout.sampling.top_p")
    for live in ([], [silent, able], [able]):
        check_generators(spec, live)
    for served in (job_spec(), job_spec(rollout__sampling__top_p=0.9, rollout__sampling__top_k=5)):
        check_generators(served, [silent])


def test_routing_replay_is_refused_where_no_live_generator_says_the_experts_of_its_tokens() -> None:
    silent, able = (GeneratorSeen(worker_id=name, no_routes=engine) for name, engine in (("g0", "vllm"), ("g1", "")))
    spec = job_spec(algorithm__routing_replay=True)
    with pytest.raises(InvalidInput, match=r"sample with vllm, and routing_replay needs the transformers") as caught:
        check_generators(spec, [silent, silent])
    assert (caught.value.status, caught.value.field) == (422, "algorithm.routing_replay")
    for live in ([], [silent, able], [able]):
        check_generators(spec, live)
    check_generators(job_spec(), [silent])


def test_weights_in_redis_are_refused_where_a_live_generator_s_server_would_have_to_read_them() -> None:
    spec = job_spec(deterministic=False, weights=RedisWeights())
    with pytest.raises(InvalidInput) as caught:
        check_generators(spec, generators("vllm", "openai"))
    assert (caught.value.status, caught.value.field) == (422, "weights.transport")
    check_generators(spec, generators("vllm"))
    check_generators(job_spec(weights=RedisWeights()), generators("", "openai"))


def test_a_job_that_is_not_deterministic_is_taken_by_any() -> None:
    check_generators(job_spec(deterministic=False), generators("vllm"))


def test_small_files_are_read_and_a_template_of_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    """What else a folder or a file may lack stands in tests/integration/test_typical_mistakes.py."""
    stub_model(tmp_path)
    (tmp_path / "rows").write_text("{")
    settings, data = StackSettings(model_root=str(tmp_path)), {"type": "jsonl", "train_path": "rows", "chat": {}}
    spec = job_spec(model__path=".", dataset=data)
    with pytest.raises(InvalidInput, match=r"dataset\.chat: .* no chat template"):
        check_paths(spec, settings)
    (tmp_path / "chat_template.jinja").write_text("")
    with pytest.raises(
        InvalidInput, match=r"dataset\.train_path: .*rows:1: the line is no JSON: Input data was truncated"
    ):
        check_paths(spec, settings)
    (tmp_path / "rows").write_text("{" + " " * MAX_ROWS_BYTES)
    check_paths(spec, settings)


def test_a_model_that_no_trainer_can_load_is_refused_before_one_starts(tmp_path: Path) -> None:
    """All that a folder can lack stands in tests/unit/onbeat/weights/base_model/test_folder_check.py."""
    stub_model(tmp_path)
    settings = StackSettings(model_root=str(tmp_path))
    check_paths(job_spec(model__path="."), settings)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "quantization_config": {"quant_method": "awq"}}')
    with pytest.raises(InvalidInput, match=r"model\.path: the weights of .* are quantized \(awq\)"):
        check_paths(job_spec(model__path="."), settings)


@pytest.mark.parametrize("place", ["dataset", "set"])
def test_a_split_of_a_folder_of_the_hub_names_no_file_and_is_the_trainers_to_read(place: str, tmp_path: Path) -> None:
    stub_model(tmp_path)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train-00000-of-00001.parquet").write_bytes(b"")
    saved = {"type": "huggingface", "train_path": "hub/train"}
    held_out = {"name": "saved", "num_prompts": 1, "dataset": saved}
    changes = {"dataset": saved} if place == "dataset" else {"evaluation__sets": [held_out]}
    check_paths(job_spec(model__path=".", **changes), StackSettings(model_root=str(tmp_path)))


@pytest.mark.parametrize("kind", ["jsonl", "huggingface"])
def test_data_that_is_not_there_is_refused_by_its_field(kind: str, tmp_path: Path) -> None:
    stub_model(tmp_path)
    spec = job_spec(model__path=".", dataset={"type": kind, "train_path": "nowhere/train"})
    problem = r"dataset\.train_path: there is no file( or folder)? nowhere/train under the model root"
    with pytest.raises(InvalidInput, match=problem):
        check_paths(spec, StackSettings(model_root=str(tmp_path)))
