"""Files that a spec names and that are edited: between two jobs, in the middle of one, and before a process of it is
replaced. A job is of the bytes with which it was accepted, or it is refused by the file's name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import UNSET
from msgspec.structs import replace

import consumer.trainer.trainer as trainer
from broker.job_store import JobStore
from consumer.trainer.held_job import HeldJob
from consumer.trainer.iteration import Iteration
from consumer.trainer.start import read_fork
from consumer.trainer.step import Stepped
from contracts.encoding.wire import encode_json
from contracts.engines import TransformersOptions
from contracts.errors import InvalidInput
from contracts.events import record_digest
from contracts.file_digests import digest_of_files
from contracts.jobs import JobState, TrainerExit
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from contracts.spec.environment import EnvironmentSpec
from contracts.spec.job import JobSpec, ModelSpec
from gateway.app import create_app
from gateway.named_files import check_named_files, with_file_digests, with_fork_digest
from gateway.services import Services
from onbeat.audit.chain import AuditEntry, verify_run
from onbeat.data.named_files import digest_of_file
from onbeat.data.rendering.base import Renderer
from onbeat.stages.models import model_loader, model_service
from onbeat.stages.served_stages import ServedStage
from producer.detokenizer import FolderDetokenizer, folder_renderer
from producer.engine.base import GenerationEngine
from producer.engine.factory import make_engine
from tests.builders import flip_a_bit, job_spec, tiny_model_folder
from tests.own_trainer import generating, one_trainer
from tests.scorer_folder import scorer_folder
from tests.served import asked, services_over

pytestmark = pytest.mark.usefixtures("restored_process")

STEP = trainer.step
ITERATIONS = 4


def set_in(key: str, value: object) -> Callable[[Path], None]:
    """Sets a key of a JSON file."""

    def edit(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

    return edit


def append(text: str) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        path.write_text(path.read_text() + text)

    return edit


ROW = '{"prompt": "9+9=", "reference": "18"}\n'
READ_BY_GENERATORS: dict[str, Callable[[Path], None]] = {
    "qwen3/config.json": set_in("max_position_embeddings", 96),
    "qwen3/generation_config.json": set_in("eos_token_id", [1, 5]),
    "qwen3/tokenizer.json": append("\n"),
    "qwen3/tokenizer_config.json": set_in("model_max_length", 77),
    "qwen3/chat_template.jinja": append("{# #}"),
}
READ_BY_TRAINERS = READ_BY_GENERATORS | {
    "qwen3/model.safetensors": flip_a_bit,
    "rows/train.jsonl": append(ROW),
    "rows/held_out.jsonl": append(ROW),
    "rows/set.jsonl": append(ROW),
}
READ_BY_STAGES: dict[str, Callable[[Path], None]] = {
    "teachers/qwen3/config.json": set_in("rms_norm_eps", 1e-5),
    "teachers/qwen3/model.safetensors": flip_a_bit,
    "scorer/model.safetensors": flip_a_bit,
    "scorer/tokenizer_config.json": set_in("model_max_length", 77),
}
FIELDS = {
    "qwen3": "model.path",
    "rows/train.jsonl": "dataset.train_path",
    "rows/held_out.jsonl": "dataset.evaluation_path",
    "rows/set.jsonl": "evaluation.sets[0].dataset.train_path",
    "teachers": "stages.teacher.model",
    "scorer": "stages.scorer.model",
}


def field_of(name: str) -> str:
    return next(field for beginning, field in FIELDS.items() if name.startswith(beginning))


@pytest.fixture
def root(own: StackSettings) -> Path:
    """The model root, with all that the specs below name."""
    folder = Path(own.model_root)
    rows = [f'{{"prompt": "{a}+{b}=", "reference": "{a + b}"}}\n' for a in range(6) for b in range(6)]
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("".join(rows[:20]))
    (folder / "rows" / "held_out.jsonl").write_text("".join(rows[20:28]))
    (folder / "rows" / "set.jsonl").write_text("".join(rows[28:]))
    tiny_model_folder(folder / "teachers", seed=1)
    scorer_folder(folder)
    return folder


def spec_of(**changes: Any) -> JobSpec:
    return job_spec(
        **{
            "iterations": ITERATIONS,
            "dataset": {
                "type": "jsonl",
                "train_path": "rows/train.jsonl",
                "evaluation_path": "rows/held_out.jsonl",
                "chat": {},
            },
            "evaluation": {
                "num_prompts": 4,
                "sets": [
                    {"name": "more", "num_prompts": 4, "dataset": {"type": "jsonl", "train_path": "rows/set.jsonl"}}
                ],
            },
            "rollout__batches_per_iteration": 1,
            "trainer__checkpoint_every_iterations": 1,
            "timeouts__trainer_lease_s": 0.5,
            **changes,
        }
    )


STAGED: dict[str, Any] = {
    "algorithm__distillation_coefficient": 0.1,
    "stages": [
        {"type": "teacher", "model": "teachers/qwen3"},
        {"type": "reward_model", "model": "scorer", "name": "scorer"},
    ],
}


@pytest.fixture
def gateway(own: StackSettings) -> Iterator[Services]:
    with services_over(own) as made:
        yield made


@pytest.fixture
def ask(gateway: Services) -> Callable[..., httpx.Response]:
    """One request to the app."""
    return partial(asked, create_app(gateway), key=gateway.settings.api_key)


def submit(ask: Callable[..., httpx.Response], spec: JobSpec) -> str:
    headers = {"Content-Type": "application/json"}
    answer = ask("POST", "/v1/jobs", content=encode_json(spec), headers=headers)
    assert answer.status_code == 201, answer.text
    return answer.json()["job_id"]


def problem_of(answer: httpx.Response) -> str:
    """`field: problem` of a refusal."""
    assert answer.status_code == 422, answer.text
    told = answer.json()
    return f"{told['field']}: {told['detail']}"


def dies_at(monkeypatch: pytest.MonkeyPatch, iteration: int) -> None:
    """Every trainer from now on dies before the step of this iteration; -1: none does."""

    def fatal(held: HeldJob, current: Iteration) -> Stepped:
        if current.number == iteration:
            raise ZeroDivisionError("the end of this trainer")
        return STEP(held, current)

    monkeypatch.setattr(trainer, "step", fatal)


@pytest.mark.parametrize("name", READ_BY_TRAINERS | READ_BY_STAGES)
def test_a_job_after_an_edit_is_of_other_content_and_its_record_says_which_file_differs(
    root: Path, ask: Callable[..., httpx.Response], gateway: Services, name: str
) -> None:
    spec = spec_of(**STAGED)
    first = gateway.jobs.spec(submit(ask, spec))
    assert first.file_digests[name] == digest_of_file(root / name)
    assert gateway.jobs.spec(submit(ask, spec)) == first, "over the same files it is the same spec"
    (READ_BY_TRAINERS | READ_BY_STAGES)[name](root / name)
    second = gateway.jobs.spec(submit(ask, spec))
    differing = {path for path in first.file_digests if first.file_digests[path] != second.file_digests[path]}
    assert differing == {name}
    assert digest_of_files(first.file_digests) != digest_of_files(second.file_digests)
    # The record of the first one, submitted again, asks for the files as they were.
    answer = ask("POST", "/v1/jobs", content=encode_json(first), headers={"Content-Type": "application/json"})
    assert name in problem_of(answer)


@pytest.mark.parametrize("name", READ_BY_TRAINERS)
def test_a_trainer_that_replaces_another_refuses_an_edited_file_and_with_the_file_put_back_the_job_ends_undisturbed(
    root: Path,
    own: StackSettings,
    ask: Callable[..., httpx.Response],
    gateway: Services,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    jobs, broker = gateway.jobs, gateway.broker
    job_id = submit(ask, spec_of())
    with generating(broker, job_id):
        dies_at(monkeypatch, 2)
        with pytest.raises(ZeroDivisionError):
            one_trainer(own, broker, job_id)
        as_it_was = (root / name).read_bytes()
        READ_BY_TRAINERS[name](root / name)
        dies_at(monkeypatch, -1)
        assert one_trainer(own, broker, job_id) == TrainerExit.FAILED
        changed, reason = f"{name} has changed since the job was accepted", jobs.fields(job_id)["reason"].decode()
        assert reason.startswith(f"{field_of(name)}: ")
        assert changed in reason
        assert problem_of(ask("POST", f"/v1/jobs/{job_id}/resume")).startswith(f"{field_of(name)}: {changed}")
        (root / name).write_bytes(as_it_was)
        assert ask("POST", f"/v1/jobs/{job_id}/resume").is_success
        assert one_trainer(own, broker, job_id) == TrainerExit.DONE
        undisturbed = submit(ask, spec_of())
    with generating(broker, undisturbed):
        assert one_trainer(own, broker, undisturbed) == TrainerExit.DONE
    digests = [[one.next_weights_digest for one in jobs.audit(each)][-2] for each in (job_id, undisturbed)]
    assert digests[0] == digests[1] != ""


def test_the_chain_has_the_files_of_the_job_and_verify_finds_a_record_of_others(
    root: Path, own: StackSettings, ask: Callable[..., httpx.Response], gateway: Services
) -> None:
    job_id = submit(ask, spec_of(iterations=2))
    with generating(gateway.broker, job_id):
        assert one_trainer(own, gateway.broker, job_id) == TrainerExit.DONE
    spec, records = gateway.jobs.spec(job_id), gateway.jobs.audit(job_id)
    assert {record.files for record in records} == {digest_of_files(spec.file_digests)}
    entries = [AuditEntry(record=record, digest=record_digest(record)) for record in records]
    assert verify_run(entries, spec, complete=True, digests_on_disk={}).gaps == ()
    (root / "qwen3" / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    edited = with_file_digests(replace(spec, model=replace(spec.model, file_digests=UNSET)), own)
    for other in (edited, replace(spec, model=replace(spec.model, file_digests=UNSET))):
        gaps = verify_run(entries, other, complete=True, digests_on_disk={}).gaps
        assert "iteration 0: the files that it was trained with are not those of the spec" in gaps


PLAYED = EnvironmentSpec(name="guess", renderer="text")


def read_by_generator(model: ModelSpec, own: StackSettings) -> tuple[GenerationEngine, FolderDetokenizer, Renderer]:
    """Reads of the model's folder all that a generator does."""
    made = make_engine(model, options=TransformersOptions(), settings=own, deterministic=True, chunks=None)
    return made, FolderDetokenizer(model, settings=own), folder_renderer(model, PLAYED, settings=own)


