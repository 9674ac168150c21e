"""All turns of a batch where an environment answers the model: under one claim, in lockstep.

    prompts ─▶ engine ─▶ turns ─ parse ─▶ reward service ─ replies ─▶ render ─▶ prompts of the next turn
       ▲      one call                       one call                                    │
       └──────────────── prompt + turn + observation, begins with what was before ◀──────┘

A turn of all trajectories that go on is one call of the engine (several where their contexts are long) and one of the
service. Which go on is a function of the
batch, so an engine computes the same numbers whatever happens around it (I7). A trajectory ends by counts alone: the
environment is done, or there is no room for another turn.

A session that hangs or dies costs its own trajectory; one that is lost with its service has no attempt less. In a
deterministic job the session is opened again and played to where it was, and nothing is sampled anew; in any other the
trajectory begins again, behind the rest of its batch. Past environment.max_attempts the batch fails with the reason
(I6), unless it is the model's message at which the environment fails, and environment.on_failure states a score for
that: then the trajectory ends with it. A service that is away is waited for between two turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from contracts.encoding.arrays import ITEM_BYTES, pack_int32
from contracts.encoding.wire import MAX_ATTEMPTS
from contracts.environments import service
from contracts.environments.messages import messages_digest
from contracts.errors import BatchFailed, EnvironmentUnavailable, InvalidInput
from contracts.rewards import UP_TO_LUCK
from contracts.rollouts import Completion, Prompt, PromptBatch, turn_seed
from contracts.spec.environment import EnvironmentSpec
from contracts.spec.job import JobSpec
from onbeat.base.process.crash_points import reach
from onbeat.base.process.dependency import Dependency
from onbeat.base.telemetry.correlation import current_facts
from onbeat.data.rendering.base import Renderer
from onbeat.data.rendering.chat_template import TemplateEnded
from producer.engine.base import Trajectories, Turn, all_or_none
from producer.rollout.trajectory import PlayedTrajectory

log = logging.getLogger(__name__)

RENEW_EVERY_S = 5.0
"""How often a generator says that its sessions are still needed."""
IDLE_BEYOND_LEASE_S = 15.0
"""How much longer than the lease of its batch a session lives of which nothing was heard."""
LOSSES_OF_AN_ATTEMPT = 8
"""A service that is started again loses its sessions, which is no failure of theirs; one that is lost so often for each
of its attempts may be what the service dies of."""
CLOSE_S = 5.0
"""Time that the end of sessions may take; those that are left end by themselves."""
MOST_TOKENS = 2**16
"""Tokens of all prompts of one call of the engine, padding included: it has them in memory at once. A turn of more is
several calls, cut by their prompts alone (I7)."""

Generate = Callable[[PromptBatch, Turn], Awaitable[list[list[Completion]]]]
"""A call of the engine, under the weights that the whole batch is sampled with."""


class EnvironmentCalls(Protocol):
    """The calls of the reward service that play environments. Each raises EnvironmentUnavailable without a usable
    answer.
    """

    async def open(
        self, environment: EnvironmentSpec, sessions: Sequence[service.NewSession], *, idle_s: float, job_id: str
    ) -> Sequence[service.Result]:
        """Answers a result for each session, in order."""
        ...

    async def step(self, steps: Sequence[service.Step]) -> Sequence[service.Result]:
        """The same."""
        ...

    async def renew(self, session_ids: Sequence[str]) -> object: ...

    async def close(self, session_ids: Sequence[str]) -> object: ...


@dataclass(kw_only=True)
class FailingMessage:
    """A message of the model that the environment fails at, and the number of its failures in a row."""

    turn: int
    """Its turn; where trajectories begin again, what the model says at it differs, and all its messages are one."""
    num: int = 0
    is_luck: bool = False
    """True: in one of these failures another machine might not have failed."""


@dataclass(kw_only=True)
class Session:
    """A trajectory and the session that answers it. TurnPlayer creates and changes it."""

    session_id: str
    prompt: Prompt
    sample: int
    row: int
    """Its row in the batch."""
    source: str
    """Whose environment answers it, as `JobSpec.environments` has it."""
    played: PlayedTrajectory
    num_failures: int = 0
    """Failures of the session, since the trajectory was begun first; but for those at messages, where on_failure states
    a score."""
    num_losses: int = 0
    """Times that the service lost it."""
    failing: FailingMessage = field(default_factory=lambda: FailingMessage(turn=-1))


@dataclass(frozen=True, kw_only=True)
class TurnPlayer:
    """Plays the rounds of a batch with an environment: `play` takes the place of the engine's call, once for each
    round.
    """

    environments: EnvironmentCalls
    renderers: Mapping[str, Renderer]
    """By source, as `JobSpec.environments`; prompts of other sources have one turn, which nothing answers."""
    spec: JobSpec
    generate: Generate
    reward_service: Dependency | None = None
    """Told of what is tried again."""
    closing: set[asyncio.Task[None]] = field(default_factory=set)

    async def play(self, batch: PromptBatch) -> list[list[Completion]]:
        """Plays all trajectories of a round.

        Returns:
            Completions [k][G], with their trajectories.

        Raises:
            BatchFailed: An environment fails beyond environment.max_attempts, or in a way that no other attempt cures.
            EnvironmentUnavailable: The service stays away.
            PrefixBroken: A context doesn't begin with the context before it (I9).
            OnbeatError: The engine raises it.
        """
        name = uuid.uuid4().hex
        environments = self.spec.environments
        sessions: list[Session] = []
        for place, prompt in enumerate(batch.prompts):
            # "" names the environment of every source.
            source = "" if "" in environments else prompt.source or ""
            if source not in environments:
                continue
            for sample in range(batch.group_size):
                played = PlayedTrajectory.of(prompt, batch, environments[source], self.renderers[source])
                sessions.append(
                    Session(
                        session_id=f"{name}/{place}/{sample}",
                        prompt=prompt,
                        sample=sample,
                        row=place * batch.group_size + sample,
                        source=source,
                        played=played,
                    )
                )
        trajectories = Trajectories(prompt_batch=batch)
        async with self._living(sessions):
            # The first turn needs nothing of a session: both are asked at the same time.
            completions: list[Completion] = []

            async def sample_first_turn() -> None:
                completions.extend(itertools.chain(*await self.generate(batch, Turn(trajectories=trajectories))))

            await all_or_none([sample_first_turn, partial(self._open, sessions, batch.job_id)])
            again = await self._play_on(trajectories, sessions, [completions[session.row] for session in sessions])
            while again:
                again = await self._begin_again(trajectories, again)
        for session in sessions:
            completions[session.row] = session.played.completion()
        return [completions[start : start + batch.group_size] for start in range(0, len(completions), batch.group_size)]

    async def _play_on(
        self, trajectories: Trajectories, alive: list[Session], sampled: Sequence[Completion]
    ) -> list[Session]:
        """Plays from a turn that was sampled to the end of each; answers those that have to begin again."""
        again: list[Session] = []
        while True:
            reach("producer.after_turn")
            for session, completion in zip(alive, sampled, strict=True):
                session.played.take(completion)
            failed = await self._step(alive, trajectories.prompt_batch.job_id)
            again += failed
            reach("producer.after_step")
            alive = await asyncio.to_thread(_going_on, [session for session in alive if session not in failed])
            if not alive:
                return again
            sampled = await self._sample(trajectories, alive)

    async def _begin_again(self, trajectories: Trajectories, sessions: list[Session]) -> list[Session]:
        batch = trajectories.prompt_batch
        for session in sessions:
            played = session.played
            prompt = session.prompt
            environment = played.environment
            renderer = played.renderer
            attempt = played.attempt + 1
            session.played = PlayedTrajectory.of(prompt, batch, environment, renderer, attempt=attempt)
        await self._open(sessions, batch.job_id)
        return await self._play_on(trajectories, sessions, await self._sample(trajectories, sessions))

    async def _sample(self, trajectories: Trajectories, alive: Sequence[Session]) -> list[Completion]:
        """Samples a turn of each session, as batches whose prompts are all tokens before it."""
        batch = trajectories.prompt_batch
        rows = [session.row for session in alive]
        for row in trajectories.pasts.keys() - rows:
            del trajectories.pasts[row]
        prompts = [
            Prompt(
                prompt_id=session.prompt.prompt_id,
                index=session.prompt.index,
                token_ids=pack_int32(session.played.seen),
                text="",
                reference="",
                sampler_seed=turn_seed(batch, session.prompt, sample=session.sample, turn=session.played.num_turns),
            )
            for session in alive
        ]
        left = iter(rows)
        calls = [
            partial(
                self.generate,
                replace(batch, group_size=1, prompts=tuple(part), reserves=()),
                Turn(trajectories=trajectories, rows=list(itertools.islice(left, len(part)))),
            )
            for part in calls_of(prompts)
        ]
        return [completion for answer in await all_or_none(calls) for (completion,) in answer]

    async def _open(self, sessions: Sequence[Session], job_id: str) -> None:
        """Opens a session for each, at the end of what was played of it. Raises as `play` does."""
        waiting = list(sessions)
        while waiting:
            parts: dict[str, list[Session]] = {}
            for session in waiting:
                parts.setdefault(session.source, []).append(session)
            calls = [partial(self._open_of, source, part, job_id) for source, part in parts.items()]
            waiting = [session for failed in await all_or_none(calls) for session in failed]

    async def _open_of(self, source: str, sessions: Sequence[Session], job_id: str) -> list[Session]:
        """Opens sessions of one environment; answers those that have to be opened again."""
        environment = self.spec.environments[source]
        results = await self.environments.open(
            environment,
            [
                service.NewSession(
                    session_id=session.session_id, task=session.played.task, history=session.played.history
                )
                for session in sessions
            ],
            # Sessions end with the lease of their batch: soon after the generator that renews both is gone.
            idle_s=self.spec.timeouts.generator_lease_s + IDLE_BEYOND_LEASE_S,
            job_id=job_id,
        )
        failed: list[Session] = []
        for session, result in zip(sessions, results, strict=True):
            if isinstance(result, service.Failure):
                self._count(session, result)
                failed.append(session)
            else:
                _check_observation(session, result)
        return failed

    async def _step(self, sessions: Sequence[Session], job_id: str) -> list[Session]:
        """Takes the replies to the last turn of each; answers those whose trajectory has to begin again."""
        waiting = list(sessions)
        while waiting:
            steps = [
                service.Step(
                    session_id=session.session_id, turn=session.played.num_turns - 1, message=session.played.message
                )
                for session in waiting
            ]
            results = await self.environments.step(steps)
            failed: list[Session] = []
            recorded = await asyncio.to_thread(_all_recorded, waiting, results)
            for session, refused in zip(waiting, recorded, strict=True):
                if refused is not None and not self._ends(session, refused):
                    failed.append(session)
            if not self.spec.deterministic:
                return failed
            # What was sampled stands: each session is played to where it was, and hears its last message again.
            await self._open(failed, job_id)
            waiting = failed
        return []

    def _ends(self, session: Session, result: service.Result) -> bool:
        """Counts a failed step; True where the trajectory ends with it, with the stated score. Raises BatchFailed."""
        score = session.played.environment.stated_score
        if score is None or not isinstance(result, service.Failure) or not service.is_of_message(result.reason):
            self._count(session, result)
            return False
        turn = session.played.num_turns if self.spec.deterministic else 0
        failing = session.failing
        if failing.turn != turn:
            failing = FailingMessage(turn=turn)
        failing.num += 1
        failing.is_luck |= result.reason in UP_TO_LUCK
        session.failing = failing
        tries = self._tries(session)
        if failing.num < tries:
            log.warning("%s; time %d of %d", self._what(session, result), failing.num, tries)
            return False
        log.info("%s: it gets the score that is stated for that", self._what(session, result))
        session.played.fail(result.reason, score)
        return True

    def _tries(self, session: Session) -> int:
        """Returns how often the environment has to fail at a message in a row before the stated score is given.

        A failure that isn't a function of the message has to happen as often as all attempts of a deterministic job's
        batch would try (I7).
        """
        attempts = 1
        if session.failing.is_luck and self.spec.deterministic:
            attempts = self.spec.rollout.max_attempts
        return min(MAX_ATTEMPTS, session.played.environment.max_attempts * attempts)

    def _what(self, session: Session, failure: service.Failure) -> str:
        return (
            f"environment `{session.played.environment.name}`, {session.prompt.prompt_id}, sample {session.sample}, "
            f"turn {session.played.num_turns}: {failure.reason}: {failure.detail}"
        )

    def _count(self, session: Session, result: service.Result) -> None:
        """Counts a failure. Raises BatchFailed for a failure that another attempt can't cure, and past the attempts."""
        failure = result
        if not isinstance(failure, service.Failure):
            failure = service.Failure(reason="invalid_reply", detail="there is no reply")
        if failure.reason == "lost":
            session.num_losses += 1
        else:
            session.num_failures += 1
        num_failures = session.num_failures + session.num_losses // LOSSES_OF_AN_ATTEMPT
        what = self._what(session, failure)
        most = session.played.environment.max_attempts
        if failure.reason not in service.RETRYABLE or num_failures >= most:
            raise BatchFailed(what)
        log.warning("%s; attempt %d of %d", what, num_failures + 1, most)
        if self.reward_service is not None:
            slow = failure.reason == "timeout"
            cure = "raise environment.step_timeout_s, or fix the environment" if slow else "fix the environment"
            self.reward_service.tried_again(str(current_facts().get("job", "")), f"{what} ({cure})")

    @contextlib.asynccontextmanager
    async def _living(self, sessions: Sequence[Session]) -> AsyncIterator[None]:
        """Renews the sessions, and ends them when the block does, also where it is cancelled; nothing waits for it."""
        session_ids = [session.session_id for session in sessions]
        renewing = asyncio.ensure_future(self._renew(session_ids))
        try:
            yield
        finally:
            renewing.cancel()
            task = asyncio.ensure_future(self._close(session_ids))
            self.closing.add(task)
            task.add_done_callback(self.closing.discard)

    async def _renew(self, session_ids: Sequence[str]) -> None:
        while True:
            await asyncio.sleep(RENEW_EVERY_S)
            try:
                await self.environments.renew(session_ids)
            except (EnvironmentUnavailable, InvalidInput) as error:
                log.info("%d sessions were not renewed: %s", len(session_ids), error)
            except Exception:
                # Without renewals the sessions would be idle, and end in the middle of their trajectories.
                log.exception("%d sessions were not renewed", len(session_ids))

    async def _close(self, session_ids: Sequence[str]) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await self.environments.close(session_ids)
        except (EnvironmentUnavailable, TimeoutError) as error:
            log.info("%d sessions can't be closed, and end at their idle limit: %s", len(session_ids), error)
        except Exception:
            # The batch is done without them: the service ends idle sessions itself.
            log.exception("%d sessions can't be closed, and end at their idle limit", len(session_ids))


