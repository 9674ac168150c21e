"""What a stack's processes are told: each documented setting has its effect, or is refused by its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from broker.connection.roles import CELERY, GATEWAY, GENERATOR, STAGE, TASKS, TRAINER
from contracts.errors import InvalidInput
from contracts.settings import ENGINE_OPTIONS, PREFIX, StackSettings, engine_from, settings_from
from onbeat.base.process.host_memory import TUNABLES
from onbeat.chaos.command import chaos
from onbeat.commands.stacks import up as stack_commands
from onbeat.commands.stacks.up import up
from onbeat.stack import vllm_python
from onbeat.stack.options import DECIDED, MAX_THREADS, SECRETS, StackOptions, child_environment, stage_workers_for
from onbeat.stack.profile import GeneratorProfile, StackProfile, load_profile
from onbeat.stack.stack import EmbeddedStack
from onbeat.training.command import demo
from tests.builders import job_spec
from tests.refusals import refusal_of

ROOT = Path(__file__).parents[4]
CHOSEN: dict[str, tuple[object, dict[str, object]]] = {
    "redis_url": ("redis://:word@127.0.0.1:6390/0", {}),
    "redis_replicas": (2, {}),
    "task_events": (True, {}),
    "api_key": ("chosen-key", {}),
    "keys_file": ("/tmp/chosen", {}),
    "metrics_key": ("key-of-scrapes", {}),
    "reward_key": ("chosen-key", {}),
    "run_root": ("/tmp/chosen", {}),
    "weight_root": ("/dev/shm/chosen", {}),
    "objects": ("file:///tmp/chosen", {}),
    "cache": ("/tmp/chosen", {}),
    "cache_mb": (100, {}),
    "cache_hosts": ("http://127.0.0.1:8300", {}),
    "cache_key": ("key-of-caches", {}),
    "model_root": (str(ROOT), {}),
    "extra_roots": ("/tmp/chosen", {}),
    "hub_root": ("/tmp/chosen", {}),
    "hub_fetch": ("all", {}),
    "hub_mb": (100, {}),
    "hub_token": ("token-of-the-hub", {}),
    "dataset_mb": (100, {}),
    "allowed_hosts": ("chosen.example", {}),
    "threads": (3, {}),
    "colocated_threads": (4, {}),
    "device": ("cuda", {}),
    "matmul": ("onednn", {}),
    "held_weights_mb": (100, {}),
    "peak_flops": (1e12, {}),
    "max_passes": (3, {}),
    "network": ("10.0.0.0/8", {}),
    "max_ranks": (5, {}),
    "max_jobs": (7, {}),
    "max_specs_mb": (9, {}),
    "max_key_jobs": (6, {}),
    "max_key_specs_mb": (8, {}),
    "max_key_streams": (5, {}),
    "verify_timeout_s": (11.5, {}),
    "verify_kept_days": (7.0, {}),
    "backup_root": ("/tmp/chosen", {}),
    "backups_kept": (3, {}),
    "redis_folder": ("/tmp/chosen", {}),
    "keep_ended_days": (3.0, {}),
    "log_format": ("json", {}),
    "broker_timeout_s": (7.5, {}),
    "broker_full_timeout_s": (8.5, {}),
    "trainer_start_s": (9.5, {}),
    "scorer_start_s": (10.5, {}),
    "scorer_memory_mb": (2048, {}),
    "scorer_network": ("host", {}),
    "cage_readable": ("/tmp/chosen", {}),
    "environment_children": (3, {}),
    "environment_sessions": (99, {}),
    "environment_reply_kb": (64, {}),
    "environment_kept_mb": (128, {}),
    "environment_start_s": (13.5, {}),
    "environment_memory_mb": (2048, {}),
    "environment_network": ("host", {}),
    "mcp_servers": ('{"one": {"command": "/bin/true"}}', {}),
    "trl_modules": ("my_package.environments", {}),
    "judge_url": ("http://127.0.0.1:9", {}),
    "judge_key": ("chosen-key", {}),
    "judge_questions": (3, {}),
    "judge_timeout_s": (12.5, {}),
    "stage_models": (2, {}),
    "crash_at": ("consumer.after_step:2", {}),
    "wrong_numbers": ("layer:2", {}),
}
"""Setting → a value that isn't its default, and what must be set for it to have an effect."""
ENGINE_CHOSEN: dict[str, tuple[object, dict[str, object]]] = {
    "url": ("http://127.0.0.1:9", {"engine": "openai"}),
    "api_key": ("chosen-key", {"engine": "openai", "engine_url": "http://127.0.0.1:9"}),
    "max_sequences": (64, {"engine": "vllm"}),
    "tensor_parallel_size": (2, {"engine": "vllm"}),
    "data_parallel_size": (2, {"engine": "vllm"}),
    "quantization": ("fp8_per_tensor", {"engine": "vllm"}),
    "max_model_len": (512, {"engine": "vllm"}),
    "kv_cache_mb": (128, {"engine": "vllm"}),
    "sleep_mode": (True, {"engine": "vllm"}),
    "batch_invariant": (True, {"engine": "vllm"}),
    "timeout_s": (11.5, {"engine": "vllm"}),
    "shared_sequences": (64, {"engine": "transformers"}),
    "shared_cache_mb": (64, {"engine": "transformers"}),
    "turns_cache_mb": (64, {"engine": "transformers"}),
    "packed_weights_mb": (64, {"engine": "transformers"}),
}
"""Option of an engine → the same."""
SERVICES = ("reward_service", "gateway", "consumer", "generator-1", "stage-1", "tasks", "beat")


