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
    """r, the number of rows of A and of columns of B in W + alpha / r · B A."""
    alpha: Annotated[float, Meta(gt=0.0, le=1e6)] = 32.0
    """The product B A is multiplied by alpha / rank."""
    target_modules: Annotated[tuple[Line, ...], Meta(min_length=1, max_length=256)] = (ALL_LINEAR,)
    """The layers that get an adapter: linear layers whose names end so, such as "q_proj". "all-linear" means all linear
    layers but the head."""

    publish: Literal["merged", "adapter"] = "merged"
    """Decides what a version brings to the generators. merged: whole weights. adapter: A and B, which the generators
    merge into the base, to the same weights and digest."""


class ParameterGroup(Record, frozen=True, kw_only=True):
    """Parameters with a learning rate or a weight decay of their own."""

    parameters: Annotated[tuple[Line, ...], Meta(min_length=1, max_length=64)]
    """Patterns of parameters' names, such as "*.mlp.*". A parameter belongs to the first group whose pattern fits its
    name."""
    learning_rate_factor: Annotated[float, Meta(ge=0.0, le=1000.0)] = 1.0
    """The learning rate of these parameters is multiplied by this number; 0 freezes them."""
    weight_decay: Factor | UnsetType = UNSET
    """The weight decay of these parameters, also of norms and embeddings among them. Left out: optimizer.weight_decay,
    on the matrices that it acts on."""


class PluginTracker(Record, tag_field="type", tag="plugin", frozen=True, kw_only=True):
    """A user's tracker, found by its name among the entry points of group `onbeat.trackers` where the trainer runs.

    docs/extend.md says how it is called.
    """

    entry_point: Line
    """Name of the class in group `onbeat.trackers`."""


