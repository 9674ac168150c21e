"""A job's life, as other processes see it, and what the exit code of a process that works on it says.

    queued ──▶ running ──▶ succeeded ──┐
    ▲ │           │  └───▶ failed ─────┤
    │ │           └─ cancelling ──▶ cancelled
    │ └────────────────────────────▲   │
    └──────────── resume ──────────────┘

A `cancelling` job waits for its trainer's checkpoint; whatever that meets, the job doesn't become `failed`. A job whose
trainer died stays `running`: the trainer is replaced. Only a resume leaves a final state, and `succeeded` only for more
iterations.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, IntEnum
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field, to_builtins

from contracts.encoding.wire import Iterations, Line, Record, changed
from contracts.errors import Fault
from contracts.rewards import OnUnscorable, with_on_unscorable
from contracts.spec.job import JobSpec
from contracts.spec.rules import check_spec
from contracts.spec.trainer import HEALTH_RULES, MOST_WIDER_BITS, WiderSums
from contracts.stated_scores import with_on_failure

MAX_SHOWN_CHARS = 80
"""Most characters of a value in a line that tells of its change."""


class JobState(str, Enum):
    """The state of a job in its life, which the head of this file draws. Only the job store moves a job."""

    QUEUED = "queued"
    RUNNING = "running"
    CANCELLING = "cancelling"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


NEXT_STATES: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED, JobState.FAILED}),
    JobState.RUNNING: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLING}),
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.SUCCEEDED}),
    JobState.SUCCEEDED: frozenset({JobState.QUEUED}),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
}


class TrainerExit(IntEnum):
    """How `python -m consumer JOB_ID` ends: its worker decides by it whether the job gets another trainer."""

    DONE = 0
    """The job is final, or this trainer was stopped and gave its lease back."""
    DIED = 1
    """It may be started again: Redis stayed away, the fence moved under it, a rank is gone. Where Redis answers, its
    lease is given back."""
    FAILED = 2
    """The job failed, and says why."""
    HELD = 3
    """Another trainer holds the job."""
    STOPPED = 4
    """It was asked to end while it loaded, while Redis was away, or did not end in time: it ended where it stood, and
    its lease may have to run out."""


class WorkerExit(IntEnum):
    """How a generator and a stage worker end."""

    STOPPED = 0
    """It was asked to end, and finished what it held, or gave it up after a grace."""
    DIED = 1
    """Redis stayed away, or a task died, before the worker had claimed anything."""
    REFUSED = 2
    """A setting is bad."""
    DIED_AT_WORK = 4
    """Its engine died, a computation hangs, or a task died after work was claimed: perhaps of that work, which the
    broker takes out of circulation in the end."""


def is_of_work(exit_code: int) -> bool:
    """Returns True where a generator or a stage worker may have died of its work.

    exit_code: negative of a process that a signal has ended, as the kernel does where memory runs out.
    """
    return exit_code == WorkerExit.DIED_AT_WORK or exit_code < 0


class ResumeRequest(Record, frozen=True, kw_only=True):
    """Body of `POST /v1/jobs/{id}/resume`; a request may leave it out."""

    iterations: Iterations | None = None
    """The job's new number of iterations; None keeps it."""
    on_unscorable: Annotated[dict[Line, OnUnscorable], Meta(max_length=32)] = field(default_factory=dict)
    """New `on_unscorable` of reward components, by their names in the breakdown; the others keep theirs."""
    on_failure: Annotated[dict[Line, OnUnscorable], Meta(max_length=32)] = field(default_factory=dict)
    """New `on_failure` of the environment, by "environment", and of stages, by their names; the others keep theirs."""
    wider_sums: Annotated[int, Meta(ge=1, le=MOST_WIDER_BITS)] | UnsetType = UNSET
    """Bits by which exact sums take larger gradients from the first iteration that isn't trained
    (`trainer.wider_sums`); left out: the range stays."""


def resumed_spec(before: JobSpec, request: ResumeRequest, *, num_trained: int = 0) -> JobSpec:
    """Returns the spec that a resumed job goes on with; what the request leaves out stays.

    Args:
        before: The spec that it had.
        request: The changes.
        num_trained: Iterations that are committed. What of them is trained again has to come to the same weights, so
            wider sums begin after them.

    Raises:
        InvalidInput: The request names what the job doesn't have.
        SpecRefused: The spec that comes of it breaks a rule.
    """
    after = before
    if request.iterations is not None:
        after = changed(after, iterations=request.iterations)
    if request.on_unscorable:
        components = with_on_unscorable(before.reward.components, request.on_unscorable)
        after = changed(after, reward=changed(before.reward, components=components))
    if request.on_failure:
        changes = with_on_failure(before.dataset, before.environment, before.stages, request.on_failure)
        after = changed(after, **changes)
    if request.wider_sums is not UNSET:
        # Sums of an earlier resume stay where iterations were trained with them.
        earlier = [sums for sums in before.trainer.wider_sums or () if sums.first_iteration < num_trained]
        wider = WiderSums(first_iteration=num_trained, bits=request.wider_sums)
        after = changed(after, trainer=changed(before.trainer, wider_sums=(*earlier, wider)))
    check_spec(after)
    return after


