"""The wire does not drift: committed bytes of every type, read by our decoder and by the plain `msgpack` package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest

from contracts.encoding.wire import Record, Table, decode, encode
from contracts.engines import BatchingOptions, EngineOptions, OpenaiOptions, TransformersOptions, VllmOptions
from contracts.events import Event, JobEvent
from contracts.jobs import JobCounts
from contracts.monitor import WorkerSeen
from contracts.rewards import Component
from contracts.rollouts import Batch, batch_digest
from contracts.settings import StackSettings
from contracts.spec.datasets import DatasetTable, DrawnTable, RowsTable
from contracts.spec.rollout import HeldOutSpec
from contracts.spec.stages import JudgingStage, LogProbStage, StageTable
from contracts.weights import Transport
from tests.contract.golden_files import NAMES, golden, golden_bytes, kind_of, record_types

NEVER_SENT = {
    *(
        Component,
        DatasetTable,
        DrawnTable,
        RowsTable,
        Event,
        HeldOutSpec,
        StackSettings,
        StageTable,
        LogProbStage,
        JudgingStage,
        Transport,
    ),
    *(Batch, JobCounts, Table, WorkerSeen),
    *(EngineOptions, BatchingOptions, TransformersOptions, VllmOptions, OpenaiOptions),
}
"""The bases, and what a process reads from its own environment."""
EVENTS = [name for name in NAMES if issubclass(kind_of(name), Event)]


def plain(name: str) -> dict[str, Any]:
    """What a client without our types reads."""
    return msgpack.unpackb(golden_bytes(name))


def records_in(value: object) -> Iterator[Record]:
    if isinstance(value, Record):
        yield value
        for name in value.__struct_fields__:
            yield from records_in(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from records_in(item)


@pytest.mark.parametrize("name", NAMES)
def test_committed_bytes_decode_to_a_value_that_encodes_to_them(name: str) -> None:
    assert encode(golden(name)) == golden_bytes(name)


@pytest.mark.parametrize("name", NAMES)
def test_plain_msgpack_reads_the_same_names_and_values(name: str) -> None:
    read = msgpack.unpackb(golden_bytes(name), use_list=False)
    assert read == msgspec.to_builtins(golden(name), builtin_types=(bytes,))


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_is_recognised_among_all_events_by_its_tag(name: str) -> None:
    assert decode(golden_bytes(name), JobEvent) == golden(name)  # type: ignore[arg-type]


def test_arrays_are_raw_bytes_that_numpy_reads() -> None:
    prompt = plain("PromptBatch")["prompts"][0]
    assert np.frombuffer(prompt["token_ids"], dtype="<i4").tolist() == [5, 70_000, 2_147_483_647]
    completion = plain("RolloutBatch")["groups"][0]["rollouts"][0]["completion"]
    assert np.frombuffer(completion["token_ids"], dtype="<i4").tolist() == [17, 1]
    assert np.frombuffer(completion["generator_logprobs"], dtype="<f4").tolist() == [-0.25, -1.5]


def test_the_digest_of_a_batch_is_as_stable_as_its_bytes() -> None:
    """The audit chain of an older job holds such digests."""
    digest = "39c67dc78e1b7ec423253b7627df1298bc730be01739dec708025e0429462308"
    assert batch_digest(golden("RolloutBatch")) == digest


def test_every_type_of_the_contracts_has_committed_bytes() -> None:
    sent = {type(record) for name in NAMES for record in records_in(golden(name))}
    assert record_types() - NEVER_SENT - sent == set()
