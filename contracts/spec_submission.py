"""What a new job may not say: settings whose numbers would lie, or that could do nothing.

    spec file ─▶ onbeat/client/spec_file.py ─┐
    POST /v1/jobs, /v1/jobs/check ───────────┴─▶ check_submitted ─▶ a job

Not part of JobSpec: earlier releases took such specs, and their jobs must still be read, resumed and verified.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec import UNSET, UnsetType

from contracts.encoding.wire import decode
from contracts.engines import ENGINES
from contracts.errors import InvalidInput
from contracts.run_folder import CHECKPOINT, RunFolder, numbered
from contracts.spec import ForkSpec, JobSpec
from contracts.spec_tables.algorithm import PluginLoss
from contracts.spec_tables.stages import ExternalStage, read_columns


def check_submitted(spec: JobSpec) -> None:
    """Raises InvalidInput that names the field and the cure."""
    _check_distribution(spec)
    _check_clips(spec)
    _check_stops(spec)
    for environment in spec.environments.values() if spec.trainer.packing == "padded" else ():
        if environment.max_context_tokens is not UNSET:
            raise InvalidInput(
                "a padded pass has all parts of a trajectory, each as long as its longest: no limit bounds it",
                field="environment.max_context_tokens",
                cure='leave it out, or take trainer.packing = "shared_prompt"',
            )


def check_engines(spec: JobSpec, *, not_reproducible: Collection[str], silent: Collection[str]) -> None:
    """Raises InvalidInput where there are generators, but none of them would serve the job (I7), or one of them cannot.

    not_reproducible: of each generator the name of its engine where batches that run beside each other change last bits
    there, "" elsewhere. silent: the same, where the engine doesn't say which tokens truncated sampling keeps.
    """
    if spec.deterministic and not_reproducible and "" not in not_reproducible:
        raise InvalidInput(
            f"generators sample with {', '.join(sorted(set(not_reproducible)))}: last bits depend on what else runs",
            field="deterministic",
            cure="set deterministic = false, or add a generator with transformers, or with vllm and batch_invariant",
        )
    if (truncation := spec.rollout.sampling.truncation) and silent and "" not in silent:
        raise InvalidInput(
            f"generators sample with {', '.join(sorted(set(silent)))}, which doesn't say which tokens {truncation} "
            "keeps: log-probs couldn't be compared",
            field=f"rollout.sampling.{truncation.split()[0]}",
            cure="leave it out, or add a generator with transformers",
        )
    of_files = [name for name in not_reproducible if name in ENGINES and not ENGINES[name].reads_elsewhere]
    if spec.weights.elsewhere and of_files and not spec.deterministic:
        raise InvalidInput(
            f"the server of a generator with {of_files[0]} reads files, not {spec.weights.elsewhere}",
            field="weights.transport",
            cure='set it to "file" or "delta"',
        )


def fork_problem(theirs: JobSpec, spec: JobSpec) -> str:
    """Says why a job can't go on from another's checkpoint: it steps on another kind of state; "" where it can."""
    for name, there, here in (
        ("optimizer.type", theirs.optimizer.type, spec.optimizer.type),
        ("model.dtype", theirs.model.dtype, spec.model.dtype),
        ("trainer.lora", _matrices(theirs), _matrices(spec)),
        ("a critic", *(one.algorithm.advantage_kind.has_critic for one in (theirs, spec))),
    ):
        if there != here:
            return f"it has {name} = {there}, this job {here}"
    return ""


class _Forked(msgspec.Struct, frozen=True):
    fork: ForkSpec | UnsetType = UNSET


def fork_of(spec: bytes) -> ForkSpec | UnsetType:
    """Reads of a spec, of whatever release, from where its job goes on. Raises ContractViolation."""
    return decode(spec, _Forked).fork


def unusable_fork(fork: ForkSpec, source: RunFolder, problem: str) -> InvalidInput:
    """The refusal of a fork, which says what its source's run folder has."""
    there = ", ".join(str(number + 1) for number, _ in numbered(source.checkpoints, CHECKPOINT))
    return InvalidInput(
        f"{fork.job} can't be gone on from at version {fork.version}: {problem}",
        field="fork.version" if there else "fork.job",
        cure=f"its checkpoints are of versions {there}"
        if there
        else "name a job of this run root that has checkpoints",
    )


def _matrices(spec: JobSpec) -> object:
    """What decides which matrices of adapters there are, and what they mean."""
    lora = spec.trainer.lora
    return None if lora is None else (lora.rank, lora.alpha, lora.target_modules)


def _check_distribution(spec: JobSpec) -> None:
    """Refuses log-probs of a stage that isn't told which distribution tokens were drawn from."""
    sampling = spec.rollout.sampling
    if sampling.processing and spec.trainer.external:
        raise InvalidInput(
            "no row tells an external trainer the distribution that it made",
            field=f"rollout.sampling.{sampling.processing}",
            cure="leave it out, or trainer.external",
        )
    setting = sampling.truncation or sampling.processing
    for stage in spec.stages if setting else ():
        made = read_columns(spec.algorithm).keys() & {column.name for column in stage.outputs}
        if made and isinstance(stage, ExternalStage):
            raise InvalidInput(
                f"no column tells stage {stage.name} the distribution that {setting} made, of which {made.pop()} are",
                field=f"rollout.sampling.{setting.split()[0]}",
                cure='leave it out, or take a stage of type "teacher" or "reference"',
            )


def _check_clips(spec: JobSpec) -> None:
    """Refuses clips of a ratio that is 1: that of an iteration's one step against the trainer's log-probs before it.

    Under a lag as well: the old policy is the trainer's then, too. A loss of a package may use them as it likes.
    """
    algorithm = spec.algorithm
    is_one = algorithm.old_policy == "trainer" and not algorithm.moves_between_steps
    if not is_one or isinstance(algorithm.loss, PluginLoss):
        return
    for name in ("clip_low", "clip_high", "clip_max"):
        if getattr(algorithm, name) not in (None, UNSET):
            raise InvalidInput(
                'it has no effect: in an iteration\'s one step with old_policy = "trainer" the ratio is exactly 1',
                field=f"algorithm.{name}",
                cure='leave it out, or set updates_per_iteration or mini_batches above 1, or old_policy = "generator"',
            )


def _check_stops(spec: JobSpec) -> None:
    """Refuses an end by a rule of health that can't be broken, and an alarm about what the job doesn't sample."""
    algorithm = spec.algorithm
    given = 'loss = "sft" samples nothing' if algorithm.learns_given else ""
    lags = spec.schedule_rule.lags
    never: dict[str, str] = {
        "reward_collapsed": given,
        "score_collapsed": "" if spec.evaluation.num_batches else "evaluation.num_prompts = 0 scores no version",
        "groups_equal": "" if algorithm.advantage_kind.compares_groups else "algorithm.advantage compares no group",
        "entropy_gone": given,
        "mismatch_high": 'under a lag "lag_too_large" says it' if lags else "",
        "truncations_rising": given,
        "lag_too_large": "" if lags else "without max_policy_lag nothing lags",
    }
    for rule in spec.trainer.stops_on:
        if reason := never.get(rule, ""):
            raise InvalidInput(f'"{rule}" is never said: {reason}', field="trainer.stop_on", cure="take it out")
    if given and spec.trainer.entropy_alarm is not UNSET:
        raise InvalidInput(f"it has no effect: {given}", field="trainer.entropy_alarm", cure="leave it out")
