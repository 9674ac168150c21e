"""Conditions of the rules of a spec (contracts/spec/rules.py) that need more than a line.

Each returns True, or the places of the spec that break the rule, with the values that stand in the rule's words. None
relies on another: a spec that breaks one rule is asked for all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from msgspec import UNSET, structs

from contracts.errors import InvalidInput
from contracts.experience.columns import BASE_COLUMNS, MAX_COLUMN_NAME, Column
from contracts.experience.graph import circle, stages_before
from contracts.hub_names import HubKind, is_hub_name, read_hub_name
from contracts.known_tasks import NOT_GENERATED, NOT_SCORED, cure_of_unknown, is_known, path_parameters
from contracts.rewards import (
    LengthReward,
    OverlongReward,
    ReasoningGymReward,
    RegexReward,
    breakdown_names,
    imports_plugins,
)
from contracts.sampling import SamplingParams
from contracts.spec.algorithm import AlgorithmSpec
from contracts.spec.datasets import (
    DifficultyPools,
    EnvironmentDataset,
    HuggingFaceDataset,
    MixtureDataset,
    ReasoningGymDataset,
    RowsTable,
    SourceDataset,
    sources_of,
)
from contracts.spec.environment import EnvironmentSpec, environment_name
from contracts.spec.job import JobSpec
from contracts.spec.kinds import AdvantageKind
from contracts.spec.limits import products
from contracts.spec.rollout import HELD_OUT, HeldOutSpec
from contracts.spec.stages import (
    ANSWER_FORMS,
    FAILURE_SUFFIX,
    NUMBER_PLACE,
    REFERENCE_LOGPROBS,
    TEACHER_STATES,
    TEACHER_TOP,
    ExternalStage,
    JudgingStage,
    LlmJudgeStage,
    RewardModelStage,
    TeacherStage,
    read_columns,
    reward_weights,
    sent_columns,
)
from contracts.spec.trainer import REGROUP_S, HostsSpec

Values = Mapping[str, object]
"""Texts for the places `{name}` of a rule's texts, for one place of a spec that breaks it."""

SAMPLES_NOTHING = 'loss = "sft" samples nothing'
RULES_OF_SAMPLES = (
    "reward_collapsed",
    "entropy_gone",
    "mismatch_high",
    "truncations_rising",
    "completions_cut",
    "completions_unscorable",
    "mismatch_unusual",
)
"""The rules of health that look at what was sampled."""


# Parts of a spec, each with its field.


def trained_sets(spec: JobSpec) -> Iterator[tuple[str, str, SourceDataset]]:
    """Yields (field, name, data set) of the job, or of each source of its mixture; "" names a data set of a job."""
    if isinstance(spec.dataset, MixtureDataset):
        for place, source in enumerate(spec.dataset.sources):
            yield f"dataset.sources[{place}].dataset", source.name, source.dataset
    else:
        yield "dataset", "", spec.dataset


def data_sets(spec: JobSpec) -> Iterator[tuple[str, str, SourceDataset]]:
    """Yields (field, name, data set) of what is trained, then of each set of the evaluation."""
    yield from trained_sets(spec)
    for place, held_out in enumerate(spec.evaluation.sets or ()):
        yield f"evaluation.sets[{place}].dataset", held_out.name, held_out.dataset


def tables_of_rows(spec: JobSpec) -> Iterator[tuple[str, RowsTable]]:
    """Yields (field, table) of each data set of rows."""
    for field, _, table in data_sets(spec):
        if isinstance(table, RowsTable):
            yield field, table


def saved_sets(spec: JobSpec) -> Iterator[tuple[str, HuggingFaceDataset]]:
    """Yields (field, table) of each data set of the type `huggingface`."""
    for field, table in tables_of_rows(spec):
        if isinstance(table, HuggingFaceDataset):
            yield field, table


def hub_names_as_files(spec: JobSpec) -> Iterator[Values]:
    """Yields each key of a file of rows that has a name of the hub."""
    for field, table in tables_of_rows(spec):
        for key in ("train_path", "evaluation_path"):
            path = getattr(table, key)
            if is_hub_name(path):
                yield {"dataset": field, "key": key, "name": path}


