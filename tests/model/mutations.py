"""Each check left out, one by one: what that breaks, and the smallest instance that shows it.

What breaks nothing is listed too, with the reason why its check is kept.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.model.explorer import Result, explore
from tests.model.state import Bounds

ONE = Bounds(generators=1, batches=1)
TWO_GENERATORS = ONE._replace(generators=2)
TWO_BATCHES = Bounds(generators=1, iterations=1)
IN_PIECES = TWO_BATCHES._replace(first_batches=1)
"""An iteration whose batches don't all go out with its opening."""
RESAMPLED = TWO_GENERATORS._replace(is_deterministic=False)
"""A job whose replays and second attempts differ."""
RESAMPLED_TWICE = ONE._replace(is_deterministic=False, faults=2)
REMOVABLE = ONE._replace(may_remove=True)
FORGETFUL = ONE._replace(lost_writes=10, faults=2, may_end=False)
"""A restart can lose a whole iteration."""


class Mutation(NamedTuple):
    off: tuple[str, ...]
    """The checks that are left out, as fence.py and moves.py name them."""
    bounds: Bounds
    breaks: str
    """Begins the name of what breaks."""
    means: str
    """In words."""


class Redundant(NamedTuple):
    off: tuple[str, ...]
    means: str
    kept_for: str


NEEDED = (
    Mutation(("acquire.clock",), ONE, "I4", "the epoch comes from the counter alone, not from the clock as well"),
    Mutation(("acquire.unknown",), REMOVABLE, "removed", "acquire_trainer of a job that was removed"),
    Mutation(
        ("acquire.lease", "rewind.link"), ONE, "I4", "acquire_trainer of a living trainer's job, any number of times"
    ),
    Mutation(("publish_weights.epoch",), ONE, "I4", "publish_weights without the epoch"),
    Mutation(("open.epoch",), ONE, "I4", "open_iteration without the epoch"),
    Mutation(("open.repeat",), ONE, "stuck", "an iteration that stands open is refused, not gone on with"),
    Mutation(("open.follows",), RESAMPLED_TWICE, "I4", "open_iteration of any number"),
    Mutation(("open.manifest",), ONE, "I4", "open_iteration without its announced weights"),
    Mutation(("claim_rollouts.epoch",), TWO_BATCHES, "stuck", "claim_rollouts without the epoch"),
    Mutation(("claim_rollouts.takeover",), ONE, "stuck", "a successor isn't given what the dead one had claimed"),
    Mutation(("trainer.reconciles",), ONE, "stuck", "a waiting trainer doesn't reconcile"),
    Mutation(("reconcile.iteration",), ONE, "stuck", "reconcile doesn't say that the opening was lost"),
    Mutation(("commit.epoch",), ONE, "I4", "commit_iteration without the epoch"),
    Mutation(("commit.complete",), ONE, "I3", "commit_iteration of a ledger with a gap"),
    Mutation(("commit.whole",), IN_PIECES, "I3", "commit_iteration of a ledger that batches have not reached yet"),
    Mutation(("commit.digest",), RESAMPLED, "I3", "commit_iteration of another copy than the ledger's"),
    Mutation(("commit.manifest",), ONE, "I4", "the next iteration opens without its announced weights"),
    Mutation(
        ("commit.iteration", "commit.repeat", "commit.link"), ONE, "I4", "commit_iteration of any number, and twice"
    ),
    Mutation(("commit.link",), FORGETFUL, "I4", "commit_iteration of a record that follows a lost one"),
    Mutation(("rewind.epoch",), ONE, "I4", "rewind without the epoch"),
    Mutation(("rewind.link",), FORGETFUL, "I4", "rewind by a record that follows a lost one"),
    Mutation(("rewind.repeat", "rewind.link"), RESAMPLED_TWICE, "I4", "a repeated rewind is recorded again"),
    Mutation(("publish.digest",), RESAMPLED, "I2", "publish_batch without the digest"),
    Mutation(
        ("publish.iteration", "publish.version", "publish.digest", "publish.expected"),
        ONE,
        "I2",
        "publish_batch into whatever iteration is open",
    ),
    Mutation(("publish.duplicate",), TWO_GENERATORS, "I3", "publish_batch of what is published"),
    Mutation(("publish.complete",), ONE, "I1", "publish_batch of a part"),
    Mutation(("fail.owner",), TWO_GENERATORS, "I5", "fail_batch by a generator that doesn't hold the lease"),
    Mutation(("renew.owner",), TWO_GENERATORS, "I5", "renew_prompts by a generator that doesn't hold the lease"),
    Mutation(("trainer.own_list",), ONE, "I3", "the trainer trains a second copy"),
    Mutation(
        ("trainer.acknowledges_at_commit",), ONE, "I5", "the trainer acknowledges what it claims, before the commit"
    ),
    Mutation(
        ("trainer.weights", "commit.link"),
        RESAMPLED_TWICE,
        "I4",
        "the trainer doesn't check the weights of what it is given",
    ),
    Mutation(("settle.confirms",), ONE, "I4", "a commit that was answered is taken for done"),
    Mutation(("settle.persisted",), ONE, "I4", "a checkpoint before its commit is on disk"),
    Mutation(("set_state.epoch",), ONE, "I4", "a job is ended by a trainer that trained it once"),
    Mutation(("set_state.clears",), ONE, "I4", "a job that ends keeps what is in work"),
    Mutation(("set_state.fences",), ONE, "I4", "a job is given up beside a trainer that goes on"),
    Mutation(("resume.rewinds",), ONE, "stuck", "a successor with an older checkpoint doesn't rewind"),
    Mutation(
        ("resume.not_after_the_fence",),
        RESAMPLED_TWICE,
        "stuck",
        "a checkpoint that the fence doesn't know of is resumed",
    ),
)

