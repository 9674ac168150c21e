"""The turns of a batch: lockstep, counts, failures, and the same bytes whatever happens around them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from msgspec import UNSET, UnsetType, to_builtins
from msgspec.structs import replace

from contracts.encoding.arrays import pack_float32, pack_int32, unpack_int32
from contracts.environments.messages import Message, messages_digest
from contracts.environments.service import (
    Failure,
    FailureReason,
    InitialObservation,
    NewSession,
    Reply,
    Result,
    Step,
    Turned,
)
from contracts.errors import BatchFailed, EnvironmentUnavailable, InvalidInput, PrefixBroken
from contracts.rewards import Scored
from contracts.rollouts import Completion, FinishReason, PromptBatch, PromptTask
from contracts.spec.environment import EnvironmentSpec
from contracts.spec.job import JobSpec
from onbeat.base.process.dependency import REWARD_SERVICE, Dependency
from onbeat.base.telemetry.correlation import about_batch
from onbeat.data.rendering import chat_template
from onbeat.data.rendering.chat_template import TemplateEnded
from onbeat.data.rendering.factory import make_renderer
from onbeat.data.rendering.text import TextRenderer
from onbeat.scoring.groups import rollout_groups
from onbeat.scoring.reward_client import RewardClient
from producer.engine.base import Trajectories, Turn
from producer.engine.sampling import completion_uniforms
from producer.rollout import turns
from producer.rollout.carried_batch import ActiveJob, CarriedBatch
from producer.rollout.turns import Generate, TurnPlayer, calls_of
from producer.wiring import Players
from tests.builders import char_tokenizer, job_spec, prompt_batch
from tests.unit.producer.rollout.test_carrier import Carried
from tests.until import Clock

EOS = 1
TOKENIZER = char_tokenizer()
OBSERVATION = InitialObservation(messages=(Message(role="user", content="ab"),))


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


class Echo:
    """The service with one environment: it repeats what was said, rewards 1 a turn, and is done after `num_turns`."""

    def __init__(self, *, num_turns: int = 3, fails: Sequence[tuple[int, FailureReason]] = ()) -> None:
        """fails: (n, reason): the nth call of a step, counted over all sessions, fails."""
        self.num_turns = num_turns
        self.fails = dict(fails)
        self.open_sessions: dict[str, int] = {}
        self.opened: list[NewSession] = []
        self.steps: list[Step] = []
        self.calls: list[int] = []
        self.closed: list[str] = []
        self.renewed: list[str] = []
        self.observation = OBSERVATION
        self.is_away = False
        self.cuts = False
        self.begins_anew_after = -1
        """The turn to which its reply begins anew."""

    async def open(
        self, environment: EnvironmentSpec, sessions: Sequence[NewSession], *, idle_s: float, job_id: str
    ) -> list[Result]:
        assert (environment.name, job_id) == ("echo", "job")
        self.opened += sessions
        self.open_sessions |= {one.session_id: len(one.history) for one in sessions}
        return [Turned(observation=self.observation) for _ in sessions]

    async def step(self, steps: Sequence[Step]) -> list[Result]:
        if self.is_away:
            raise EnvironmentUnavailable("it is away")
        self.calls.append(len(steps))
        return [self._one(step) for step in steps]

    async def renew(self, session_ids: Sequence[str]) -> None:
        self.renewed += session_ids

    async def close(self, session_ids: Sequence[str]) -> None:
        self.closed += session_ids

    def _one(self, step: Step) -> Result:
        self.steps.append(step)
        if reason := self.fails.pop(len(self.steps), None):
            self.open_sessions.pop(step.session_id, None)
            return Failure(reason=reason, detail="as asked")
        assert self.open_sessions[step.session_id] == step.turn
        self.open_sessions[step.session_id] += 1
        said = Message(role="user", content=f"<{step.message.content}>")
        is_last = step.turn + 1 == self.num_turns
        return Turned(
            reply=Reply(
                messages=(said,),
                reward=1.0,
                done=is_last,
                truncated=is_last and self.cuts,
                begins_anew=step.turn == self.begins_anew_after,
            )
        )


class Engine:
    """Samples tokens that are a function of the context and the sample's random numbers."""

    kept_sets: bytes | UnsetType = UNSET

    def __init__(self, *, finish_reason: FinishReason = "stop", num_tokens: int = 2) -> None:
        self.finish_reason: FinishReason = finish_reason
        self.num_tokens = num_tokens
        self.asked: list[PromptBatch] = []
        self.turns: list[Turn] = []
        self.kept: list[set[int]] = []
        """Rows that were kept when each call came."""

    async def __call__(self, batch: PromptBatch, turn: Turn) -> list[list[Completion]]:
        self.asked.append(batch)
        self.turns.append(turn)
        self.kept.append(set(turn.trajectories.pasts))
        rows = range(batch.num_completions) if turn.rows is None else turn.rows
        turn.trajectories.pasts |= dict.fromkeys(rows)
        draws = iter(completion_uniforms(batch)[:, 0].tolist())
        return [
            [self._one(len(unpack_int32(prompt.token_ids)), next(draws)) for _ in range(batch.group_size)]
            for prompt in batch.prompts
        ]

    def _one(self, length: int, draw: float) -> Completion:
        tokens = [3 + (length + int(1000 * draw)) % 40] * (self.num_tokens - 1)
        return Completion(
            token_ids=pack_int32([*tokens, EOS if self.finish_reason == "stop" else 9]),
            generator_logprobs=pack_float32([-draw] * self.num_tokens),
            finish_reason=self.finish_reason,
            kept_sets=self.kept_sets,
        )