class Started(Exception):
    """Carries the options that a command would have run."""

    def __init__(self, options: StackOptions) -> None:
        self.options = options


COMMANDS: dict[str, Callable[[], None]] = {
    "up": lambda: up(port=0),
    "chaos": lambda: chaos(rounds=1, max_faults=1),
    "demo": demo,
}


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Calls the command as the command line does; answers the options instead of running it."""

    def refuse(*arguments: Any, **_: Any) -> None:
        raise Started(next(argument for argument in arguments if isinstance(argument, StackOptions)))

    for module in {stack_commands.__name__, chaos.__module__}:
        monkeypatch.setattr(f"{module}.EmbeddedStack", refuse)
    monkeypatch.setattr(f"{demo.__module__}.run_demo", refuse)
    for variable in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(variable)
    monkeypatch.chdir(ROOT)

    def chosen_options() -> StackOptions:
        with pytest.raises(Started) as caught:
            COMMANDS[request.param]()
        return caught.value.options

    return chosen_options


def set_in_environment(monkeypatch: pytest.MonkeyPatch, values: dict[str, object]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(f"{PREFIX}{name.upper()}", str(value))


def environments(options: StackOptions) -> dict[str, dict[str, str]]:
    """Service → the environment of its process, of one generator and one stage worker."""
    stack = EmbeddedStack(replace(options, stage_workers=1, tasks=True))
    environment_of = {child.name: child.environment for child in stack._plan_children(stack._settings())}
    assert set(SERVICES) <= set(environment_of)
    return {service: environment_of[service] for service in SERVICES}


def told(options: StackOptions) -> dict[str, StackSettings]:
    """Service → the settings that its process would read."""
    return {service: settings_from(environment) for service, environment in environments(options).items()}


def test_every_setting_is_chosen_here_or_decided_by_the_stack() -> None:
    assert set(CHOSEN) | set(DECIDED) == set(StackSettings.__struct_fields__)
    assert not set(CHOSEN) & set(DECIDED)
    assert set(ENGINE_CHOSEN) == set(ENGINE_OPTIONS)


def test_the_processes_that_compute_get_large_pages(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TUNABLES, raising=False)
    with_large = {service for service, environment in environments(command()).items() if TUNABLES in environment}
    assert with_large == {"generator-1", "stage-1"}


@pytest.mark.parametrize("name", ENGINE_CHOSEN)
def test_an_engines_option_reaches_the_generators_and_no_other_process(
    name: str, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, with_others = ENGINE_CHOSEN[name]
    set_in_environment(monkeypatch, {**with_others, f"engine_{name}": value})
    monkeypatch.setattr(vllm_python, "has_vllm", lambda: True)
    environment_of = environments(command())
    options = engine_from(environment_of.pop("generator-1"))
    assert (options.name, getattr(options, name)) == (with_others["engine"], value)
    for service, environment in environment_of.items():
        assert not [variable for variable in environment if variable.startswith("ONBEAT_ENGINE")], service


@pytest.mark.parametrize("name", CHOSEN)
def test_a_setting_reaches_every_process_that_it_belongs_to(
    name: str, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, with_others = CHOSEN[name]
    assert value != getattr(StackSettings(), name)
    set_in_environment(monkeypatch, {**with_others, name: value})
    for service, settings in told(command()).items():
        kind = service.partition("-")[0]
        is_secret = any(name in secrets for secrets in SECRETS.values())
        expected = "" if is_secret and name not in SECRETS[kind] else value
        if name in ("run_root", "extra_roots"):  # the stack adds a folder of its own
            assert getattr(settings, name).startswith(str(value))
        else:
            assert getattr(settings, name) == expected, service


@pytest.mark.parametrize("name", DECIDED)
def test_a_setting_that_the_stack_decides_is_refused_by_its_name(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_in_environment(monkeypatch, {name: "1" if name == "port" else "http://127.0.0.1:9"})
    for command in (COMMANDS | {"up": lambda: up(port=0, run_dir=tmp_path)}).values():
        with refusal_of(f"{PREFIX}{name.upper()}", match="cannot be set for a stack"):
            command()


def test_a_child_computes_with_the_stacks_threads_whatever_the_launchers_environment_says() -> None:
    inherited = {"PATH": "/bin", "OMP_NUM_THREADS": "7", "OMP_DYNAMIC": "true"}
    environment = child_environment(inherited, StackSettings(threads=2), port=0)
    assert (environment["PATH"], environment["OMP_NUM_THREADS"], environment["MKL_NUM_THREADS"]) == ("/bin", "2", "2")
    assert "OMP_DYNAMIC" not in environment


def test_the_token_of_the_hub_reaches_the_gateway_alone(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "token-of-the-hub")
    environment_of = environments(command())
    assert environment_of.pop("gateway")["ONBEAT_HUB_TOKEN"] == "token-of-the-hub"
    for service, environment in environment_of.items():
        assert "token-of-the-hub" not in environment.values(), service


@pytest.mark.parametrize(("offline", "fetches"), [("", "operator"), ("0", "operator"), ("1", "none"), ("true", "none")])
def test_where_the_hub_may_not_be_asked_the_gateway_of_a_stack_fetches_nothing(
    command: Any, monkeypatch: pytest.MonkeyPatch, offline: str, fetches: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    assert told(command())["gateway"].hub_fetch == fetches


def test_up_alone_has_tasks_and_they_can_be_left_out(
    command: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A stack of one job has none: a worker of tasks takes a second of a core at its start, and 100 MB."""
    is_up = request.node.callspec.params["command"] == "up"
    assert command().tasks is is_up
    monkeypatch.setitem(COMMANDS, "up", lambda: up(port=0, tasks=False))
    assert command().tasks is False


