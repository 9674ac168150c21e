"""docs/http.md: its commands run, in order, against a gateway over a real server; its answers are those."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.generator_side import GeneratorSide
from broker.openings import IterationOpening
from broker.trainer_side import TrainerSide
from contracts.encoding.wire import encode_json
from contracts.jobs import EvaluationScore, JobState
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.versions import WeightFile, weights_digest
from gateway.services import Services
from onbeat.recording.files import INDEX, write_record
from onbeat.recording.records import RecordedBatch, RecordedIteration, RecordedSummary
from tests.builders import job_spec
from tests.integration import test_gateway as rig
from tests.integration.dead_batches import bury, running
from tests.recorded import record_of, recorded
from tests.served import services_over
from tests.task_worker import task_worker

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "http.md"
SECTION = re.compile(r"^## Every route\n(.*?)^## ", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EMPTY = b"\x02" + bytes(7) + b"{}"
"""A safetensors file without tensors."""
MARK = "=== command {number} ==="


def section() -> str:
    found = SECTION.search(PAGE.read_text())
    assert found is not None
    return found[1]


def commands() -> Iterator[tuple[str, str]]:
    """(command, the answer that the page shows) in the page's order."""
    for block in BLOCK.findall(section()):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, answer = part.partition("\n")
            if "<<'JSON'" in command:
                body, _, answer = answer.partition("\nJSON\n")
                command = f"{command}\n{body}\nJSON"
            yield command, answer


def without_spaces(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.fixture
def services(settings: StackSettings) -> Iterator[Services]:
    with services_over(replace(settings, model_root=str(ROOT))) as made:
        yield made


def done_job(services: Services) -> str:
    """A job that has committed an iteration and failed then, with all the files of a run folder."""
    spec = job_spec(
        name="done", iterations=5, evaluation__num_prompts=0, rollout__batches_per_iteration=2, recording={}
    )
    job_id, _ = services.jobs.create(spec)
    trainer = TrainerSide(services.broker, job_id, owner="t", lease_s=60.0)
    trainer.acquire()
    services.jobs.move(job_id, JobState.RUNNING)
    batches = tuple(rig.training_batch(job_id, index) for index in range(2))
    for version, digest in enumerate((rig.DIGEST, rig.NEXT_DIGEST)):
        trainer.publish_weights(rig.manifest(version, digest), oldest_kept=0)
    trainer.open_iteration(
        IterationOpening(iteration=0, oldest_version=0, newest_version=0, batches=batches), {0: rig.DIGEST}
    )
    generator = GeneratorSide(services.broker, job_id, "g1")
    for batch in batches:
        claim = generator.claim(60.0)
        assert claim is not None
        generator.publish(claim, rig.rollouts_of(batch, "g1"))
    arrived, _ = trainer.claim_rollouts(0, max_batches=2)
    digests = {item.batch.batch_id: item.digest for item in arrived}
    trainer.commit(rig.audit_record(digests), digests, event=None, opening=None, next_version=None)
    services.jobs.fail(job_id, "the loss is not finite")
    folder = RunFolder(services.settings.run_root_path, job_id)
    folder.path.mkdir(parents=True)
    folder.metrics.write_bytes(rig.metrics_line(0, 0.5))
    score = EvaluationScore(iteration=0, policy_version=0, sampled=0.5, num_prompts=2)
    folder.evaluations.write_bytes(encode_json(score))
    folder.trainer_log.write_text("12:03:44 trainer    info   iteration 0 committed\n")
    record = record_of(job_id, "3/train/1")
    assert record.manifest is not None
    version = replace(record.manifest, files=(WeightFile(name="weights.safetensors", num_bytes=len(EMPTY)),))
    record = replace(record, manifest=version)
    files = recorded(services, job_id, record)
    write_record(files.path_of("3/train/1").with_name(INDEX), indexed(record))
    (folder.weights_of(0) / "weights.safetensors").write_bytes(EMPTY)
    return job_id


def indexed(record: RecordedBatch) -> RecordedIteration:
    batch = record.batch
    one = RecordedSummary(
        batch_id=batch.batch_id,
        purpose=batch.purpose,
        index=1,
        policy_version=batch.policy_version,
        weights_digest=batch.weights_digest,
        generator_id=batch.generator_id,
        num_groups=1,
        num_completions=2,
        reward_mean=0.5,
        batch_digest=record.batch_digest,
    )
    return RecordedIteration(iteration=3, batches=(one,), versions={})


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_commands_of_the_page_give_the_answers_of_the_page(
    services: Services, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig, "DIGEST", weights_digest([]))  # of the empty file that the run folder has as version 0
    dead = running(services.settings, name="dead")
    bury(dead)
    services.jobs.fail(dead.job_id, "a batch is dead")
    shown = list(commands())
    (tmp_path / "auth").write_text(f"Authorization: Bearer {rig.KEY}\n")
    script = "\n".join(
        f"echo '{MARK.format(number=number)}'\n{command}\necho" for number, (command, _) in enumerate(shown)
    )
    log = tmp_path / "worker.log"
    with rig.serving(services) as url, task_worker(services.settings, services.broker, log):
        told = {"GATEWAY": url, "DONE": done_job(services), "DEAD": dead.job_id, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        run = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=told, capture_output=True, text=True, check=False, timeout=300
        )
    answers = re.split(r"=== command \d+ ===\n", run.stdout)[1:]
    assert len(answers) == len(shown), run.stderr
    wrong = [
        f"{command}\nanswers\n{answer}"
        for (command, expected), answer in zip(shown, answers, strict=True)
        if not re.fullmatch(
            ".*".join(re.escape(without_spaces(part)) for part in expected.split("…")), without_spaces(answer)
        )
    ]
    assert wrong == [], "\n".join([*wrong, run.stderr])
    assert len(list(tmp_path.glob("*.trace.json"))) == 1


def test_the_page_shows_every_path_of_the_interface(services: Services) -> None:
    from gateway.app import create_app

    paths = {path for path in create_app(services).openapi()["paths"] if path != "/openapi.json"}
    called = re.findall(r"\$GATEWAY(/[^\s\"?|)]*)", section())
    found = {path for path in paths for one in called if re.fullmatch(re.sub(r"{\w+}", "[^/]+", path), one)}
    assert paths - found - {"/", "/assets/{name}"} == set()