@pytest.mark.parametrize("name", READ_BY_GENERATORS)
def test_a_generator_that_is_new_refuses_an_edited_file_and_one_that_has_read_it_goes_on(
    root: Path, own: StackSettings, name: str
) -> None:
    model = with_file_digests(spec_of(), own).model
    _, detokenizer, renderer = read_by_generator(model, own)
    READ_BY_GENERATORS[name](root / name)
    refused = f"^model.path: {name} has changed since the job was accepted"
    with pytest.raises(InvalidInput, match=refused):
        make_engine(model, options=TransformersOptions(), settings=own, deterministic=True, chunks=None)
    assert folder_renderer(model, PLAYED, settings=own) is renderer, "it is kept by content"
    # A job that was accepted after the edit: nothing of the one before is taken for it.
    after = with_file_digests(spec_of(), own).model
    assert after != model
    _, of_after, renderer_after = read_by_generator(after, own)
    assert of_after._tokenizer is not detokenizer._tokenizer
    assert renderer_after is not renderer
    with pytest.raises(InvalidInput, match=refused):
        FolderDetokenizer(model, settings=own)


def test_a_job_that_no_gateway_accepted_is_kept_by_what_is_in_the_folder_now(root: Path, own: StackSettings) -> None:
    model = spec_of().model
    first = FolderDetokenizer(model, settings=own)._tokenizer
    assert FolderDetokenizer(model, settings=own)._tokenizer is first
    READ_BY_GENERATORS["qwen3/tokenizer_config.json"](root / "qwen3/tokenizer_config.json")
    assert FolderDetokenizer(model, settings=own)._tokenizer is not first


