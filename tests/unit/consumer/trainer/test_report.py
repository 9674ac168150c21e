"""What the trainer reads back of its own run log."""

from __future__ import annotations

from pathlib import Path

from consumer.trainer.report import RunLog, sampled_scores
from contracts.jobs import EvaluationScore
from contracts.run_folder import RunFolder
from tests.builders import job_spec


def score(version: int, sampled: float) -> EvaluationScore:
    return EvaluationScore(iteration=version, policy_version=version, sampled=sampled, num_prompts=8)


def test_the_last_score_of_a_version_counts_and_a_line_that_was_cut_off_does_not(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "job")
    run_log = RunLog(folder, job_spec())
    assert sampled_scores(folder) == {}
    for one in (score(0, 0.25), score(2, 0.5), score(2, 0.75)):
        run_log.evaluation(one)
    with folder.evaluations.open("ab") as file:
        file.write(b'{"iteration": 4, "pol')
    assert sampled_scores(folder) == {0: 0.25, 2: 0.75}
