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
TWO_KINDS = TWO_GENERATORS._replace(kinds=2)
"""A deterministic job whose generators sample with two kinds of engines, each to other bits."""
REMOVABLE = ONE._replace(may_remove=True)
FORGETFUL = ONE._replace(lost_writes=10, faults=2, may_end=False)
"""A restart can lose a whole iteration."""
REPLAYED = FORGETFUL._replace(is_deterministic=False, trainers=1, iterations=1)
"""The same of a job whose replays differ."""
SELDOM = ONE._replace(iterations=3, checkpoint_every=3, lost_writes=10, may_end=False)
"""A trainer goes on after a commit without a look at the server's disk, and a restart can lose that commit."""
DELAYED = ONE._replace(lag=1, iterations=3)
BOUNDED = DELAYED._replace(is_bounded=True, is_deterministic=False)
TIGHT = DELAYED._replace(batches=2, trainers=1, room=2, iterations=2, faults=0, may_end=False)
"""The memory of one iteration, for a window of two."""
EVALUATING = ONE._replace(lag=1, batches=2, evaluations=1)
"""The window is open before the version is made that samples its evaluations."""
STAGED = ONE._replace(iterations=1, stages=((2, ()), (1, (1,))), stage_workers=2)
"""A batch of two rows: a stage takes each of them, and one that reads its column takes the batch."""
JUDGED = STAGED._replace(stages_vary=True, is_deterministic=False, may_end=False)
"""Stage workers whose columns differ."""
MORTAL = STAGED._replace(stage_workers=1, trainers=1, item_attempts=1)
"""An item that fails once is dead, and its batch with it."""
ONE_STAGE = STAGED._replace(stages=((1, ()),), may_end=False)
CROWDED = ONE_STAGE._replace(batches=2, stage_workers=1, max_waiting=1)
"""One batch at a time may wait for columns."""
RECALLED = ONE_STAGE._replace(
    generators=2, stage_workers=1, trainers=1, is_deterministic=False, lost_writes=4, faults=2, may_end=False
)
"""A batch is published, forgotten, and published again with other completions."""


