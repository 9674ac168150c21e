"""The wire does not drift: committed bytes of every type, read by our decoder and by the plain `msgpack` package."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest

import contracts
from contracts.encoding.wire import Record, decode, encode
from contracts.engines import BatchingOptions, EngineOptions, OpenaiOptions, TransformersOptions, VllmOptions
from contracts.events import Event, JobEvent
from contracts.rewards import Component
from contracts.rollouts import batch_digest
from contracts.settings import StackSettings
from contracts.spec_tables.datasets import DatasetTable
from contracts.spec_tables.stages import JudgingStage, LogProbStage, StageTable
from contracts.weights import Transport
from tests.contract.make_golden import (
    FOLDER,
    GOLDEN,
    PROMPT_TOKENS,
    RESPONSE_LOGPROBS,
    RESPONSE_TOKENS,
    rollout_batch,
)

NEVER_SENT = {
    *(Record, Component, DatasetTable, Event, StackSettings, StageTable, LogProbStage, JudgingStage, Transport),
    *(EngineOptions, BatchingOptions, TransformersOptions, VllmOptions, OpenaiOptions),
}
"""The bases, and what a process reads from its own environment."""


def golden_bytes(name: str) -> bytes:
    return (FOLDER / f"{name}.msgpack").read_bytes()


def plain(name: str) -> dict[str, Any]:
    """What a client without our types reads."""
    return msgpack.unpackb(golden_bytes(name))


def record_types() -> set[type[Record]]:
    """Every record that a module of contracts/ defines."""
    for module in pkgutil.walk_packages(contracts.__path__, "contracts."):
        importlib.import_module(module.name)
    found: set[type[Record]] = set()
    waiting: list[type[Record]] = [Record]
    while waiting:
        kinds = waiting.pop().__subclasses__()
        found.update(kinds)
        waiting += kinds
    return {kind for kind in found if kind.__module__.startswith("contracts.")} - NEVER_SENT


def records_in(value: object) -> Iterator[Record]:
    if isinstance(value, Record):
        yield value
        for name in value.__struct_fields__:
            yield from records_in(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from records_in(item)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_value_encodes_to_its_committed_bytes(name: str) -> None:
    assert encode(GOLDEN[name]) == golden_bytes(name)


@pytest.mark.parametrize("name", GOLDEN)
def test_committed_bytes_decode_to_their_value(name: str) -> None:
    assert decode(golden_bytes(name), type(GOLDEN[name])) == GOLDEN[name]


@pytest.mark.parametrize("name", GOLDEN)
def test_plain_msgpack_reads_the_same_names_and_values(name: str) -> None:
    read = msgpack.unpackb(golden_bytes(name), use_list=False)
    assert read == msgspec.to_builtins(GOLDEN[name], builtin_types=(bytes,))


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.startswith("event_")])
def test_an_event_is_recognised_among_all_events_by_its_tag(name: str) -> None:
    assert decode(golden_bytes(name), JobEvent) == GOLDEN[name]  # type: ignore[arg-type]


def test_arrays_are_raw_bytes_that_numpy_reads() -> None:
    prompt = plain("prompt_batch")["prompts"][0]
    assert np.frombuffer(prompt["token_ids"], dtype="<i4").tolist() == PROMPT_TOKENS
    completion = plain("rollout_batch")["groups"][0]["rollouts"][0]["completion"]
    assert np.frombuffer(completion["token_ids"], dtype="<i4").tolist() == RESPONSE_TOKENS
    assert np.frombuffer(completion["generator_logprobs"], dtype="<f4").tolist() == RESPONSE_LOGPROBS


def test_the_digest_of_a_batch_is_as_stable_as_its_bytes() -> None:
    """The audit chain of an older job holds such digests."""
    assert batch_digest(rollout_batch()) == "39c67dc78e1b7ec423253b7627df1298bc730be01739dec708025e0429462308"


def test_every_type_of_the_contracts_has_committed_bytes() -> None:
    sent = {type(record) for value in GOLDEN.values() for record in records_in(value)}
    assert record_types() - sent == set()


def test_every_committed_file_is_a_value_that_is_checked() -> None:
    assert {path.stem for path in FOLDER.glob("*.msgpack")} == set(GOLDEN)