def turns_spec(**changes: Any) -> JobSpec:
    environment: dict[str, Any] = {"name": "echo", "renderer": "text", "max_turns": 8, "max_tokens": 64}
    environment |= changes.pop("environment", {})
    return job_spec(environment=environment, reward__components=[], **changes)


def batch() -> PromptBatch:
    task = PromptTask(task="{}", seed=3, observation_digest=messages_digest(OBSERVATION.messages))
    asked = prompt_batch([ids("ab"), ids("ab")])
    return replace(asked, prompts=tuple(replace(prompt, environment=task) for prompt in asked.prompts))


def play(
    service: Echo,
    engine: Generate | None = None,
    asked: PromptBatch | None = None,
    mixed: JobSpec | None = None,
    **changes: Any,
) -> Any:
    async def run() -> list[list[Completion]]:
        player = TurnPlayer(
            environments=service,
            renderers=dict.fromkeys((mixed or turns_spec()).environments, make_renderer(TOKENIZER, "text", "")),
            spec=mixed or turns_spec(**changes),
            generate=engine or Engine(),
        )
        try:
            return await player.play(asked or batch())
        finally:
            await asyncio.gather(*player.closing)

    return asyncio.run(run())


def test_the_kept_sets_of_a_trajectory_are_those_of_its_turns() -> None:
    engine = Engine()
    engine.kept_sets = b"\x08\x00\x00"
    for group in play(Echo(), engine):
        for completion in group:
            assert completion.kept_sets == engine.kept_sets * len(completion.spans)
    assert all(one.kept_sets is UNSET for group in play(Echo()) for one in group)


class Writer(Echo):
    """Writes tokens, and asks for those of the model."""

    def __init__(self, *observations: list[int]) -> None:
        super().__init__(num_turns=len(observations) + 1)
        self.observations = observations
        first = Message(role="user", token_ids=pack_int32(ids("ab")))
        self.observation = InitialObservation(messages=(first,), asks_for_tokens=True)

    def _one(self, step: Step) -> Result:
        super()._one(step)
        if step.turn == len(self.observations):
            return Turned(reply=Reply(reward=1.0, done=True))
        written = Message(role="user", token_ids=pack_int32(self.observations[step.turn]))
        return Turned(reply=Reply(messages=(written,)))


def written_batch(service: Writer) -> PromptBatch:
    task = PromptTask(task="{}", seed=3, observation_digest=messages_digest(service.observation.messages))
    asked = batch()
    return replace(asked, prompts=tuple(replace(prompt, environment=task) for prompt in asked.prompts))