def changes_in_words(before: JobSpec, after: JobSpec) -> tuple[str, ...]:
    """Returns a line for each value of a spec that differs: `reward.components.0.on_unscorable: fail → 0.0`."""
    return tuple(_changes("", to_builtins(before), to_builtins(after)))


def _changes(field: str, before: object, after: object) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in (*before, *(name for name in after if name not in before)):
            path = f"{field}.{name}" if field else str(name)
            yield from _changes(path, before.get(name), after.get(name))
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _changes(f"{field}.{number}", old, new)
    elif before != after:
        yield f"{field}: {_shown(before)} → {_shown(after)}"


def _shown(value: object) -> str:
    text = "none" if value is None else str(value)
    if len(text) <= MAX_SHOWN_CHARS:
        return text
    return f"{text[: MAX_SHOWN_CHARS - 1]}…"


class PassAt(Record, frozen=True, kw_only=True):
    """The share of held-out prompts of which one of k samples passes."""

    k: int
    share: float
    """Chen et al., arXiv 2107.03374, equation 1: unbiased, of n samples a prompt."""
    error: float
    """Standard error over the prompts; 0.0 of one."""


class SetScore(Record, frozen=True, kw_only=True):
    """Mean reward over the prompts of a set; fields as of EvaluationScore."""

    sampled: float
    greedy: float | None = None
    num_prompts: int
    sampled_error: float | UnsetType = UNSET
    pass_at: tuple[PassAt, ...] | UnsetType = UNSET


class EvaluationScore(Record, frozen=True, kw_only=True):
    """Mean reward over held-out prompts under one version: of the set that `evaluation.best` names."""

    iteration: int
    policy_version: int
    sampled: float
    """The mean over `evaluation.group_size` samples a prompt."""
    greedy: float | None = None
    """Greedy decoding; None where the spec turns it off."""
    num_prompts: int
    sampled_error: float | UnsetType = UNSET
    """Standard error of `sampled` over the prompts: the unbiased deviation of their mean rewards, over the root of
    their number. The samples of a prompt are alike, and count as one. Left out of a single prompt."""
    pass_at: tuple[PassAt, ...] | UnsetType = UNSET
    """For k = 1, 2, 4, ... and all samples of a prompt; left out with one."""
    by_source: dict[str, float] | UnsetType = UNSET
    """`sampled` of each source, in a mixture of data sets."""
    sets: dict[str, SetScore] | UnsetType = UNSET
    """Name → score, of the other sets of the evaluation; "held_out" of the job's own data set."""


def passes_in_words(score: EvaluationScore) -> str:
    """Writes a score's passes, sources and other sets behind its mean reward; "" where it has none.

    The text is `, pass@1 0.412 ± 0.021, pass@8 0.731 ± 0.030`, then `, sums 0.611` for each source, and
    `; aime: sampled 0.3` for each other set.
    """
    words = "".join(f", {name} {mean:.4g}" for name, mean in (score.by_source or {}).items())
    for name, of_set in (score.sets or {}).items():
        greedy = "" if of_set.greedy is None else f", greedy {of_set.greedy:.4g}"
        words += f"; {name}: sampled {of_set.sampled:.4g}{greedy}{_passes(of_set)}"
    return _passes(score) + words


def _passes(score: EvaluationScore | SetScore) -> str:
    return "".join(f", pass@{passes.k} {passes.share:.3f} ± {passes.error:.3f}" for passes in score.pass_at or ())


class DrawnPrompts(Record, frozen=True, kw_only=True):
    """The prompts that an iteration drew from a source with difficulty pools, and how it went.

    Later draws follow from it.
    """

    source: str = ""
    """"" of the only one."""
    num_prompts: int
    """Training prompts of the source, then those in its easy and in its hard pool when it was drawn."""
    num_easy: int
    num_hard: int
    places: tuple[int, ...]
    """Number of each drawn prompt in its source, in the order of the iteration."""
    passed: tuple[int, ...]
    """[places] Completions that passed; -1 where the batch was abandoned."""

    @property
    def shares(self) -> dict[str, float]:
        """Pool → its share of the source's prompts."""
        sizes = {
            "easy": self.num_easy,
            "hard": self.num_hard,
            "normal": self.num_prompts - self.num_easy - self.num_hard,
        }
        prefix = f"{self.source}/" if self.source else ""
        return {f"{prefix}{pool}": size / self.num_prompts for pool, size in sizes.items()}