REDUNDANT = (
    Redundant(("open.closed",), "open_iteration while another is open", "an open iteration never follows itself"),
    Redundant(
        ("commit.iteration",), "commit_iteration of any number", "`already_committed` catches it; see the pair above"
    ),
    Redundant(("commit.repeat",), "a repeated commit is refused", "its trainer would end and be replaced for nothing"),
    Redundant(("rewind.repeat",), "a repeated rewind is refused", "its trainer would end and be replaced for nothing"),
    Redundant(("rewind.gap",), "rewind to beyond the fence", "trainers pick a checkpoint that the fence knows of"),
    Redundant(
        ("reconcile.epoch",), "reconcile without the epoch", "scripts are atomic, so it has nothing to write here"
    ),
    Redundant(
        ("publish.ended",),
        "publish_batch of a job that has ended",
        "its end has cleared the ledger; the reason is clearer",
    ),
    Redundant(("publish.iteration",), "publish_batch of another iteration", "version, digest and batch id say it too"),
    Redundant(
        ("publish.version",), "publish_batch of another version", "the digest says it too; the reason is clearer"
    ),
    Redundant(("publish.open",), "publish_batch into a closed iteration", "its ledger is empty; the reason is clearer"),
    Redundant(
        ("publish.expected",),
        "publish_batch of an unknown batch",
        "a batch id that was never asked for: a wrong generator",
    ),
    Redundant(
        ("publish.repeat",), "a repeated publication is a duplicate", "its generator would log a refusal that was none"
    ),
    Redundant(
        ("fail.entry",), "fail_batch by another entry", "owner and attempt say it, while a generator has one claim"
    ),
    Redundant(
        ("fail.attempt",), "fail_batch by another attempt", "entry and owner say it, while a generator has one claim"
    ),
    Redundant(
        ("resume_job.epoch",),
        "a trainer that slept through the job's end keeps its epoch",
        "its end has fenced it off, unless it was the one that ended the job",
    ),
    Redundant(
        ("resume_job.clears",),
        "a resumed job goes on with the iteration that stands open",
        "its end has cleared it, unless it ended under an older Onbeat",
    ),
    Redundant(("step.renews",), "a step without the lease", "it keeps a fenced-off trainer from writing files"),
    Redundant(
        ("trainer.weights",),
        "the trainer doesn't check the weights of what it is given",
        "the commit refuses what the check would; it ends sooner",
    ),
    Redundant(
        ("trainer.content",),
        "the trainer takes either of two copies",
        "the commit refuses the wrong one; it ends sooner",
    ),
)


def mutated(bounds: Bounds, off: tuple[str, ...]) -> Result:
    return explore(bounds, frozenset(off))
