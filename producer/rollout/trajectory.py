"""A trajectory while it is played: its tokens, its turns, and whether another turn has room.

    take(sampled) ─▶ message ─▶ (the environment) ─┬▶ reply(…) ─▶ goes_on() ─▶ context of the next turn
                                                   └▶ fail(…): it ends here, with the score that is stated for that

Tokens are only ever appended: what the model saw and sampled is what is trained (I9). Where the environment begins
anew, the model sees what stands from there on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from contracts.encoding.arrays import pack_int32, unpack_int32
from contracts.encoding.digests import content_digest
from contracts.environments.messages import EnvironmentNumbers, Message, Sampled, Tool
from contracts.environments.service import Played, Reply, Task, reply_digest
from contracts.errors import BatchFailed, InvalidInput, PrefixBroken
from contracts.rewards import StatedReason
from contracts.rollouts import Completion, FinishReason, Prompt, PromptBatch, StopReason, Trajectory, Turn
from contracts.spec.environment import EnvironmentSpec
from contracts.versions import PolicyVersion
from onbeat.data.rendering.base import Renderer


@dataclass(kw_only=True)
class PlayedTrajectory:
    """A trajectory that grows by a turn and an observation at a time, until `goes_on` returns False.

    The player of turns creates and changes it; its session reads it.
    """

    task: Task
    environment: EnvironmentSpec
    renderer: Renderer
    max_new_tokens: int
    policy_version: PolicyVersion
    prompt_ids: tuple[int, ...]
    attempt: int = 1
    """How many times it was begun, from its first turn."""
    context: list[int] = field(default_factory=list)
    """The prompt and all tokens after it."""
    _begins: int = 0
    """Place in the context from which on the model sees its tokens: where the environment last began anew. 0: it never
    did, and the model sees all of the context, the prompt included. (It can't have begun anew at 0: the prompt is
    there.)"""
    tools: tuple[Tool, ...] = ()
    asks_for_tokens: bool = False
    """True: the environment gets the sampled tokens next to the model's message."""
    history: tuple[Played, ...] = ()
    _turns: list[Turn] = field(default_factory=list)
    _logprobs: list[bytes] = field(default_factory=list)
    _kept_sets: list[bytes] = field(default_factory=list)
    """The packed kept sets of each turn, with truncated sampling."""
    _open_turn: tuple[int, FinishReason] | None = None
    """Start of the turn that has no reply yet, and why it ended."""
    _message: Message | None = None
    _reply: Reply | None = None
    _fresh_context: list[int] = field(default_factory=list)
    """The tokens of the reply's messages, where it begins anew."""
    _stop: StopReason | None = None
    _failure: StatedReason | None = None

    @classmethod
    def of(
        cls, prompt: Prompt, batch: PromptBatch, environment: EnvironmentSpec, renderer: Renderer, *, attempt: int = 1
    ) -> PlayedTrajectory:
        """Begins the trajectory of a prompt.

        Args:
            prompt: A prompt of the batch.
            batch: The batch.
            environment: The prompt's environment.
            renderer: Renders messages to tokens.
            attempt: The number of the try, from 1 on.

        Raises:
            BatchFailed: The prompt is none that an environment opened.
        """
        if prompt.environment is UNSET:
            raise BatchFailed(f"{prompt.prompt_id} has no task of an environment")
        prompt_ids = tuple(unpack_int32(prompt.token_ids))
        return cls(
            task=Task(task=prompt.environment.task, seed=prompt.environment.seed, sampling=batch.sampling),
            environment=environment,
            renderer=renderer,
            max_new_tokens=batch.sampling.max_new_tokens,
            policy_version=batch.policy_version,
            prompt_ids=prompt_ids,
            attempt=attempt,
            context=list(prompt_ids),
        )

    @property
    def num_turns(self) -> int:
        """Turns that were sampled."""
        return len(self._turns) + (self._open_turn is not None)

    @property
    def seen(self) -> list[int]:
        """The tokens that the model sees: all of them, or those since it began anew."""
        return self.context[self._begins :] if self._begins else self.context

    @property
    def message(self) -> Message:
        """The model's message of its last turn."""
        if self._message is None:
            raise AssertionError("no turn was sampled yet")
        return self._message

    def take(self, sampled: Completion) -> None:
        """Appends a turn."""
        turn = unpack_int32(sampled.token_ids)
        self._message = self.renderer.parse(self.seen, turn, self.tools)
        if self.asks_for_tokens:
            self._message = replace(self._message, sampled=self._sampled(sampled))
        self._open_turn = (self._num_tokens, sampled.finish_reason)
        self._logprobs.append(sampled.generator_logprobs)
        if sampled.kept_sets is not UNSET:
            self._kept_sets.append(sampled.kept_sets)
        self.context += turn

    def reply(self, reply: Reply) -> None:
        """Records the environment's reply to the turn.

        Raises:
            InvalidInput: The context can't begin anew with the reply's messages; nothing is recorded then.
        """
        fresh_context: list[int] = []
        if reply.begins_anew and not reply.done:
            fresh_context = self.renderer.open(reply.messages, self.tools)
            if not fresh_context:
                raise InvalidInput("the messages with which it begins anew have no tokens", field="messages")
        self._fresh_context = fresh_context
        digest = reply_digest(reply)
        self._close_turn(reward=reply.reward, digest=digest)
        self._reply = reply
        self.history = (*self.history, Played(message=self.message, reply_digest=digest))

    def fail(self, reason: StatedReason, score: float) -> None:
        """Ends the trajectory with a turn at which the environment failed: `score` is its whole reward.

        What earlier turns were given goes: else a model could collect it, and then end the trajectory by a failure.
        """
        self._turns = [replace(turn, reward=0.0) for turn in self._turns]
        self._close_turn(reward=score, digest=content_digest(reason.encode()))
        self._stop = "failed"
        self._failure = reason

    def _close_turn(self, *, reward: float, digest: str) -> None:
        if self._open_turn is None:
            raise AssertionError("a reply follows a turn")
        start, finish_reason = self._open_turn
        # A turn counts tokens from the end of the prompt on, as `token_ids` of its completion does; `_begins` counts
        # from the beginning of the context.
        self._open_turn = None
        self._turns.append(
            Turn(
                start=start,
                end=self._num_tokens,
                finish_reason=finish_reason,
                reward=reward,
                reply_digest=digest,
                sees_from=self._begins - len(self.prompt_ids) if self._begins else UNSET,
            )
        )

    def goes_on(self) -> bool:
        """Appends the observation where another turn has room, by counts alone. Raises PrefixBroken."""
        self._stop = self._stop or self._stop_reason()
        if self._stop is not None or self._reply is None:
            return False
        start = len(self.prompt_ids) + self._turns[-1].start
        begins = self._begins
        messages = self._reply.messages
        if self._reply.begins_anew:
            begins = len(self.context)
            observation = self._fresh_context
        else:
            observation = self.renderer.go_on(self.context[begins:start], self.context[start:], messages, self.tools)
        added = len(observation) + self.max_new_tokens
        # Neither bound counts the tokens of the prompt: tokens that the model sees count from the end of the prompt on,
        # or, where it began anew, from there.
        num_seen = len(self.context) - (begins or len(self.prompt_ids))
        most = self.environment.max_tokens
        _, most_seen = self.environment.seen_bound
        if self._num_tokens + added > most or num_seen + added > most_seen:
            self._stop = "max_tokens"
            return False
        if not all(type(token) is int and token >= 0 for token in observation):
            raise PrefixBroken("a renderer answered what are no tokens")
        self.context += observation
        self._begins = begins
        return True

    def completion(self) -> Completion:
        """Returns the whole trajectory, which ends with its last turn."""
        if self._stop is None:
            raise AssertionError("a trajectory that goes on is no completion")
        metrics: EnvironmentNumbers = {}
        if self._reply is not None and self._failure is None:
            metrics = self._reply.metrics
        return Completion(
            token_ids=pack_int32(self.context[len(self.prompt_ids) :]),
            generator_logprobs=b"".join(self._logprobs),
            finish_reason=self._turns[-1].finish_reason,
            trajectory=Trajectory(
                turns=tuple(self._turns),
                stop=self._stop,
                attempt=self.attempt,
                metrics=metrics,
                failure=self._failure or UNSET,
            ),
            kept_sets=b"".join(self._kept_sets) or UNSET,
        )

    def _sampled(self, completion: Completion) -> Sampled:
        """Returns the facts of a turn before it is appended."""
        return Sampled(
            token_ids=completion.token_ids,
            logprobs=completion.generator_logprobs,
            finish_reason=completion.finish_reason,
            num_prompt_tokens=len(self.seen),
            policy_version=self.policy_version,
        )

    @property
    def _num_tokens(self) -> int:
        """The number of tokens after the prompt."""
        return len(self.context) - len(self.prompt_ids)

    def _stop_reason(self) -> StopReason | None:
        """Returns the reason why there is no other turn, as far as it is known before the observation is rendered."""
        if self._reply is not None and self._reply.done:
            return "truncated" if self._reply.truncated else "done"
        if self._turns[-1].finish_reason == "length":
            # The model had not ended its turn: what it would have said is unknown, and so is what is answered to it.
            return "max_tokens"
        if len(self._turns) == self.environment.max_turns:
            return "max_turns"
        return None