def unreadable_hub_names(spec: JobSpec) -> Iterator[Values]:
    """Yields each name of the hub that isn't of the form of one."""
    models = {"model.path": spec.model.path}
    for stage in spec.stages:
        if isinstance(stage, (TeacherStage, RewardModelStage)):
            models |= {f"stages.{stage.name}.{key}": path for key, path in stage.files().items()}
    sets = {f"{field}.path": table.path for field, table in saved_sets(spec) if table.path}
    for field, path in models.items():
        if is_hub_name(path) and not _is_readable(path, "model"):
            yield {"field": field, "path": path[:200]}
    for field, path in sets.items():
        if not _is_readable(path, "dataset"):
            yield {"field": field, "path": path[:200]}


def _is_readable(path: str, kind: HubKind) -> bool:
    try:
        read_hub_name(path, kind=kind, field="")
    except InvalidInput:
        return False
    return True


def tasks_of_reasoning_gym(spec: JobSpec) -> Iterator[tuple[str, str, ReasoningGymDataset]]:
    """Yields (field, name, table) of each data set of the type `reasoning_gym`, as `data_sets` does."""
    for field, name, table in data_sets(spec):
        if isinstance(table, ReasoningGymDataset):
            yield field, name, table


def unknown_tasks(spec: JobSpec) -> Iterator[Values]:
    for field, _, table in tasks_of_reasoning_gym(spec):
        if not is_known(table.task):
            yield {"dataset": field, "task": table.task[:100], "cure": cure_of_unknown(table.task)}


def tasks_without_prompts(spec: JobSpec) -> Iterator[Values]:
    for field, _, table in tasks_of_reasoning_gym(spec):
        if table.task in NOT_GENERATED:
            yield {"dataset": field, "task": table.task, "reason": NOT_GENERATED[table.task]}


def paths_of_tasks(spec: JobSpec) -> Iterator[Values]:
    """Yields each parameter by which a task would read another file than one of its package."""
    for field, _, table in tasks_of_reasoning_gym(spec):
        for name in path_parameters(table):
            yield {"dataset": field, "name": name}


def places_of_gym_rewards(spec: JobSpec, source: str) -> list[int]:
    """Returns the places of the rewards of type `reasoning_gym` that score a source, or a set of the evaluation."""
    components = enumerate(spec.reward.components)
    return [place for place, part in components if isinstance(part, ReasoningGymReward) and part.scores(source)]


def tasks_without_scorer(spec: JobSpec) -> Iterator[Values]:
    for field, source, table in tasks_of_reasoning_gym(spec):
        # A task that makes no prompts has nothing to score.
        if table.task in NOT_SCORED and table.task not in NOT_GENERATED and places_of_gym_rewards(spec, source):
            yield {"dataset": field, "task": table.task, "reason": NOT_SCORED[table.task]}


def rewards_without_task_entries(spec: JobSpec) -> Iterator[Values]:
    for _, source, table in data_sets(spec):
        if not table.has_task_entries:
            for place in places_of_gym_rewards(spec, source):
                yield {"place": place, "kind": table.kind}


def names_a_column(template: str) -> bool:
    """Returns True for a template with a column in braces, in which each other brace is written twice."""
    rest = re.sub(r"\{\{|\}\}", "", template)
    columns = re.findall(r"\{[^{}]+\}", rest)
    return bool(columns) and not set("{}") & set(re.sub(r"\{[^{}]+\}", "", rest))


def environments(spec: JobSpec) -> Iterator[tuple[str, str, EnvironmentSpec]]:
    """Yields (field, source, environment); the source is "" for the environment that plays all prompts."""
    if spec.environment is not None:
        yield "environment", "", spec.environment
    if isinstance(spec.dataset, MixtureDataset):
        for place, source in enumerate(spec.dataset.sources):
            if source.environment:
                yield f"dataset.sources[{place}].environment", source.name, source.environment


def held_outs(spec: JobSpec) -> Iterator[tuple[str, HeldOutSpec]]:
    """Yields (field, how held-out prompts are sampled): the evaluation itself, then its sets."""
    yield "evaluation", spec.evaluation
    for place, held_out in enumerate(spec.evaluation.sets or ()):
        yield f"evaluation.sets[{place}]", held_out


