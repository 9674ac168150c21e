"""`[optimizer]` and `[trainer]`: the step, how gradients are accumulated and saved, and whether either is ours."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, UnsetType

from contracts.encoding.wire import MAX_ITERATIONS, Factor, Iterations, IterationsOrNone, Line, Record

HEALTH_RULES = {
    "reward_collapsed": "reward collapsed",
    "score_collapsed": "held-out score collapsed",
    "groups_equal": "groups are equal",
    "entropy_gone": "entropy is gone",
    "kl_high": "KL is high",
    "gradient_dead": "gradient is dead",
    "mismatch_high": "mismatch is high",
    "truncations_rising": "truncations rise",
    "lag_too_large": "lag is too large",
    "completions_cut": "completions are cut",
    "completions_unscorable": "completions can't be judged",
    "mismatch_unusual": "mismatch is unusual",
}
"""A rule of a job's health → its name in words; `onbeat/loop/health/rules.py` says what each looks at."""
HealthRule: TypeAlias = Literal[tuple(HEALTH_RULES)]  # pyright: ignore[reportInvalidTypeForm]  # msgspec reads it when it runs

NumHosts = Annotated[int, Meta(ge=1, le=512)]
"""Hosts of a trainer."""
REGROUP_S = 600.0
"""`trainer.hosts.regroup_s` where a spec leaves it out."""
ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the output head."""


class LoraSpec(Record, frozen=True, kw_only=True):
    """Trains low-rank adapters next to the model's own weights, which stay as they are (arXiv 2106.09685)."""

    rank: Annotated[int, Meta(ge=1, le=1024)] = 16
    """r: rows of A and columns of B in W + alpha / r · B A."""
    alpha: Annotated[float, Meta(gt=0.0, le=1e6)] = 32.0
    """The product counts alpha / rank."""
    target_modules: Annotated[tuple[Line, ...], Meta(min_length=1, max_length=256)] = (ALL_LINEAR,)
    """Ends of the names of the linear layers that get an adapter, such as "q_proj"; "all-linear": all but the head."""

    publish: Literal["merged", "adapter"] = "merged"
    """What a version brings the generators. merged: whole weights; adapter: A and B, which they merge into the base, to
    the same weights and digest."""


class ParameterGroup(Record, frozen=True, kw_only=True):
    """Parameters with a learning rate or a weight decay of their own."""

    parameters: Annotated[tuple[Line, ...], Meta(min_length=1, max_length=64)]
    """Patterns of names, as "*.mlp.*"; the first group that names a parameter has it."""
    learning_rate_factor: Annotated[float, Meta(ge=0.0, le=1000.0)] = 1.0
    """Times the learning rate."""
    weight_decay: Factor | UnsetType = UNSET
    """Theirs, norms' and embeddings' too; left out: optimizer.weight_decay, on what that acts on."""


class PluginTracker(Record, tag_field="type", tag="plugin", frozen=True, kw_only=True):
    """A user's tracker, found by its name among the entry points of group `onbeat.trackers` where the trainer runs.

    docs/extend.md says how it is called.
    """

    entry_point: Line
    """Name of the class in group `onbeat.trackers`."""


