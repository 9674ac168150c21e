"""Where a trainer starts, and what it may go on with."""

from __future__ import annotations

from typing import Any

import pytest

from broker.fence import FenceState
from contracts.errors import FenceViolation, InvalidInput
from contracts.events import AuditRecord, versions_of
from contracts.jobs import WindowIteration
from onbeat.loop.chain import check_same_environment, check_same_run, first_version, furthest_commit, needs_rewind
from tests.builders import commit_record, job_spec, manifest
from tests.refusals import refusal_of


def digest_of(version: int) -> str:
    return f"{version:x}" * 64


def commit(iteration: int, **changes: Any) -> AuditRecord:
    digests: dict[str, Any] = {"weights_digest": digest_of(iteration), "next_weights_digest": digest_of(iteration + 1)}
    return commit_record(iteration, **(digests | changes))


def rewind(iteration: int) -> AuditRecord:
    return commit(iteration, kind="rewind", next_weights_digest="")


CHAIN = [commit(0), commit(1), commit(2)]


def test_a_deterministic_run_goes_on_with_the_version_of_its_chain_and_with_no_other() -> None:
    check_same_run(CHAIN, manifest(2, digest_of(2)), job_spec())
    with pytest.raises(FenceViolation, match=r"version 2 is ffffffffffff, the audit chain says 222222222222"):
        check_same_run(CHAIN, manifest(2, "f" * 64), job_spec())


def test_a_run_that_is_not_deterministic_may_have_made_another_version() -> None:
    spec = job_spec(deterministic=False)
    check_same_run(CHAIN, manifest(2, "f" * 64), spec)
    with refusal_of("model.path", match=r"version 0 is ffffffffffff, the audit chain says 000000000000"):
        check_same_run(CHAIN, manifest(0, "f" * 64), spec)


def test_any_run_starts_again_with_the_model_that_it_was_started_with() -> None:
    check_same_run(CHAIN, manifest(0, digest_of(0)), job_spec())
    with pytest.raises(InvalidInput, match="put the folder back"):
        check_same_run(CHAIN, manifest(0, "f" * 64), job_spec())


def test_what_counts_is_the_newest_commit_that_made_the_version() -> None:
    replayed = [*CHAIN, rewind(2), commit(1, next_weights_digest="e" * 64)]
    check_same_run(replayed, manifest(2, "e" * 64), job_spec())
    with pytest.raises(FenceViolation, match="the audit chain says eeeeeeeeeeee"):
        check_same_run(replayed, manifest(2, digest_of(2)), job_spec())


def test_a_rewind_takes_versions_back_and_an_evaluation_makes_none() -> None:
    assert versions_of(CHAIN, 2) == {1: digest_of(1), 2: digest_of(2), 3: digest_of(3)}
    assert versions_of(CHAIN, 1) == {1: digest_of(1), 2: digest_of(2)}
    assert versions_of([*CHAIN, rewind(1)], 2) == {1: digest_of(1)}
    assert versions_of([*CHAIN, commit(3, next_weights_digest="")], 3) == versions_of(CHAIN, 2)
    assert furthest_commit([*CHAIN, rewind(1)]) == 2
    assert furthest_commit([]) == -1


def test_the_model_that_the_job_found_is_in_the_chain_once_an_iteration_was_committed() -> None:
    assert first_version([]) == {}
    assert first_version(CHAIN[1:]) == {}
    assert first_version([*CHAIN, rewind(0), commit(0)]) == {0: digest_of(0)}


def opened(*iterations: int) -> tuple[WindowIteration, ...]:
    return tuple(
        WindowIteration(
            iteration=one,
            oldest_version=one,
            newest_version=one,
            batches_expected=0,
            batches_published=0,
            batches_dead=0,
        )
        for one in iterations
    )


@pytest.mark.parametrize(
    ("fence", "is_ahead"),
    [
        ({"committed": 2}, True),
        ({"committed": 1}, False),
        ({"committed": 1, "window": opened(2), "versions": {2: digest_of(2)}}, False),
        ({"committed": 2, "window": opened(3), "versions": {3: digest_of(3)}}, True),
        ({"committed": 1, "window": opened(3), "versions": {2: digest_of(2)}}, True),
        ({"committed": 1, "window": opened(2), "versions": {2: "f" * 64}}, True),
        ({"committed": 1, "window": opened(2, 3), "versions": {1: digest_of(1), 2: digest_of(2)}}, False),
        ({"committed": 1, "window": opened(2, 3), "versions": {1: "f" * 64, 2: digest_of(2)}}, True),
        ({"committed": 1, "window": opened(2, 3), "versions": {0: digest_of(0), 2: digest_of(2)}}, True),
    ],
    ids=[
        "committed it",
        "waits for it",
        "opened it",
        "opened another",
        "opened another on the trainer's weights",
        "opened other weights",
        "opened a window",
        "opened a window on other older weights",
        "opened a window on weights that the trainer lacks",
    ],
)
def test_a_fence_that_is_ahead_of_the_weights_is_rewound(fence: dict[str, Any], *, is_ahead: bool) -> None:
    assert needs_rewind(fence_state(**fence), 2, {1: digest_of(1), 2: digest_of(2)}) == is_ahead


def fence_state(**changes: Any) -> FenceState:
    state = "open" if changes.get("window") else "closed"
    return FenceState(state=state, **({"versions": {}, "trainer_epoch": 1, "lease_until_s": 0.0} | changes))


PLAYED = [commit(0, environment="games 1.0"), commit(1, environment="games 1.1"), rewind(1)]


def test_a_deterministic_run_goes_on_with_the_environment_of_its_newest_records_and_with_no_other() -> None:
    check_same_environment(PLAYED, "games 1.1", job_spec())
    check_same_environment(CHAIN, "games 1.1", job_spec())
    with refusal_of("environment.name", match=r"is games 1\.2, the audit chain says games 1\.1"):
        check_same_environment(PLAYED, "games 1.2", job_spec())
    of_two = [commit(0, environment="games: games 1.0; tools: mcp 1.0")]
    environments = [
        {"name": name, "dataset": {"type": "environment"}, "environment": {"name": name}} for name in ("games", "tools")
    ]
    spec = job_spec(dataset={"type": "mixture", "sources": environments}, reward__components=[])
    with refusal_of("dataset.sources[1].environment.name"):
        check_same_environment(of_two, "games: games 1.0; tools: mcp 1.1", spec)


def test_a_run_that_is_not_deterministic_goes_on_with_another_environment_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_same_environment(PLAYED, "games 1.2", job_spec(deterministic=False))
    assert "the environment is games 1.2, the audit chain says games 1.1" in caplog.text