@pytest.mark.parametrize("name", READ_BY_STAGES)
def test_a_stage_worker_that_is_new_refuses_an_edited_file_by_the_stages_key(
    root: Path, own: StackSettings, name: str
) -> None:
    spec = with_file_digests(spec_of(**STAGED), own)
    stage = spec.stages[0 if name.startswith("teachers") else 1]
    node = spec.stage_graph.stages[spec.stage_graph.index(stage.name)]
    served = ServedStage(job_id="job", spec=spec, stage=stage, node=node, side=None, version_0=lambda: "")  # type: ignore[arg-type]
    model_loader(own)(served)
    READ_BY_STAGES[name](root / name)
    with pytest.raises(InvalidInput, match=f"^{field_of(name)}: {name} has changed since the job was accepted"):
        model_loader(own)(served)
    is_looked_at = "safetensors" not in name
    check = model_service(own)["teacher"].check
    if is_looked_at:
        with pytest.raises(InvalidInput, match=f"{name} has changed"):
            check(served)
    else:
        check(served)
    with pytest.raises(InvalidInput, match=f"{name} has changed"):
        check_named_files(spec, own)


def test_a_reference_stage_refuses_an_edited_file_of_the_jobs_own_model(root: Path, own: StackSettings) -> None:
    staged = {"algorithm__kl_coefficient": 0.1, "stages": [{"type": "reference"}]}
    spec = with_file_digests(spec_of(**staged), own)
    (stage,), (node,) = spec.stages, spec.stage_graph.stages
    served = ServedStage(job_id="job", spec=spec, stage=stage, node=node, side=None, version_0=lambda: "")  # type: ignore[arg-type]
    flip_a_bit(root / "qwen3" / "model.safetensors")
    with pytest.raises(InvalidInput, match=r"^model\.path: qwen3/model\.safetensors has changed since"):
        model_loader(own)(served)


