"""A job that needs what no trainer, or not the reward service, has is refused when it is submitted, or resumed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import UNSET, UnsetType

from broker.presence import ConsumerPresence
from contracts.encoding.wire import encode_json
from contracts.errors import SpecRefused
from contracts.monitor import ConsumerSeen
from contracts.rewards import ExactReward, MathVerifyReward, ReasoningGymReward
from contracts.settings import StackSettings
from contracts.spec import extras, trainer_plugins
from contracts.spec.extras import EXTRAS, missing_extras
from contracts.spec.trainer_plugins import PLUGINS, offered_plugins
from gateway.app import create_app
from gateway.services import Services
from gateway.submission import check_scorers
from onbeat.stack.ports import free_port
from reward_service.app import create_app as reward_app
from reward_service.scorers import rubric
from tests.builders import job_spec, stub_model
from tests.served import asked, services_over, serving

JSON = {"Content-Type": "application/json"}
ALL = tuple(extra.name for extra in EXTRAS)
NEEDS: dict[str, tuple[str, dict[str, Any]]] = {
    "reasoning-gym": ("dataset.type", {"dataset": {"type": "reasoning_gym", "task": "chain_sum"}}),
    "huggingface": ("dataset.type", {"dataset": {"type": "huggingface", "train_path": "rows.parquet"}}),
    "lora": ("trainer.lora", {"trainer__lora": {"rank": 4}}),
    "adamw8bit": ("optimizer.type", {"optimizer__type": "adamw_8bit"}),
    "tensorboard": ("trackers", {"trackers": ("tensorboard",)}),
    "wandb": ("trackers", {"trackers": ("wandb",)}),
    "mlflow": ("trackers", {"trackers": ("mlflow",)}),
    "renderers": (
        "environment.chat_format",
        {"environment": {"name": "calculator", "renderer": "chat", "chat_format": "qwen3"}},
    ),
}
"""Extra → the key that needs it, and a spec which sets that."""


@pytest.fixture
def services(settings: StackSettings, tmp_path: Path) -> Iterator[Services]:
    """Settings over a model root that holds the model of `job_spec`."""
    stub_model(tmp_path / "models" / "qwen3")
    (tmp_path / "models" / "rows.parquet").write_bytes(b"")
    settings = msgspec.structs.replace(settings, model_root=str(tmp_path / "models"))
    with services_over(settings) as services:
        # Those of a test before would count as live for some seconds.
        for consumer in ConsumerPresence(services.broker).live():
            ConsumerPresence(services.broker).leave(consumer.worker_id)
        yield services


@pytest.fixture
def check(services: Services) -> Callable[..., httpx.Response]:
    """Has a spec checked as `POST /v1/jobs/check` does."""
    ask = partial(asked, create_app(services), key="test-key")

    def check(**changes: Any) -> httpx.Response:
        return ask("POST", "/v1/jobs/check", content=encode_json(job_spec(**changes)), headers=JSON)

    return check


def plugin(name: str) -> dict[str, str]:
    return {"type": "plugin", "entry_point": name}


NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "onbeat.losses": ("algorithm.loss.entry_point", {"algorithm__loss": plugin("mine")}),
    "onbeat.datasets": ("dataset.entry_point", {"dataset": plugin("mine")}),
    "onbeat.trackers": ("trackers[1].entry_point", {"trackers": ("tensorboard", plugin("mine"))}),
}
"""Group of entry points → the key that names a plug-in of it, and a spec which does."""


def beat(services: Services, lacks: tuple[str, ...] | UnsetType, name: str = "consumer-1", **says: Any) -> None:
    ConsumerPresence(services.broker).beat(ConsumerSeen(worker_id=name, lives_s=1.0, lacks=lacks, **says))


def absent(answer: httpx.Response) -> dict[str, tuple[str, str]]:
    """Returns field → (problem, cure) of the refusals for plug-ins that no package offers."""
    refusals = answer.json().get("refusals", []) if answer.status_code != 200 else []
    return {
        refusal["field"]: (refusal["problem"], refusal["cure"])
        for refusal in refusals
        if refusal["problem"].startswith("no package offers")
    }


def missing(answer: httpx.Response) -> dict[str, str]:
    """Returns field → cure of the refusals for packages that aren't installed."""
    refusals = answer.json().get("refusals", []) if answer.status_code != 200 else []
    return {refusal["field"]: refusal["cure"] for refusal in refusals if "isn't installed where" in refusal["problem"]}


def test_each_extra_has_a_spec_here() -> None:
    assert sorted(NEEDS) == sorted(ALL)


@pytest.mark.parametrize("name", NEEDS)
def test_a_job_is_refused_by_the_key_that_needs_what_every_consumer_lacks(
    services: Services, check: Callable[..., httpx.Response], name: str
) -> None:
    field, changes = NEEDS[name]
    beat(services, ALL, "consumer-1")
    beat(services, (name,), "consumer-2")
    assert missing(check(**changes)) == {field: f"pip install 'onbeat[{name}]' there"}
    assert missing(check()) == {}, "a job that needs none of them"


@pytest.mark.parametrize("lacks", [(), UNSET, tuple(name for name in ALL if name != "lora")])
def test_one_consumer_that_has_it_or_does_not_say_is_enough(
    services: Services, check: Callable[..., httpx.Response], lacks: tuple[str, ...] | UnsetType
) -> None:
    beat(services, ALL, "consumer-1")
    beat(services, lacks, "consumer-2")
    assert missing(check(trainer__lora={"rank": 4})) == {}


def test_nothing_is_refused_without_a_consumer_or_for_a_trainer_of_one_s_own(
    services: Services, check: Callable[..., httpx.Response]
) -> None:
    assert missing(check(trackers=("wandb",))) == {}
    beat(services, ALL)
    assert missing(check(trackers=("wandb",), trainer__external=True)) == {}