def test_a_flag_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choices: list[StackOptions] = []

    def capture(options: StackOptions, **_: Any) -> EmbeddedStack:
        choices.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(stack_commands, "EmbeddedStack", capture)
    set_in_environment(monkeypatch, {"threads": 3, "run_root": "/tmp/chosen"})
    with pytest.raises(KeyboardInterrupt):
        up(threads=2, run_dir=tmp_path, port=0)
    assert (choices[0].threads, choices[0].run_root) == (2, tmp_path)


def test_an_engine_of_the_environment_and_a_profile_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    set_in_environment(monkeypatch, {"engine": "vllm"})
    with refusal_of("ONBEAT_ENGINE", match="has no effect with a profile"):
        up(profile=ROOT / "configs" / "stacks" / "mixed.toml", port=0)


def test_a_process_of_a_private_redis_gets_the_user_of_its_role_and_no_other_secret(tmp_path: Path) -> None:
    stack = EmbeddedStack(StackOptions(run_root=tmp_path, model_root=tmp_path, stage_workers=1, tasks=True))
    stack.start_redis()
    assert stack.redis is not None
    try:
        children = {child.name: child.environment for child in stack._plan_children(stack._settings())}
    finally:
        stack.stop()
    redis = stack.redis
    users = {
        GATEWAY: ["gateway"],
        TRAINER: ["consumer"],
        GENERATOR: ["generator-1"],
        STAGE: ["stage-1"],
        TASKS: ["tasks", "beat"],
    }
    for role, services in users.items():
        assert {children[service]["ONBEAT_REDIS_URL"] for service in services} == {redis.url_of(role)}
        assert [name for name in children if password_of(redis.url_of(role)) in told_to(children[name])] == services
    with_messages = ["gateway", "tasks", "beat"]
    assert {children[service]["ONBEAT_CELERY_URL"] for service in with_messages} == {redis.url_of(CELERY)}
    assert [name for name in children if password_of(redis.url_of(CELERY)) in told_to(children[name])] == with_messages
    assert children["reward_service"]["ONBEAT_REDIS_URL"] == ""
    assert not any(password_of(redis.url) in told_to(environment) for environment in children.values())