def calls_of(prompts: Sequence[Prompt], most_tokens: int = MOST_TOKENS) -> list[list[Prompt]]:
    """Cuts the prompts of a turn, in order, into calls of at most so many tokens, each as long as its longest."""
    calls: list[list[Prompt]] = [[]]
    longest = 0
    for prompt in prompts:
        longest = max(longest, len(prompt.token_ids) // ITEM_BYTES)
        if calls[-1] and (len(calls[-1]) + 1) * longest > most_tokens:
            calls.append([])
            longest = len(prompt.token_ids) // ITEM_BYTES
        calls[-1].append(prompt)
    return calls


def _going_on(sessions: Sequence[Session]) -> list[Session]:
    """Appends the observation to each that has room for another turn, and returns these. Raises PrefixBroken.

    Messages are written by a chat template, whose process may take seconds: it runs beside the event loop, in which the
    leases of other batches are renewed.
    """
    return [session for session in sessions if session.played.goes_on()]


def _all_recorded(sessions: Sequence[Session], results: Sequence[service.Result]) -> list[service.Result | None]:
    """Does `_recorded` for each, beside the event loop, for the same reason."""
    return [_recorded(session, result) for session, result in zip(sessions, results, strict=True)]


def _recorded(session: Session, result: service.Result) -> service.Result | None:
    """Records a reply. Returns what is no reply, and a failure in place of one that nothing can go on from.

    Raises BatchFailed where the model's chat template goes beyond a bound."""
    if not isinstance(result, service.Turned) or result.reply is UNSET:
        return result
    try:
        session.played.reply(result.reply)
    except InvalidInput as error:
        if isinstance(error.__cause__, TemplateEnded):  # the machine has a part in that: no stated score follows
            raise BatchFailed(str(error)) from error
        return service.Failure(reason="invalid_reply", detail=f"it can't begin anew with its messages: {error}")
    return None


def _check_observation(session: Session, result: service.Turned) -> None:
    """Raises BatchFailed for a session that begins otherwise than the prompt says (I2 of what the model reads)."""
    if result.observation is UNSET or session.prompt.environment is UNSET:
        raise BatchFailed(f"{session.prompt.prompt_id} has no initial observation of an environment")
    digest = messages_digest(result.observation.messages, result.observation.tools)
    if digest != session.prompt.environment.observation_digest:
        raise BatchFailed(
            f"the environment opens {session.prompt.prompt_id} otherwise than when its prompt was made",
            cure="make the initial observation a function of task and seed, and its code the same for the whole job",
        )
    session.played.tools = result.observation.tools
    session.played.asks_for_tokens = result.observation.asks_for_tokens is True