class HealthProblem(Record, frozen=True, kw_only=True):
    """A rule that a job's numbers break, as it was when that began."""

    rule: str
    """A name in HEALTH_RULES."""
    since: int
    """The iteration after which it was noticed."""
    problem: str
    """A sentence about what the job's numbers show, with the numbers."""
    cure: str
    until: int | UnsetType = UNSET
    """The iteration after which it was gone; left out while it is there."""

    @property
    def name(self) -> str:
        return HEALTH_RULES.get(self.rule, self.rule)

    @property
    def in_words(self) -> str:
        """`reward collapsed since iteration 10: 0 on average over 10 iterations, after 0.432 up to iteration 0`; of one
        that is gone `mismatch is unusual from iteration 0 until 2: …`."""
        when = f"since iteration {self.since}"
        if self.until is not UNSET:
            when = f"from iteration {self.since} until {self.until}"
        return f"{self.name} {when}: {self.problem}"


class WindowIteration(Record, frozen=True, kw_only=True):
    """An iteration that is open: generators may sample it."""

    iteration: int
    oldest_version: int
    """Its training batches are sampled by this version, or a newer one up to newest_version."""
    newest_version: int
    batches_expected: int
    """Published and dead ones are among them, and an evaluation that waits for its version."""
    batches_published: int
    batches_dead: int


class JobCounts(Record, frozen=True, kw_only=True):
    """Counts over the whole job, and its window."""

    job_id: str
    max_policy_lag: int = 0
    """As the spec says: the window is at most one iteration longer."""
    window: tuple[WindowIteration, ...] = ()
    """The open iterations, oldest first."""
    policy_version: int = 0
    """The newest that a commit made, or the job's first."""
    weights_digest: str = ""
    trainer_epoch: int = 0
    """0 before the first trainer."""
    batches_expected: int = 0
    """Batches of the oldest open iteration; batches_published of them are."""
    batches_published: int = 0
    batches_accepted: int = 0
    """Publications that the fence accepted, over the whole job."""
    batches_rejected: dict[str, int] = field(default_factory=dict)
    """Refused publications by reason, over the whole job."""
    batches_reclaimed: int = 0
    """Leases that expired and went to another generator."""
    leases_lost: int = 0
    """Leases that ended without another word of their generator: it died, or hung. The batch went to the next claim
    (`batches_reclaimed`) or was published as a copy, or its iteration began again or ended."""
    batches_hedged: int = 0
    """Copies of late batches that idle generators took."""
    hedges_won: int = 0
    """Copies that were published before the original."""
    batches_dead: int = 0
    """Batches that were given up."""


class JobStatus(JobCounts, frozen=True, kw_only=True):
    """The answer to `GET /v1/jobs/{id}`, which broker/monitor.py makes of the job's keys at each request."""

    name: str
    state: JobState
    reason: str = ""
    """Why a job failed or ended early, what a running one waits for, or what a cancelled one could not save."""
    schedule: str
    iterations: int
    iterations_committed: int = 0
    created_s: float
    """Unix time, like the next two."""
    started_s: float = 0.0
    """Start of the first trainer; 0.0 before it."""
    ended_s: float = 0.0
    """0.0 before a final state."""
    run_directory: str = ""
    """Relative to the run root."""
    stack_directory: str = ""
    """Folder by which a command on the gateway's host finds the stack, as its `--run-dir`; "" where the gateway is no
    part of an `onbeat up`."""
    live_generators: int = 0
    evaluation_before: EvaluationScore | None = None
    evaluation_latest: EvaluationScore | None = None
    health: tuple[HealthProblem, ...] = ()
    """The problems that its numbers show; () where all is well, or too few iterations are committed to tell."""
    health_past: tuple[HealthProblem, ...] = ()
    """Problems that its numbers showed and show no more: of each rule the newest."""
    disk_bytes: int | None = None
    """Size of its run folder with its versions, of an ended job an hour ago at most; None where it isn't known yet."""
    tags: tuple[str, ...] = ()
    owner: str = ""
    """The name of the key that submitted it, which with the scope submit may change it; "" where no gateway took it."""
    learns_given: bool = False
    """True: the job learns completions of its data set (loss = "sft"). Its curve is the loss, its rewards are all 0."""
    fault: Fault | UnsetType = UNSET
    """The side on which the cause of a failed job lies; absent in every other state."""
