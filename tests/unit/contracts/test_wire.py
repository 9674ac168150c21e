"""How records are decoded, whatever else the process does meanwhile."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from msgspec import UNSET

from contracts.encoding.wire import Record, convert, decode, encode
from contracts.errors import InvalidInput
from tests.pipeline import REPOSITORY

THREADS_THAT_MEET_A_SPEC = """
import sys, threading, time, tomllib
from contracts.encoding.wire import convert, decode_json, encode_json
from contracts.spec.job import JobSpec

sys.setswitchinterval(1e-6)
values = tomllib.load(open("configs/demo.toml", "rb"))
found = []

def meet(after_s, read):
    time.sleep(after_s)
    found.append(read())

reads = [lambda: convert(values, JobSpec), lambda: decode_json(body, JobSpec)]
body = __import__("json").dumps(values).encode()
threads = [threading.Thread(target=meet, args=(number * 2e-4, reads[number % 2])) for number in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len({encode_json(one) for one in found}), len(found))
"""


def test_threads_that_meet_a_type_for_the_first_time_at_once_all_read_it() -> None:
    run = subprocess.run(
        [sys.executable, "-c", THREADS_THAT_MEET_A_SPEC], cwd=REPOSITORY, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout.split()) == (0, ["1", "16"]), run.stderr


@pytest.mark.parametrize("num_optional", [5, 14, 15, 16, 20])
def test_a_type_that_gains_an_optional_field_changes_no_byte_of_a_record_without_it(num_optional: int) -> None:
    """An audit chain of an older job names its records by their bytes; a map of more than 15 pairs has another head."""
    optional = [(f"field_{number}", int | msgspec.UnsetType, UNSET) for number in range(num_optional)]
    kind = msgspec.defstruct("Grown", [("name", str), *optional], bases=(Record,), frozen=True, kw_only=True)
    for num_set in range(num_optional + 1):
        values = {"name": "a"} | {f"field_{number}": number for number in range(num_set)}
        assert encode(kind(**values)) == msgspec.msgpack.encode(values)
        assert decode(encode(kind(**values)), kind) == kind(**values)


class Optimizer(Record, frozen=True, kw_only=True):
    learning_rate: float = 1e-3


class Model(Record, frozen=True, kw_only=True):
    dtype: str = "float32"
    optimizer: Optimizer = Optimizer()


def test_an_unknown_key_of_the_whole_record_has_the_keys_that_it_may_be_for_a_cure() -> None:
    with pytest.raises(InvalidInput) as caught:
        convert({"dtyp": "float64"}, Model)
    assert (caught.value.field, caught.value.cure) == (None, "did you mean dtype? One of dtype, optimizer")
    with pytest.raises(InvalidInput) as caught:
        convert({"optimizer": {"learning_rat": 1.0}}, Model)
    assert (caught.value.field, caught.value.cure) == ("optimizer", "did you mean learning_rate? One of learning_rate")
