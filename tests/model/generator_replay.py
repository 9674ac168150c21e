"""The generators of a walk: each of their moves is done on a real server, which must answer the same."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from broker.generator_side import Claim, GeneratorSide, ProofDue
from contracts.encoding.wire import decode, encode
from contracts.errors import BrokerUnavailable, WrongEngine
from contracts.rollouts import PromptBatch
from contracts.versions import WeightManifest
from tests.integration.fence_checks import read
from tests.integration.fence_parts import (
    AnswerLosingBroker,
    let_expire,
    let_live,
    set_claim_times,
    set_fault,
    set_typical_time,
)
from tests.model.move import Move
from tests.model.moves import moves
from tests.model.real import LONG_S, STEP, RealFence, digest_text, engine_text, numbers_of
from tests.model.server import FREE, NONE, VARIANTS, Server, known
from tests.model.stage_names import stage_tables
from tests.model.state import Bounds, State
from tests.model.wrong_calls import OFF, Late, Others

WORDS = "AttributeError: no cache"
"""By which an attempt fails that is the last one for that."""


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
        iteration, batch = move.place[:2]
        let_expire(self._broker, self._real.keys, self._real.batch_id(iteration, batch), iteration=iteration)

    def _buries(self, move: Move) -> State:
        """A claim passes over the batch that it buries: it gets the next new one, or nothing."""
        self._expire(move)
        self._state = move.state
        following = [
            one
            for one in moves(self._state, self._bounds, OFF)
            if one.name in ("claims: claimed", "claims: unproved") and one.who == move.who
            if one.place >= move.place[:1]
        ]
        if following:
            return self._claim(following[0], following)
        assert self._generators[move.who].claim(LONG_S) is None
        return move.state

    def _is_to_hedge(self, move: Move) -> bool:
        """Whether the server would give this copy: there is nothing else, and it is of a batch's first holder.

        If so, the batch is late from here on. A `bounded` job takes no copies.
        """
        server, real, iteration = self._state.server, self._real, move.place[0]
        batch_id = real.batch_id(*move.place[:2])
        is_new = any(is_free(server, one.iteration) for one in server.window)
        claims = read(self._broker, real.keys).slot_of(iteration).claims
        is_idle = not self._state.workers[move.who] and server.item_at(move.place)[2] != move.who
        if self._bounds.is_bounded or is_new or not is_idle or batch_id not in claims:
            return False
        set_typical_time(self._broker, real.keys, LONG_S)
        set_claim_times(self._broker, real.keys, batch_id, iteration=iteration, claimed_ms=1)
        return True

    def _claim(self, move: Move, options: list[Move]) -> State:
        real, who = self._real, move.who
        if move.name.startswith("claims from"):
            self._expire(move)
        claim = self._answer(move)
        if isinstance(claim, ProofDue):
            return self._must_show(move, claim)
        if move.name.startswith("claims again"):
            assert claim.number == self._numbers[who]
        else:
            assert claim.number > max(self._numbers), "a number comes once, and grows"
        self._claims[who], self._numbers[who] = claim, claim.number
        name = _granted(move.name)
        same = [
            one
            for one in options
            if (one.name, one.who) == (name, who)
            and real.batch_id(*one.place[:2]) == claim.prompt_batch.batch_id
            and one.state.workers[who][5] in ((), *((digest,) for digest in self._digests(claim)))
        ]
        assert len(same) == 1, f"the model knows no {move.name} of {claim.prompt_batch.batch_id}"
        oldest = min(one.place[0] for one in options if _granted(one.name) == name and one.who == who)
        assert same[0].place[0] == (oldest if move.name.startswith(("claims: ", "claims,")) else move.place[0])
        self._note_claim(same[0], claim)
        return same[0].state

    def _must_show(self, move: Move, due: ProofDue) -> State:
        """The state after an answer that no claim was given, which is the same one: the version is not shown (I11)."""
        server = self._state.server
        digests = self._digests(due)
        assert any(digest in server.weights for digest in digests), move
        assert server.proofs[move.who][due.manifest.policy_version] not in digests, move
        if move.name.startswith("claims from"):
            iteration, batch = move.place[:2]
            let_live(self._broker, self._real.keys, self._real.batch_id(iteration, batch), iteration=iteration)
        return self._state

    def _proves(self, move: Move) -> str:
        """Shows a version's probe as the engine computes it; returns what counts the verdict."""
        (digest,) = move.place
        side = self._generators[move.who]
        right = numbers_of(digest)
        noise = np.float32([self._random.uniform(-0.02, 0.02) for _ in right])
        engines = {"proved": right + noise, "far": right + np.float32(4), "not_finite": right * np.float32("nan")}
        if digest >= VARIANTS:
            engines["stale"] = right - np.float32(STEP) + noise
        wrong = sorted(engines.keys() - {"proved"})
        outcome = self._random.choice(wrong) if move.name == "proves: refused" else "proved"
        verdict = side.prove(self._real.manifest(digest), engines[outcome].tobytes(), kind="kind float32")
        assert verdict.outcome == outcome, move
        # The model's generators show a version that a restart has forgotten by a move of their own.
        side._proofs.clear()
        return "proved" if outcome == "proved" else f"proof_{outcome}"

    def _note_claim(self, move: Move, claim: Claim) -> None:
        """Its generator may come back with it late, if it has heard of it."""
        if not claim.hedged:
            self._others.newest[move.place[:2]] = claim.number
        if move.name != "claims, answer lost":
            self._others.claims.append(Late(move.who, claim, move.state.workers[move.who]))

    def _answer(self, move: Move) -> Claim | ProofDue:
        """What the server gives, also where its generator never hears of it."""
        side = self._generators[move.who]
        if move.name != "claims, answer lost":
            is_copy = move.name == "takes a copy"
            claim = side.claim(LONG_S, loaded=self._held(move), hedge=is_copy)
            assert claim is not None, move
            assert isinstance(claim, ProofDue) or claim.hedged == is_copy
            return claim
        self._broker.loses_next_answer = True
        with pytest.raises(BrokerUnavailable):
            side.claim(LONG_S)
        outcome, *rest = self._broker.lost
        if outcome == b"unproved":
            return ProofDue(manifest=decode(rest[0], WeightManifest))
        attempt, number, payload, packed = rest
        return Claim(
            prompt_batch=decode(payload, PromptBatch),
            number=number,
            attempt=attempt,
            manifest=decode(packed, WeightManifest),
        )

    def _digests(self, claim: Claim | ProofDue) -> list[int]:
        """The digests of the model that a claim's version may be."""
        first = VARIANTS * claim.manifest.policy_version
        every = range(first, first + VARIANTS)
        return [digest for digest in every if digest_text(digest) == claim.manifest.weights_digest]

    def _held(self, move: Move) -> tuple[int, str] | None:
        """The weights that the generator holds at this claim; those of a version that is gone are none of the range."""
        there = known(self._state.server.versions, 0, self._bounds.iterations)
        digest = there[-1]
        if not move.name.endswith(": unproved"):
            (digest,) = move.state.workers[move.who][5]
        held = self._random.choice((digest, digest, there[0], digest + 1, NONE))
        return None if held == NONE else (held // VARIANTS, digest_text(held))

    def _generator_does(self, move: Move) -> None:
        claim, mine = self._claims[move.who], self._state.workers[move.who]
        if move.name == "asks for work: wrong_engine":
            with pytest.raises(WrongEngine, match="is sampled with"):
                self._generators[move.who].claim(LONG_S)
        elif move.name == "takes a copy":
            owner = self._state.server.item_at(move.place)[2]
            self._claims[move.who] = self._claims[owner]
        elif move.name.startswith("publishes"):
            assert claim is not None
            batch = self._real.rollouts(mine[0], mine[1], content=4 * mine[4] + move.who, digest=mine[5][0])
            self._num_bytes = len(encode(batch))
            outcome = self._generators[move.who].publish(claim, batch).value
            assert move.name in (f"publishes: {outcome}", "publishes, answer lost"), outcome
        elif move.name.startswith("fails its item by the same words"):
            assert claim is not None
            set_fault(self._broker, self._real.keys, claim.prompt_batch.batch_id, WORDS)
            outcome = self._generators[move.who].fail(claim, "no cache", fault=WORDS).value
            assert move.name == f"fails its item by the same words: {outcome}"
        elif move.name.startswith("fails"):
            assert claim is not None
            assert move.name == f"fails its item: {self._generators[move.who].fail(claim, 'no reward').value}"
        elif move.name.startswith("gives back"):
            assert claim is not None
            outcome = self._generators[move.who].fail(claim, "no mount", is_released=True).value
            assert move.name == f"gives back its item: {outcome}"


def _granted(name: str) -> str:
    """The name of the same claim where its generator has shown the version."""
    if name.startswith("claims again"):
        return "claims again"
    return name.replace(": unproved", ": claimed")


def is_free(server: Server, iteration: int, stage: int = 0) -> bool:
    """Whether an item of the stage is free in an open iteration."""
    batches = server.slot_of(iteration).batches
    return any(
        item[:1] == (FREE,) for batch in batches if batch and stage < len(batch.items) for item in batch.items[stage]
    )
