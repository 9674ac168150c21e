"""A stack profile: which generators a stack has, under which interpreter, with which engine."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from contracts.engines import OpenaiOptions
from contracts.errors import InvalidInput
from contracts.weights import RedisWeights
from onbeat.commands.options import profile_and_count
from onbeat.stack.options import StackOptions
from onbeat.stack.profile import GeneratorProfile, StackProfile, load_profile
from tests.builders import job_spec
from tests.refusals import refusal_of

STACKS = sorted((Path(__file__).parents[4] / "configs" / "stacks").glob("*.toml"))


def written(folder: Path, text: str) -> Path:
    path = folder / "stack.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", STACKS, ids=lambda path: path.stem)
def test_every_shipped_profile_gives_settings_that_a_generator_takes(path: Path) -> None:
    for generator in load_profile(path).each:
        assert generator.options({}).name == generator.engine["type"]


def test_the_mixed_profile_is_a_vllm_and_a_transformers_generator() -> None:
    mixed = load_profile(next(path for path in STACKS if path.stem == "mixed"))
    assert [(one.options({}).name, one.python) for one in mixed.each] == [
        ("vllm", ""),
        ("transformers", ""),
    ]
    mixed.check(job_spec())


def test_engine_keys_become_the_settings_of_the_same_name(tmp_path: Path) -> None:
    profile = load_profile(
        written(
            tmp_path,
            """
            [[generators]]
            count = 2
            engine = { type = "openai", url = "http://host:1", api_key_variable = "KEY",
                       max_sequences = 9, timeout_s = 5.0 }
            """.replace("\n                       ", " "),
        )
    )
    assert profile.each[1].options({"KEY": "secret"}) == OpenaiOptions(
        url="http://host:1", api_key="secret", max_sequences=9, timeout_s=5.0
    )
    with pytest.raises(InvalidInput, match="KEY is not set"):
        profile.each[0].options({})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[[generators]]\ncolour = 1", "colour"),
        ("[[generators]]\nengine = { type = 'llama.cpp' }", "llama.cpp"),
        ("[[generators]]\nengine = { type = ['vllm'] }", "generators"),
        ("[[generators]]\nengine = { type = 3 }", "generators.engine.type"),
        ("[[generators]]\nengine = { colour = 1 }", "colour"),
        ("[[generators]]\nengine = { type = 'vllm', max_sequences = 0 }", "generators.engine.max_sequences"),
        ("[[generators]]\nengine = { type = 'vllm', timeout_s = 'soon' }", "generators.engine.timeout_s"),
        ("[[generators]]\nengine = { type = 'openai', url = 'http://h', api_key_variable = 1 }", "api_key_variable"),
        ("generators = []", "generators"),
        ("generators", "stack.toml"),
    ],
)
def test_a_bad_profile_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem):
        load_profile(written(tmp_path, text))


def test_a_key_that_the_engine_would_ignore_is_refused(tmp_path: Path) -> None:
    for engine, option in (("{ sleep_mode = true }", "sleep_mode"), ("{ api_key_variable = 'KEY' }", "api_key")):
        with refusal_of(f"generators.engine.{option}", match=f"engine_{option} has no effect"):
            load_profile(written(tmp_path, f"[[generators]]\nengine = {engine}"))


def test_a_key_of_a_server_is_refused_in_a_file(tmp_path: Path) -> None:
    with refusal_of("generators.engine.api_key", match="a key doesn't belong into a file"):
        load_profile(written(tmp_path, "[[generators]]\nengine = { type = 'openai', url = 'http://h', api_key = 'k' }"))


def test_an_interpreter_starts_at_the_profile_s_folder_and_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "model-root"
    folder = tmp_path / "stacks"
    for place in (root, folder):
        place.mkdir()
        (place / "python").symlink_to(sys.executable)
    (root / "elsewhere").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert GeneratorProfile().interpreter(root) == sys.executable

    def interpreter_of(python: str) -> str:
        written(folder, f"[[generators]]\npython = {json.dumps(python)}")
        (generator,) = load_profile(Path("stacks") / "stack.toml").generators
        return generator.interpreter(root)

    assert interpreter_of("python") == str(folder / "python"), "a link stays one"
    assert interpreter_of("../model-root/elsewhere") == str(folder / "../model-root/elsewhere")
    assert interpreter_of(sys.executable) == sys.executable
    absent = f"there is no interpreter {folder}/elsewhere"
    with refusal_of("generators.python", match=re.escape(absent)) as error:
        interpreter_of("elsewhere")
    assert str(error.value.cure).endswith("a relative path starts at the profile's folder")


def test_the_flags_name_a_profile_or_a_number_of_generators(tmp_path: Path) -> None:
    path = written(tmp_path, "[[generators]]\ncount = 3")
    assert profile_and_count(None, None) == (None, None)
    assert profile_and_count(None, 2) == (None, 2)
    assert profile_and_count(path, None)[1] == 3
    with pytest.raises(InvalidInput, match="--generators"):
        profile_and_count(path, 3)
    with pytest.raises(InvalidInput, match="differs from the profile, which has 3 generators"):
        StackOptions(run_root=tmp_path, model_root=tmp_path, generators=1, profile=load_profile(path))


def test_a_deterministic_job_needs_a_generator_that_serves_it() -> None:
    vllm = load_profile(next(path for path in STACKS if path.stem == "vllm"))
    with refusal_of("deterministic", match="set deterministic = false"):
        vllm.check(job_spec())
    vllm.check(job_spec(deterministic=False))
    StackProfile(generators=(GeneratorProfile(count=2),)).check(job_spec())
    assert len(StackProfile().each) == 1


def test_truncated_sampling_needs_a_generator_that_says_what_it_kept() -> None:
    vllm, mixed = (load_profile(next(path for path in STACKS if path.stem == stem)) for stem in ("vllm", "mixed"))
    spec = job_spec(deterministic=False, rollout__sampling__min_p=0.5)
    with refusal_of("rollout.sampling.min_p", match=r"which tokens min_p = 0\.5 keeps without a top_k: .*set top_k"):
        vllm.check(spec)
    mixed.check(spec)
    vllm.check(job_spec(deterministic=False, rollout__sampling__top_k=5, rollout__sampling__min_p=0.5))


def test_weights_in_redis_are_refused_where_a_server_would_have_to_read_them(tmp_path: Path) -> None:
    text = "[[generators]]\n\n[[generators]]\nengine = { type = 'openai', url = 'http://host:1' }"
    profile = load_profile(written(tmp_path, text))
    with refusal_of("weights.transport", match="reads files, not Redis"):
        profile.check(job_spec(deterministic=False, weights=RedisWeights()))
    profile.check(job_spec(weights=RedisWeights()))
    load_profile(next(path for path in STACKS if path.stem == "mixed")).check(
        job_spec(deterministic=False, weights=RedisWeights())
    )
