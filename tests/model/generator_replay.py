"""The generators of a walk: each of their moves is done on a real server, which must answer the same."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from broker.generator_side import Claim, GeneratorSide
from contracts.encoding.wire import decode, encode
from contracts.errors import BrokerUnavailable, WrongEngine
from contracts.rollouts import PromptBatch
from contracts.versions import WeightManifest
from tests.integration.fence_checks import read
from tests.integration.fence_parts import AnswerLosingBroker, let_expire, set_ledger_times, set_typical_time
from tests.model.move import Move
from tests.model.moves import moves
from tests.model.real import LONG_S, RealFence, digest_text, engine_text
from tests.model.server import NONE, VARIANTS, known
from tests.model.stage_names import stage_tables
from tests.model.state import Bounds, State
from tests.model.wrong_calls import OFF, Late, Others


class GeneratorReplay:
    """A job of the model on a real server, with its generators."""

    def __init__(self, broker: AnswerLosingBroker, random: Random, bounds: Bounds) -> None:
        self._broker, self._random, self._bounds = broker, random, bounds
        spec: dict[str, Any] = {"stages": stage_tables(bounds)} if bounds.stages else {}
        self._real = RealFence(broker, bounds, rollout__max_attempts=bounds.max_attempts, **spec)
        self._state = bounds.first_state()
        self._generators = [
            GeneratorSide(self._broker, self._real.job_id, f"g{i}", engine=engine_text(bounds.engine_of(i)) or None)
            for i in range(bounds.generators)
        ]
        for side in self._generators:
            side.wait_for_prompts(0.001)  # each knows the job's spec, as one that has claimed does
        self._claims: list[Claim | None] = [None] * bounds.generators
        self._numbers = [0] * bounds.generators
        """[generators] The number of the newest claim of each, whether it has heard of it or not."""
        self._others = Others(broker, self._real, bounds, random)
        self._num_bytes = 0
        """The size of the batch that was published last."""

    def _expire(self, move: Move) -> None:
        """Ends the lease of the move's batch, as time would."""
        entry = self._state.server.slot_of(move.iteration).batches[move.batch][1]
        let_expire(self._broker, self._real.keys, f"g{entry[3]}", self._entry_id(move), iteration=move.iteration)

    def _entry_id(self, move: Move) -> str:
        batch_id = self._real.batch_id(move.iteration, move.batch)
        prompts = read(self._broker, self._real.keys).slot_of(move.iteration).prompts
        return next(entry for entry, named, _ in prompts if named == batch_id)

    def _buries(self, move: Move) -> State:
        """A claim passes over the batch that it buries: it gets the next new one, or nothing."""
        self._expire(move)
        self._state = move.state
        following = [
            one
            for one in moves(self._state, self._bounds, OFF)
            if (one.name, one.who) == ("claims: claimed", move.who) and one.iteration >= move.iteration
        ]
        if following:
            return self._claim(following[0], following)
        assert self._generators[move.who].claim(LONG_S) is None
        return move.state

    def _is_to_hedge(self, move: Move) -> bool:
        """Whether the server would give this copy: there is nothing else, and it is of a batch's first holder.

        If so, the batch is late from here on. A `bounded` job takes no copies.
        """
        server, real = self._state.server, self._real
        batch_id = real.batch_id(move.iteration, move.batch)
        slots = [server.slot_of(one.iteration).batches for one in server.window]
        entry = server.slot_of(move.iteration).batches[move.batch][1]
        is_new = any(one and not one[2] for slot in slots for _, one in slot)
        claims = read(self._broker, real.keys).slot_of(move.iteration).claims
        is_idle = not self._state.generators[move.who] and entry[3] != move.who
        if self._bounds.is_bounded or is_new or not is_idle or batch_id not in claims:
            return False
        set_typical_time(self._broker, real.keys, LONG_S)
        set_ledger_times(self._broker, real.keys, batch_id, iteration=move.iteration, claimed_ms=1)
        return True

    def _claim(self, move: Move, options: list[Move]) -> State:
        real, who = self._real, move.who
        if move.name.startswith("claims from"):
            self._expire(move)
        claim = self._answer(move)
        if move.name == "claims again":
            assert claim.number == self._numbers[who]
        else:
            assert claim.number > max(self._numbers), "a number comes once, and grows"
        self._claims[who], self._numbers[who] = claim, claim.number
        same = [
            one
            for one in options
            if (one.name, one.who) == (move.name, who)
            and real.batch_id(one.iteration, one.batch) == claim.prompt_batch.batch_id
            and one.state.generators[who][2] in (NONE, *self._digests(claim))
        ]
        assert len(same) == 1, f"the model knows no {move.name} of {claim.prompt_batch.batch_id}"
        oldest = min(one.iteration for one in options if (one.name, one.who) == (move.name, who))
        assert same[0].iteration == (oldest if move.name.startswith(("claims: ", "claims,")) else move.iteration)
        self._note_claim(same[0], claim)
        return same[0].state

    def _note_claim(self, move: Move, claim: Claim) -> None:
        """Its generator may come back with it late, if it has heard of it."""
        if not claim.hedged:
            self._others.newest[move.iteration, move.batch] = claim.number
        if move.name != "claims, answer lost":
            self._others.claims.append(Late(move.who, claim, move.state.generators[move.who][:5]))

    def _answer(self, move: Move) -> Claim:
        """The claim that the server gives, also where its generator never hears of it."""
        side = self._generators[move.who]
        if move.name != "claims, answer lost":
            is_copy = move.name == "takes a copy"
            claim = side.claim(LONG_S, held=self._held(move), hedge=is_copy)
            assert claim is not None, move
            assert claim.hedged == is_copy
            return claim
        self._broker.loses_next_answer = True
        with pytest.raises(BrokerUnavailable):
            side.claim(LONG_S)
        _, entry, attempt, number, payload, packed = self._broker.lost
        return Claim(
            prompt_batch=decode(payload, PromptBatch),
            entry_id=entry.decode(),
            number=number,
            attempt=attempt,
            manifest=decode(packed, WeightManifest),
        )

    def _digests(self, claim: Claim) -> list[int]:
        """The digests of the model that a claim's version may be."""
        first = VARIANTS * claim.manifest.policy_version
        every = range(first, first + VARIANTS)
        return [digest for digest in every if digest_text(digest) == claim.manifest.weights_digest]

    def _held(self, move: Move) -> tuple[int, str] | None:
        """The weights that the generator holds at this claim; those of a version that is gone are none of the range."""
        digest = move.state.generators[move.who][2]
        there = known(self._state.server.versions, 0, self._bounds.iterations)
        held = self._random.choice((digest, digest, there[0], digest + 1, NONE))
        return None if held == NONE else (held // VARIANTS, digest_text(held))

    def _generator_does(self, move: Move) -> None:
        claim, mine = self._claims[move.who], self._state.generators[move.who]
        if move.name == "asks for work: wrong_engine":
            with pytest.raises(WrongEngine, match="is sampled with"):
                self._generators[move.who].claim(LONG_S)
        elif move.name == "takes a copy":
            owner = self._state.server.slot_of(move.iteration).batches[move.batch][1][3]
            self._claims[move.who] = self._claims[owner]
        elif move.name.startswith("publishes"):
            assert claim is not None
            batch = self._real.rollouts(mine[0], mine[1], content=4 * mine[4] + move.who, digest=mine[2])
            self._num_bytes = len(encode(batch))
            outcome = self._generators[move.who].publish(claim, batch).value
            assert move.name in (f"publishes: {outcome}", "publishes, answer lost"), outcome
        elif move.name.startswith("fails"):
            assert claim is not None
            assert move.name == f"fails its batch: {self._generators[move.who].fail(claim, 'no reward').value}"
        elif move.name.startswith("gives back"):
            assert claim is not None
            outcome = self._generators[move.who].fail(claim, "no mount", is_released=True).value
            assert move.name == f"gives back its batch: {outcome}"