class OptimizerSpec(Record, frozen=True, kw_only=True):
    """AdamW or Muon; the learning rate is a function of the iteration, the same for all of its updates."""

    type: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """The optimizer. adamw: its moments are in float32, 8 bytes a parameter. adamw_8bit: its moments are quantised to 2
    bytes a parameter, by blocks of 256 (bitsandbytes, arXiv 2110.02861); it needs the extra `adamw8bit`. muon: torch's
    Muon, at AdamW's learning rates (arXiv 2502.16982), for the matrices of hidden layers, and adamw for all other
    parameters."""
    groups: Annotated[tuple[ParameterGroup, ...], Meta(min_length=1, max_length=32)] | UnsetType = UNSET
    """Groups of parameters with a learning rate or a weight decay of their own."""
    learning_rate: Annotated[float, Meta(gt=0.0, le=1.0)] = 1e-6
    """The peak of the learning rate."""
    critic_learning_rate_factor: Annotated[float, Meta(gt=0.0, le=1000.0)] | UnsetType = UNSET
    """The learning rate of a critic's parameters (algorithm.advantage = "gae") is multiplied by this number, before the
    factor of a group. Left out: 10."""
    beta1: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.9
    """The decay of the first moment."""
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.99
    """The decay of the second moment."""
    epsilon: Annotated[float, Meta(gt=0.0, le=1.0)] = 1e-8
    """The number that is added to the root of the second moment."""
    weight_decay: Factor = 0.0
    """Decoupled weight decay. It acts on matrices: linear layers, a head that isn't tied, and LoRA's A and B."""
    max_grad_norm: Annotated[float, Meta(gt=0.0, le=1e12)] = 1.0
    """The bound to which the global norm of the gradient is clipped."""
    offload: Literal["host", "disk"] | UnsetType = UNSET
    """Where the float32 weights and the moments are between two steps, instead of a GPU's memory. host: in the host's
    memory, which has no effect on a CPU. disk: in a file of the run root that ends with the process. A step brings them
    group by group, to the same weights. Left out: they stay on the device."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """How the learning rate decays after the warm-up, to min_learning_rate. wsd (warm-up, stable, decay) decays
    linearly, in the last decay_iterations only."""
    warmup_iterations: IterationsOrNone = 0
    """The number of first iterations in which the learning rate grows linearly to its peak."""
    decay_iterations: Iterations | UnsetType = UNSET
    """The number of last iterations in which wsd decays. wsd needs it; with another schedule it has no effect."""
    min_learning_rate: Annotated[float, Meta(gt=0.0, le=1.0)] | UnsetType = UNSET
    """The learning rate at the end of the decay. Left out: 0."""


class HostsSpec(Record, frozen=True, kw_only=True):
    """The hosts of a trainer. Consumers with ONBEAT_NETWORK offer theirs. One that is lost ends the group, and those
    that are left form the next one: the weights are the same for any number of hosts."""

    least: NumHosts
    """The fewest hosts with which a group begins."""
    most: NumHosts
    """The most hosts of a group. Further hosts wait. Hosts beyond `least` join if they come in time."""
    ranks: Annotated[int, Meta(ge=1, le=256)] = 1
    """Ranks on each host."""
    wait_s: Annotated[float, Meta(gt=0.0, le=86400.0)] = 60.0
    """The longest time that a group waits for its least hosts. A group that has waited in vain counts as a start
    without progress (timeouts.max_trainer_starts)."""
    regroup_s: Annotated[float, Meta(ge=0.0, le=2592000.0)] = REGROUP_S
    """If a group has run for this long with fewer than `most` hosts, and others wait, it begins again from its last
    iteration. 0: never."""


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
    """Wider ranges of exact sums, each from an iteration on, in ascending order. If a job fails because a gradient is
    beyond the range, `onbeat resume --wider-sums` adds an entry. Left out: the range follows from the loss and the
    rollout (docs/losses.md)."""
    checkpoint_every_iterations: Iterations = 10
    """A checkpoint is also written after the last iteration and on cancel."""
    keep_checkpoints: Annotated[int, Meta(ge=1, le=1000)] = 2
    """The number of newest checkpoints that are kept. The best of those whose version was evaluated is kept, too."""
    packing: Literal["shared_prompt", "as_sampled", "padded"] = "shared_prompt"
    """How completions go through the model (docs/hardware.md). shared_prompt: a prompt goes through once for all its
    completions, by packed attention or by the model's cache. A trial decides when the model is loaded; a model that can
    do neither gets padded rows. as_sampled: the prompt goes through once, and log-probs are the generator's bit for
    bit. padded: each completion is a row with its prompt, which every architecture takes."""
    max_tokens_per_micro_batch: Annotated[int, Meta(ge=1, le=2**24)] = 8192
    """The most input tokens of one pass through the model, padding included. It bounds the memory of activations. A
    batch with more tokens goes through in several passes; a prompt with one completion always goes whole."""
    measure_entropy: bool = True
    """Measures entropy_trained_tokens, the entropy of the whole distribution, also if there is no entropy bonus. The
    estimate `entropy` is always there."""
    mismatch_alarm: Annotated[float, Meta(gt=0.0, le=1e6)] = 0.01
    """If the mean K3 a token between trainer and generator is above this number, the iteration makes a warning and an
    event. The mean is over the batches that the trained version sampled. The default is for answers of some ten tokens
    (docs/numbers.md)."""
    on_mismatch: Literal["warn", "fail"] = "warn"
    """Decides what happens at such an iteration. warn: it is trained nevertheless. fail: the job fails before the
    iteration's step."""
    kl_alarm: Annotated[float, Meta(gt=0.0, le=1e6)] | UnsetType = UNSET
    """If the mean `kl_to_reference` of ten iterations is above this number, the job's health shows kl_high. Left out:
    never."""
    entropy_alarm: Annotated[float, Meta(gt=0.0, le=1e3)] | UnsetType = UNSET
    """If the mean `entropy` is below this number, the job's health shows entropy_gone. Left out: below 0.05, and below
    a tenth of that of the first iterations."""
    stop_on: Annotated[tuple[HealthRule, ...], Meta(max_length=16)] | UnsetType = UNSET
    """Rules of the job's health (docs/numbers.md). If one of them is broken, the job ends as failed, with a checkpoint.
    A rule that was broken before a resume doesn't end the job again. Left out: no rule ends it."""
    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, about a third more time."""
    free_gradients: bool | UnsetType = UNSET
    """Frees the gradient of each parameter as soon as a backward pass has added it to the sums. On a CPU it also frees
    the memory of the sums as they are stepped on. A model with many small parameters gets slower. Left out: false."""
    offload_activations: bool | UnsetType = UNSET
    """Keeps the activations of a pass on a GPU in the host's memory until the backward pass, to the same weights. With
    gradient_checkpointing these are the inputs of layers. It has no effect on a CPU. Left out: false."""
    lora: LoraSpec | None = None
    """Trains adapters instead of the model; none: every parameter."""
    external: bool = False
    """A process of your own trains the job, by `onbeat.client` (docs/extend.md). Consumers leave the job alone. Nothing
    reads the other keys of trainer, algorithm, optimizer and trackers, so they must be left out."""

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
