"""No valid job ends a stack: every number has two bounds, every text and list a longest length, and products too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta
from msgspec import inspect as types

from contracts.encoding.wire import decode_json, encode_json
from contracts.errors import InvalidInput, SpecRefused
from contracts.jobs import ResumeRequest
from contracts.rewards import RewardComponent
from contracts.spec.job import JobSpec
from tests.builders import job_spec, judged_spec
from tests.refusals import refusal_of


def unbounded(kind: types.Type, path: str, *, texts: bool = True) -> Iterator[str]:
    """Paths of all that a spec may hold any amount of; every member of every union is walked.

    texts: whether a text needs a bound.
    """
    match kind:
        case types.IntType() | types.FloatType():
            if (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None):
                yield path
        case types.StrType():
            if texts and kind.max_length is None:
                yield path
        case types.StructType():
            for field in kind.fields:
                yield from unbounded(field.type, f"{path}.{field.name}", texts=texts)
        case types.UnionType():
            members = {type(member) for member in kind.types if not isinstance(member, types.StrType) or member.pattern}
            if types.StrType in members and members & {types.VarTupleType, types.ListType, types.DictType}:
                yield f"{path}: msgspec 0.22 frees the pattern of a text beside a list or table twice"
            for member in kind.types:
                yield from unbounded(member, f"{path}|{getattr(member, 'tag', '')}", texts=texts)
        case types.VarTupleType():
            if kind.max_length is None:
                yield path
            yield from unbounded(kind.item_type, f"{path}[]", texts=texts)
        case types.DictType():
            if kind.max_length is None:
                yield path
            yield from unbounded(kind.key_type, f"{path}.key", texts=texts)
            yield from unbounded(kind.value_type, f"{path}.value", texts=texts)
        case types.BoolType() | types.LiteralType() | types.NoneType():
            return
        case _:
            yield f"{path}: {kind}, which this test doesn't know"


@pytest.mark.parametrize("kind", [JobSpec, RewardComponent, ResumeRequest], ids=["job", "reward component", "resume"])
def test_everything_that_a_job_may_hold_has_a_bound(kind: Any) -> None:
    assert list(unbounded(types.type_info(kind), "")) == []


class Inner(msgspec.Struct, tag="inner"):
    factor: float


class Outer(msgspec.Struct):
    name: str
    members: tuple[Inner | int, ...]
    either: Annotated[str, Meta(max_length=9, pattern="^a")] | Annotated[tuple[bool, ...], Meta(max_length=9)]


def test_the_walk_finds_what_has_no_bound_and_what_frees_a_pattern_twice() -> None:
    paths = {path.partition(":")[0] for path in unbounded(types.type_info(Outer), "")}
    assert paths == {".name", ".members", ".members[]|inner.factor", ".members[]|", ".either"}


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("rollout.group_size", 10**8, "<= 4096"),
        ("timeouts.iteration_s", 1e300, "<= 604800"),
        ("timeouts.generator_lease_s", 1e-9, ">= 0.01"),
        ("iterations", 10**30, "<= 1000000"),
        ("name", "a\nforged log line", "control characters"),
        ("name", "\x1b[2Jcleared", "control characters"),
        ("name", "right\u202eto left", "control characters"),
        ("name", "ends with a line break\n", "control characters"),
        ("model.path", "models/\0", "control characters"),
        ("model.path", "m" * 5000, "length <= 1024"),
    ],
)
def test_what_is_beyond_its_bound_is_refused_by_its_name(path: str, value: object, problem: str) -> None:
    with refusal_of(path, match=problem):
        job_spec(**{path.replace(".", "__"): value})


@pytest.mark.parametrize("text", ["two-digit addition", "réponses № 1 — 数学", "β=0.9 (run/3) 🎲"])
def test_a_name_may_be_in_any_language(text: str) -> None:
    assert job_spec(name=text).name == text


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rollout__prompts_per_batch": 4096, "rollout__group_size": 4096}, "16,777,216 completions of a batch"),
        (
            {"rollout__prompts_per_batch": 64, "rollout__group_size": 64, "rollout__sampling__max_new_tokens": 2**20},
            "4,294,967,296 tokens of a batch",
        ),
        (
            {
                "rollout__prompts_per_batch": 64,
                "rollout__group_size": 64,
                "environment": {"name": "calculator", "max_tokens": 2**20},
            },
            "rollout.group_size . environment.max_tokens make 4,294,967,296 tokens of a batch",
        ),
        (
            {"evaluation__prompts_per_batch": 4096, "rollout__sampling__max_new_tokens": 2**20},
            "4,294,967,296 tokens of an evaluation batch",
        ),
        ({"evaluation__num_prompts": 2**18, "evaluation__prompts_per_batch": 1}, "524,292 batches of an iteration"),
        ({"rollout__batches_per_iteration": 9000, "rollout__prompts_per_batch": 128}, "4,608,000 completions of an"),
        (
            {
                "rollout__batches_per_iteration": 9000,
                "rollout__group_size": 32,
                "rollout__sampling__max_new_tokens": 2**20,
            },
            "603,979,776,000 tokens of an iteration",
        ),
        ({"rollout__prompts_per_batch": 4096, "rollout__max_prompt_tokens": 2**20}, "prompt tokens of a batch"),
        ({"evaluation__prompts_per_batch": 4096, "rollout__max_prompt_tokens": 2**20}, "tokens of an evaluation batch"),
        ({"rollout__batches_per_iteration": 9000, "rollout__max_prompt_tokens": 2**20}, "18,016 prompts"),
    ],
)
def test_what_numbers_make_together_has_a_bound(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecRefused, match=problem):
        judged_spec(**changes)


def test_the_largest_known_runs_are_valid() -> None:
    judged_spec(
        iterations=100_000,
        rollout__batches_per_iteration=8,
        rollout__prompts_per_batch=1024,
        rollout__group_size=16,
        rollout__sampling__max_new_tokens=32_768,
        rollout__max_prompt_tokens=4096,
    )
    judged_spec(
        rollout__batches_per_iteration=64,
        rollout__prompts_per_batch=1,
        rollout__group_size=64,
        rollout__sampling__max_new_tokens=1_000_000,
        rollout__max_prompt_tokens=1_000_000,
        evaluation__num_prompts=16,
        evaluation__prompts_per_batch=1,
    )


def test_a_job_that_is_read_again_is_held_to_the_same_bounds() -> None:
    stored = encode_json(job_spec()).replace(b'"group_size":4', b'"group_size":100000000')
    with pytest.raises(InvalidInput, match="<= 4096"):
        decode_json(stored, JobSpec)