def test_an_environment_that_writes_tokens_is_told_tokens_and_no_renderer_has_a_part_in_it() -> None:
    service, engine = Writer([7, 8], [9]), Engine()
    completions = play(service, engine, written_batch(service))
    (first, *_), asked = completions[0], written_batch(service)
    tokens = unpack_int32(first.token_ids)
    (one, two, three) = first.spans
    assert tokens[one[1] : two[0]] == [7, 8]
    assert tokens[two[1] : three[0]] == [9]
    told = [step.message.sampled for step in service.steps if step.session_id.endswith("0/0")]
    assert [sampled.token_ids for sampled in told if sampled] == [
        pack_int32(tokens[start:end]) for start, end in first.spans
    ]
    assert b"".join(sampled.logprobs for sampled in told if sampled) == first.generator_logprobs
    assert [sampled.num_prompt_tokens for sampled in told if sampled] == [
        len(ids("ab")) + start for start, _ in first.spans
    ]
    assert {sampled.policy_version for sampled in told if sampled} == {asked.policy_version}
    assert {new.task.sampling for new in service.opened} == {asked.sampling}


@pytest.mark.parametrize("strange", [[-1], [10**6]])
def test_tokens_of_an_environment_that_are_none_of_the_model_are_refused(strange: list[int]) -> None:
    service = Writer(strange)
    with pytest.raises(PrefixBroken, match=f"token {strange[0]} is none of the model's"):
        play(service, asked=written_batch(service))


def test_an_environment_that_asks_for_no_tokens_is_told_none() -> None:
    service = Echo()
    play(service)
    assert {step.message.sampled for step in service.steps} == {UNSET}


def test_a_batch_is_one_call_of_the_engine_and_one_of_the_service_for_each_turn() -> None:
    service, engine = Echo(num_turns=3), Engine()
    completions = play(service, engine)
    assert [len(batch.prompts) * batch.group_size for batch in engine.asked] == [4, 4, 4]
    assert service.calls == [4, 4, 4]
    assert [len(of_prompt) for of_prompt in completions] == [2, 2]
    assert sorted(service.closed) == sorted(service.open_sessions)
    for completion in [one for of_prompt in completions for one in of_prompt]:
        assert completion.trajectory.stop == "done"
        assert (completion.num_sampled, completion.trajectory.reward, completion.trajectory.attempt) == (6, 3.0, 1)
        assert completion.trajectory.metrics == {}


def test_each_turn_s_prompt_begins_with_all_that_came_before_and_the_trajectory_is_its_last_one() -> None:
    engine = Engine()
    completions = play(Echo(num_turns=3), engine)
    contexts = [[unpack_int32(prompt.token_ids) for prompt in batch.prompts] for batch in engine.asked]
    rows = [one for of_prompt in completions for one in of_prompt]
    for row, completion in enumerate(rows):
        whole = [*ids("ab"), *unpack_int32(completion.token_ids)]
        for context in (contexts[1][row], contexts[2][row]):
            assert whole[: len(context)] == context
        for (_, end), (start, _) in zip(completion.spans[:-1], completion.spans[1:], strict=True):
            sampled = TOKENIZER.decode(unpack_int32(completion.token_ids)[:end], skip_special_tokens=True)[-1]
            assert unpack_int32(completion.token_ids)[end:start] == ids(f"<{sampled}>")


