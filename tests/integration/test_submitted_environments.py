"""An environment that isn't there, or can't be in such a job, is refused at submission and at the trainer's start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.encoding.arrays import unpack_int32
from contracts.errors import EnvironmentUnavailable, InvalidInput
from contracts.settings import StackSettings
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from gateway.submission import check_environment
from onbeat.data.datasets.loading import job_examples
from onbeat.data.prompts.environment_service import EnvironmentService
from onbeat.data.prompts.source import PromptSource
from onbeat.stack.ports import free_port
from tests.builders import char_tokenizer, job_spec
from tests.integration.test_environments_over_http import Service
from tests.played import KEY

TOKENIZER = char_tokenizer()


TASKS = {"type": "environment", "num_train_prompts": 16}


def table(name: str, params: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "renderer": "text", "max_tokens": 32, "params": params, "request_timeout_s": 20.0}


def environment_spec(name: str = "echo", *, deterministic: bool = True, **params: Any) -> JobSpec:
    return job_spec(dataset=TASKS, environment=table(name, params), reward__components=[], deterministic=deterministic)


def mixed(name: str, **params: Any) -> JobSpec:
    """A job whose second source has the environment."""
    sources = [{"name": "echo", "dataset": TASKS, "environment": table("echo", {})}]
    sources += [{"name": "other", "dataset": TASKS, "environment": table(name, params)}]
    return job_spec(dataset={"type": "mixture", "sources": sources}, reward__components=[])


@pytest.fixture(scope="module")
def told() -> Iterator[StackSettings]:
    """Settings that lead to a real reward service."""
    service = Service()
    service.start()
    yield StackSettings(reward_url=service.url, reward_key=KEY)
    service.end()


def opened(asked: JobSpec, settings: StackSettings) -> Any:
    examples, played = job_examples(asked, SpecRoot(settings.run_root_path)), EnvironmentService(settings)
    told = {"context_tokens": 512, "end_ids": [TOKENIZER.eos_token_id]}
    return PromptSource(examples, spec=asked, tokenizer=TOKENIZER, environments=played, **told)


def test_a_job_whose_environment_is_there_passes_and_has_its_initial_observations_for_prompts(
    told: StackSettings,
) -> None:
    check_environment(environment_spec(), told)
    check_environment(job_spec(), told)
    source = opened(environment_spec(), told)
    texts = [TOKENIZER.decode(unpack_int32(prompt.token_ids)) for prompt in source.training_prompts(0)]
    assert all(text[:4] == "say " and text[4:].isdigit() for text in texts)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (environment_spec("absent"), "environment.name"),
        (environment_spec(colour="red"), "environment.params"),
        (mixed("absent"), "dataset.sources[1].environment.name"),
        (mixed("echo", colour="red"), "dataset.sources[1].environment.params"),
    ],
    ids=["unknown", "parameters", "unknown of a source", "parameters of a source"],
)
def test_an_environment_that_is_unknown_or_refuses_its_parameters_is_named_at_both_doors(
    told: StackSettings, asked: JobSpec, field: str
) -> None:
    for door in (check_environment, opened):
        with pytest.raises(InvalidInput) as caught:
            door(asked, told)
        assert caught.value.field == field


def test_a_service_that_is_away_or_refuses_the_key_refuses_no_submission_and_no_start_goes_on_without_it(
    told: StackSettings,
) -> None:
    away = replace(told, reward_url=f"http://127.0.0.1:{free_port()}")
    hurried = replace(environment_spec(), environment=replace(environment_spec().environment, request_timeout_s=0.2))
    check_environment(environment_spec("absent"), replace(told, reward_key="wrong"))
    patient = replace(environment_spec(), environment=replace(environment_spec().environment, request_timeout_s=3.0))
    with pytest.raises(EnvironmentUnavailable, match="refuses this process with 401"):
        opened(patient, replace(told, reward_key="wrong"))
    with pytest.raises(EnvironmentUnavailable):
        opened(hurried, away)


def test_an_environment_that_is_not_deterministic_is_refused_in_a_deterministic_job_when_it_is_submitted(
    told: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = EnvironmentService(told).facts(environment_spec().environment)
    monkeypatch.setattr(EnvironmentService, "facts", lambda *_: replace(facts, deterministic=False))
    check_environment(replace(environment_spec(), deterministic=False), told)
    with pytest.raises(InvalidInput) as caught:
        check_environment(environment_spec(), told)
    assert caught.value.field == "deterministic"


def test_what_is_wrong_with_the_gateway_s_own_settings_refuses_no_submission(told: StackSettings) -> None:
    check_environment(environment_spec(), replace(told, reward_url="no address"))