PROVING = ONE._replace(proves=True, may_end=False)
"""A generator's engine shows each version before it samples with it, or goes wrong."""
PROVING_ANEW = PROVING._replace(is_deterministic=False)
"""The same of a job whose replays make other weights."""
PROVING_DELAYED = PROVING._replace(lag=1, iterations=3, trainers=1)
PROVING_BOUNDED = PROVING_DELAYED._replace(is_bounded=True, is_deterministic=False)
"""The version that a claim names may be another one when it comes again."""


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
    Mutation(("publish_weights.window",), SELDOM, "I5", "publish_weights forgets what its trainer asks it to"),
    Mutation(
        ("publish_weights.same",), REPLAYED, "I5", "publish_weights of other weights than the window is sampled with"
    ),
    Mutation(("trainer.keeps",), DELAYED, "stuck", "a trainer keeps its newest version only as it announces one"),
    Mutation(("open.epoch",), ONE, "I4", "open_iteration without the epoch"),
    Mutation(("open.repeat",), ONE, "stuck", "an iteration that stands open is refused, not gone on with"),
    Mutation(("open.follows",), DELAYED, "I4", "open_iteration of any number"),
    Mutation(("open.window", "open.range"), DELAYED, "I4", "open_iteration of one more than the window takes"),
    Mutation(("open.range",), DELAYED, "I2", "open_iteration for a version older than the window is long"),
    Mutation(("open.manifest",), ONE, "I5", "open_iteration without its announced weights"),
    Mutation(("open.samplable",), ONE, "I5", "open_iteration without the version that samples it"),
    Mutation(("claim_rollouts.epoch",), TWO_BATCHES, "stuck", "claim_rollouts without the epoch"),
    Mutation(("claim_rollouts.takeover",), ONE, "stuck", "a successor isn't given what the dead one had claimed"),
    Mutation(("trainer.reconciles",), EVALUATING, "stuck", "a waiting trainer doesn't reconcile"),
    Mutation(("claim_rollouts.iteration", "reconcile.iteration"), ONE, "I3", "nothing says that the opening was lost"),
    Mutation(("reconcile.iteration",), EVALUATING, "I3", "dispatch for an iteration whose opening was lost"),
    Mutation(("dispatch.version",), EVALUATING, "I5", "dispatch of an evaluation whose version is not made, or lost"),
    Mutation(("trainer.pins",), EVALUATING, "I2", "an evaluation is sent to the version that samples for training"),
    Mutation(("commit.epoch",), ONE, "I4", "commit_iteration without the epoch"),
    Mutation(("commit.complete",), ONE, "I3", "commit_iteration of a ledger with a gap"),
    Mutation(("commit.whole",), IN_PIECES, "I3", "commit_iteration of a ledger that batches have not reached yet"),
    Mutation(("commit.digest",), RESAMPLED, "I3", "commit_iteration of another copy than the ledger's"),
    Mutation(("commit.manifest",), DELAYED, "I5", "commit_iteration of a version that is not announced"),
    Mutation(
        ("commit.iteration", "commit.repeat", "commit.link"), ONE, "I4", "commit_iteration of any number, and twice"
    ),
    Mutation(
        ("commit.iteration", "commit.manifest"), DELAYED, "I4", "commit_iteration of one that is not the oldest open"
    ),
    Mutation(("commit.link",), FORGETFUL, "I4", "commit_iteration of a record that follows a lost one"),
    Mutation(("commit.clears",), DELAYED, "I2", "commit_iteration leaves the iteration in its slot"),
    Mutation(("commit.keeps",), DELAYED, "I5", "commit_iteration forgets versions that the window may be sampled with"),
    Mutation(("rewind.epoch",), ONE, "I4", "rewind without the epoch"),
    Mutation(("rewind.link",), FORGETFUL, "I4", "rewind by a record that follows a lost one"),
    Mutation(("rewind.repeat", "rewind.link"), RESAMPLED_TWICE, "I4", "a repeated rewind is recorded again"),
    Mutation(("rewind.manifests",), ONE, "memory", "rewind leaves the versions announced that it goes back behind"),
    Mutation(("claim.range",), BOUNDED, "admission", "a generator goes on with what it holds, however old that is"),
    Mutation(("claim.digest",), BOUNDED, "admission", "a generator goes on with what it holds, whatever its digest"),
    Mutation(("publish.digest",), RESAMPLED, "I2", "publish_batch without the digest"),
    Mutation(("publish.digest",), BOUNDED, "I2", "the same, where an older version's digest is asked for as well"),
    Mutation(("publish.version",), DELAYED, "I2", "publish_batch of any version of the window"),
    Mutation(
        ("publish.iteration", "publish.version", "publish.digest", "publish.expected"),
        ONE,
        "I2",
        "publish_batch into whatever iteration is open",
    ),
    Mutation(("publish.expected",), EVALUATING, "I2", "publish_batch of a batch that is not dispatched"),
    Mutation(("publish.duplicate",), TWO_GENERATORS, "I3", "publish_batch of what is published"),
    Mutation(("publish.complete",), ONE, "I1", "publish_batch of a part"),
    Mutation(
        ("claim.engine",),
        TWO_KINDS._replace(trainers=1, iterations=1, may_end=False, max_attempts=2, max_epochs=3),
        "stuck",
        "claim_prompt by another kind of engine, which samples in vain until the batch is dead",
    ),
    Mutation(("publish.engine",), TWO_KINDS, "I7", "publish_batch of what another kind of engine has sampled"),
    Mutation(("commit.engine",), TWO_KINDS, "I7", "commit_iteration of what another kind than the job's has sampled"),
    Mutation(("commit.keeps_engine",), TWO_KINDS, "I7", "commit_iteration forgets what kind has sampled its batches"),
    Mutation(("fail.claim",), TWO_GENERATORS, "I5", "a failure under another claim than the lease's"),
    Mutation(("release.free",), ONE, "I6", "an item that is given back has one attempt less"),
    Mutation(("fail.pin",), EVALUATING, "I2", "an evaluation that is tried again forgets its version"),
    Mutation(("renew.claim",), TWO_GENERATORS, "I5", "a renewal under another claim than the lease's"),
    Mutation(("renew.claim",), STAGED, "I5", "the same, of an item of a job's own stage"),
    Mutation(("fail.claim",), ONE_STAGE._replace(trainers=1, faults=2), "I5", "a failure of such an item"),
    Mutation(("claim.stands",), STAGED, "I5", "such an item comes again when its claim is over"),
    Mutation(("claim.again",), TWO_BATCHES, "I5", "a claim whose answer was lost doesn't come again"),
    Mutation(("claim.stands",), TWO_GENERATORS, "I5", "a claim whose answer was lost comes again when it is over"),
    Mutation(("claim.proof",), PROVING, "I11", "claim_prompt for an engine that has not shown the version"),
    Mutation(
        ("claims_again.proof",),
        PROVING_BOUNDED,
        "I11",
        "a claim whose answer was lost comes again with a version that the engine has not shown",
    ),
    Mutation(("publish.proof",), PROVING, "I11", "publish_batch of an engine that has failed since its claim"),
    Mutation(("proof.digest",), PROVING_ANEW, "I11", "the proof of a version counts for other weights of its number"),
    Mutation(("prove.numbers",), PROVING, "I11", "prove_version whatever the engine's log-probs are"),
    Mutation(("prove.drops",), PROVING, "I11", "an engine that fails keeps the proof that it passed before"),
    Mutation(("publish_weights.proofs",), PROVING, "memory", "publish_weights leaves the proofs of old versions"),
    Mutation(("trainer.own_list",), ONE, "I3", "the trainer trains a second copy"),
    Mutation(
        ("trainer.acknowledges_at_commit",), ONE, "I5", "the trainer acknowledges what it claims, before the commit"
    ),
    Mutation(
        ("trainer.weights", "commit.link", "claim_rollouts.iteration", "publish_weights.same"),
        RESAMPLED_TWICE,
        "I5",
        "the trainer doesn't check what it is given",
    ),
    Mutation(("settle.confirms",), ONE, "I4", "a commit that was answered is taken for done"),
    Mutation(("settle.persisted",), ONE, "I4", "a checkpoint before its commit is on disk"),
    Mutation(("set_state.epoch",), ONE, "I4", "a job is ended by a trainer that trained it once"),
    Mutation(("set_state.clears",), ONE, "I4", "a job that ends keeps what is in work"),
    Mutation(("set_state.fences",), ONE, "I4", "a job is given up beside a trainer that goes on"),
    Mutation(("resume.rewinds",), ONE, "stuck", "a successor with an older checkpoint doesn't rewind"),
    Mutation(("resume.chain",), RESAMPLED_TWICE, "I2", "a checkpoint that the audit chain doesn't know is resumed"),
    Mutation(("publish.full",), CROWDED, "memory", "publish_batch however many batches wait for columns"),
    Mutation(
        ("publish.age",), TIGHT, "stuck", "publish_batch of a younger iteration where the oldest one needs the room"
    ),
    Mutation(("claim.oldest_only",), TIGHT, "stuck", "a generator that holds what finds no room claims nothing more"),
    Mutation(("put.copy",), RECALLED._replace(faults=1), "I3", "put_rows of what was computed from another copy"),
    Mutation(("put.inputs",), JUDGED, "I3", "put_rows of what was computed from other inputs"),
    Mutation(("put.first",), STAGED, "I1", "put_rows of an item that is put"),
    Mutation(("put.last",), STAGED, "I1", "a batch goes to the trainer with its first column"),
    Mutation(("put.keeps",), STAGED, "I5", "put_rows forgets a batch that has its columns"),
    Mutation(("bury.rows",), MORTAL, "I6", "a batch that dies of a stage leaves its items"),
    Mutation(("commit.dead",), MORTAL, "I3", "commit_iteration of a batch that died after it was trained"),
    Mutation(("columns.whole",), STAGED, "I1", "the trainer trains a batch whose columns a restart has lost"),
    Mutation(("columns.digest",), RECALLED, "I3", "the trainer takes columns of whatever copy stands in the ledger"),
)

