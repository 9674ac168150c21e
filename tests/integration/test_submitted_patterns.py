"""A job's patterns at its submission, over a real gateway and a real reward service with its cages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from contracts.encoding.wire import encode_json
from contracts.errors import InvalidInput
from contracts.rewards import ExactReward, FormatReward, ReasoningGymReward, RegexReward, RewardComponent
from contracts.settings import StackSettings
from gateway import app as gateway_app
from gateway import submission
from gateway.submission import check_patterns
from onbeat.stack.ports import free_port
from reward_service import app as reward_app
from tests.builders import job_spec, stub_model
from tests.served import services_over, serving

KEY = "test-key"
SLOW = "(?i)" + "[\u0100-\U0010ffff]" * 800
"""Python's `re` takes minutes to compile it."""


@pytest.fixture
def rewards(settings: StackSettings) -> Iterator[StackSettings]:
    with serving(reward_app.create_app(settings, num_threads=2)) as url:
        yield msgspec.structs.replace(settings, reward_url=url)


def check(settings: StackSettings, *components: RewardComponent) -> None:
    check_patterns(job_spec(reward__components=components), settings)


def test_a_pattern_that_only_python_compiles_passes_and_one_that_is_none_is_refused_by_its_field(
    rewards: StackSettings,
) -> None:
    check(rewards, RegexReward(pattern=r"\bfive\b(?! apples)"), FormatReward(pattern=r"(a|b)\1"), ReasoningGymReward())
    with pytest.raises(InvalidInput, match=r"`a\(` is not a regular expression: missing \)") as caught:
        check(rewards, ExactReward(), RegexReward(pattern="a("))
    assert caught.value.field == "reward.components[1].pattern"
    with pytest.raises(InvalidInput, match="multiple repeat") as caught:
        check(rewards, ReasoningGymReward(answer_pattern="(?P<answer>a)**"))
    assert caught.value.field == "reward.components[0].answer_pattern"


def test_a_pattern_that_does_not_compile_in_time_is_refused_by_its_field_with_a_cure(rewards: StackSettings) -> None:
    with pytest.raises(
        InvalidInput, match=r"does not compile it within 2 s.* \(make it shorter; without look"
    ) as caught:
        check(rewards, ExactReward(), FormatReward(pattern=SLOW))
    assert caught.value.field == "reward.components[1].pattern"


def test_a_reward_service_that_is_away_refuses_no_pattern_but_costs_no_time_of_the_gateway(
    settings: StackSettings,
) -> None:
    check(msgspec.structs.replace(settings, reward_url=f"http://127.0.0.1:{free_port()}"), RegexReward(pattern=SLOW))


def test_a_pattern_whose_turn_comes_after_the_time_for_all_of_them_is_refused_untried(
    settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = msgspec.structs.replace(settings, reward_url=f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(submission, "PATTERNS_TIMEOUT_S", 0.0)
    with pytest.raises(InvalidInput, match="its turn to be compiled did not come within 0 s") as caught:
        check(away, ExactReward(), RegexReward(pattern=SLOW))
    assert caught.value.field == "reward.components[1].pattern"
    assert "make it shorter" in (caught.value.cure or "")


def test_the_gateway_answers_others_while_it_is_given_patterns_that_never_compile(
    rewards: StackSettings, tmp_path: Path
) -> None:
    """With 32 of them a decode in the event loop kept every other request waiting for minutes."""
    stub_model(tmp_path / "models" / "qwen3")
    settings = msgspec.structs.replace(rewards, model_root=str(tmp_path / "models"), api_key=KEY)
    spec = encode_json(job_spec(reward__components=tuple(RegexReward(pattern=SLOW) for _ in range(32))))
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with services_over(settings, max_body_bytes=2**20) as services, serving(gateway_app.create_app(services)) as url:
        answers: list[httpx.Response] = []
        hostile = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{url}/v1/jobs/check", content=spec, headers=headers, timeout=120.0)
            )
        )
        hostile.start()
        longest_s = 0.0
        while hostile.is_alive():
            started_s = time.monotonic()
            assert httpx.get(f"{url}/healthz", timeout=60.0).status_code == 200
            longest_s = max(longest_s, time.monotonic() - started_s)
            hostile.join(0.05)
        services.closing.set()
    assert longest_s < 10.0  # 144 s when the decode compiled
    assert answers[0].status_code == 422
    assert answers[0].json()["field"] == "reward.components[0].pattern"
