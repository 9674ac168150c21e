"""A whole environment of verifiers trains a policy here: its taskset, its seat, its interception server, its clients.

verifiers is no dependency of the project: `make test-verifiers` installs it beside it, and runs this file.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from msgspec import UNSET

from contracts.encoding.arrays import pack_float32, pack_int32, unpack_int32
from contracts.environments.messages import Message, Sampled
from contracts.environments.service import Failure, NewSession, Result, Step, Task, Turned
from contracts.sampling import SamplingParams
from reward_service.playing.pool import EnvironmentPool
from tests.chaos.short_job import assert_undisturbed, running, short_job
from tests.e2e.test_turns import death_of, killed_again
from tests.pipeline import Pipeline
from tests.played import SETTINGS, Asked, reply_of, text_of
from tests.unit.onbeat.data.rendering.chat_models import CHATML, chat_tokenizer

pytest.importorskip("verifiers.v1", reason="verifiers is not installed: `make test-verifiers` runs this where it is")

PLUGIN = Path(__file__).parent / "verifiers_plugin"
PARAMS: dict[str, Any] = {"taskset": "letters_rounds", "seat": "player", "max_turns": 3}
SAMPLING = SamplingParams(max_new_tokens=8)
JOB = short_job(
    iterations=2,
    model__path="configs/models/secret-table",
    dataset={"type": "environment", "num_train_prompts": 48},
    environment={
        "name": "verifiers",
        "params": PARAMS | {"held_out": 16},
        "renderer": "text",
        "max_turns": 3,
        "max_tokens": 48,
        "max_attempts": 100,
        "request_timeout_s": 60.0,
    },
    evaluation={"num_prompts": 16},
    reward__components=[],
)


def said(content: str, token_ids: list[int] | None = None) -> Message:
    tokens = token_ids or list(range(len(content)))
    sampled = Sampled(
        token_ids=pack_int32(tokens),
        logprobs=pack_float32([-0.5] * len(tokens)),
        finish_reason="stop",
        num_prompt_tokens=4,
        policy_version=0,
    )
    return Message(role="assistant", content=content, sampled=sampled)


@pytest.fixture(scope="module")
def ask() -> Iterator[Asked]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PLUGIN))
        pool = EnvironmentPool(SETTINGS)
        yield Asked(pool)
        pool.shut()


def episode(number: int, *, index: int = 0, split: str = "train") -> NewSession:
    task = Task(task=json.dumps({"split": split, "index": index}), seed=number, sampling=SAMPLING)
    return NewSession(session_id=f"s{number}", task=task)


async def opened(ask: Asked, *sessions: NewSession, **changes: Any) -> list[Result]:
    return await ask.open("verifiers", *sessions, params=PARAMS | changes)


async def stepped(ask: Asked, number: int, turn: int, message: Message) -> Result:
    (result,) = await ask.pool.step([Step(session_id=f"s{number}", turn=turn, message=message)])
    return result


def test_a_job_learns_from_an_environment_of_verifiers_and_verifies_whatever_dies(tmp_path: Path) -> None:
    """The second time the service dies in the midst of a call: the episodes are played to where they were."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PLUGIN))
        with Pipeline(tmp_path) as pipeline:
            with running(pipeline, "producer-verifiers"):
                first = pipeline.train(JOB)
                killed_again(pipeline, crash_at="environment.after_play:9")
                second, _ = pipeline.jobs.create(JOB)
                trainer = pipeline.start(f"consumer-{second}", second)
                assert death_of(pipeline, trainer) == 0, trainer.tail()
            for job_id in (first, second):
                assert_undisturbed(pipeline, job_id, pipeline.final_digest(first))
                assert pipeline.verdict(job_id).environments == (f"verifiers {metadata.version('verifiers')}",)


async def test_an_episode_ends_as_verifiers_says_and_is_worth_what_its_reward_says(ask: Asked) -> None:
    results = await opened(ask, episode(1, index=0), episode(2, index=1), episode(3, index=0))
    observations = [result.observation for result in results if isinstance(result, Turned)]
    texts = [observation.messages[0].content for observation in observations if observation is not UNSET]
    assert texts[0] == texts[2] != texts[1]
    told = text_of(await stepped(ask, 1, 0, said("?" + texts[0][0] + texts[0][2])))
    answer = str(sum(map(int, told.rstrip("=").split())))[::-1]
    ended = reply_of(await stepped(ask, 1, 1, said(answer)))
    assert (ended.done, ended.reward) == (True, 1.0)
    assert ended.metrics == {"reward_is_right": 1.0, "model_turns": 2.0}
    assert reply_of(await stepped(ask, 2, 0, said("no"))).reward == 0.0


async def test_an_episode_of_as_many_turns_as_its_seat_may_have_is_scored_as_it_is(ask: Asked) -> None:
    await opened(ask, episode(4), max_turns=1)
    ended = reply_of(await stepped(ask, 4, 0, said("?")))
    assert (ended.done, ended.metrics["model_turns"]) == (True, 1.0)


@pytest.fixture
def readable_folder() -> Iterator[Path]:
    """A folder that the user of a cage can read, which pytest's are not."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def test_its_client_for_training_asks_by_tokens(ask: Asked, readable_folder: Path) -> None:
    tokenizer = chat_tokenizer(CHATML, with_tags=True)
    tokenizer.save_pretrained(readable_folder)
    (result,) = await opened(ask, episode(5), tokenizer=str(readable_folder), renderer="qwen3")
    assert isinstance(result, Turned)
    assert result.observation is not UNSET
    (message,) = result.observation.messages
    assert message.token_ids is not UNSET
    assert "m+n=" in tokenizer.decode(unpack_int32(message.token_ids))
    turn = tokenizer("no<|im_end|>", add_special_tokens=False).input_ids
    assert reply_of(await stepped(ask, 5, 0, said("no", turn))).done


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"taskset": "not_there"}, "taskset 'not_there' not found"),
        ({"seat": "somebody"}, "Extra inputs are not permitted"),
        ({"tokenizer": "a"}, "are given together"),
        ({"num_tasks": "many"}, "valid integer"),
    ],
)
def test_parameters_that_verifiers_does_not_take_are_refused(ask: Asked, params: dict[str, Any], problem: str) -> None:
    (result,) = asyncio.run(opened(ask, episode(6), **params))
    assert isinstance(result, Failure)
    assert problem in result.detail


def test_a_task_that_the_taskset_does_not_have_is_a_bad_task(ask: Asked) -> None:
    results = asyncio.run(opened(ask, episode(7, index=64), episode(8, split="evaluation")))
    assert [result.reason for result in results if isinstance(result, Failure)] == ["bad_task", "bad_task"]