def samplings(spec: JobSpec) -> Iterator[tuple[str, SamplingParams]]:
    """Yields (field, sampling) of each that the spec has; an evaluation without its own is sampled as training is."""
    yield "rollout.sampling", spec.rollout.sampling
    for field, held_out in held_outs(spec):
        if held_out.sampling is not UNSET:
            yield f"{field}.sampling", held_out.sampling


def pools(spec: JobSpec) -> Iterator[tuple[str, DifficultyPools]]:
    """Yields (field, pools) of each data set that is drawn by difficulty."""
    for field, _, dataset in data_sets(spec):
        if dataset.difficulty_pools:
            yield f"{field}.difficulty_pools", dataset.difficulty_pools


def judges(spec: JobSpec) -> Iterator[tuple[int, LlmJudgeStage]]:
    """Yields (place, stage) of each stage that asks a model for a score."""
    for place, stage in enumerate(spec.stages):
        if isinstance(stage, LlmJudgeStage):
            yield place, stage


def teachers(spec: JobSpec) -> Iterator[tuple[int, TeacherStage]]:
    """Yields (place, stage) of each teacher."""
    for place, stage in enumerate(spec.stages):
        if isinstance(stage, TeacherStage):
            yield place, stage


def kind(spec: JobSpec) -> AdvantageKind:
    return spec.algorithm.advantage_kind


def hosts(spec: JobSpec) -> HostsSpec | None:
    return spec.trainer.over_hosts


def makes_reference(spec: JobSpec) -> bool:
    """Returns True where a stage makes the reference's log-probs, so that the trainer loads no reference."""
    return any(column.name == REFERENCE_LOGPROBS for stage in spec.stages for column in stage.outputs)


