"""The switches that save memory change no bit: of a step, of a checkpoint, nor of what follows a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from consumer.gradient.accumulation import SumRange
from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner, OptimizerStep
from consumer.gradient.saved_state import adapter_state, restore_state
from consumer.model import offloaded_activations
from consumer.model.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from consumer.model.offloaded_activations import Waiting, activations_of_pass
from consumer.ranks.threads import passes_at_once
from contracts.errors import OnbeatError, TrainingDiverged
from contracts.settings import StackSettings
from contracts.spec.trainer import TrainerSpec
from onbeat.base.process.host_memory import zero_pages
from onbeat.weights.hashing import tensors_digest
from tests.builders import job_spec, rollout_batch, tiny_model_folder

NUM_BATCHES = 3
DISK: dict[str, Any] = {"optimizer__offload": "disk"}
FREED: dict[str, Any] = {"trainer__free_gradients": True}
JOBS: dict[str, dict[str, Any]] = {
    "bfloat16": {"model__dtype": "bfloat16"},
    "float32": {},
    "muon": {"optimizer__type": "muon", "model__dtype": "bfloat16"},
    "adapters": {"trainer__lora": {"rank": 4}, "model__dtype": "bfloat16"},
    "a critic": {"algorithm__advantage": "gae", "model__dtype": "bfloat16"},
    "a moving reference": {
        "model__dtype": "bfloat16",
        "algorithm__kl_coefficient": 0.1,
        "algorithm__ref_model_sync_iterations": 1,
        "algorithm__ref_model_mixup_alpha": 0.6,
    },
    "float sums": {"deterministic": False, "trainer__accumulation": "float", "model__dtype": "bfloat16"},
}


@pytest.fixture
def settings(tmp_path: Path) -> StackSettings:
    tiny_model_folder(tmp_path, hidden_size=64, num_layers=3, tied=False)
    return StackSettings(run_root=str(tmp_path / "runs"), model_root=str(tmp_path))


def train(learner: Learner, iteration: int) -> None:
    """Trains an iteration of three batches, and steps."""
    for number in range(NUM_BATCHES):
        learner.train(rollout_batch(seed=10 * iteration + number, batch_id=f"{iteration}/train/{number}"))
    syncs = learner.spec.algorithm.ref_model_sync_iterations == 1
    learner.step(
        OptimizerStep(iteration=iteration, divisor=7.0, learning_rate=0.01, is_last=True, syncs_reference=syncs)
    )


def state(learner: Learner) -> dict[str, Tensor]:
    """Returns the weights and the optimizer's state, by name."""
    optimizer = {f"optimizer.{name}": tensor for name, tensor in learner.optimizer.state_tensors().items()}
    return {name: tensor.clone() for name, tensor in (learner.policy.state_tensors() | optimizer).items()}