def password_of(url: str) -> str:
    return url.split(":")[2].split("@")[0]


def told_to(environment: dict[str, str]) -> str:
    return "\n".join(environment.values())


def test_the_key_of_an_engines_server_stays_with_its_generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret-of-the-server")
    profile = tmp_path / "profile.toml"
    profile.write_text(
        '[[generators]]\nengine = { type = "openai", url = "http://127.0.0.1:9", api_key_variable = "SERVER_KEY" }\n'
        "[[generators]]\n"
    )
    options = StackOptions(run_root=tmp_path, model_root=tmp_path, generators=2, profile=load_profile(profile))
    stack = EmbeddedStack(options)
    children = {child.name: child.environment for child in stack._plan_children(stack._settings())}
    holders = [name for name, environment in children.items() if "secret-of-the-server" in environment.values()]
    assert holders == ["generator-1"]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"generators": 0}, "--generators: must be 1 or more"),
        ({"generators": 10**6}, "--generators: 1000000 generators are too many for one machine"),
        ({"profile": StackProfile(generators=(GeneratorProfile(count=1000),) * 2), "generators": 2000}, "2000 gener"),
        ({"stage_workers": -1}, "--stage-workers: must be from 0 to 1024"),
        ({"stage_workers": 10**6}, "--stage-workers: must be from 0 to 1024"),
        ({"threads": 0}, "--threads: must be 1 or more"),
        ({"threads": 10**9}, "--threads: must be at most 4096"),
    ],
)
def test_a_stack_has_no_more_processes_and_threads_than_a_machine_could_start(
    wrong: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=words):
        StackOptions(run_root=tmp_path, model_root=tmp_path, **wrong)
    assert StackSettings(threads=MAX_THREADS).threads == MAX_THREADS
    with pytest.raises(InvalidInput):
        settings_from({"ONBEAT_THREADS": str(MAX_THREADS + 1)})


@pytest.mark.parametrize(
    ("chosen", "of_generator", "of_consumer"),
    [
        ({"generators": 3}, 2, 0),
        ({"generators": 9}, 1, 0),
        ({"generators": 3, "threads": 5}, 5, 5),
        ({"generators": 3, "threads": 5, "settings": StackSettings(colocated_threads=4)}, 4, 4),
    ],
)
def test_generators_share_the_cores_in_their_turn_unless_a_number_is_chosen(
    chosen: dict[str, Any], of_generator: int, of_consumer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onbeat.stack.options.usable_cores", lambda: 8)
    settings = told(StackOptions(run_root=tmp_path, model_root=ROOT, **chosen))
    assert settings["generator-1"].colocated_threads == of_generator
    assert settings["consumer"].colocated_threads == settings["stage-1"].colocated_threads == of_consumer


JUDGE = {"type": "llm_judge", "model": "m", "prompt": "{completion}"}
OWN = {"type": "external", "name": "own", "inputs": ["text"], "outputs": [{"name": "x", "type": "float32"}]}


@pytest.mark.parametrize(
    ("stages", "chosen", "expected"),
    [
        ([], None, 0),
        ([], 2, 2),
        ([OWN], None, 0),
        ([{"type": "reward_model", "model": "m"}, JUDGE, OWN], None, 1),
        ([JUDGE], 3, 3),
    ],
)
def test_a_stack_for_one_job_has_a_stage_worker_where_onbeat_serves_a_stage_of_it(
    stages: list[dict[str, Any]], chosen: int | None, expected: int
) -> None:
    spec = job_spec(deterministic=False, stages=stages)
    assert stage_workers_for(spec, chosen, StackSettings(judge_url="http://127.0.0.1:9")) == expected


def test_a_stage_that_would_wait_for_ever_is_refused_by_the_cure() -> None:
    spec = job_spec(deterministic=False, stages=[JUDGE])
    with pytest.raises(InvalidInput, match="--stage-workers: stage llm_judge needs a stage worker"):
        stage_workers_for(spec, 0, StackSettings(judge_url="http://127.0.0.1:9"))
    with pytest.raises(InvalidInput, match="ONBEAT_JUDGE_URL: is not set, but stage llm_judge needs a judge"):
        stage_workers_for(spec, None, StackSettings())


def test_each_process_of_a_stack_takes_its_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert StackOptions(run_root=tmp_path, model_root=ROOT, generators=2).threads_each == 4
    assert StackOptions(run_root=tmp_path, model_root=ROOT, generators=2, stage_workers=3).threads_each == 2