REDUNDANT = (
    Redundant(
        ("open.window",), "open_iteration of one more than the window takes", "its oldest version is not made yet"
    ),
    Redundant(
        ("versions.same",),
        "open_iteration with another digest of a version that the window may be sampled with",
        "a trainer that finds one rewinds; what was sampled with the first would be refused",
    ),
    Redundant(
        ("claim_rollouts.iteration",), "claim_rollouts of an iteration that is not open", "`reconcile` says it too"
    ),
    Redundant(
        ("commit.iteration",), "commit_iteration of any number", "`already_committed` catches it; see the pairs above"
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
    Redundant(("publish.open",), "publish_batch into a closed iteration", "its ledger is empty; the reason is clearer"),
    Redundant(
        ("publish.repeat",), "a repeated publication is a duplicate", "its generator would log a refusal that was none"
    ),
    Redundant(
        ("resume_job.epoch",),
        "a trainer that slept through the job's end keeps its epoch",
        "its end has fenced it off, unless it was the one that ended the job",
    ),
    Redundant(
        ("resume_job.clears",),
        "a resumed job goes on with the iterations that stand open",
        "its end has cleared them, unless it ended under an older Onbeat",
    ),
    Redundant(
        ("resume.not_after_the_fence",),
        "a checkpoint that the fence doesn't know of is resumed",
        "the audit chain doesn't know it either",
    ),
    Redundant(
        ("resume.versions",),
        "a successor goes on with a window of other older versions than its checkpoint's",
        "the audit chain gives both their digests",
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
    Redundant(("put.ended",), "put_rows of a job that has ended", "its end has cleared the items"),
    Redundant(("put.published",), "put_rows of a batch that is not published", "nothing is left of one that is dead"),
    Redundant(("put.ready",), "put_rows before the inputs are there", "`put.inputs` says it too"),
)


def mutated(bounds: Bounds, off: tuple[str, ...]) -> Result:
    return explore(bounds, frozenset(off))
