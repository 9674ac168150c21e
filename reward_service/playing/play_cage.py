"""The service's side of one child: start it, give it work under a deadline for each call, end it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from contracts.encoding.wire import decode, encode
from contracts.environments.service import EnvironmentTable, Failure, FailureReason, Result
from contracts.errors import ContractViolation
from onbeat.base.cage.cage import CageRules
from onbeat.base.cage.caged_process import CagedProcess
from onbeat.base.cage.frames import Gone, Late
from reward_service.player.player import FLUSH_BYTES
from reward_service.player.protocol import Answers, Load, Loaded, Place, Play, Work

NO_ANSWER = "the environment's process sent what is no answer"
"""It doesn't name the session that sent it, which can't be told: the child may have gone on meanwhile."""
SEND_TIMEOUT_S = 60.0
"""A child that reads no work is stuck in what an earlier session left behind."""
CALLS_OF_A_PLAY = 4
"""Beside the turns of its history: made, reset, stepped, closed."""
HASH_SEED = 0
"""Equal in all processes, so that the order of a set of texts is no chance."""


class Interrupted(Exception):
    """The child is gone before it answered all; `at`: the place of the play that cost it, None where it isn't known."""

    def __init__(self, at: int | None, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.at = at
        self.failure = failure


class PlayCage(CagedProcess):
    """Its child plays the sessions of one environment."""

    module = "reward_service.player.player"
    noun = "the environment"
    hash_seed = HASH_SEED

    def __init__(
        self,
        rules: CageRules,
        *,
        environment: EnvironmentTable,
        reply_bytes: int,
        start_timeout_s: float,
        operators_part: bytes | None,
        on_empty: Callable[[], None] = lambda: None,
        on_printed: Callable[[str], None] = lambda printed: None,
    ) -> None:
        """on_printed: takes what the environment prints. The others are those of a `CagedProcess` and of a `Load`."""
        super().__init__(rules, start_timeout_s=start_timeout_s, on_empty=on_empty)
        self._load = Load(environment=environment, reply_bytes=reply_bytes, operators_part=operators_part)
        self._on_printed = on_printed
        self._is_warm = False
        self._place: Place | None = None

    def start_child(self) -> Loaded:
        """Has a child that has loaded the environment, in place of the one before. Raises ChildLate, ChildDied."""
        self._drop_child()
        deadline_s = self.start_ends_s()
        if not self._is_warm:
            self.prepare(encode(self._load.environment), deadline_s=deadline_s)
            self._is_warm = True
        child = self.fresh_child(max_bytes=self._load.reply_bytes + 4 * FLUSH_BYTES)
        self._place, page = Place.made_with_handle()
        with self.heard(self.importing):
            with page:
                child.send_handle(encode(self._load), page.fileno())
            loaded = decode(child.receive(deadline_s=deadline_s), Loaded)
        self._on_printed(loaded.printed)
        if loaded.failure is not None:
            self._drop_child()
        return loaded

    def play(self, plays: Sequence[Play], *, call_timeout_s: Sequence[float]) -> Iterator[Result]:
        """Results in order, as they come. Raises Interrupted; then only `start_child` or `end` may follow.

        call_timeout_s: for each play, how long each of its calls may take.
        """
        assert self.child is not None
        calls_left = sum(len(play.history) + CALLS_OF_A_PLAY for play in plays)
        num_answered = 0
        try:
            self.child.send(encode(Work(plays=tuple(plays))), deadline_s=time.monotonic() + SEND_TIMEOUT_S)
            while num_answered < len(plays):
                results = self._receive(num_answered, call_timeout_s)
                calls_left -= not results
                if num_answered + len(results) > len(plays) or calls_left < 0:
                    raise ContractViolation("it answers out of turn")
                for result in results:
                    num_answered += 1
                    yield result
        except Late:
            at = self._place_of(num_answered, len(plays))
            limit_s = call_timeout_s[num_answered if at is None else at]
            detail = f"a call of the environment took more than {limit_s:g} s; its process was killed"
            raise self._interrupted(num_answered if at is None else at, "timeout", detail) from None
        except (Gone, ContractViolation) as error:
            if error.args:
                raise self._interrupted(None, "crashed", f"{NO_ANSWER}: {error}") from None
            at = self._place_of(num_answered, len(plays))
            raise self._interrupted(at, "crashed", str(self.child_death())) from None

    def end(self) -> None:
        self._drop_child()
        super().end()

    def _receive(self, num_answered: int, call_timeout_s: Sequence[float]) -> tuple[Result, ...]:
        """The next results. A play that the child has come to in silence has its own deadline. Raises Late, Gone."""
        assert self.child is not None
        since_s = time.monotonic()
        at = num_answered
        while True:
            try:
                answers = decode(self.child.receive(deadline_s=since_s + call_timeout_s[at]), Answers)
                self._on_printed(answers.printed)
                return answers.results
            except Late:
                place = self._place_of(num_answered, len(call_timeout_s))
                if place is None or call_timeout_s[place] <= call_timeout_s[at]:
                    raise
                at = place

    def _place_of(self, num_answered: int, num_plays: int) -> int | None:
        """Returns the play that the child is at; None where what it says can't be believed."""
        at = self._place.at if self._place is not None else num_plays
        return at if num_answered <= at < num_plays else None

    def _interrupted(self, at: int | None, reason: FailureReason, detail: str) -> Interrupted:
        self._drop_child()
        return Interrupted(at, Failure(reason=reason, detail=detail))

    def _drop_child(self) -> None:
        """Kills the child with all that it started."""
        if self.child is not None:
            self.end_child()
        if self._place is not None:
            self._place.close()
            self._place = None
