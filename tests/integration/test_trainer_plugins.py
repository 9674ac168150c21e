"""Losses and data sets of an installed package: equal to ours where they say the same, refused where they can't be."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from broker.connection.client import Broker
from broker.job_store import JobStore
from consumer.gradient.losses.base import LossInputs
from consumer.gradient.losses.family import policy_loss
from consumer.trainer import job_run
from consumer.trainer.held_job import load_prompts
from contracts.errors import InvalidInput
from contracts.jobs import JobState, TrainerExit
from contracts.settings import StackSettings
from contracts.spec.algorithm import AlgorithmSpec, PluginLoss
from contracts.spec.datasets import JsonlDataset, PluginDataset
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from onbeat.data.datasets.loading import load_dataset
from onbeat.data.prompts.source import PromptSource
from tests.builders import char_tokenizer, job_spec
from tests.own_trainer import generating, one_trainer

pytestmark = pytest.mark.usefixtures("restored_process")

SITE = Path(__file__).parent / "trainer_plugins"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SITE))


def spec_of(**changes: object) -> JobSpec:
    return job_spec(**{"iterations": 3, "evaluation__num_prompts": 0, "timeouts__trainer_lease_s": 0.5, **changes})


def trained(own: StackSettings, broker: Broker, spec: JobSpec) -> list[str]:
    """Digests of the versions that the job made."""
    jobs = JobStore(broker)
    job_id, _ = jobs.create(spec)
    with generating(broker, job_id):
        assert one_trainer(own, broker, job_id) == TrainerExit.DONE
    return [record.next_weights_digest for record in jobs.audit(job_id) if record.next_weights_digest]


def failed(own: StackSettings, broker: Broker, spec: JobSpec) -> str:
    """Reason of a job that ends as failed."""
    jobs = JobStore(broker)
    job_id, _ = jobs.create(spec)
    with generating(broker, job_id):
        one_trainer(own, broker, job_id)
    assert jobs.state(job_id) is JobState.FAILED
    return jobs.fields(job_id)["reason"].decode()


def plugin(name: str) -> dict[str, str]:
    return {"type": "plugin", "entry_point": name}


def test_a_loss_that_equals_grpo_makes_the_weights_of_grpo(own: StackSettings, broker: Broker) -> None:
    """The clips act: they are narrow, and the second update leaves the policy that sampled."""
    clips = {"updates_per_iteration": 2, "clip_low": 0.001, "clip_high": 0.001}
    ours = trained(own, broker, spec_of(algorithm=clips | {"loss": "grpo"}))
    assert len(set(ours)) == 3
    assert trained(own, broker, spec_of(algorithm=clips | {"loss": plugin("as_grpo")})) == ours
    assert trained(own, broker, spec_of(algorithm=clips | {"loss": "cispo"})) != ours


def test_a_job_whose_loss_is_not_installed_fails_at_its_start_with_field_and_cure(
    own: StackSettings, broker: Broker
) -> None:
    reason = failed(own, broker, spec_of(algorithm__loss=plugin("mine")))
    assert "algorithm.loss.entry_point: no package offers `mine` in group onbeat.losses where the trainer" in reason
    assert "install its package there; installed: as_grpo, " in reason


def test_a_loss_that_raises_in_an_iteration_fails_the_job_with_the_reason(own: StackSettings, broker: Broker) -> None:
    reason = failed(own, broker, spec_of(algorithm__loss=plugin("raises_later")))
    assert "algorithm.loss.entry_point: the loss `raises_later` raised KeyError: 'nothing'" in reason


def test_a_loss_that_is_not_a_number_later_fails_the_job_and_moves_no_weight(
    own: StackSettings, broker: Broker
) -> None:
    assert "loss: the loss of batch " in failed(own, broker, spec_of(algorithm__loss=plugin("nan_later")))


def test_a_loss_that_never_ends_fails_the_job_after_the_time_of_an_iteration(
    own: StackSettings, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[TrainerExit] = []

    def ends(code: TrainerExit) -> None:
        """Lets the pass go on in the place of the process's end."""
        codes.append(code)
        importlib.import_module("trainer_plugins").let_go.set()

    monkeypatch.setattr(job_run, "_exit", ends)
    reason = failed(own, broker, spec_of(algorithm__loss=plugin("hangs_later"), timeouts__iteration_s=3.0))
    assert "training of one rollout batch has taken 3 s and hasn't ended (raise timeouts.iteration_s)" in reason
    assert codes == [TrainerExit.FAILED]


def torch_now() -> list[object]:
    return [
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
    ]