class Slow:
    """A renderer that writes nothing before the event loop has run beside it."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.has_run = threading.Event()
        self.num_waits = 0

    def parse(self, *seen: Any, **named: Any) -> Any:
        return self.inner.parse(*seen, **named)

    def open(self, *said: Any, **named: Any) -> Any:
        self._wait()
        return self.inner.open(*said, **named)

    def go_on(self, *said: Any, **named: Any) -> Any:
        self._wait()
        return self.inner.go_on(*said, **named)

    def _wait(self) -> None:
        self.has_run.clear()
        self.num_waits += self.has_run.wait(20.0)


def test_messages_are_written_beside_the_event_loop_in_which_leases_are_renewed() -> None:
    service, slow = Echo(), Slow(make_renderer(TOKENIZER, "text", ""))
    service.begins_anew_after = 0

    async def tick() -> None:
        while True:
            slow.has_run.set()
            await asyncio.sleep(0.001)

    async def run() -> list[list[Completion]]:
        ticking = asyncio.ensure_future(tick())
        player = TurnPlayer(environments=service, renderers={"": slow}, spec=turns_spec(), generate=Engine())
        try:
            return await player.play(batch())
        finally:
            ticking.cancel()
            await asyncio.gather(*player.closing)

    completions = asyncio.run(run())
    plain = Echo()
    plain.begins_anew_after = 0
    assert completions == play(plain)
    assert slow.num_waits == 2 * sum(map(len, completions)), "each trajectory began anew once, and went on once"


def test_a_template_that_goes_beyond_a_bound_fails_the_batch_and_is_no_failure_with_a_stated_score() -> None:
    class Ended(Slow):
        def _wait(self) -> None:
            raise chat_template.invalid(TemplateEnded("it is slow")) from TemplateEnded("it is slow")

    service = Echo()
    service.begins_anew_after = 0
    player = TurnPlayer(
        environments=service,
        renderers={"": Ended(make_renderer(TOKENIZER, "text", ""))},
        spec=turns_spec(environment=STATED),
        generate=Engine(),
    )

    async def run() -> None:
        try:
            await player.play(batch())
        finally:
            await asyncio.gather(*player.closing)

    with pytest.raises(BatchFailed, match=r"model\.path: the model's chat template was stopped"):
        asyncio.run(run())


def test_where_an_environment_begins_anew_the_model_sees_what_stands_from_there_on() -> None:
    service, engine = Echo(num_turns=4), Engine()
    service.begins_anew_after = 1
    # Two turns and what is said between them are 7 tokens behind the prompt, and 10 with what is seen next.
    rows = [one for of_prompt in play(service, engine, environment={"max_context_tokens": 15}) for one in of_prompt]
    contexts = [[unpack_int32(prompt.token_ids) for prompt in batch.prompts] for batch in engine.asked]
    for row, completion in enumerate(rows):
        tokens = unpack_int32(completion.token_ids)
        turns = completion.trajectory.turns
        assert [turn.sees_from for turn in turns] == [UNSET, UNSET, turns[1].end, turns[1].end]
        assert completion.lines == ((0, 0, turns[1].end), (turns[1].end, turns[2].start, len(tokens)))
        assert contexts[1][row] == [*ids("ab"), *tokens[: turns[1].start]]
        assert contexts[2][row] == tokens[turns[1].end : turns[2].start]
        assert contexts[3][row] == tokens[turns[1].end : turns[3].start]
    # A turn of 2, what is said in 3, and room for 5 more: seen together, and from the beginning anew on.
    for most, num_turns in ((9, 1), (10, 3), (13, 4)):
        rows = play(service, Engine(), environment={"max_context_tokens": most})
        assert {len(one.trajectory.turns) for of_prompt in rows for one in of_prompt} == {num_turns}


@pytest.mark.parametrize(
    ("opened", "said"), [(InvalidInput("the template refuses them"), "the template refuses them"), ([], "no tokens")]
)
def test_messages_that_nothing_can_begin_with_are_a_failure_at_what_the_model_said(
    monkeypatch: pytest.MonkeyPatch, opened: list[int] | InvalidInput, said: str
) -> None:
    service = Echo()
    service.begins_anew_after = 0

    def open_or_refuse(*_: object) -> list[int]:
        if isinstance(opened, InvalidInput):
            raise opened
        return opened

    monkeypatch.setattr(TextRenderer, "open", open_or_refuse)
    with pytest.raises(BatchFailed, match=f"invalid_reply: it can't begin anew with its messages: .*{said}"):
        play(service)
    for of_prompt in play(service, environment={"on_failure": 0.25}):
        for completion in of_prompt:
            played = completion.trajectory
            assert played is not UNSET
            assert (played.stop, played.failure, played.reward) == ("failed", "invalid_reply", 0.25)


def test_samples_and_turns_have_random_numbers_of_their_own_and_the_first_turn_those_of_today() -> None:
    engine = Engine()
    play(Echo(num_turns=2), engine)
    first, second = (completion_uniforms(one) for one in engine.asked)
    assert (first == completion_uniforms(prompt_batch([ids("ab"), ids("ab")]))).all()
    assert len({*first[:, 0].tolist(), *second[:, 0].tolist()}) == 8


@pytest.mark.parametrize(
    ("changes", "finish_reason", "stop", "num_turns"),
    [
        ({"max_turns": 2}, "stop", "max_turns", 2),
        # A turn of 2 tokens, an observation of 3, and room for 5 more: 10; each other turn takes 5 more.
        ({"max_tokens": 9}, "stop", "max_tokens", 1),
        ({"max_tokens": 10}, "stop", "max_tokens", 2),
        ({"max_tokens": 14}, "stop", "max_tokens", 2),
        ({"max_tokens": 15}, "stop", "max_tokens", 3),
        ({}, "length", "max_tokens", 1),
    ],
)
def test_a_trajectory_ends_by_counts(
    changes: dict[str, Any], finish_reason: FinishReason, stop: str, num_turns: int
) -> None:
    service = Echo(num_turns=9)
    completions = play(service, Engine(finish_reason=finish_reason), environment=changes)
    for completion in [one for of_prompt in completions for one in of_prompt]:
        assert (completion.trajectory.stop, len(completion.trajectory.turns)) == (stop, num_turns)
        assert completion.num_tokens <= changes.get("max_tokens", 64)
        assert completion.finish_reason == finish_reason
    assert len(service.steps) == 4 * num_turns


def test_an_environment_may_say_that_it_cut_a_trajectory() -> None:
    service = Echo(num_turns=2)
    service.cuts = True
    rows = [one for of_prompt in play(service, Engine()) for one in of_prompt]
    assert {(row.trajectory.stop, row.finish_reason, row.is_truncated) for row in rows} == {("truncated", "stop", True)}
    whole = [one for of_prompt in play(Echo(num_turns=2), Engine()) for one in of_prompt]
    assert {(row.trajectory.stop, row.is_truncated) for row in whole} == {("done", False)}
    assert [row.trajectory.reward for row in rows] == [2.0] * 4
    assert [turn.reply_digest for turn in rows[0].trajectory.turns[:1]] == [whole[0].trajectory.turns[0].reply_digest]


@pytest.mark.parametrize("reason", ["timeout", "crashed", "raised", "lost"])
def test_in_a_deterministic_job_a_session_goes_on_from_its_history_to_the_same_bytes(reason: FailureReason) -> None:
    calm, engine = play(Echo()), Engine()
    service = Echo(fails=[(6, reason), (9, reason)])
    assert play(service, engine) == calm
    assert len(engine.asked) == 3
    assert [len(one.history) for one in service.opened] == [0, 0, 0, 0, 1, 1]


def test_elsewhere_a_trajectory_begins_again_behind_its_batch_and_says_so() -> None:
    service, engine = Echo(fails=[(6, "crashed")]), Engine()
    completions = play(service, engine, deterministic=False)
    rows = [one for of_prompt in completions for one in of_prompt]
    assert [row.trajectory.attempt for row in rows] == [1, 2, 1, 1]
    assert [len(batch.prompts) * batch.group_size for batch in engine.asked] == [4, 4, 3, 1, 1, 1]
    assert all(row.trajectory.reward == 3.0 for row in rows)
    assert all(not one.history for one in service.opened)


def test_the_engine_is_told_which_rows_go_on_and_keeps_nothing_of_the_others() -> None:
    service, engine = Echo(fails=[(6, "crashed")]), Engine()
    play(service, engine, deterministic=False)
    assert [turn.rows for turn in engine.turns] == [None, [0, 1, 2, 3], [0, 2, 3], [1], [1], [1]]
    assert engine.kept == [set(), {0, 1, 2, 3}, {0, 2, 3}, set(), {1}, {1}]
    assert len({id(turn.trajectories) for turn in engine.turns}) == 1
    assert engine.turns[0].trajectories.prompt_batch == engine.asked[0]


def test_sessions_are_renewed_while_the_model_takes_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "RENEW_EVERY_S", 0.001)
    service, engine = Echo(), Engine()

    async def slow(batch: PromptBatch, turn: Turn) -> list[list[Completion]]:
        service.renewed.clear()
        while not service.renewed:
            await asyncio.sleep(0.001)
        return await engine(batch, turn)

    play(service, slow)
    assert set(service.renewed) == set(service.open_sessions)


def test_a_session_that_keeps_failing_fails_its_batch_with_the_reason_and_ends_the_others() -> None:
    service = Echo(fails=[(2, "timeout"), (5, "crashed"), (6, "timeout")])
    with pytest.raises(BatchFailed, match=r"`echo`, train/0, sample 1, turn 1: timeout: as asked"):
        play(service)
    assert len(service.closed) == 4


async def test_a_session_that_is_played_again_is_said_with_the_key_of_its_deadline() -> None:
    clock = Clock()

    async def unasked() -> None:
        raise AssertionError("no probe is made here")

    rewards = Dependency(REWARD_SERVICE, "http://r", probe=unasked, clock=clock)
    player = TurnPlayer(
        environments=Echo(fails=[(2, "timeout")]),
        renderers={"": make_renderer(TOKENIZER, "text", "")},
        spec=turns_spec(),
        generate=Engine(),
        reward_service=rewards,
    )
    with about_batch("job-1", iteration=0, batch_id="0/train/0", attempt=1):
        await player.play(batch())
    await asyncio.gather(*player.closing)
    clock.now_s += 6.0
    words = (rewards.seen.tries_again or {})["job-1"]
    assert "turn 1: timeout: as asked (raise environment.step_timeout_s, or fix the environment)" in words


@pytest.mark.parametrize("reason", ["invalid_reply", "oversize", "bad_task", "unknown", "divergent", "not_in_turn"])
def test_what_no_other_attempt_fixes_fails_at_once(reason: FailureReason) -> None:
    service = Echo(fails=[(1, reason)])
    with pytest.raises(BatchFailed, match=reason):
        play(service)
    assert len(service.steps) == 4


class Hates(Echo):
    """Fails at each message of one turn of one trajectory, however often it is opened."""

    def __init__(self, turn: int, *reasons: FailureReason, session: str = "/0/1", num_turns: int = 3) -> None:
        """reasons: of each time; the last one for ever after."""
        super().__init__(num_turns=num_turns)
        self.turn, self.reasons, self.session = turn, list(reasons), session
        self.num_failed = 0

    def _one(self, step: Step) -> Result:
        if step.turn != self.turn or not step.session_id.endswith(self.session):
            return super()._one(step)
        self.num_failed += 1
        reason = self.reasons.pop(0) if len(self.reasons) > 1 else self.reasons[0]
        self.open_sessions.pop(step.session_id, None)
        return Failure(reason=reason, detail=f"at 0x{self.num_failed}")


STATED: dict[str, Any] = {"on_failure": -0.25, "max_attempts": 3}


def rows_of(completions: list[list[Completion]]) -> list[Completion]:
    return [one for of_prompt in completions for one in of_prompt]


@pytest.mark.parametrize("reason", ["raised", "invalid_reply", "oversize", "rewritten"])
def test_a_trajectory_that_the_environment_fails_at_each_time_ends_there_with_the_stated_score(
    reason: FailureReason,
) -> None:
    calm, service = rows_of(play(Echo())), Hates(1, reason)
    rows = rows_of(play(service, environment=STATED))
    assert service.num_failed == 3, "in as many sessions as environment.max_attempts"
    assert [row for row, _ in enumerate(rows) if rows[row] != calm[row]] == [1], "the others are what they were"
    failed = rows[1].trajectory
    assert failed is not UNSET
    assert (failed.stop, failed.failure, failed.reward, failed.metrics) == ("failed", reason, -0.25, {})
    assert [turn.reward for turn in failed.turns] == [0.0, -0.25], "what it had collected is gone"
    assert unpack_int32(rows[1].token_ids) == unpack_int32(calm[1].token_ids)[: failed.turns[-1].end]
    assert rows[1].num_sampled == 4, "the message that it failed at is trained"
    assert rows == rows_of(play(Hates(1, reason), environment=STATED)), "whatever a detail says (I7)"


@pytest.mark.parametrize("reason", ["timeout", "crashed"])
@pytest.mark.parametrize(("deterministic", "times"), [(True, 6), (False, 3)])
def test_luck_has_to_strike_as_often_as_all_attempts_of_the_batch_would_try(
    reason: FailureReason, deterministic: bool, times: int
) -> None:
    service = Hates(0, reason)
    rows = rows_of(play(service, environment=STATED, deterministic=deterministic, rollout__max_attempts=2))
    assert service.num_failed == times
    assert [row.trajectory is not UNSET and row.trajectory.stop for row in rows] == ["done", "failed", "done", "done"]


def test_what_was_luck_in_one_of_its_times_is_taken_for_luck() -> None:
    service = Hates(0, "raised", "raised", "timeout", "raised")
    play(service, environment=STATED, rollout__max_attempts=2)
    assert service.num_failed == 6


def test_a_failure_that_heals_costs_nothing_and_does_not_count_at_the_next_message() -> None:
    calm = play(Echo())
    twice: list[tuple[int, FailureReason]] = [(6, "raised"), (9, "raised"), (12, "raised"), (15, "raised")]
    assert play(Echo(fails=twice), environment=STATED) == calm


@pytest.mark.parametrize("reason", ["bad_task", "unknown", "divergent", "not_in_turn"])
def test_what_no_message_is_the_cause_of_fails_the_batch_whatever_is_stated(reason: FailureReason) -> None:
    with pytest.raises(BatchFailed, match=reason):
        play(Hates(1, reason), environment=STATED)


def test_sessions_that_are_lost_are_no_failure_at_a_message() -> None:
    with pytest.raises(BatchFailed, match="lost"):
        play(Hates(1, "lost"), environment=STATED)


def test_a_failed_trajectory_is_marked_in_its_group_beside_what_scorers_could_not_score() -> None:
    completions = rows_of(play(Hates(1, "raised"), environment=STATED))
    scored = [Scored(reward=1.0, breakdown={"exact": 1.0}, unscorable={"exact": "timeout"})] * 4
    groups = rollout_groups(batch(), turns_spec(), completions=completions, texts=["x"] * 4, scored=scored)
    rollouts = [one for group in groups for one in group.rollouts]
    assert [one.reward for one in rollouts] == [4.0, 0.75, 4.0, 4.0]
    assert rollouts[1].unscorable == {"environment": "raised", "exact": "timeout"}
    assert rollouts[0].unscorable == {"exact": "timeout"}


def test_an_observation_that_is_not_the_prompt_s_fails_the_batch() -> None:
    service = Echo()
    service.observation = InitialObservation(messages=(Message(role="user", content="ac"),))
    with pytest.raises(BatchFailed, match="otherwise than when its prompt was made"):
        play(service)


def test_a_service_that_stays_away_fails_the_batch_by_name() -> None:
    service = Echo()
    service.is_away = True
    with pytest.raises(EnvironmentUnavailable):
        play(service)


def test_a_prompt_without_a_task_is_refused() -> None:
    asked = batch()
    with pytest.raises(BatchFailed, match="no task"):
        play(Echo(), asked=replace(asked, prompts=tuple(replace(one, environment=UNSET) for one in asked.prompts)))


def test_a_renderer_that_would_change_what_stands_ends_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> list[int]:
        raise PrefixBroken("it rewrites history")

    monkeypatch.setattr(TextRenderer, "go_on", refuse)
    with pytest.raises(BatchFailed, match="rewrites history"):
        play(Echo())


async def test_a_batch_that_is_dropped_ends_its_sessions() -> None:
    service = Echo()

    async def never(_: PromptBatch, __: Turn) -> list[list[Completion]]:
        await asyncio.Event().wait()
        raise AssertionError

    player = TurnPlayer(
        environments=service, renderers={"": make_renderer(TOKENIZER, "text", "")}, spec=turns_spec(), generate=never
    )
    playing = asyncio.ensure_future(player.play(batch()))
    while len(service.opened) < 4:
        await asyncio.sleep(0)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    await asyncio.gather(*player.closing)
    assert sorted(service.closed) == sorted(service.open_sessions)
    assert service.steps == []


def test_without_scorers_a_reward_is_what_the_environment_gave_and_no_reward_service_is_asked() -> None:
    completions = [one for of_prompt in play(Echo()) for one in of_prompt]

    async def sample(asked: PromptBatch) -> list[list[Completion]]:
        return [completions[:2], completions[2:]]

    async def run() -> Carried:
        carried = Carried()
        job = ActiveJob(job_id="job", spec=turns_spec(), side=carried.batch.job.side)
        claim, weights = carried.batch.claim, carried.batch.weights
        batch = CarriedBatch(job=job, claim=claim, loaded=carried.loaded, weights=weights, play=sample)
        unasked = httpx.MockTransport(lambda _: pytest.fail("there is nothing to score"))
        rewards = RewardClient(httpx.AsyncClient(transport=unasked, base_url="http://rewards"), key="key")
        object.__setattr__(carried.carrier, "rewards", rewards)
        batch.sample(started_s=0.0)
        await carried.carrier.carry(batch)
        return carried

    carried = asyncio.run(run())
    (published,) = carried.side.published
    assert [rollout.reward for group in published.groups for rollout in group.rollouts] == [3.0] * 4
    assert carried.loaded.asked == []


def mixture_spec() -> JobSpec:
    own = {
        "name": "said",
        "dataset": {"type": "environment"},
        "environment": to_builtins(turns_spec().environments[""]),
    }
    sums = {"name": "sums", "dataset": {"type": "addition"}}
    return job_spec(
        dataset={"type": "mixture", "sources": [sums, own]}, reward__components=[{"type": "exact", "sources": ["sums"]}]
    )


def test_a_prompt_of_a_source_without_an_environment_has_one_turn_beside_those_that_are_answered() -> None:
    asked, service = batch(), Echo(num_turns=2)
    plain, answered = asked.prompts
    mixed = replace(asked, prompts=(replace(plain, source="sums", environment=UNSET), replace(answered, source="said")))
    of_two = mixture_spec()
    of_sums, of_said = play(service, asked=mixed, mixed=of_two)
    alone = asyncio.run(Engine()(mixed, Turn(trajectories=Trajectories(prompt_batch=mixed))))
    assert of_sums == alone[0]
    assert [[turn.reward for turn in one.trajectory.turns] for one in of_said] == [[1.0, 1.0]] * 2
    assert service.calls == [2, 2]
    failed = replace(of_said[0].trajectory, stop="failed", failure="crashed")
    groups = rollout_groups(
        mixed,
        of_two,
        completions=[*of_sums, replace(of_said[0], trajectory=failed), of_said[1]],
        texts=["x"] * 4,
        scored=[Scored(reward=0.0, breakdown={})] * 4,
    )
    assert [one.unscorable for group in groups for one in group.rollouts] == [
        {},
        {},
        {"environment/said": "crashed"},
        {},
    ]


@pytest.mark.parametrize("problem", ["no folder", "no such format"])
def test_a_renderer_that_can_t_be_made_fails_the_batch_with_its_field(problem: str) -> None:
    def refuse(*_: Any) -> Any:
        raise InvalidInput(problem, field="model.path")

    players = Players(make_client=lambda _: Echo(), make_renderer=refuse)
    loaded: Any = SimpleNamespace(generate=Engine())
    playing = players.play_for(turns_spec(), loaded)
    assert playing is not None
    with pytest.raises(BatchFailed, match=f"model.path: {problem}"):
        asyncio.run(asyncio.wait_for(cast(Any, playing(batch())), 120.0))
    assert players.play_for(job_spec(), loaded) is None


def test_a_generator_that_can_t_render_a_source_s_messages_names_the_source_s_table() -> None:
    def refuse(*_: Any) -> Any:
        raise InvalidInput("no such format", field="environment.chat_format", cure="see environment.renderer")

    with pytest.raises(InvalidInput) as refused:
        asyncio.run(Players(make_client=lambda _: Echo(), make_renderer=refuse).prepare(mixture_spec()))
    field = "dataset.sources[1].environment"
    assert (refused.value.field, refused.value.cure) == (f"{field}.chat_format", f"see {field}.renderer")


def test_contexts_that_are_long_together_are_several_calls_in_order() -> None:
    prompts = prompt_batch([[5] * length for length in (3, 1, 2, 9, 1, 1)]).prompts
    assert [[len(one.token_ids) // 4 for one in call] for call in calls_of(prompts, 8)] == [[3, 1], [2], [9], [1, 1]]
    assert calls_of(prompts) == [list(prompts)]
