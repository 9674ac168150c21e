"""`onbeat verify` names every kind of gap in a chain of audit records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from msgspec import UNSET

from contracts.answers import AuditVerdict
from contracts.encoding.digests import content_digest
from contracts.events import AuditRecord, record_digest
from contracts.file_digests import digest_of_files
from contracts.rewards import PluginReward, source_digests
from onbeat.audit.chain import AuditEntry, expected_batches, verify_run
from tests.builders import commit_record
from tests.building.specs import SpecBuilder

ITERATIONS = 3


def weights(version: int, branch: str = "") -> str:
    return f"{branch}{version:x}".rjust(64, "0")


spec = SpecBuilder(
    iterations=ITERATIONS,
    rollout__batches_per_iteration=2,
    evaluation__num_prompts=3,
    evaluation__prompts_per_batch=2,
    evaluation__greedy=False,
)


def commit(iteration: int, *, epoch: int = 1, **changes: object) -> AuditRecord:
    trains = iteration < ITERATIONS
    batches = {f"{iteration}/train/{index}": f"batch {index}" for index in range(2)} if trains else {}
    if iteration in (0, ITERATIONS):
        batches |= {f"{iteration}/evaluation/{index}": f"evaluation {index}" for index in range(2)}
    fields: dict[str, object] = {
        "weights_digest": weights(iteration),
        "next_weights_digest": weights(iteration + 1) if trains else "",
        "trainer_epoch": epoch,
        "batches": batches,
    }
    return commit_record(iteration, **(fields | changes))


def rewind(iteration: int, *, epoch: int, **changes: object) -> AuditRecord:
    return commit(iteration, epoch=epoch, **({"kind": "rewind", "next_weights_digest": "", "batches": {}} | changes))


def chain(records: Sequence[AuditRecord]) -> list[AuditEntry]:
    """Links the records as a broker does."""
    entries: list[AuditEntry] = []
    for record in records:
        linked = msgspec.structs.replace(record, previous=entries[-1].digest if entries else "")
        entries.append(AuditEntry(record=linked, digest=record_digest(linked)))
    return entries


def whole_run() -> list[AuditRecord]:
    return [commit(iteration) for iteration in range(ITERATIONS + 1)]


def verdict_of(records: Sequence[AuditRecord], *, complete: bool = True, **changes: object) -> AuditVerdict:
    return verify_run(chain(records), spec(**changes), complete=complete, digests_on_disk={})


def changed(position: int, **changes: object) -> list[AuditRecord]:
    records = whole_run()
    records[position] = msgspec.structs.replace(records[position], **changes)
    return records


def test_an_undisturbed_run_is_verified_and_counted() -> None:
    verdict = verdict_of(whole_run())
    assert verdict.gaps == ()
    assert verdict.verified
    assert (verdict.iterations, verdict.batches_trained, verdict.batches_evaluated) == (3, 6, 4)


def test_a_run_that_is_under_way_needs_no_end() -> None:
    assert verdict_of(whole_run()[:2], complete=False).verified
    assert "never committed" in verdict_of(whole_run()[:2]).gaps[0]


def test_a_job_without_evaluation_ends_with_its_last_training_iteration() -> None:
    records = [commit(i, batches={f"{i}/train/{n}": "digest" for n in range(2)}) for i in range(ITERATIONS)]
    assert verdict_of(records, evaluation__num_prompts=0).verified


@pytest.mark.parametrize(
    ("records", "gap"),
    [
        (changed(1, batches={"1/train/0": "digest"}), "iteration 1: 1/train/1 are missing"),
        (changed(1, batches=commit(1).batches | {"1/train/2": "d"}), "iteration 1: 1/train/2 were not expected"),
        (changed(1, batches=commit(1).batches | {"0/train/1": "d"}), "iteration 1: 0/train/1 were not expected"),
        (changed(1, batches={"1/train/0": "d", "1/train/1": ""}), "iteration 1: 1/train/1 have no digest"),
        (changed(3, batches={}), "iteration 3: 3/evaluation/0, 3/evaluation/1 are missing"),
        (changed(1, abandoned={"1/train/1": "timeout"}), "counted both as used and as abandoned"),
        (changed(1, policy_version=0), "iteration 1 trained version 0"),
        (changed(2, weights_digest=weights(9)), "iteration 2: version 2 has digest"),
        (changed(1, next_weights_digest=""), "iteration 1 made no version"),
        (changed(2, trainer_epoch=0), "iteration 2: trainer epoch fell from 1 to 0"),
        (changed(2, kind="guess"), "record 2: unknown kind `guess`"),
        ([commit(0), commit(2), commit(3)], "iteration 2 was committed where iteration 1 was due"),
        ([commit(0), commit(1), commit(1), commit(2), commit(3)], "iteration 1 was committed where iteration 2 was"),
        ([commit(1), commit(0)], "iteration 1 was committed where iteration 0 was due"),
    ],
)
def test_a_gap_is_named(records: list[AuditRecord], gap: str) -> None:
    verdict = verdict_of(records)
    assert not verdict.verified
    assert any(gap in found for found in verdict.gaps), verdict.gaps


def test_a_batch_may_be_abandoned_only_where_the_spec_allows_it() -> None:
    records = changed(1, batches={"1/train/0": "digest"}, abandoned={"1/train/1": "timeout"})
    assert any("which this job does not allow" in gap for gap in verdict_of(records).gaps)
    assert verdict_of(records, rollout__on_failed_batch="abandon").verified


@pytest.mark.parametrize(
    "damage",
    [lambda entries: entries.pop(1), lambda entries: entries.reverse(), lambda entries: entries.insert(1, entries[0])],
    ids=["removed", "reversed", "repeated"],
)
def test_a_chain_with_a_removed_or_moved_record_is_broken(damage: Callable[[list[AuditEntry]], object]) -> None:
    entries = chain(whole_run())
    damage(entries)
    gaps = verify_run(entries, spec(), complete=True, digests_on_disk={}).gaps
    assert any("one is missing or out of order" in gap for gap in gaps)


def test_a_record_that_was_changed_after_it_was_written_is_found_by_its_own_and_the_next_link() -> None:
    entries = chain(whole_run())
    entries[1] = AuditEntry(record=msgspec.structs.replace(entries[1].record, loss=0.5), digest=entries[1].digest)
    gaps = verify_run(entries, spec(), complete=True, digests_on_disk={}).gaps
    assert len(gaps) == 2
    assert "record 1" in gaps[0]
    assert "it was changed" in gaps[0]
    assert "record 2" in gaps[1]


def test_a_recorded_rewind_under_a_newer_epoch_may_replay_iterations() -> None:
    replayed = [commit(1, epoch=2), commit(2, epoch=2), commit(3, epoch=2)]
    verdict = verdict_of([commit(0), commit(1), rewind(1, epoch=2), *replayed])
    assert verdict.gaps == ()
    assert (verdict.iterations, verdict.batches_trained, verdict.rewinds) == (3, 6, 1)


def evaluated(iteration: int) -> AuditRecord:
    """The last iteration of a job that had no more."""
    batches = {f"{iteration}/evaluation/{index}": "digest" for index in range(2)}
    return commit(iteration, next_weights_digest="", batches=batches)


def test_a_job_that_was_given_more_iterations_goes_back_to_the_one_that_only_evaluated() -> None:
    grown = [commit(0), commit(1), evaluated(2), rewind(2, epoch=2), commit(2, epoch=2), commit(3, epoch=2)]
    assert verdict_of(grown).gaps == ()
    assert verdict_of(grown[:3], complete=False).verified, "resumed, and not started yet"


@pytest.mark.parametrize(
    "records",
    [
        [commit(0), commit(1), evaluated(2), commit(3)],
        [commit(0), commit(1), evaluated(2), rewind(3, epoch=2), commit(3, epoch=2)],
        [commit(0), commit(1), evaluated(2)],
    ],
    ids=["gone on", "rewound to the next", "the end"],
)
def test_an_iteration_that_only_evaluated_and_is_not_the_last_is_a_gap(records: list[AuditRecord]) -> None:
    assert "iteration 2 made no version" in verdict_of(records).gaps


def test_a_rewind_needs_a_newer_epoch() -> None:
    gaps = verdict_of([commit(0), commit(1), rewind(1, epoch=1)], complete=False).gaps
    assert gaps == ("rewind to iteration 1: epoch 1 is not above 1, of the trainer before",)


def test_a_rewind_cannot_skip_ahead() -> None:
    gaps = verdict_of([commit(0), rewind(2, epoch=2)], complete=False).gaps
    assert gaps[0] == "rewind to iteration 2: only 1 iterations were committed before it"


def test_a_replay_of_a_deterministic_job_must_make_the_same_weights() -> None:
    other = weights(2, "f")
    records = [commit(0), commit(1), rewind(1, epoch=2), commit(1, epoch=2, next_weights_digest=other)]
    assert any("although the job is deterministic" in gap for gap in verdict_of(records, complete=False).gaps)
    assert verdict_of(records, complete=False, deterministic=False).verified


def test_greedy_evaluation_doubles_the_evaluation_batches() -> None:
    assert spec().evaluation.num_batches == 2
    assert spec(evaluation__greedy=True).evaluation.num_batches == 4


def test_nothing_is_trained_after_the_last_iteration() -> None:
    assert expected_batches(spec(), 2) == {"2/train/0", "2/train/1"}
    assert expected_batches(spec(), ITERATIONS) == frozenset()


def test_a_score_in_the_place_of_one_needs_a_component_that_states_it_and_a_batch_that_was_used() -> None:
    records = whole_run()
    counted = {"0/train/0": {"exact: timeout": 2}}
    records[0] = commit(0, unscorable=counted, on_unscorable={"exact": 0.0})
    assert verdict_of(records).gaps == ()
    records[0] = commit(0, unscorable=counted)
    assert any("states no score" in gap for gap in verdict_of(records).gaps)
    records[0] = commit(0, unscorable={"0/train/9": {"exact: timeout": 2}}, on_unscorable={"exact": 0.0})
    assert any("were not used" in gap for gap in verdict_of(records).gaps)


STAGED: dict[str, object] = {"algorithm__kl_coefficient": 0.1, "stages": [{"type": "reference"}]}


def staged_run() -> list[AuditRecord]:
    records = whole_run()
    for number, record in enumerate(records[:ITERATIONS]):
        columns = {batch: "columns" for batch in record.batches if "/train/" in batch}
        records[number] = msgspec.structs.replace(record, columns=columns)
    return records


def test_each_trained_batch_of_a_job_with_stages_names_its_columns_and_no_evaluation_does() -> None:
    assert verdict_of(staged_run(), **STAGED).gaps == ()


@pytest.mark.parametrize(
    ("columns", "gap"),
    [
        ({"0/train/0": "columns"}, "iteration 0: 0/train/1 were trained without columns, the job has stages"),
        ({"0/train/0": "columns", "0/train/1": ""}, "iteration 0: the columns of 0/train/1 have no digest"),
        (
            {"0/train/0": "columns", "0/train/1": "columns", "0/evaluation/0": "columns"},
            "iteration 0: 0/evaluation/0 have columns, no stage made any",
        ),
    ],
)
def test_columns_that_are_missing_or_strange_are_a_gap(columns: dict[str, str], gap: str) -> None:
    records = staged_run()
    records[0] = msgspec.structs.replace(records[0], columns=columns)
    assert verdict_of(records, **STAGED).gaps == (gap,)


def test_a_job_without_stages_names_no_columns_and_a_rewind_none_at_all() -> None:
    assert verdict_of(changed(0, columns={"0/train/0": "columns"})).gaps == (
        "iteration 0: 0/train/0 have columns, the job has no stages",
    )
    records = [commit(0), rewind(0, epoch=2, columns={"0/train/0": "columns"})]
    assert (
        "rewind to iteration 0: it names columns of batches, and trained none"
        in verdict_of(records, complete=False).gaps
    )


def test_a_verdict_names_the_environments_in_their_order() -> None:
    records = [
        msgspec.structs.replace(record, environment=f"games 1.{min(record.iteration, 1)}") for record in whole_run()
    ]
    verdict = verdict_of(records, deterministic=False)
    assert verdict.verified
    assert verdict.environments == ("games 1.0", "games 1.1")
    assert verdict_of(whole_run()).environments is UNSET


def test_a_deterministic_job_whose_environment_changed_has_a_gap() -> None:
    records = [
        msgspec.structs.replace(record, environment=f"games 1.{min(record.iteration, 1)}") for record in whole_run()
    ]
    assert verdict_of(records).gaps == ("iteration 1 was played by games 1.1, the iterations before by games 1.0",)


def test_an_environment_of_another_file_than_the_specs_is_a_gap() -> None:
    table = {"name": "Guess", "file": "guess.py", "source": "class Guess: ..."}
    version = f"Guess {content_digest(b'class Guess: ...')}"
    records = [msgspec.structs.replace(record, environment=version) for record in whole_run()]
    assert verdict_of(records, environment=table).verified
    problem = "iteration 0: its environment is of another file than the spec's"
    assert verdict_of(records, environment=table | {"source": "class Guess: pass"}).gaps[0] == problem
    assert verdict_of(whole_run(), environment=table).gaps[0] == problem


def test_a_model_and_rows_of_other_files_than_the_specs_are_a_gap() -> None:
    named = {"model__file_digests": {"qwen3/config.json": "1" * 64}}
    rows = {"type": "jsonl", "train_path": "train.jsonl", "file_digests": {"train.jsonl": "2" * 64}}
    files = digest_of_files({"qwen3/config.json": "1" * 64, "train.jsonl": "2" * 64})
    records = [msgspec.structs.replace(record, files=files) for record in whole_run()]
    assert verdict_of(records, **named, dataset=rows).verified
    problem = "iteration 0: the files that it was trained with are not those of the spec"
    edited = {"model__file_digests": {"qwen3/config.json": "3" * 64}}
    for of_spec in (edited | {"dataset": rows}, named, {}):
        assert verdict_of(records, **of_spec).gaps[0] == problem
    assert verdict_of(whole_run(), **named, dataset=rows).gaps[0] == problem


def test_rewards_of_another_file_than_the_specs_are_a_gap() -> None:
    component = PluginReward(entry_point="mine", file="rewards.py", source="def mine(): return 1")
    recorded = source_digests((component,))
    records = [msgspec.structs.replace(record, rewards=recorded) for record in whole_run()]
    assert verdict_of(records, reward__components=(component,)).verified
    other = msgspec.structs.replace(component, source="def mine(): return 2")
    for of_spec in ((other,), ()):
        gaps = verdict_of(records, reward__components=of_spec or ({"type": "exact"},)).gaps
        assert gaps[0] == "iteration 0: its rewards are of another file than the spec's"


@pytest.mark.parametrize(
    ("in_sums", "gaps"),
    [
        ((1, 1), ()),
        ((0, 1), ()),
        ((2, 1), ("iteration 1: 2 of its gradient's sums held 1/train/0",)),
        ((1, 1, 1), ("iteration 1: 1 of its gradient's sums held 1/train/2",)),
    ],
)
def test_a_gradient_s_sums_held_each_batch_in_each_pass_and_no_other(
    in_sums: tuple[int, ...], gaps: tuple[str, ...]
) -> None:
    assert verdict_of(changed(1, in_sums=in_sums)).gaps == gaps
    doubled = tuple(2 * times for times in in_sums)
    assert len(verdict_of(changed(1, in_sums=doubled), algorithm__updates_per_iteration=2).gaps) == len(gaps)


STOP_WHEN = {"held_out": 0.9}


def stopped_run(scores: Sequence[float], *, why: str | None = None) -> list[AuditRecord]:
    """A run that evaluated each version, and whose last record ended it before the step."""
    records = [
        commit(
            number,
            batches=commit(number).batches | {f"{number}/evaluation/{index}": "evaluation" for index in range(2)},
            held_out=score,
        )
        for number, score in enumerate(scores)
    ]
    if why is None:
        last = len(scores) - 1
        why = f"version {last} has a held-out reward of {scores[-1]:g}, and evaluation.stop_when.held_out is 0.9"
    records[-1] = msgspec.structs.replace(records[-1], next_weights_digest="", stopped=why)
    return records


def verdict_of_stopped(records: Sequence[AuditRecord]) -> AuditVerdict:
    return verdict_of(records, evaluation__every_iterations=1, evaluation__stop_when=STOP_WHEN)


def test_a_run_that_its_spec_ends_early_is_verified_up_to_there() -> None:
    verdict = verdict_of_stopped(stopped_run([0.2, 0.95]))
    assert verdict.gaps == ()
    assert (verdict.iterations, verdict.batches_trained, verdict.batches_evaluated) == (1, 2, 4)


@pytest.mark.parametrize(
    ("records", "gap"),
    [
        (stopped_run([0.2, 0.5]), "iteration 1: it ended the job, which was not due"),
        (stopped_run([0.95, 0.95]), "iteration 0: the job was due to end there"),
        (
            [msgspec.structs.replace(record, held_out=UNSET) for record in stopped_run([0.2, 0.95])],
            "iteration 0: it lacks the held-out score by which the job may end",
        ),
        (stopped_run([0.2, 0.95])[:1], "iteration 1 of 0 to 3 was never committed"),
    ],
)
def test_a_run_that_ends_elsewhere_than_its_scores_say_is_none(records: list[AuditRecord], gap: str) -> None:
    verdict = verdict_of_stopped(records)
    assert any(gap in found for found in verdict.gaps), verdict.gaps


def test_a_score_in_a_job_that_does_not_end_by_scores_is_a_gap() -> None:
    gaps = verdict_of(changed(0, held_out=0.5)).gaps
    assert gaps == ("iteration 0: it has a held-out score, by which this job does not end",)


def test_a_last_iteration_that_only_evaluated_ended_nothing_early_though_its_score_would_after_a_resume() -> None:
    """A job of two iterations evaluated its last version, and was resumed with a third, which that score forestalls."""
    first, second, stopped = stopped_run([0.2, 0.5, 0.95])
    evaluation = {name: digest for name, digest in stopped.batches.items() if "/evaluation/" in name}
    only_evaluated = msgspec.structs.replace(stopped, batches=evaluation, stopped=UNSET)
    again = msgspec.structs.replace(stopped, trainer_epoch=2)
    verdict = verdict_of_stopped([first, second, only_evaluated, rewind(2, epoch=2), again])
    assert verdict.gaps == ()