def test_what_foreign_code_does_to_torch_ends_with_it(own: StackSettings, broker: Broker) -> None:
    """A data set is called in rank 0 alone: what it left behind would be in the weights of that rank's batches (I7)."""
    before = torch_now()
    policy_loss(AlgorithmSpec(loss=PluginLoss(entry_point="meddles_when_imported")))
    assert torch_now() == before
    meddles = PluginDataset(entry_point="meddles", params={"count": 9})
    meddling = replace(spec_of(evaluation__num_prompts=1), dataset=meddles)
    load_prompts(own, meddling, "")
    assert torch_now() == before
    ours = trained(own, broker, spec_of(algorithm__loss="grpo"))
    assert trained(own, broker, spec_of(algorithm__loss=plugin("meddles"))) == ours


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("no_loss", "is a function, not a consumer.gradient.losses.base.PolicyLoss"),
        ("not_there", "of trainer-plugins 1.0 cannot be imported: AttributeError"),
        ("no_module", "of trainer-plugins 1.0 cannot be imported: ModuleNotFoundError"),
        ("own_normaliser", "has a normaliser that is none of"),
        ("draws", "answered the same inputs with two different losses"),
        ("squares", "is not linear in a positive scale of the advantages"),
        ("idles", "gives a loss to a response of advantage 0"),
        ("mixes", "lets one response change the loss of another"),
        ("sums", r"answered token_loss without the shape \[3, 4\]"),
        ("raises", "raised KeyError: 'nothing'"),
        ("leaves", "raised SystemExit: 0"),
        ("changes", "changes the tensors that it is given"),
        ("detached", "without a gradient"),
        ("overflows", "a loss that is not finite"),
    ],
)
def test_a_loss_that_breaks_a_promise_is_refused_before_it_trains(name: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as refusal:
        policy_loss(AlgorithmSpec(loss=PluginLoss(entry_point=name)))
    assert refusal.value.field == "algorithm.loss.entry_point"


def test_a_plug_in_loss_knows_its_clips_and_takes_what_others_take() -> None:
    algorithm = job_spec(algorithm={"loss": plugin("as_grpo"), "clip_high": 0.5, "correction": "tis"}).algorithm
    assert algorithm.clip_range == (0.2, 0.5)
    inputs = LossInputs(
        logprobs=torch.tensor([[-1.0, -2.0]], requires_grad=True),
        old_logprobs=torch.tensor([[-2.0, -1.0]]),
        advantages=torch.tensor([1.0]),
        loss_mask=torch.ones(1, 2, dtype=torch.bool),
        clip_low=0.2,
        clip_high=0.5,
    )
    term = policy_loss(algorithm).surrogate(inputs)
    assert term.token_loss.tolist() == [[-1.5, pytest.approx(-0.36788, abs=1e-5)]]
    assert (term.clipped_high.tolist(), term.clipped_low.tolist()) == ([[True, False]], [[False, False]])


def test_a_name_that_two_packages_offer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "rival-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rival\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[onbeat.losses]\nonce = rival:LOSS\nno_module = rival:LOSS\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidInput, match=r"several packages .*: rival 2\.0, trainer-plugins 1\.0 \(keep one of them"):
        policy_loss(AlgorithmSpec(loss=PluginLoss(entry_point="no_module")))


def prompts_of(dataset: JsonlDataset | PluginDataset, root: Path) -> list[object]:
    """What three iterations and an evaluation ask."""
    spec = replace(job_spec(evaluation__num_prompts=4), dataset=dataset)
    loaded = load_dataset(dataset, num_evaluation=4, seed=3, model_root=SpecRoot(root))
    source = PromptSource(loaded, tokenizer=char_tokenizer(), spec=spec, context_tokens=128)
    return [source.evaluation_prompts(), *(source.training_prompts(iteration) for iteration in range(3))]


def test_a_data_set_that_equals_a_file_of_lines_asks_the_same_prompts(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"{number}+{number}=", "reference": str(2 * number)}) for number in range(24)]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    of_file = prompts_of(JsonlDataset(train_path="sums.jsonl"), tmp_path)
    assert prompts_of(PluginDataset(entry_point="riddles", params={"count": 24}), tmp_path) == of_file
    assert prompts_of(PluginDataset(entry_point="riddles", params={"count": 23}), tmp_path) != of_file


@pytest.mark.parametrize(
    ("name", "field", "problem"),
    [
        ("absent", "dataset.entry_point", "no package offers `absent` in group onbeat.datasets"),
        ("short", "evaluation.num_prompts", "1 prompts are asked for, the data set `short` holds 0 out"),
        ("twice", "dataset.entry_point", "gives two examples the same example_id"),
        ("none_left", "dataset.entry_point", "every prompt of the data set `none_left` is also held out"),
        ("dicts", "dataset.entry_point", "failed: TypeError: dict is no onbeat.data.prompts.examples.Example"),
        ("broken_text", "dataset.entry_point", "failed: UnicodeEncodeError"),
        ("leaves", "dataset.entry_point", "failed: SystemExit: 0"),
        ("fails", "dataset.entry_point", "failed: OSError: the disk is away"),
    ],
)
def test_a_data_set_that_cannot_be_had_is_refused_with_its_field(name: str, field: str, problem: str) -> None:
    with pytest.raises(InvalidInput, match=problem) as refusal:
        load_dataset(PluginDataset(entry_point=name), num_evaluation=1, seed=0, model_root=SpecRoot(SITE))
    assert refusal.value.field == field
    assert refusal.value.cure
