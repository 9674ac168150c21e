"""The stage workers of a walk: each of their moves is done on a real server, which must answer and hold the same."""

from __future__ import annotations

from random import Random

import pytest

from broker.keys import STAGE_BAND, JobKeys, item_fields
from broker.ledger import Published, batch_record
from broker.stage_side import ClaimedItem, StageSide
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import decode
from contracts.errors import BrokerUnavailable
from contracts.experience.columns import pack_values
from contracts.rollouts import RolloutBatch
from tests.integration.fence_parts import AnswerLosingBroker, set_fault
from tests.model.generator_replay import WORDS
from tests.model.move import Move
from tests.model.real import RealFence
from tests.model.server import DONE, FREE, LEASED, Items, Server
from tests.model.stage_calls import StageCalls
from tests.model.stage_names import NAMES, NUM_ROWS, column_values
from tests.model.state import Bounds, State
from tests.model.worker_moves import value_of


class StageReplay:
    """The stage workers of one walk."""

    def __init__(self, broker: AnswerLosingBroker, real: RealFence, bounds: Bounds, random: Random) -> None:
        self._broker, self._real, self._bounds = broker, real, bounds
        workers = range(bounds.generators, bounds.generators + bounds.stage_workers)
        self._sides = {i: StageSide(broker, real.job_id, f"s{i}") for i in workers}
        self.calls = StageCalls(real, bounds, self._sides, random)
        self._claims: dict[int, ClaimedItem] = {}
        self._lost: dict[int, int] = {}
        """The number of the newest claim that each has not heard of."""

    @property
    def _keys(self) -> JobKeys:
        return self._real.keys

    def claim(self, state: State, move: Move, options: list[Move]) -> State:
        """The state after a claim: which item it gets is the server's choice, among those of the move's stage."""
        iteration, batch, stage, item = move.state.workers[move.who][:4]
        if move.name.startswith("claims from"):
            member = item_fields(stage, self._real.batch_id(iteration, batch), item).member
            self._broker.redis.zadd(self._keys.slot_of(iteration).work, {member: stage * STAGE_BAND + 1}, xx=True)
        if move.name == "claims, answer lost":
            return self._loses(stage, move, options)
        (claimed,) = self._sides[move.who].claim(NAMES[stage], 1)
        if move.name == "claims again":
            assert claimed.claim == self._lost[move.who]
        self._claims[move.who] = claimed
        same = [
            one
            for one in options
            if (one.name, one.who) == (move.name, move.who) and self.calls.is_at(one.state.workers[one.who], claimed)
        ]
        assert len(same) == 1, f"the model knows no {move.name} of {claimed}"
        model = same[0].state.workers[move.who]
        assert claimed.attempt == state.server.item_at(model[:4])[1] + (move.name != "claims again")
        self.calls.note(move.who, claimed, model)
        self.calls.check_inputs(claimed, model)
        return same[0].state

    def _loses(self, stage: int, move: Move, options: list[Move]) -> State:
        """The state after a claim that its stage worker never hears of."""
        self._broker.loses_next_answer = True
        with pytest.raises(BrokerUnavailable):
            self._sides[move.who].claim(NAMES[stage], 1)
        answer = decode(self._broker.lost[1], dict)
        self._lost[move.who], (found,) = answer["claim"], answer["batches"]
        named = (found["iteration"], found["batch_id"], stage, found["items"][0][0])
        claims = [(one, one.state.workers[one.who]) for one in options if (one.name, one.who) == (move.name, move.who)]
        (same,) = [
            one for one, claim in claims if named == (claim[0], self._real.batch_id(*claim[:2]), claim[2], claim[3])
        ]
        return same.state

    def does(self, state: State, move: Move) -> None:
        """A put, a failure."""
        claim, mine = self._claims[move.who], state.workers[move.who]
        if move.name.startswith("puts"):
            values = column_values(mine[2], value_of(self._bounds, mine, move.who), len(claim.rows))
            (outcome,) = self._sides[move.who].put([(claim, values)])
            assert move.name in (f"puts: {outcome.value}", "puts, answer lost"), f"{move.name}: {outcome.value}"
        elif move.name.startswith("fails its item by the same words"):
            set_fault(self._broker, self._keys, claim.batch_id, WORDS, stage=mine[2], item=claim.item)
            outcome = self._sides[move.who].fail(claim, "no cache", fault=WORDS)
            assert move.name == f"fails its item by the same words: {outcome.value}"
        elif move.name.startswith("fails its item"):
            outcome = self._sides[move.who].fail(claim, "no answer")
            assert move.name == f"fails its item: {outcome.value}"
        elif move.name.startswith("gives back its item"):
            outcome = self._sides[move.who].fail(claim, "no model", is_released=True)
            assert move.name == f"gives back its item: {outcome.value}"

    def check_columns(self, side: TrainerSide, batch: RolloutBatch, items: Items) -> None:
        """The trainer reads what the model's stages made. Raises FenceViolation as the side does."""
        found = side.columns(batch)
        for stage, values in enumerate(items, start=1):
            size = len(batch.groups) * batch.group_size // len(values)
            expected = [one for value in values for one in column_values(stage, value, size)[f"{NAMES[stage]}_column"]]
            assert list(found[f"{NAMES[stage]}_column"]) == expected

    def check(self, server: Server, name: str) -> None:
        """The server holds the items and columns of the model, and nothing else."""
        for index, slot in enumerate(self._keys.slots):
            with self._broker.redis.pipeline(transaction=True) as pipe:
                pipe.hgetall(slot.items)
                pipe.zrange(slot.work, 0, -1, withscores=True)
                pipe.hgetall(slot.ledger)
                pipe.hgetall(self._keys.progress)
                columns, work, ledger, progress = pipe.execute()
            opened = server.in_slot_of(index)
            if not opened:
                assert (columns, work) == ({}, []), name
                continue
            kept = {key: value for key, value in columns.items() if key[:2] in (b"b/", b"c/")}
            wanted: dict[bytes, bytes] = {}
            batches = server.slot_of(opened.iteration).batches
            for index, batch in enumerate(batches):
                batch_id = self._real.batch_id(opened.iteration, index)
                if not batch or len(batch.items) == 1:
                    continue
                record = batch_record(ledger[batch_id.encode()])
                assert isinstance(record, Published)
                assert record.left == batch.left, name
                payload = f"b/{batch_id}".encode()
                assert decode(kept[payload], RolloutBatch).batch_id == batch_id
                wanted[payload] = kept[payload]
                wanted |= self._check_items(batch.items, batch_id, columns, dict(work), name)
            assert kept == wanted, name
            num_waiting = sum(bool(batch and batch.left) for batch in batches)
            counted = progress.get(f"waiting:{opened.iteration % len(self._keys.slots)}".encode(), 0)
            assert int(counted) == NUM_ROWS * num_waiting, name

    def _check_items(
        self, items: Items, batch_id: str, columns: dict[bytes, bytes], work: dict[bytes, float], name: str
    ) -> dict[bytes, bytes]:
        """What the hash of columns must hold of the items."""
        wanted: dict[bytes, bytes] = {}
        for stage, of_stage in enumerate(items[1:], start=1):
            for item, one in enumerate(of_stage):
                fields = item_fields(stage, batch_id, item)
                score = work.get(fields.member.encode())
                assert (score is None) == (one[:1] in ((), (DONE,))), name
                if one[:1] == (DONE,):
                    values = column_values(stage, one[1], NUM_ROWS // len(of_stage))
                    wanted[fields.columns.encode()] = pack_values(values)
                elif one[:1] == (FREE,):
                    assert score == stage * STAGE_BAND, name
                elif one[:1] == (LEASED,):
                    assert score is not None
                    assert score > stage * STAGE_BAND, name
                    held = decode(columns[f"l/{fields.member}".encode()], dict)
                    assert (held["worker"], held["attempt"]) == (f"s{one[2]}", one[1]), name
        return wanted
