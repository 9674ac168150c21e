"""What a new job may not say: settings whose numbers would lie, or that could do nothing.

    spec file ─▶ onbeat/client/spec_file.py ─┐
    POST /v1/jobs, /v1/jobs/check ───────────┴─▶ check_submitted ─▶ a job

Not part of JobSpec: earlier releases took such specs, and their jobs must still be read, resumed and verified.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec
from msgspec import UNSET, UnsetType

from contracts.encoding.wire import Record, decode
from contracts.engines import ENGINES
from contracts.errors import InvalidInput
from contracts.rewards import imports_plugins
from contracts.run_folder import CHECKPOINT, RunFolder, numbered
from contracts.spec.algorithm import PluginLoss
from contracts.spec.datasets import dataset_field, sources_of
from contracts.spec.job import ForkSpec, JobSpec
from contracts.spec.stages import ExternalStage, read_columns
from contracts.spec.trainer import REGROUP_S

GIVEN = 'loss = "sft" samples nothing'


def check_submitted(spec: JobSpec) -> None:
    """Raises InvalidInput that names the field and the cure."""
    problems = (
        *_wrong_distributions(spec),
        *_idle_settings(spec),
        *_idle_masks(spec),
        *_lonely_completions(spec),
        *_rules_never_broken(spec),
    )
    for field, problem, cure in problems:
        raise InvalidInput(problem, field=field, cure=cure)


def check_engines(spec: JobSpec, *, not_reproducible: Collection[str], silent: Collection[str]) -> None:
    """Raises InvalidInput where there are generators, but none of them would serve the job (I7), or one of them cannot.

    not_reproducible: of each generator the name of its engine where batches that run beside each other change last bits
    there, "" elsewhere. silent: the same, where the engine says what truncated sampling keeps by a top_k alone.
    """
    if spec.deterministic and not_reproducible and "" not in not_reproducible:
        raise InvalidInput(
            f"generators sample with {', '.join(sorted(set(not_reproducible)))}: last bits depend on what else runs",
            field="deterministic",
            cure="set deterministic = false, or add a generator with transformers, or with vllm and batch_invariant",
        )
    if (truncation := spec.rollout.sampling.unbounded_truncation) and silent and "" not in silent:
        raise InvalidInput(
            f"generators sample with {', '.join(sorted(set(silent)))}, which doesn't say which tokens {truncation} "
            "keeps without a top_k: log-probs couldn't be compared",
            field=f"rollout.sampling.{truncation.split()[0]}",
            cure="set top_k, too, or add a generator with transformers",
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


Refusals = Iterator[tuple[str, str, str]]
"""(field, problem, cure)."""


def _wrong_distributions(spec: JobSpec) -> Refusals:
    """Yields what leaves no choice to draw, and stages that aren't told what tokens were drawn from."""
    sampling, table = spec.rollout.sampling, "rollout.sampling"
    for key, is_alone in (("top_k", sampling.top_k == 1), ("min_p", sampling.min_p == 1.0)):
        if is_alone:
            yield f"{table}.{key}", "one token is left to draw: a group of equal samples has no advantage", "widen it"
    if sampling.processing and spec.trainer.external:
        problem = "no row tells an external trainer the distribution that it made"
        yield f"{table}.{sampling.processing}", problem, "leave it out, or trainer.external"
    setting = sampling.truncation or sampling.processing
    for stage in spec.stages if setting else ():
        made = read_columns(spec.algorithm).keys() & {column.name for column in stage.outputs}
        if made and isinstance(stage, ExternalStage):
            problem = f"no column tells stage {stage.name} the distribution that {setting} made, of which"
            cure = 'leave it out, or take a stage of type "teacher" or "reference"'
            yield f"{table}.{setting.split()[0]}", f"{problem} {made.pop()} are", cure