class OptimizerSpec(Record, frozen=True, kw_only=True):
    """AdamW or Muon; the learning rate is a function of the iteration, the same for all of its updates."""

    type: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw: moments in float32, 8 bytes a parameter; adamw_8bit: quantised to 2 bytes by blocks of 256 (bitsandbytes,
    arXiv 2110.02861), by the extra `adamw8bit`; muon: torch's Muon, at AdamW's learning rates (arXiv 2502.16982), for
    the matrices of hidden layers, and adamw for all else."""
    groups: Annotated[tuple[ParameterGroup, ...], Meta(min_length=1, max_length=32)] | UnsetType = UNSET
    """Parameters by their names."""
    learning_rate: Annotated[float, Meta(gt=0.0, le=1.0)] = 1e-6
    """Peak learning rate."""
    critic_learning_rate_factor: Annotated[float, Meta(gt=0.0, le=1000.0)] | UnsetType = UNSET
    """Times the learning rate for a critic's parameters (algorithm.advantage = "gae"), before the factor of a group;
    left out: 10."""
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.99
    """Decay of the second moment."""
    epsilon: Annotated[float, Meta(gt=0.0, le=1.0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Factor = 0.0
    """Decoupled weight decay of matrices: linear layers, an untied head, LoRA's A and B."""
    max_grad_norm: Annotated[float, Meta(gt=0.0, le=1e12)] = 1.0
    """Global gradient norm is clipped to this."""
    offload: Literal["host", "disk"] | UnsetType = UNSET
    """Where the float32 weights and the moments are between two steps, instead of a GPU's memory. host: in the host's
    memory, without effect on a CPU; disk: in a file of the run root that ends with the process. A step brings them
    group by group, to the same weights; left out: they stay."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Decay of the learning rate after the warm-up, to min_learning_rate; wsd (warm-up, stable, decay): linear, in the
    last decay_iterations alone."""
    warmup_iterations: IterationsOrNone = 0
    """Linear warm-up."""
    decay_iterations: Iterations | UnsetType = UNSET
    """The last iterations, in which wsd decays; needed there, and without effect elsewhere."""
    min_learning_rate: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """What the decay ends with; left out: 0."""


class HostsSpec(Record, frozen=True, kw_only=True):
    """The hosts of a trainer. Consumers with ONBEAT_NETWORK offer theirs. One that is lost ends the group, and those
    that are left form the next one: the weights are the same for any number of hosts."""

    least: NumHosts
    """Fewer don't begin."""
    most: NumHosts
    """Further ones wait; more than least join where they come in time."""
    ranks: Annotated[int, Meta(ge=1, le=256)] = 1
    """Ranks on each host."""
    wait_s: Annotated[float, Meta(gt=0.0, le=86400.0)] = 60.0
    """Longest that a group waits for its least hosts; one that has waited in vain counts as a start without progress
    (timeouts.max_trainer_starts)."""
    regroup_s: Annotated[float, Meta(ge=0.0, le=2592000.0)] = REGROUP_S
    """A group that has run so long with fewer hosts than it may begins again, from its last iteration, if others wait;
    0: never."""


MOST_WIDER_BITS = 24
"""The most that `WiderSums.bits` may be: a gradient that needs more is one of a training that has diverged."""


class WiderSums(Record, frozen=True, kw_only=True):
    """Exact sums that take larger gradients from an iteration on, and resolve as much less of each."""

    first_iteration: Annotated[int, Meta(ge=0, le=MAX_ITERATIONS)]
    """The first iteration whose gradients are summed so; those before it keep their sums, and their weights."""
    bits: Annotated[int, Meta(ge=1, le=MOST_WIDER_BITS)]
    """The sums take gradients 2**bits times as large as without it."""


