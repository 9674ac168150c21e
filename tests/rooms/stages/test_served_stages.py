"""Which stages a worker serves, and how often it looks at what they need."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from onbeat.stages.served_stages import ServedStage, ServedStages
from tests.builders import job_spec
from tests.fakes import Changes
from tests.rooms.stages.stage_fakes import FakeStack, FakeStageSide, typed

JUDGE: dict[str, Any] = {"type": "llm_judge", "model": "m", "prompt": "{completion}"}


def test_a_job_whose_spec_stays_keeps_its_stages_and_is_not_looked_at_again() -> None:
    """A resume may state scores of such a stage, so its spec is asked for again and again."""

    async def scenario() -> None:
        changes, looked_at = Changes(), list[str]()
        stack, sides = FakeStack(changes), dict[str, FakeStageSide]()
        stages = ServedStages(
            typed(stack),
            typed(sides.__getitem__),
            kinds={"llm_judge"},
            check=lambda stage: looked_at.append(stage.stage.name),
        )

        async def served(**judge: Any) -> ServedStage:
            sides["job"] = FakeStageSide(job_spec(deterministic=False, stages=[JUDGE | judge]), changes)
            await stages.refresh()
            (stage,) = stages.in_turn()
            return stage

        stack.active.append("job")
        first, again = await served(), await served()
        assert again is first
        assert looked_at == ["llm_judge"]
        resumed = await served(on_failure=0.5)
        assert resumed.spec != first.spec
        assert looked_at == ["llm_judge"] * 2

    asyncio.run(scenario())


async def test_a_judge_is_left_alone_by_name_where_no_server_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes, stack = Changes(), FakeStack(Changes())
    side = FakeStageSide(job_spec(deterministic=False, stages=[JUDGE]), changes)
    stack.active.append("job")
    stages = ServedStages(typed(stack), typed(lambda _: side), kinds=())
    await stages.refresh()
    assert stages.in_turn() == []
    assert "doesn't serve stage llm_judge of job: ONBEAT_JUDGE_URL is not set here" in caplog.text