def test_a_consumer_lacks_the_extras_whose_package_it_can_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda module: None if module in ("peft", "wandb") else object())
    assert missing_extras() == ("lora", "wandb")


def test_each_extra_is_one_of_the_package_and_brings_its_module() -> None:
    metadata = importlib.metadata.metadata("onbeat")
    assert set(ALL) <= set(metadata.get_all("Provides-Extra") or ())


@pytest.mark.parametrize("group", NAMES)
def test_a_plug_in_that_no_live_consumer_has_is_refused_by_its_key_with_those_that_are_installed(
    services: Services, check: Callable[..., httpx.Response], group: str
) -> None:
    field, changes = NAMES[group]
    beat(services, (), "consumer-1", offers={group: ("other",)})
    beat(services, (), "consumer-2", offers={group: ("another",)})
    problem = f"no package offers `mine` in group {group} where the trainers run"
    assert absent(check(**changes)) == {field: (problem, "install its package there; installed: another, other")}
    assert absent(check()) == {}, "a job that names none"
    beat(services, (), "consumer-2", offers={group: ("mine",)})
    assert absent(check(**changes)) == {}, "one consumer that has it is enough"


def test_a_plug_in_is_accepted_where_no_consumer_lives_or_says_or_the_trainer_is_one_s_own(
    services: Services, check: Callable[..., httpx.Response]
) -> None:
    _, changes = NAMES["onbeat.losses"]
    assert absent(check(**changes)) == {}
    beat(services, (), "consumer-1", offers={})
    assert absent(check(**changes)).keys() == {"algorithm.loss.entry_point"}
    assert absent(check(**changes, trainer__external=True)) == {}
    beat(services, (), "of-an-older-release")
    assert absent(check(**changes)) == {}


def test_a_consumer_offers_what_the_packages_of_its_environment_do(tmp_path: Path, monkeypatch: Any) -> None:
    assert NAMES.keys() == PLUGINS.keys()
    info = tmp_path / "offers_a_loss-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offers-a-loss\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[onbeat.losses]\nbrief = absent_module:LOSS\n")
    before = offered_plugins()
    assert before is not UNSET
    assert "brief" not in before["onbeat.losses"]
    monkeypatch.syspath_prepend(tmp_path)
    offers = offered_plugins()
    assert offers is not UNSET
    assert "brief" in offers["onbeat.losses"]
    monkeypatch.setattr(trainer_plugins, "LONGEST_NAME", 4)
    assert offered_plugins() is UNSET, "more than a sign of life has room for"


def test_a_resume_is_refused_for_what_is_installed_no_more(services: Services) -> None:
    ask = partial(asked, create_app(services), key="test-key")
    beat(services, (), offers={"onbeat.losses": ("mine",)})
    spec = job_spec(algorithm__loss=plugin("mine"), trackers=("tensorboard",))
    created = ask("POST", "/v1/jobs", content=encode_json(spec), headers=JSON)
    assert created.status_code == 201, created.text
    job = f"/v1/jobs/{created.json()['job_id']}"
    assert ask("POST", f"{job}/cancel").json()["state"] == "cancelled"
    beat(services, ("tensorboard",), offers={"onbeat.losses": ()})
    answer = ask("POST", f"{job}/resume")
    assert answer.status_code == 422
    assert missing(answer) == {"trackers": "pip install 'onbeat[tensorboard]' there"}
    assert absent(answer).keys() == {"algorithm.loss.entry_point"}
    assert ask("GET", job).json()["state"] == "cancelled"
    beat(services, (), offers={"onbeat.losses": ("mine",)})
    assert ask("POST", f"{job}/resume").json()["state"] == "queued"
    assert ask("POST", f"{job}/cancel").json()["state"] == "cancelled"


def test_a_resume_is_refused_for_a_scorer_that_the_reward_service_has_no_more(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    created, _ = services.jobs.create(job_spec(reward__components=(MathVerifyReward(),)))
    services.jobs.request_cancel(created)
    monkeypatch.setattr(rubric, "find_spec", lambda package: None if package == "math_verify" else object())
    with serving(reward_app(services.settings, num_threads=1)) as url:
        services.settings = msgspec.structs.replace(services.settings, reward_url=url)
        ask = partial(asked, create_app(services), key="test-key")
        answer = ask("POST", f"/v1/jobs/{created}/resume")
        assert missing(answer) == {"reward.components[0].type": "pip install math-verify there"}
        monkeypatch.setattr(rubric, "find_spec", lambda package: object())
        assert ask("POST", f"/v1/jobs/{created}/resume").json()["state"] == "queued"
    services.jobs.request_cancel(created)


def test_a_reward_whose_package_the_reward_service_lacks_is_refused_by_its_place(
    settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = job_spec(
        dataset={"type": "reasoning_gym", "task": "chain_sum"},
        reward__components=(ExactReward(), ReasoningGymReward()),
    )
    with serving(reward_app(settings, num_threads=1)) as url:
        settings = msgspec.structs.replace(settings, reward_url=url)
        monkeypatch.setattr(rubric, "find_spec", lambda package: None if package == "reasoning_gym" else object())
        with pytest.raises(SpecRefused, match="isn't installed where the reward service runs") as caught:
            check_scorers(spec, settings)
        assert [refusal.field for refusal in caught.value.refusals] == ["reward.components[1].type"]
        assert caught.value.cure == "pip install 'onbeat[reasoning-gym]' there"
        monkeypatch.setattr(rubric, "find_spec", lambda package: object())
        check_scorers(spec, settings)
    check_scorers(spec, msgspec.structs.replace(settings, reward_url=f"http://127.0.0.1:{free_port()}"))