def _idle_settings(spec: JobSpec) -> Refusals:
    """Yields each key that is set though nothing reads it, or what it acts on isn't there."""
    algorithm, trainer = spec.algorithm, spec.trainer
    is_first, is_packages = not algorithm.moves_between_steps, isinstance(algorithm.loss, PluginLoss)
    has_bits = trainer.packing == "as_sampled"
    # Under a lag as well: the old policy is the trainer's then, too. A loss of a package may use them as it likes.
    is_one = is_first and algorithm.old_policy == "trainer" and not is_packages
    is_mu = has_bits and not spec.schedule_rule.lags
    of_bits = 'packing = "as_sampled" gives the trainer the generator\'s log-probs'
    syncs, is_whole = algorithm.ref_model_sync_iterations, algorithm.distillation_beta is not UNSET
    weighs_kl = algorithm.weighs_kl
    rows: tuple[tuple[str, bool, str], ...] = (
        (
            "algorithm clip_low clip_high clip_max",
            is_one,
            'in an iteration\'s one step with old_policy = "trainer" the ratio is exactly 1; set updates_per_iteration '
            'or mini_batches above 1, or old_policy = "generator"',
        ),
        ("algorithm correction old_policy", is_mu, f"without a lag {of_bits}"),
        (
            "algorithm correction old_policy",
            algorithm.advantage == "none" and is_whole and not weighs_kl,
            'with advantage = "none" and distillation_beta it weighs no sampled token',
        ),
        ("algorithm off_policy_mask_threshold", is_mu and is_first, f"without a lag {of_bits}"),
        (
            "optimizer critic_learning_rate_factor",
            not algorithm.advantage_kind.has_critic,
            f'algorithm.advantage = "{algorithm.advantage}" trains no critic; set algorithm.advantage = "gae"',
        ),
        ("algorithm loss", trainer.external, "with trainer.external = true a process of your own decides it"),
        ("trainer mismatch_alarm", has_bits, f"{of_bits}, and any difference is an alarm"),
        ("trainer mismatch_alarm on_mismatch entropy_alarm", algorithm.learns_given, GIVEN),
        ("trainer measure_entropy", algorithm.entropy_coefficient > 0.0, "entropy_coefficient measures it, too"),
        ("algorithm ref_model_sync_iterations", syncs is not UNSET and syncs >= spec.iterations, "the job ends first"),
        ("algorithm shuffle_rewards", algorithm.distillation_coefficient > 0.0, "a teacher teaches all the same"),
    )
    for names, is_idle, why in rows:
        table, *keys = names.split()
        given: Record = getattr(spec, table)
        defaults = type(given)()
        reason, _, cure = why.partition("; ")
        for key in keys if is_idle else ():
            if getattr(given, key) not in (getattr(defaults, key), "none"):
                yield f"{table}.{key}", f"it has no effect: {reason}", f"leave it out{cure and f', or {cure}'}"
    if trainer.hosts and trainer.hosts.least == trainer.hosts.most and trainer.hosts.regroup_s not in (0.0, REGROUP_S):
        yield "trainer.hosts.regroup_s", "it has no effect: least hosts are the most", "leave it out"
    for number, group in enumerate(spec.optimizer.groups or ()):
        if group.learning_rate_factor == 0.0 and group.weight_decay is not UNSET:
            field = f"optimizer.groups[{number}].weight_decay"
            yield field, "it has no effect: it is times the learning rate, here 0", "leave it out"
    if algorithm.learns_given and (weights := spec.stage_reward_weights):
        yield "stages", f"{', '.join(weights)} has no effect: {GIVEN}", "leave the stage out"
    for source, table in sources_of(spec.dataset).items():
        if getattr(table, "metadata_columns", UNSET) and not imports_plugins(spec.reward.components):
            field = f"{dataset_field(spec.dataset, spec.evaluation, source)}.metadata_columns"
            yield field, "it has no effect: no reward of type plugin reads it", "leave it out"
    for environment in spec.environments.values() if trainer.packing == "padded" else ():
        if environment.max_context_tokens is not UNSET:
            problem = "a padded pass has all parts of a trajectory, each as long as its longest: no limit bounds it"
            cure = 'leave it out, or take trainer.packing = "shared_prompt"'
            yield "environment.max_context_tokens", problem, cure


def _idle_masks(spec: JobSpec) -> Refusals:
    """Yields what a mask of whole responses has no meaning with, or no bounds for."""
    algorithm = spec.algorithm
    if algorithm.correction_name == "none" or algorithm.correction_level != "geometric":
        return
    if algorithm.correction != "icepop":
        problem = f"a geometric mean is no weight, which {algorithm.correction} needs: it only leaves responses out"
        yield "algorithm.correction_level", problem, 'set correction = "icepop", or correction_level = "sequence"'
    elif algorithm.correction_high is None or algorithm.correction_high == 1.0:
        problem = 'it has to be set above 1 with correction_level = "geometric": a response\'s mean hardly leaves 1'
        yield "algorithm.correction_high", problem, "set it near 1, as to 1.001"


def _lonely_completions(spec: JobSpec) -> Refusals:
    """Yields a batch too small to normalise the advantages of its tokens over."""
    rollout = spec.rollout
    if spec.algorithm.whitens_advantages and rollout.prompts_per_batch * rollout.group_size == 1:
        problem = "a batch of one completion has its own tokens alone to whiten them by, whatever its reward"
        cure = "sample several completions in a batch, or set algorithm.whiten_advantages = false"
        yield "rollout.prompts_per_batch", problem, cure


def _rules_never_broken(spec: JobSpec) -> Refusals:
    """Yields each end by a rule of health that can't be broken."""
    given = GIVEN if spec.algorithm.learns_given else ""
    lags, compares = spec.schedule_rule.lags, spec.algorithm.advantage_kind.compares_groups
    scores = spec.evaluation.num_batches > 0 and 0 < spec.evaluation.every_iterations < spec.iterations
    never: dict[str, str] = {
        "reward_collapsed": given,
        "score_collapsed": "" if scores else "no version between the first and the last is evaluated",
        "groups_equal": "" if compares else "algorithm.advantage compares no group",
        "entropy_gone": given,
        "mismatch_high": given or ('under a lag "lag_too_large" says it' if lags else ""),
        "truncations_rising": given,
        "lag_too_large": "" if lags else "without max_policy_lag nothing lags",
        "completions_cut": given,
        "completions_unscorable": given,
        "mismatch_unusual": given or ("" if spec.samples_as_trained else "its engines may differ by rounding, or lag"),
    }
    for rule in spec.trainer.stops_on:
        if reason := never.get(rule, ""):
            yield "trainer.stop_on", f'"{rule}" is never said: {reason}', "take it out"