def assert_same_bits(first: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert first.keys() == other.keys()
    assert tensors_digest(first) == tensors_digest(other)


def saved(learner: Learner, folder: Path) -> Checkpoint:
    """Writes a learner's state as a checkpoint, and reads it."""
    target = folder / "i000001"
    digest = tensors_digest(learner.policy.state_tensors())
    adapters = adapter_state(learner.policy)
    write_checkpoint(target, job_id="job", iteration=1, weights_digest=digest, save=learner.save, adapters=adapters)
    return read_checkpoint(target)


@pytest.mark.parametrize("switches", [DISK, FREED, DISK | FREED], ids=["on disk", "freed", "both"])
@pytest.mark.parametrize("job", JOBS)
def test_a_job_with_a_switch_steps_to_the_weights_of_one_without(
    job: str, switches: dict[str, Any], settings: StackSettings
) -> None:
    plain = make_learner(settings, job_spec(**JOBS[job]))
    offloaded = make_learner(settings, job_spec(**JOBS[job], **switches))
    before = state(plain)
    for iteration in range(3):
        for learner in (plain, offloaded):
            train(learner, iteration)
        assert_same_bits(state(plain), state(offloaded))
    assert tensors_digest(before) != tensors_digest(state(plain))


@pytest.mark.parametrize("job", ["bfloat16", "float32", "muon", "adapters"])
@pytest.mark.parametrize("begins_on_disk", [True, False])
def test_a_checkpoint_of_either_is_resumed_by_the_other(
    job: str, begins_on_disk: bool, settings: StackSettings, tmp_path: Path
) -> None:
    specs = [job_spec(**JOBS[job], **DISK), job_spec(**JOBS[job])]
    first, second = specs if begins_on_disk else reversed(specs)
    learner = make_learner(settings, first)
    train(learner, 0)
    train(learner, 1)
    checkpoint = saved(learner, tmp_path / "checkpoint")
    successor = make_learner(settings, second)
    restore_state(checkpoint, successor.policy, successor.optimizer)
    successor.policy.follow()
    assert_same_bits(state(learner), state(successor))
    for each in (learner, successor):
        train(each, 2)
    assert_same_bits(state(learner), state(successor))


def test_the_masters_and_moments_are_in_the_file_between_two_steps(settings: StackSettings) -> None:
    learner = make_learner(settings, job_spec(model__dtype="bfloat16", **DISK))
    train(learner, 0)
    offload = learner.optimizer._offload
    assert offload is not None
    homes = {tensor.data_ptr() for tensor in offload._tensors.values()}
    kept = [tensor for tensor in learner.optimizer.state_tensors().values() if tensor.dim() > 0]
    assert len(kept) == 3 * len(learner.policy.trained_parameters())
    assert {tensor.data_ptr() for tensor in kept} == homes
    # The file has no name: nothing stays of a trainer that is killed.
    assert list(Path(settings.run_root).iterdir()) == []


def test_a_disk_without_room_is_an_error_that_names_the_folder_and_the_cure(
    settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OnbeatError, match=r'runs: no file of .* bytes.*No space left.*optimizer\.offload = "host"'):
        make_learner(settings, job_spec(**DISK))


def test_on_a_cpu_the_hosts_memory_is_no_other_and_the_log_says_so(
    settings: StackSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    learner = make_learner(settings, job_spec(optimizer__offload="host"))
    assert learner.optimizer._offload is None
    assert 'optimizer.offload = "host" has no effect on a CPU' in caplog.text


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("packing", ["padded", "shared_prompt"])
def test_activations_that_waited_elsewhere_give_the_same_gradient(
    checkpointing: bool, packing: str, settings: StackSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU plays the GPU: its tensors are copied, let go and brought back as a GPU's are."""
    waited: list[int] = []
    monkeypatch.setattr(offloaded_activations, "LEAST_BYTES", 64)
    monkeypatch.setattr("consumer.gradient.micro_step.activations_of_pass", _as_on_a_gpu)
    to_host = offloaded_activations.to_host

    def counted(tensor: Tensor, **options: Any) -> Any:
        result = to_host(tensor, **options)
        if isinstance(result, Waiting):
            waited.append(tensor.nbytes)
        return result

    monkeypatch.setattr(offloaded_activations, "to_host", counted)
    changes: dict[str, Any] = {"trainer__packing": packing, "trainer__gradient_checkpointing": checkpointing}
    plain = make_learner(settings, job_spec(**changes))
    train(plain, 0)
    assert waited == []
    offloaded = make_learner(settings, job_spec(**changes, trainer__offload_activations=True))
    train(offloaded, 0)
    # The inputs of three layers at least, in each of the batches' passes.
    assert len(waited) >= 3 * NUM_BATCHES
    assert_same_bits(state(plain), state(offloaded))


def _as_on_a_gpu(trainer: TrainerSpec, models: Any) -> Any:
    return activations_of_pass(trainer, models, device_type="cpu")


def test_weights_and_views_of_them_are_not_taken_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_activations, "LEAST_BYTES", 64)
    layer = torch.nn.Linear(8, 8)
    address = layer.weight.untyped_storage().data_ptr()
    activation = torch.randn(16, 8)
    assert not isinstance(offloaded_activations.to_host(layer.weight.t(), weights={address}), Waiting)
    assert isinstance(offloaded_activations.to_host(activation, weights={address}), Waiting)


def test_what_comes_back_has_its_bits_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded_activations, "LEAST_BYTES", 64)
    activation = torch.randn(4, 8, 16).transpose(1, 2)
    waiting = offloaded_activations.to_host(activation, weights=())
    assert isinstance(waiting, Waiting)
    again = offloaded_activations.from_host(waiting)
    assert torch.equal(again, activation)
    assert again.stride() == activation.stride()
    # A mask that stands for every head has one memory, which a copy would multiply.
    expanded = torch.randn(1, 32).expand(8, 32)
    assert offloaded_activations.to_host(expanded, weights=()) is expanded


def test_on_a_cpu_activations_stay(settings: StackSettings, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    offloaded_activations._say_without_effect.cache_clear()
    learner = make_learner(settings, job_spec(trainer__offload_activations=True))
    train(learner, 0)
    train(learner, 1)
    assert caplog.text.count("trainer.offload_activations has no effect on a CPU") == 1


@pytest.mark.parametrize("job", ["bfloat16", "adapters", "float sums"])
@pytest.mark.parametrize("max_tokens", [8192, 24])
def test_a_gradient_is_gone_before_the_next_parameters_has_come(
    job: str, max_tokens: int, settings: StackSettings
) -> None:
    limit = {"trainer__max_tokens_per_micro_batch": max_tokens}
    plain = make_learner(settings, job_spec(**JOBS[job], **limit))
    freeing = make_learner(settings, job_spec(**JOBS[job], **limit, **FREED))
    parameters = freeing.policy.trained_parameters()
    num_gradients: list[int] = []

    def count(_: Tensor) -> None:
        num_gradients.append(sum(parameter.grad is not None for parameter in parameters.values()))

    for parameter in parameters.values():
        # Behind the hook that takes the gradient.
        parameter.register_post_accumulate_grad_hook(count)
    for learner in (plain, freeing):
        train(learner, 0)
    assert len(num_gradients) >= NUM_BATCHES * len(parameters)
    assert max(num_gradients) == 0
    assert_same_bits(state(plain), state(freeing))


def test_a_gradient_out_of_range_ends_the_backward_pass_by_its_name(settings: StackSettings) -> None:
    learner = make_learner(settings, job_spec(**FREED))
    learner.accumulator.open(SumRange())
    weight = learner.policy.trained_parameters()["model.embed_tokens.weight"]
    with pytest.raises(TrainingDiverged, match=r"model\.embed_tokens\.weight: a gradient of 1e\+30 is beyond"):
        (weight * 1e30).sum().backward()
    with pytest.raises(TrainingDiverged, match=r"model\.embed_tokens\.weight: a gradient is not finite"):
        (weight * float("nan")).sum().backward()


def test_threads_that_free_their_gradients_add_to_one_sum(settings: StackSettings) -> None:
    spec = job_spec(**FREED)
    alone, first = (make_learner(settings, spec) for _ in range(2))
    second = first.beside(1)
    batches = [rollout_batch(seed=number, batch_id=f"0/train/{number}") for number in range(2)]
    for batch in batches:
        alone.train(batch)
    first.train(batches[0])
    second.train(batches[1])
    step = OptimizerStep(iteration=0, divisor=7.0, learning_rate=0.01, is_last=True)
    for learner in (alone, first):
        learner.step(step)
    assert_same_bits(state(alone), state(first))


def test_a_job_that_frees_gradients_trains_one_batch_at_a_time_unless_it_is_told(settings: StackSettings) -> None:
    one_thread = msgspec.structs.replace(settings, threads=1)
    assert passes_at_once(one_thread, job_spec(**FREED)).then == 1
    assert passes_at_once(msgspec.structs.replace(one_thread, max_passes=2), job_spec(**FREED)).then == 2


def test_at_rest_the_sums_have_no_memory_and_the_next_batch_starts_at_zero(settings: StackSettings) -> None:
    resting, other = (make_learner(settings, job_spec()) for _ in range(2))
    for iteration in range(2):
        for learner in (resting, other):
            train(learner, iteration)
        resting.rest()
        assert resting.accumulator._memory._flat is None
        assert other.accumulator._memory._flat is not None
    assert_same_bits(state(resting), state(other))
    assert resting.accumulator.added == other.accumulator.added


def test_sums_that_are_open_stay_at_rest(settings: StackSettings) -> None:
    learner = make_learner(settings, job_spec())
    learner.train(rollout_batch(seed=1, batch_id="0/train/0"))
    learner.rest()
    assert learner.accumulator._memory._flat is not None
    assert learner.accumulator._memory.flat.any()


def test_pages_that_go_back_read_as_zeros_and_their_neighbours_stay() -> None:
    numbers = torch.ones(1 << 16, dtype=torch.int64)
    part = numbers[1000:60000]
    first, end = zero_pages(part.data_ptr(), part.nbytes)
    if first == end:
        pytest.skip("this system gives no pages back")
    raw = part.view(torch.uint8)
    assert not raw[first:end].any()
    assert first < 4096 or first % 4096 == 0
    assert part[: first // 8].all()
    assert part[-(-end // 8) :].all()
    assert numbers[:1000].all()
    assert numbers[60000:].all()