def places_of_repeats(names: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yields (place, name) of each name that stands earlier, too."""
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            yield place, name
        seen.add(name)


@cache
def defaults(table: type) -> Mapping[str, object]:
    return {key.name: key.default for key in structs.fields(table)}


def is_set(spec: JobSpec, field: str) -> bool:
    """Returns True where a key of a table has another value than its default, "none" apart: that sets nothing."""
    table, _, key = field.partition(".")
    record = getattr(spec, table)
    return getattr(record, key) not in (defaults(type(record))[key], "none")


# Conditions that need more than a line.


def keys_beside_sft(spec: JobSpec) -> Iterator[Values]:
    """Yields each key of `algorithm` that is about rewards, or about the policy that sampled."""
    acting = ("loss", "advantage", "updates_per_iteration", "mini_batches", "entropy_coefficient")
    if not spec.algorithm.learns_given:
        return
    for key, default in defaults(AlgorithmSpec).items():
        if key not in acting and getattr(spec.algorithm, key) != default:
            yield {"key": key}


def keys_beside_external(spec: JobSpec) -> Iterator[Values]:
    """Yields each key of how a job is trained that a process of one's own decides, and that is set all the same."""
    if not spec.trainer.external:
        return
    for table in ("trainer", "algorithm", "optimizer"):
        record = getattr(spec, table)
        for key, default in defaults(type(record)).items():
            field = f"{table}.{key}"
            if field != "trainer.external" and getattr(record, key) != default:
                yield {"key": field}


def chats_that_are_played(spec: JobSpec) -> Iterator[Values]:
    for environment_field, source, _ in environments(spec):
        for field, name, dataset in data_sets(spec):
            if dataset.chat is not None and source in ("", name):
                yield {"dataset": field, "environment": environment_field}


def ends_that_are_played(spec: JobSpec) -> Iterator[Values]:
    for environment_field, _, _ in environments(spec):
        for field, sampling in samplings(spec):
            if sampling.own_end:
                yield {"sampling": field, "key": sampling.own_end, "environment": environment_field}


def turns_without_room(spec: JobSpec) -> Iterator[Values]:
    for field, _, environment in environments(spec):
        key, most = environment.seen_bound
        if most < spec.rollout.sampling.max_new_tokens:
            yield {"environment": field, "key": key, "most": most}


def wide_contexts(spec: JobSpec) -> Iterator[Values]:
    for field, _, environment in environments(spec):
        if environment.max_context_tokens is not UNSET and environment.max_context_tokens > environment.max_tokens:
            yield {"environment": field}


def environments_beside_the_jobs(spec: JobSpec) -> Iterator[Values]:
    if spec.environment is not None:
        yield from ({"environment": field} for field, source, _ in environments(spec) if source)


def unplayed(spec: JobSpec) -> Iterator[tuple[str, str, SourceDataset]]:
    """Yields as `data_sets` does what no environment plays, so that components alone score it."""
    played = spec.environments.keys()
    for field, name, dataset in data_sets(spec):
        if not {"", name} & played:
            yield field, name, dataset


def tasks_of_no_environment(spec: JobSpec) -> Iterator[Values]:
    sources = sources_of(spec.dataset)
    for field, name, dataset in unplayed(spec):
        if isinstance(dataset, EnvironmentDataset):
            place = "environment"
            if name and name in sources:
                place = field.replace("].dataset", "].environment")
            yield {"dataset": field, "environment": place}


def unscored(spec: JobSpec) -> Iterator[tuple[str, bool]]:
    """Yields (name, True where a component scores it) of each data set that components alone have to score."""
    is_given = spec.algorithm.learns_given and not spec.evaluation.num_prompts
    sources = sources_of(spec.dataset)
    for _, name, dataset in unplayed(spec):
        if isinstance(dataset, EnvironmentDataset) or (is_given and name in sources):
            continue
        yield name, any(component.scores(name) for component in spec.reward.components)


def nothing_scores(spec: JobSpec) -> Iterator[Values]:
    names = [name for name, _ in unscored(spec)]
    # A judge or a reward model scores what is trained by itself.
    if names and not spec.reward.components and not spec.stage_reward_weights:
        yield {"what": f"`{names[0]}`" if names[0] else "the job"}


def held_out_without_scores(spec: JobSpec) -> bool:
    """Returns True where stages alone score, which work on training batches: each held-out reward would be 0."""
    scores_by_stages = bool(spec.stage_reward_weights) and not spec.reward.components
    return scores_by_stages and spec.evaluation.num_batches > 0 and any(True for _ in unscored(spec))


def scored_by_none(spec: JobSpec) -> Iterator[Values]:
    # Without any component another rule says so once, and not for each data set.
    if not spec.reward.components:
        return
    for name, is_scored in unscored(spec):
        if not is_scored:
            what = f"`{name}`" if name else "what is trained"
            cure = "leave sources of a component out"
            if name:
                cure = f"add `{name}` to a component's sources"
            yield {"what": what, "cure": cure}


def unknown_sources(spec: JobSpec) -> Iterator[Values]:
    names = {name for _, name, _ in data_sets(spec)}
    for place, component in enumerate(spec.reward.components):
        for name in component.sources or ():
            if name not in names:
                yield {"place": place, "name": name}


def idle_overlongs(spec: JobSpec) -> Iterator[Values]:
    most = spec.max_sampled_tokens
    for place, component in enumerate(spec.reward.components):
        # Nothing is sampled beyond `most`: a punishment that begins there punishes nothing.
        if isinstance(component, OverlongReward) and component.free_tokens >= most:
            yield {"place": place, "free": component.free_tokens, "most": most}


def long_buffers(spec: JobSpec) -> Iterator[Values]:
    for place, component in enumerate(spec.reward.components):
        if isinstance(component, OverlongReward) and component.buffer_tokens > component.max_tokens:
            yield {"place": place}


def short_lengths(spec: JobSpec) -> Iterator[Values]:
    for place, component in enumerate(spec.reward.components):
        # The score falls between the two: equal, it would be divided by 0.
        if isinstance(component, LengthReward) and component.max_chars <= component.target_chars:
            yield {"place": place}


def idle_comparisons(spec: JobSpec) -> Iterator[Values]:
    for place, component in enumerate(spec.reward.components):
        if isinstance(component, RegexReward) and component.compare and not component.compares:
            yield {"place": place}


def unread_metadata(spec: JobSpec) -> Iterator[Values]:
    if not imports_plugins(spec.reward.components):
        for field, _, dataset in trained_sets(spec):
            if getattr(dataset, "metadata_columns", UNSET):
                yield {"dataset": field}


def unnamed_correction(spec: JobSpec) -> bool:
    """Returns True where samples of an older policy are trained, and the spec doesn't say what becomes of that.

    A lag that another rule refuses is none.
    """
    lags = spec.schedule_rule.lags and spec.max_policy_lag > 0
    return lags and spec.algorithm.correction is None and not spec.algorithm.learns_given


def teaches_when_equal(spec: JobSpec, condition: bool) -> bool:
    return spec.rollout.max_resamples > 0 and condition


def single_tokens(spec: JobSpec) -> Iterator[Values]:
    sampling = spec.rollout.sampling
    # One token is left to draw: its log-prob is 0, and so is every gradient.
    if sampling.top_k == 1:
        yield {"key": "top_k"}
    if sampling.min_p == 1.0:
        yield {"key": "min_p"}


def unseen_distributions(spec: JobSpec) -> Iterator[Values]:
    """Yields stages of one's own that make log-probs which the loss reads, where sampling changes the distribution."""
    sampling = spec.rollout.sampling
    setting = sampling.truncation or sampling.processing
    if not setting:
        return
    for stage in spec.stages:
        columns = read_columns(spec.algorithm).keys() & {column.name for column in stage.outputs}
        if columns and isinstance(stage, ExternalStage):
            yield {"key": setting.split()[0], "setting": setting, "stage": stage.name, "column": min(columns)}


def evaluates_meanwhile(spec: JobSpec) -> bool:
    """Returns True where versions between the first and the last are evaluated."""
    return spec.evaluation.num_batches > 0 and 0 < spec.evaluation.every_iterations < spec.iterations


def unbreakable(spec: JobSpec) -> Iterator[Values]:
    """Yields each rule of health in `trainer.stop_on` that can't be broken."""
    reasons: dict[str, str] = {}
    if not evaluates_meanwhile(spec):
        reasons["score_collapsed"] = "no version between the first and the last is evaluated"
    if not kind(spec).compares_groups:
        reasons["groups_equal"] = "algorithm.advantage compares no group"
    if spec.trainer.kl_alarm is UNSET:
        reasons["kl_high"] = "without kl_alarm there is no limit"
    if spec.schedule_rule.lags:
        reasons["mismatch_high"] = 'under a lag "lag_too_large" says it'
    else:
        reasons["lag_too_large"] = "without max_policy_lag nothing lags"
    if not spec.samples_what_it_trains:
        reasons["mismatch_unusual"] = "another version samples than is trained, or none"
    if spec.algorithm.learns_given:
        # Last, since it is the reason that comes before the others.
        reasons |= dict.fromkeys(RULES_OF_SAMPLES, SAMPLES_NOTHING)
    for name in spec.trainer.stops_on:
        if name in reasons:
            cure = "take it out"
            if name == "kl_high":
                cure = "set kl_alarm, or take it out"
            yield {"name": name, "reason": reasons[name], "cure": cure}


def unlearnable(spec: JobSpec) -> Iterator[Values]:
    """Yields the sources of an SFT job whose data set has no completions."""
    if spec.algorithm.learns_given:
        for field, _, dataset in trained_sets(spec):
            if not dataset.has_completions:
                yield {"dataset": field, "kind": dataset.kind}


def drawn_sets(spec: JobSpec) -> Iterator[Values]:
    for place, held_out in enumerate(spec.evaluation.sets or ()):
        if held_out.dataset.drawn_by:
            yield {"place": place, "key": held_out.dataset.drawn_by}


def unnamed_sets(spec: JobSpec) -> Iterator[Values]:
    """Yields the sets of the evaluation whose name is another's, or stands for what the data set holds out."""
    # The data set's own held-out prompts come first, so a place in this list is one more than that in the spec.
    names = [HELD_OUT, *(held_out.name for held_out in spec.evaluation.sets or ())]
    for place, name in places_of_repeats(names):
        yield {"place": place - 1, "name": name}


def unordered_sums(spec: JobSpec) -> bool:
    # Ascending, and each once: an entry counts from its first iteration to the next one's.
    firsts = [wider.first_iteration for wider in spec.trainer.wider_sums or ()]
    return firsts != sorted(set(firsts))


def idle_regroups(spec: JobSpec) -> bool:
    group = hosts(spec)
    return group is not None and group.least == group.most and group.regroup_s not in (0.0, REGROUP_S)


def lengths_beyond_training(spec: JobSpec) -> Iterator[Values]:
    for field, sampling in samplings(spec):
        if sampling.max_new_tokens > spec.rollout.sampling.max_new_tokens:
            yield {"sampling": field}


def beyond_products(spec: JobSpec) -> Iterator[Values]:
    given_tokens = 0
    if spec.algorithm.learns_given:
        given_tokens = spec.rollout.sampling.max_new_tokens
    for product in products(
        spec.rollout,
        spec.evaluation,
        num_open=spec.num_open,
        longest=spec.longest_completion(),
        given_tokens=given_tokens,
    ):
        if product.value > product.limit:
            yield {"product": product, "key": product.factors.split()[0]}


# Conditions on stages.


def repeated_outputs(spec: JobSpec) -> Iterator[Values]:
    seen: set[str] = set()
    for place, stage in enumerate(spec.stages):
        for column in stage.outputs:
            if column.name in seen:
                yield {"place": place, "column": column.name}
            seen.add(column.name)


def outputs_of_every_rollout(spec: JobSpec) -> Iterator[Values]:
    for place, stage in enumerate(spec.stages):
        for column in stage.outputs:
            if column.name in BASE_COLUMNS:
                yield {"place": place, "column": column.name}


def unknown_inputs(spec: JobSpec) -> Iterator[Values]:
    known = BASE_COLUMNS.keys() | {column.name for stage in spec.stages for column in stage.outputs}
    for place, stage in enumerate(spec.stages):
        for name in stage.inputs:
            if name not in known:
                yield {"place": place, "column": name, "known": ", ".join(sorted(known))}


def circles(spec: JobSpec) -> Iterator[Values]:
    if any(unknown_inputs(spec)):
        return
    outputs = [stage.outputs for stage in spec.stages]
    waiting = circle([stages_before(stage.inputs, outputs) for stage in spec.stages])
    if waiting:
        yield {"way": " → ".join(spec.stages[place].name for place in [*waiting, waiting[0]])}


def wrong_widths(spec: JobSpec) -> Iterator[Values]:
    for place, stage in enumerate(spec.stages):
        if not isinstance(stage, ExternalStage):
            continue
        for number, column in enumerate(stage.outputs):
            # A width is how many numbers a token has: a text has none, nor has a value of a whole rollout.
            if column.width is not UNSET and (column.type == "text" or column.per != "token"):
                yield {"place": place, "number": number}


def long_failure_names(spec: JobSpec) -> Iterator[Values]:
    for place, stage in enumerate(spec.stages):
        if not isinstance(stage, JudgingStage) or stage.stated_score is None:
            continue
        if len(stage.failure_column) > MAX_COLUMN_NAME:
            yield {"place": place, "most": MAX_COLUMN_NAME - len(FAILURE_SUFFIX)}


def long_criteria(spec: JobSpec) -> Iterator[Values]:
    for place, stage in judges(spec):
        # The names of criteria become columns.
        if stage.criteria is UNSET:
            continue
        for column in stage.reward_weights:
            if len(column) > MAX_COLUMN_NAME:
                yield {"place": place, "column": column}


def unreadable_answers(spec: JobSpec) -> Iterator[Values]:
    for place, stage in judges(spec):
        if stage.answer not in ANSWER_FORMS and stage.answer.count(NUMBER_PLACE) != 1:
            yield {"place": place}


def wrong_reward_columns(spec: JobSpec) -> Iterator[Values]:
    for place, stage in enumerate(spec.stages):
        if isinstance(stage, ExternalStage) and stage.reward_column:
            columns = {column.name: column for column in stage.outputs}
            column = columns.get(stage.reward_column)
            if column is None or (column.type, column.per) != ("float32", "rollout"):
                yield {"place": place, "column": stage.reward_column}


def idle_stage_weights(spec: JobSpec) -> Iterator[Values]:
    for place, stage in enumerate(spec.stages):
        if isinstance(stage, ExternalStage) and not stage.reward_column and stage.weight != 1.0:
            yield {"place": place}


def missing_columns(spec: JobSpec) -> Iterator[Values]:
    """Yields what the loss reads, and no stage makes."""
    columns = {column.name for stage in spec.stages for column in stage.outputs}
    for name, (is_read, key) in read_by_loss(spec).items():
        if is_read and name not in columns and name != REFERENCE_LOGPROBS:
            kind = '"teacher"'
            if name == TEACHER_TOP:
                kind = '"teacher" with top_k or hidden_size'
            yield {"key": key.split()[0], "column": name, "kind": kind}


def read_by_loss(spec: JobSpec) -> Mapping[str, tuple[bool, str]]:
    """Returns `read_columns`; {} where a trainer of one's own decides what it reads."""
    if spec.trainer.external:
        return {}
    return read_columns(spec.algorithm, spec.stages)


def malformed_columns(spec: JobSpec) -> Iterator[Values]:
    """Yields what the loss reads of a stage, and isn't of the form that it takes."""
    read = read_by_loss(spec)
    for place, stage in enumerate(spec.stages):
        for column in stage.outputs:
            if column.name not in read or column.name == TEACHER_STATES:
                continue
            width = column.width or 1
            is_wide = column.name == TEACHER_TOP
            # A teacher's likeliest tokens are 2 k + 1 numbers, an odd width above 1; the others have one number.
            is_number = (column.type, column.per) == ("float32", "token") and width % 2 and (width > 1) == is_wide
            if not is_number:
                form = "of width 2 k + 1 per token" if is_wide else "per token"
                yield {"place": place, "column": column.name, "form": form}


def unread_columns(spec: JobSpec) -> Iterator[Values]:
    """Yields what a stage makes for the loss, and the loss doesn't read."""
    read = read_by_loss(spec)
    for place, stage in enumerate(spec.stages):
        for column in stage.outputs:
            is_read, key = read.get(column.name, (True, ""))
            if not is_read:
                yield {"place": place, "column": column.name, "key": key}


def taught_sources(spec: JobSpec, *, unknown: bool) -> Iterator[Values]:
    """Yields sources that a teacher's `models` lack, or, if unknown, names that no source has."""
    sources = sources_of(spec.dataset).keys()
    for place, stage in teachers(spec):
        taught = (stage.models or {}).keys()
        if not taught:
            continue
        missing = sources - taught
        if unknown:
            missing = taught - sources
        for name in sorted(missing):
            yield {"place": place, "name": name}


def is_wide(column: Column) -> bool:
    """Returns True for several numbers a token. A text has no width; where it names one another rule refuses that."""
    return column.width is not UNSET and column.type != "text"


def wide_batches(spec: JobSpec) -> Iterator[Values]:
    rollout, limit = spec.rollout, spec.limits.max_batch_bytes
    # The most that a batch may come to: each of its k * G completions as long as the job samples any.
    num_tokens = rollout.prompts_per_batch * rollout.group_size * spec.max_sampled_tokens
    for place, stage in enumerate(spec.stages):
        columns = sent_columns(stage, spec.model.dtype)
        num_bytes = num_tokens * sum(column.num_bytes for column in columns if is_wide(column))
        if num_bytes > limit:
            cure = "lower width"
            if isinstance(stage, TeacherStage):
                cure = "lower top_k" if stage.top_k else "take top_k"
            yield {"place": place, "tokens": num_tokens, "bytes": num_bytes, "cure": cure}


def columns_like_components(spec: JobSpec) -> Iterator[Values]:
    taken = {*breakdown_names(spec.reward.components)}
    for place, stage in enumerate(spec.stages):
        for column in reward_weights([stage]):
            if column in taken:
                yield {"place": place, "column": column}


def failures_like_others(spec: JobSpec) -> Iterator[Values]:
    taken = {*breakdown_names(spec.reward.components), *map(environment_name, spec.environments)}
    for place, stage in enumerate(spec.stages):
        if isinstance(stage, JudgingStage) and stage.stated_score is not None and stage.name in taken:
            yield {"place": place}


def stages_that_reward(spec: JobSpec, condition: bool) -> Iterator[Values]:
    weights = spec.stage_reward_weights
    if condition and weights:
        yield {"columns": ", ".join(weights)}
