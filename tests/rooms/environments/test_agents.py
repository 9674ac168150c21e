"""An agent that owns its loop keeps the promise of an environment (I7): the same tokens, the same weights, any kill."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from contracts.encoding.digests import content_digest
from contracts.spec.job import JobSpec
from tests.chaos.short_job import assert_undisturbed, long_variant, running, short_job, undisturbed_digest
from tests.e2e.test_turns import death_of, killed_again
from tests.pipeline import REPOSITORY, Pipeline
from tests.played import FORGETFUL

PLUGIN = Path(__file__).parent / "plugin"
MODEL = "configs/models/secret-table"
JOB = short_job(
    iterations=2,
    model__path=MODEL,
    dataset={"type": "environment", "num_train_prompts": 64},
    environment=FORGETFUL | {"name": "secret_table", "file": "", "source": ""},
    reward__components=[],
)
TOKENIZER = str(REPOSITORY / MODEL / "tokenizer.json")


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PLUGIN))
        with Pipeline(tmp_path_factory.mktemp("agents")) as pipeline:
            yield pipeline


@pytest.fixture(scope="module")
def oracle(pipeline: Pipeline) -> str:
    """Final digest of the same task, written as an environment."""
    with running(pipeline, "producer-oracle"):
        return undisturbed_digest(pipeline, JOB)


def played_by(agent: str, **params: Any) -> JobSpec:
    assert JOB.environment is not None
    return replace(JOB, environment=replace(JOB.environment, name="agent", params={"agent": agent, **params}))


@long_variant
def test_an_agent_gives_the_weights_of_the_environment_that_it_might_be_whatever_dies(
    pipeline: Pipeline, oracle: str
) -> None:
    """The service dies with the answers of a call; the agents of its successor are played to where they were."""
    service = killed_again(pipeline, crash_at="environment.after_play:9")
    job_id, _ = pipeline.jobs.create(played_by("secret_table"))
    with running(pipeline, "producer-agents"):
        trainer = pipeline.start(f"consumer-{job_id}", job_id)
        assert death_of(pipeline, trainer) == 0, trainer.tail()
    assert service.exit_code is not None, service.tail()
    assert_undisturbed(pipeline, job_id, oracle)


@long_variant
def test_an_agent_by_tokens_gives_the_same_weights_again(pipeline: Pipeline, oracle: str) -> None:
    with running(pipeline, "producer-tokens"):
        job_id = pipeline.train(played_by("secret_tokens", tokenizer=TOKENIZER))
    assert_undisturbed(pipeline, job_id, oracle)


def test_an_agent_that_is_a_function_of_a_file_plays_what_the_same_one_of_a_package_plays(
    pipeline: Pipeline, oracle: str
) -> None:
    """The gateway takes the file's text into the spec; the version in the audit chain is its digest."""
    source = (PLUGIN / "played_agents.py").read_text()
    of_package = played_by("secret_table").environment
    assert of_package is not None
    environment = replace(of_package, file="played_agents.py", source=source)
    with running(pipeline, "producer-file"):
        job_id = pipeline.train(replace(JOB, environment=environment))
    assert_undisturbed(pipeline, job_id, oracle)
    assert pipeline.jobs.audit(job_id)[0].environment == f"agent {content_digest(source.encode())}"