class TrainerSpec(Record, frozen=True, kw_only=True):
    """How gradients are accumulated and saved."""

    world_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    """Number of trainer processes, called ranks; on GPUs each has one. With exact accumulation the number doesn't
    change the weights."""
    hosts: HostsSpec | UnsetType = UNSET
    """Ranks of several hosts are one trainer; left out: one host has all of them, and world_size says how many."""
    sharding: Literal["none", "fsdp"] = "none"
    """none: each rank has a copy of the model; fsdp: ranks share parameters, gradients and optimizer state by rows
    (FSDP2), to the same weights."""
    accumulation: Literal["exact", "float"] = "exact"
    """exact: 64-bit fixed point, independent of arrival order (I7), 8 bytes a parameter; float: float32 sums."""
    wider_sums: Annotated[tuple[WiderSums, ...], Meta(min_length=1, max_length=64)] | UnsetType = UNSET
    """Wider ranges of exact sums, each from its iteration on, in ascending order. A job that ends since a gradient is
    beyond their range gets one by `onbeat resume --wider-sums`; left out: the range follows from the loss and the
    rollout (docs/losses.md)."""
    checkpoint_every_iterations: Iterations = 10
    """A checkpoint is also written after the last iteration and on cancel."""
    keep_checkpoints: Annotated[int, Meta(ge=1, le=1000)] = 2
    """Newest checkpoints that are kept, and next to them the best of those whose version was evaluated."""
    packing: Literal["shared_prompt", "as_sampled", "padded"] = "shared_prompt"
    """shared_prompt: a prompt goes through the model once for all its completions, by packed attention or by the
    model's cache, and once for each where the model can take neither: a trial decides when it is loaded; as_sampled:
    once, with the generator's log-probs bit for bit (docs/hardware.md); padded: once for each, which every architecture
    takes."""
    max_tokens_per_micro_batch: Annotated[int, Meta(ge=1, le=2**24)] = 8192
    """Input tokens of one pass, padding included: bounds the memory of activations. A batch with more goes through in
    several passes; a prompt with one completion always goes whole."""
    measure_entropy: bool = True
    """Measures entropy_trained_tokens, of the whole distribution, without a bonus too; the estimate `entropy` is always
    there."""
    mismatch_alarm: Annotated[float, Meta(gt=0.0, le=1e6)] = 0.01
    """Above this mean K3 a token between trainer and generator, over the batches that the trained version sampled, an
    iteration is a warning and an event. The default is for answers of some ten tokens (docs/numbers.md)."""
    on_mismatch: Literal["warn", "fail"] = "warn"
    """Whether such an iteration is trained all the same, or fails the job before its step."""
    kl_alarm: Annotated[float, Meta(gt=0.0, le=1e6)] | UnsetType = UNSET
    """Above this `kl_to_reference`, a mean of ten iterations, health says kl_high; left out: never."""
    entropy_alarm: Annotated[float, Meta(gt=0.0, le=1e3)] | UnsetType = UNSET
    """Below this `entropy` it says entropy_gone; left out: below 0.05 and a tenth of the first iterations'."""
    stop_on: Annotated[tuple[HealthRule, ...], Meta(max_length=16)] | UnsetType = UNSET
    """Rules of the job's health (docs/numbers.md) that end it as failed, with a checkpoint, once broken; left out:
    none. What broke before a resume doesn't end it again."""
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, about a third more time."""
    free_gradients: bool | UnsetType = UNSET
    """Lets go of the gradient of each parameter as soon as a backward pass has added it to the sums, and on a CPU of
    the sums' memory as they are stepped on; slower where a model has many small parameters. Left out: false."""
    offload_activations: bool | UnsetType = UNSET
    """Has the activations of a pass on a GPU wait in the host's memory for the backward pass, to the same weights;
    without effect on a CPU. With gradient_checkpointing those are the inputs of layers. Left out: false."""
    lora: LoraSpec | None = None
    """Trains adapters instead of the model; none: every parameter."""
    external: bool = False
    """A process of one's own trains the job, by `onbeat.client` (docs/extend.md): consumers leave it alone, and other
    keys of trainer, algorithm, optimizer and trackers, which nothing reads, must be left out."""

    def wider_bits(self, iteration: int) -> int:
        """Returns the bits by which the exact sums of an iteration are wider than they would be by themselves."""
        if self.wider_sums is UNSET:
            return 0
        # The newest entry that has begun holds.
        return next((sums.bits for sums in reversed(self.wider_sums) if sums.first_iteration <= iteration), 0)

    @property
    def frees_gradients(self) -> bool:
        return self.free_gradients is True

    @property
    def offloads_activations(self) -> bool:
        return self.offload_activations is True

    @property
    def over_hosts(self) -> HostsSpec | None:
        """None where one host has all ranks."""
        return None if self.hosts is UNSET else self.hosts

    @property
    def mismatch_limit(self) -> float:
        """The K3 above which there is an alarm; 0.0: at any difference, where bits are to be the same."""
        return 0.0 if self.packing == "as_sampled" else self.mismatch_alarm

    @property
    def stops_on(self) -> tuple[str, ...]:
        return () if self.stop_on is UNSET else self.stop_on