def test_a_fork_is_of_the_version_that_the_other_job_had_when_it_was_accepted(
    root: Path, own: StackSettings, ask: Callable[..., httpx.Response], gateway: Services
) -> None:
    source = submit(ask, spec_of())
    with generating(gateway.broker, source):
        assert one_trainer(own, gateway.broker, source) == TrainerExit.DONE
    made = {record.policy_version + 1: record.next_weights_digest for record in gateway.jobs.audit(source)}
    forking = spec_of(fork={"job": source, "version": ITERATIONS})
    spec = gateway.jobs.spec(submit(ask, forking))
    assert spec.fork
    assert spec.fork.weights_digest == made[ITERATIONS]
    read_fork(own.run_root_path, spec, ())
    other = replace(spec, fork=replace(spec.fork, weights_digest=made[ITERATIONS - 1]))
    with pytest.raises(InvalidInput, match=r"its weights are \w+, the job was accepted with others"):
        read_fork(own.run_root_path, other, ())
    with pytest.raises(InvalidInput, match=r"its weights are not those that fork\.weights_digest names"):
        with_fork_digest(other, own, JobStore(gateway.broker))
    # A run folder that Redis has forgotten says the same.
    JobStore(gateway.broker).remove(source)
    assert RunFolder(own.run_root_path, source).chain.is_file()
    assert with_fork_digest(forking, own, gateway.jobs).fork == spec.fork


def test_a_resume_of_a_job_whose_files_are_as_they_were_is_taken(
    root: Path, own: StackSettings, ask: Callable[..., httpx.Response], gateway: Services
) -> None:
    job_id = submit(ask, spec_of())
    assert ask("POST", f"/v1/jobs/{job_id}/cancel").is_success
    (root / "qwen3" / "README.md").write_text("Nothing reads it.")
    assert ask("POST", f"/v1/jobs/{job_id}/resume").is_success
    assert gateway.jobs.state(job_id) is JobState.QUEUED
