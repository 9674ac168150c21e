"""The one judge of a spec: a table of rules, and `judge`, which gives all that a spec breaks.

    TOML, JSON, Python ─▶ types and ranges (contracts/spec/reading.py) ─▶ JobSpec ─▶ judge ─▶ refusals, or none
                                                                                       │
    gateway/submission.py adds what needs the stack: paths, plug-ins, live generators ◀┘

The tables of a spec have types, ranges and choices, and nothing else. What a spec may not say although each of its
values is within its range stands here: keys that don't go together, keys that have no effect, products beyond what a
stack holds. docs/configuration.md lists the rules.

A rule is asked of a spec whatever other rules say of it, so none may rely on another. Each costs a time that is linear
in the spec: no pattern is compiled, no file is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import islice

from msgspec import UNSET

from contracts.errors import MOST_REFUSALS, Refusal, SpecRefused
from contracts.experience.columns import MAX_COLUMN_NAME
from contracts.known_tasks import FILE_CURE
from contracts.sampling import SamplingParams
from contracts.spec import conditions
from contracts.spec.algorithm import AlgorithmSpec, PluginLoss
from contracts.spec.conditions import SAMPLES_NOTHING, Values
from contracts.spec.datasets import (
    MixtureDataset,
    RowsTable,
    sources_of,
)
from contracts.spec.job import JobSpec
from contracts.spec.reading import SpecReading, where_read
from contracts.spec.trainer import ALL_LINEAR
from contracts.weights import has_deltas

Broken = bool | Iterable[Values]
"""The answer of a rule's `when`: True, or values for each place that breaks the rule; False, or nothing, for none."""

LEAVE_OUT = "leave it out"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A condition that no job may meet, with the words of its refusal.

    In the texts `{spec.schedule}` stands for a value of the spec, `{place}` for a value that `when` gives.
    """

    field: str
    """Key at fault, as `trainer.kl_alarm` or `stages[{place}].weight`."""
    when: Callable[[JobSpec], Broken]
    """Finds what breaks the rule."""
    says: str
    """The problem of the key: a predicate, whose subject is the field."""
    cure: str
    """The change that the author has to make."""

    def refusals(self, spec: JobSpec) -> Iterator[Refusal]:
        """Yields a refusal for each place of the spec that breaks the rule."""
        broken = self.when(spec)
        if isinstance(broken, bool):
            broken = ({},) if broken else ()
        for values in broken:
            yield Refusal(
                field=self.field.format(spec=spec, **values),
                problem=self.says.format(spec=spec, **values),
                cure=self.cure.format(spec=spec, **values),
            )


def judge(spec: JobSpec, *, unread: Set[str] = frozenset()) -> list[Refusal]:
    """Returns all refusals of a spec in the order of the table, but no more than MOST_REFUSALS.

    Args:
        spec: The spec.
        unread: The keys of it without a value, as `SpecReading.unread`. A rule that looks at one of them isn't asked.
    """
    refusals: list[Refusal] = []
    for rule in RULES:
        with where_read(unread):
            refusals += islice(rule.refusals(spec), MOST_REFUSALS - len(refusals))
    return refusals


def refusals_of(reading: SpecReading) -> list[Refusal]:
    """Returns a refusal for each wrong key of a spec, then for each rule that the rest of it breaks."""
    refusals = list(reading.refusals)
    if reading.spec is not None:
        refusals += judge(reading.spec, unread=reading.unread)
    return refusals[:MOST_REFUSALS]


def judged(reading: SpecReading) -> JobSpec:
    """Returns the spec that was read. Raises SpecRefused, with all refusals, for a wrong key or a broken rule."""
    refusals = refusals_of(reading)
    if refusals:
        raise SpecRefused(refusals)
    return reading.whole


def check_spec(spec: JobSpec) -> None:
    """Raises SpecRefused, with all refusals, for a spec that breaks a rule."""
    refusals = judge(spec)
    if refusals:
        raise SpecRefused(refusals)


# Keys that are set without an effect.


def _idle(keys: str, *, when: Callable[[JobSpec], bool], why: str, cure: str = LEAVE_OUT) -> tuple[Rule, ...]:
    """Returns a rule for each key that has no effect under a condition, and is refused where it is set.

    Args:
        keys: `table key key …`.
        when: The condition under which nothing reads the keys.
        why: The rest of the sentence "KEY has no effect …".
    """
    table, *names = keys.split()

    def rule(field: str) -> Rule:
        return Rule(
            field=field,
            when=lambda spec: when(spec) and conditions.is_set(spec, field),
            says=f"has no effect {why}",
            cure=cure,
        )

    return tuple(rule(f"{table}.{name}") for name in names)


def _idle_algorithm(
    keys: str, *, when: Callable[[AlgorithmSpec], bool], why: str, cure: str = LEAVE_OUT
) -> tuple[Rule, ...]:
    """Returns `_idle` rules of table `algorithm`, by a condition on that table.

    With loss = "sft" they are silent: a rule of its own refuses all that is about rewards and sampled tokens.
    """
    return _idle(
        f"algorithm {keys}",
        when=lambda spec: not spec.algorithm.learns_given and when(spec.algorithm),
        why=why,
        cure=cure,
    )


# The table. Rules stand in the order of a spec's tables.

RULES: tuple[Rule, ...] = (
    # Top level.
    Rule(
        field="trackers",
        when=lambda spec: len(set(spec.trackers)) < len(spec.trackers),
        says="has the same name twice",
        cure="give each name once",
    ),
    Rule(
        field="tags",
        when=lambda spec: len(set(spec.tags)) < len(spec.tags),
        says="has the same name twice",
        cure="give each name once",
    ),
    Rule(
        field="deterministic",
        when=lambda spec: spec.deterministic and spec.trainer.accumulation != "exact",
        says='needs trainer.accumulation = "exact"',
        cure='set deterministic = false, or trainer.accumulation = "exact"',
    ),
    Rule(
        field="deterministic",
        when=lambda spec: spec.deterministic and spec.schedule == "bounded",
        says='is not possible with schedule = "bounded", where the version that samples a batch depends on the moment',
        cure='set deterministic = false, or schedule = "delayed"',
    ),
    Rule(
        field="deterministic",
        when=lambda spec: ({"stage": stage.name} for _, stage in conditions.judges(spec) if spec.deterministic),
        says='is not possible with stage "{stage}", whose answers may differ from one time to the next',
        cure="set deterministic = false",
    ),
    Rule(
        field="iterations",
        when=lambda spec: spec.iterations == 0 and spec.evaluation.num_batches == 0,
        says="0 trains nothing, and evaluation.num_prompts = 0 evaluates nothing",
        cure="set evaluation.num_prompts, or iterations to 1 or more",
    ),
    Rule(
        field="iterations",
        when=lambda spec: spec.iterations == 0 and spec.trainer.external,
        says="0 leaves nothing to do for a trainer of your own",
        cure="set it to 1 or more, or trainer.external = false",
    ),
    Rule(
        field="max_policy_lag",
        when=lambda spec: spec.max_policy_lag > 0 and not spec.schedule_rule.lags,
        says='{spec.max_policy_lag} has no effect with schedule = "{spec.schedule}": there the version that an '
        "iteration trains also samples it",
        cure='set it to 0, or schedule = "delayed" or "bounded"',
    ),
    Rule(
        field="schedule",
        when=lambda spec: spec.max_policy_lag == 0 and spec.schedule_rule.lags,
        says='"{spec.schedule}" with max_policy_lag = 0 is the same as schedule = "periodic"',
        cure='set max_policy_lag to 1 or more, or schedule = "periodic"',
    ),
    Rule(
        field="max_policy_lag",
        when=lambda spec: spec.schedule_rule.lags and spec.max_policy_lag >= spec.iterations,
        says="{spec.max_policy_lag} is too large: it must be below iterations = {spec.iterations}",
        cure="lower max_policy_lag, or raise iterations",
    ),
    Rule(
        field="fork",
        when=lambda spec: spec.fork is not UNSET and spec.trainer.external,
        says="is not possible with trainer.external = true: a trainer of your own starts from the model of the spec",
        cure="remove fork, or set trainer.external = false",
    ),
    Rule(
        field="fork",
        when=lambda spec: spec.fork is not UNSET and any(stage.kind == "reference" for stage in spec.stages),
        says='is not possible with a stage of type "reference", which uses the model of the spec',
        cure="remove fork, or the stage",
    ),
    # model
    Rule(
        field="model.matmul",
        when=lambda spec: bool(spec.model.matmul) and spec.model.dtype != "float32",
        says='has no effect with dtype = "bfloat16": oneDNN multiplies bfloat16 matrices',
        cure=LEAVE_OUT,
    ),
    Rule(
        field="model.cast_lm_head_to_fp32",
        when=lambda spec: spec.model.cast_lm_head_to_fp32 is True and spec.model.dtype == "float32",
        says='has no effect with dtype = "float32"',
        cure=LEAVE_OUT,
    ),
    Rule(
        field="{field}",
        when=conditions.unreadable_hub_names,
        says="`{path}` is no name of the hub",
        cure="write it as hub:OWNER/NAME, or hub:OWNER/NAME@REVISION",
    ),
    # dataset
    Rule(
        field="{dataset}.train_path",
        when=lambda spec: (
            {"dataset": field}
            for field, table in conditions.saved_sets(spec)
            if not table.path and not table.train_path
        ),
        says="is required",
        cure='name a file or folder, or a data set of the hub by path = "hub:OWNER/NAME"',
    ),
    Rule(
        field="{dataset}.{key}",
        when=lambda spec: (
            {"dataset": field, "key": key}
            for field, table in conditions.saved_sets(spec)
            for key in ("train_path", "evaluation_path")
            if table.path and getattr(table, key)
        ),
        says="and path both name rows",
        cure="leave it out: split and evaluation_split name those of path",
    ),
    Rule(
        field="{dataset}.{key}",
        when=lambda spec: (
            {"dataset": field, "key": key}
            for field, table in conditions.saved_sets(spec)
            for key in ("config", "split", "evaluation_split")
            if not table.path and getattr(table, key)
        ),
        says="has no effect without path, which names a data set of the hub",
        cure='leave it out, or write path = "hub:OWNER/NAME" in place of train_path',
    ),
    Rule(
        field="{dataset}.evaluation_split",
        when=lambda spec: (
            {"dataset": field}
            for field, table in conditions.saved_sets(spec)
            if table.path and len(set(table.hub_splits)) < len(table.hub_splits)
        ),
        says="is the split that is trained, too",
        cure="name another one, or leave it out to hold out the last evaluation.num_prompts rows",
    ),
    Rule(
        field="{dataset}.{key}",
        when=conditions.hub_names_as_files,
        says="is a name of the hub, and a file or folder is named here",
        cure='write type = "huggingface", path = "{name}", split = "train" in its place',
    ),
    Rule(
        field="{dataset}.prompt_template",
        when=lambda spec: (
            {"dataset": field}
            for field, table in conditions.tables_of_rows(spec)
            if table.prompt_template and table.columns and table.columns.prompt != "prompt"
        ),
        says="and columns.prompt both say what the prompt is",
        cure="leave one of them out",
    ),
    Rule(
        field="{dataset}.prompt_template",
        when=lambda spec: (
            {"dataset": field}
            for field, table in conditions.tables_of_rows(spec)
            if table.prompt_template is not UNSET and not conditions.names_a_column(table.prompt_template)
        ),
        says="names no column, or has a brace that is open",
        cure='write the column in braces, as "Question: {{question}}"; a brace itself is written twice',
    ),
    Rule(
        field="dataset.sources[{place}].name",
        when=lambda spec: (
            {"place": place, "name": name}
            for place, name in conditions.places_of_repeats(
                source.name for source in (spec.dataset.sources if isinstance(spec.dataset, MixtureDataset) else ())
            )
        ),
        says="`{name}` is the name of another source, too",
        cure="give each source its own name",
    ),
    Rule(
        field="{dataset}.curriculum",
        when=lambda spec: (
            {"dataset": field}
            for field, _, dataset in conditions.data_sets(spec)
            if isinstance(dataset, RowsTable) and dataset.curriculum and dataset.difficulty_pools
        ),
        says="and difficulty_pools both choose which prompts are drawn",
        cure="remove one of the two",
    ),
    Rule(
        field="{pools}.hard_threshold",
        when=lambda spec: (
            {"pools": field} for field, pools in conditions.pools(spec) if pools.hard_threshold >= pools.easy_threshold
        ),
        says="must be below easy_threshold, so that no prompt is both hard and easy",
        cure="lower hard_threshold",
    ),
    Rule(
        field="{pools}.easy_fraction",
        when=lambda spec: (
            {"pools": field}
            for field, pools in conditions.pools(spec)
            if pools.easy_fraction + pools.hard_fraction > 1.0
        ),
        says="and hard_fraction add up to more than 1",
        cure="lower one of the two",
    ),
    Rule(
        field="{pools}",
        when=lambda spec: (
            {"pools": field}
            for field, _ in conditions.pools(spec)
            # Iteration i is opened by the commit of i - num_open.
            if spec.iterations <= spec.num_open and not field.startswith("evaluation")
        ),
        says="has no effect: all {spec.iterations} iterations are opened before the first one is measured",
        cure="raise iterations",
    ),
    Rule(
        field="{dataset}.metadata_columns",
        when=conditions.unread_metadata,
        says="has no effect: no reward of type plugin reads it",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="{dataset}.type",
        when=conditions.tasks_of_no_environment,
        says='"environment" takes its tasks from an environment, and the job has none',
        cure="set {environment}.name",
    ),
    Rule(
        field="{dataset}.task",
        when=conditions.unknown_tasks,
        says="`{task}` is no task of reasoning-gym",
        cure="{cure}",
    ),
    Rule(
        field="{dataset}.task",
        when=conditions.tasks_without_prompts,
        says="`{task}` makes no prompts here: {reason}",
        cure="choose another task",
    ),
    Rule(
        field="{dataset}.task",
        when=conditions.tasks_without_scorer,
        says="`{task}` is not scored: {reason}",
        cure="choose another task, or a reward of another type",
    ),
    Rule(
        field="{dataset}.params.{name}",
        when=conditions.paths_of_tasks,
        says="names one of the package's own files, never a path",
        cure=FILE_CURE,
    ),
    # environment
    Rule(
        field="{environment}",
        when=conditions.environments_beside_the_jobs,
        says="has no effect: the table environment plays all sources",
        cure="remove one of the two",
    ),
    Rule(
        field="{environment}.chat_format",
        when=lambda spec: (
            {"environment": field}
            for field, _, environment in conditions.environments(spec)
            if environment.chat_format and environment.renderer != "chat"
        ),
        says='has no effect with {environment}.renderer = "text"',
        cure=LEAVE_OUT,
    ),
    Rule(
        field="{dataset}.chat",
        when=conditions.chats_that_are_played,
        says="has no effect with an environment: {environment}.renderer formats its messages",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="{sampling}.{key}",
        when=conditions.ends_that_are_played,
        says="would end turns that {environment}.renderer can't read",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="{environment}.max_context_tokens",
        when=conditions.wide_contexts,
        says="has no effect above max_tokens",
        cure="lower it, or leave it out",
    ),
    Rule(
        field="{environment}.{key}",
        when=conditions.turns_without_room,
        says="{most} is too small for one turn of rollout.sampling.max_new_tokens = "
        "{spec.rollout.sampling.max_new_tokens}",
        cure="raise {key}, or lower max_new_tokens",
    ),
    Rule(
        field="{environment}.max_context_tokens",
        when=lambda spec: (
            {"environment": field}
            for field, _, environment in conditions.environments(spec)
            if environment.max_context_tokens is not UNSET and spec.trainer.packing == "padded"
        ),
        says="has no effect: a padded pass has all parts of a trajectory, each as long as its longest",
        cure='leave it out, or take trainer.packing = "shared_prompt"',
    ),
    # reward
    Rule(
        field="reward.components",
        when=conditions.nothing_scores,
        says="is empty, so nothing scores {what}",
        cure='add a reward, such as {{ type = "exact" }}, a stage that scores, as "llm_judge" or "reward_model", or an '
        "environment that gives rewards",
    ),
    Rule(
        field="evaluation.num_prompts",
        when=conditions.held_out_without_scores,
        says="has no effect: stages alone score, and they work on training batches, so held-out rewards would all be 0",
        cure='set it to 0 and leave evaluation.sets out, or add a reward, such as {{ type = "exact" }}',
    ),
    Rule(
        field="reward.components",
        when=conditions.scored_by_none,
        says="has no reward that scores {what}",
        cure="{cure}",
    ),
    Rule(
        field="reward.components[{place}].sources",
        when=conditions.unknown_sources,
        says="names `{name}`, which is neither a source of dataset.sources nor a set of evaluation.sets",
        cure="name a source or a set, or leave sources out",
    ),
    Rule(
        field="reward.components[{place}].type",
        when=conditions.rewards_without_task_entries,
        says='"reasoning_gym" needs task entries, and the data set of type "{kind}" has none',
        cure='use "exact", or a data set of type "reasoning_gym"',
    ),
    Rule(
        field="reward.components[{place}].compare",
        when=conditions.idle_comparisons,
        says="has no effect without a group `answer` in pattern",
        cure="leave it out, or add the group",
    ),
    Rule(
        field="reward.components[{place}].max_chars",
        when=conditions.short_lengths,
        says="must be above target_chars",
        cure="raise it, or lower target_chars",
    ),
    Rule(
        field="reward.components[{place}].buffer_tokens",
        when=conditions.long_buffers,
        says="must be max_tokens or less",
        cure="lower it, or raise max_tokens",
    ),
    Rule(
        field="reward.components[{place}].max_tokens",
        when=conditions.idle_overlongs,
        says="has no effect: the punishment begins above {free} tokens, a completion has at most {most}",
        cure="lower max_tokens or raise buffer_tokens",
    ),
    # rollout
    Rule(
        field="rollout.group_size",
        when=lambda spec: (
            spec.rollout.group_size == 1
            and not spec.trainer.external
            and not spec.algorithm.learns_given
            and conditions.kind(spec).compares_groups
        ),
        says='must be 2 or more with algorithm.advantage = "{spec.algorithm.advantage}", which compares '
        "completions of one prompt",
        cure='raise group_size, or set algorithm.advantage = "gae"',
    ),
    Rule(
        field="rollout.group_size",
        when=lambda spec: spec.algorithm.learns_given and spec.rollout.group_size > 1,
        says='{spec.rollout.group_size} has no effect with algorithm.loss = "sft", which trains on the '
        "data set's own completions, once for each prompt",
        cure="set it to 1",
    ),
    Rule(
        field="rollout.prompts_per_batch",
        when=lambda spec: (
            spec.algorithm.whitens_advantages and spec.rollout.prompts_per_batch * spec.rollout.group_size == 1
        ),
        says="makes batches of one completion, so that their tokens are whitened only by each other, "
        "whatever the reward",
        cure="sample several completions in a batch, or set algorithm.whiten_advantages = false",
    ),
    Rule(
        field="rollout.max_resamples",
        when=lambda spec: conditions.teaches_when_equal(spec, spec.algorithm.credits_turns),
        says='would drop groups that teach: with algorithm.credit = "turn" trajectories of equal rewards may have '
        "unequal turns",
        cure='set it to 0, or credit = "trajectory"',
    ),
    Rule(
        field="rollout.max_resamples",
        when=lambda spec: conditions.teaches_when_equal(
            spec, conditions.kind(spec).normalises_components or conditions.kind(spec).has_critic
        ),
        says='would drop groups that teach: under algorithm.advantage = "{spec.algorithm.advantage}" equal rewards '
        "have an advantage",
        cure="set it to 0, or choose another advantage",
    ),
    Rule(
        field="rollout.max_resamples",
        when=lambda spec: conditions.teaches_when_equal(
            spec, spec.algorithm.kl_coefficient > 0.0 and spec.algorithm.kl_placement == "reward"
        ),
        says='would drop groups that teach: with algorithm.kl_placement = "reward" the KL makes their rewards differ',
        cure='set kl_placement = "loss", or max_resamples to 0',
    ),
    Rule(
        field="rollout.max_resamples",
        when=lambda spec: conditions.teaches_when_equal(spec, spec.algorithm.distillation_coefficient > 0.0),
        says="would drop groups that teach: with algorithm.distillation_coefficient the teacher judges every "
        "completion, whatever its reward",
        cure="set one of the two to 0",
    ),
    Rule(
        field="rollout.max_resamples",
        when=lambda spec: conditions.stages_that_reward(spec, spec.rollout.max_resamples > 0),
        says="drops groups of equal reward before stages add to it ({columns})",
        cure="set it to 0",
    ),
    Rule(
        field="rollout.max_resamples",
        when=lambda spec: spec.rollout.max_resamples > 0 and any(True for _ in conditions.pools(spec)),
        says="drops groups that difficulty_pools needs to tell easy prompts from hard ones",
        cure="set it to 0",
    ),
    Rule(
        field="rollout.max_resamples",
        when=lambda spec: spec.algorithm.learns_given and spec.rollout.max_resamples > 0,
        says='has no effect with algorithm.loss = "sft", which trains on the completions of the data set',
        cure="set it to 0",
    ),
    Rule(
        field="rollout.sampling.temperature",
        when=lambda spec: spec.rollout.sampling.temperature == 0.0,
        says="must be above 0: greedy completions of a prompt are all equal, so their advantage is 0",
        cure="set it to 1.0",
    ),
    Rule(
        field="rollout.sampling.{key}",
        when=conditions.single_tokens,
        says="leaves only one token to draw: completions of a prompt are all equal, so their advantage is 0",
        cure="choose a wider value",
    ),
    Rule(
        field="{sampling}.min_new_tokens",
        when=lambda spec: (
            {"sampling": field, "least": sampling.min_new_tokens}
            for field, sampling in conditions.samplings(spec)
            if sampling.min_new_tokens is not UNSET and sampling.min_new_tokens > sampling.max_new_tokens
        ),
        says="{least} is above max_new_tokens",
        cure="lower it",
    ),
    Rule(
        field="rollout.sampling",
        when=lambda spec: (
            spec.algorithm.learns_given
            and spec.rollout.sampling != SamplingParams(max_new_tokens=spec.rollout.sampling.max_new_tokens)
        ),
        says='has no effect with algorithm.loss = "sft", which trains on the completions of the data '
        "set: only max_new_tokens counts",
        cure="keep only max_new_tokens; set evaluation.sampling for the held-out prompts",
    ),
    Rule(
        field="rollout.sampling.{spec.rollout.sampling.processing}",
        when=lambda spec: spec.trainer.external and bool(spec.rollout.sampling.processing),
        says="changes the distribution, and no row tells an external trainer which one it made",
        cure="leave it out, or trainer.external",
    ),
    Rule(
        field="rollout.sampling.{key}",
        when=conditions.unseen_distributions,
        says="changes the distribution: no column tells stage {stage} the distribution that {setting} made, of which "
        "{column} are",
        cure='leave it out, or take a stage of type "teacher" or "reference"',
    ),
    # evaluation
    Rule(
        field="{evaluation}.sampling.temperature",
        when=lambda spec: (
            {"evaluation": field}
            for field, held_out in conditions.held_outs(spec)
            if held_out.sampling is not UNSET and held_out.sampling.temperature == 0.0
        ),
        says="must be above 0: an evaluation decodes greedily anyway",
        cure="set it to 1.0, or leave sampling out",
    ),
    Rule(
        field="{sampling}.max_new_tokens",
        when=conditions.lengths_beyond_training,
        says="is above rollout.sampling.max_new_tokens, which bounds a completion",
        cure="lower it",
    ),
    Rule(
        field="{evaluation}.pass_reward",
        when=lambda spec: (
            {"evaluation": field}
            for field, held_out in conditions.held_outs(spec)
            if held_out.pass_reward is not UNSET and held_out.num_samples == 1
        ),
        says="has no effect with one sample a prompt",
        cure="set group_size to 2 or more",
    ),
    Rule(
        field="evaluation.sets[{place}].num_prompts",
        when=lambda spec: (
            {"place": place} for place, held_out in enumerate(spec.evaluation.sets or ()) if held_out.num_prompts == 0
        ),
        says="must be above 0 in a set",
        cure="raise it, or leave the set out",
    ),
    Rule(
        field="evaluation.sets[{place}].dataset.{key}",
        when=conditions.drawn_sets,
        says="has no effect in a set that isn't trained",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="evaluation.sets[{place}].name",
        when=conditions.unnamed_sets,
        says="`{name}` is the name of another set, or of the held-out prompts of dataset",
        cure="give the set its own name",
    ),
    Rule(
        field="evaluation.sets[{place}].name",
        when=lambda spec: (
            {"place": place, "name": held_out.name}
            for place, held_out in enumerate(spec.evaluation.sets or ())
            if held_out.name in sources_of(spec.dataset)
        ),
        says="`{name}` is the name of a source of dataset, too",
        cure="give the set its own name",
    ),
    Rule(
        field="evaluation.stop_when",
        when=lambda spec: (
            spec.evaluation.stop_when is not UNSET
            and spec.evaluation.stop_when.held_out is UNSET
            and spec.evaluation.stop_when.patience is UNSET
        ),
        says="names nothing by which the job ends",
        cure="set held_out, patience or both, or leave it out",
    ),
    Rule(
        field="evaluation.stop_when",
        when=lambda spec: spec.evaluation.stop_when is not UNSET and not conditions.evaluates_meanwhile(spec),
        says="has no effect: no version between the first and the last is evaluated",
        cure="set evaluation.every_iterations below iterations, with evaluation.num_prompts",
    ),
    Rule(
        field="evaluation.stop_when",
        when=lambda spec: spec.evaluation.stop_when is not UNSET and spec.trainer.external,
        says="has no effect with trainer.external = true: a trainer of your own decides when it ends",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="evaluation.best",
        when=lambda spec: spec.evaluation.best is not UNSET and spec.evaluation.best not in spec.evaluation.tables,
        says="`{spec.evaluation.best}` is not the name of an evaluation set",
        cure="name one of evaluation.sets, or leave best out",
    ),
    Rule(
        field="evaluation.num_prompts",
        when=lambda spec: (
            bool(spec.evaluation.sets) and spec.evaluation.num_prompts == 0 and spec.evaluation.best is UNSET
        ),
        says="0 leaves evaluation.best without a score",
        cure="set evaluation.best to the name of an evaluation set",
    ),
    # algorithm: loss and advantage
    Rule(
        field="algorithm.advantage",
        when=lambda spec: spec.algorithm.learns_given and spec.algorithm.advantage != "none",
        says='has no effect with loss = "sft", which trains on the completions of the data set, whatever their reward',
        cure='set advantage = "none"',
    ),
    Rule(
        field="algorithm.{key}",
        when=conditions.keys_beside_sft,
        says='has no effect with loss = "sft", which trains on the completions of the data set',
        cure=LEAVE_OUT,
    ),
    Rule(
        field="{dataset}.type",
        when=conditions.unlearnable,
        says='"{kind}" gives no completions to learn with algorithm.loss = "sft"',
        cure='take "jsonl" or another that does',
    ),
    Rule(
        field="{environment}",
        when=lambda spec: (
            {"environment": field} for field, source, _ in conditions.environments(spec) if spec.algorithm.learns_given
        ),
        says='has no effect with algorithm.loss = "sft", which trains on the completions of the data set',
        cure=LEAVE_OUT,
    ),
    Rule(
        field="schedule",
        when=lambda spec: spec.algorithm.learns_given and spec.schedule_rule.lags,
        says='"{spec.schedule}" has no effect with algorithm.loss = "sft", which trains on the completions of the '
        "data set: nothing is sampled",
        cure='set schedule = "periodic" and max_policy_lag = 0',
    ),
    Rule(
        field="{pools}",
        when=lambda spec: (
            {"pools": field}
            for field, _ in conditions.pools(spec)
            if spec.algorithm.learns_given and not field.startswith("evaluation")
        ),
        says='has no effect with algorithm.loss = "sft", which trains on the completions of the data set',
        cure=LEAVE_OUT,
    ),
    Rule(
        field="algorithm.advantage",
        when=lambda spec: (
            spec.algorithm.advantage == "none"
            and spec.algorithm.distillation_coefficient == 0.0
            and not spec.algorithm.learns_given
        ),
        says='"none" leaves nothing to learn from',
        cure="set distillation_coefficient above 0",
    ),
    Rule(
        field="algorithm.advantage",
        when=lambda spec: isinstance(spec.algorithm.loss, PluginLoss) and conditions.kind(spec).has_critic,
        says="gives each token its own advantage, but the loss `{spec.algorithm.loss_name}` takes one a response",
        cure="choose a loss of the family, or another advantage",
    ),
    Rule(
        field="algorithm.credit",
        when=lambda spec: isinstance(spec.algorithm.loss, PluginLoss) and spec.algorithm.credits_turns,
        says="gives each token its own advantage, but the loss `{spec.algorithm.loss_name}` takes one a response",
        cure="choose a loss of the family, or leave it out",
    ),
    Rule(
        field="algorithm.advantage",
        when=lambda spec: conditions.kind(spec).has_critic and spec.trainer.lora is not None,
        says='"gae" trains a critic, which is a whole model, and trainer.lora trains none',
        cure="remove trainer.lora, or choose another advantage",
    ),
    Rule(
        field="algorithm.mini_batches",
        when=lambda spec: spec.rollout.batches_per_iteration % spec.algorithm.num_mini_batches != 0,
        says="{spec.algorithm.num_mini_batches} does not divide rollout.batches_per_iteration = "
        "{spec.rollout.batches_per_iteration}",
        cure="choose a divisor of rollout.batches_per_iteration",
    ),
    *_idle_algorithm(
        "advantage_epsilon",
        when=lambda algorithm: not (algorithm.advantage_kind.uses_epsilon or algorithm.whitens_advantages),
        why='with advantage = "{spec.algorithm.advantage}"',
    ),
    *_idle_algorithm(
        "gae_lambda discount value_coefficient value_clip whiten_advantages",
        when=lambda algorithm: not algorithm.advantage_kind.has_critic,
        why='with advantage = "{spec.algorithm.advantage}"',
        cure='set "gae", or leave it out',
    ),
    *_idle_algorithm(
        "value_clip",
        when=lambda algorithm: algorithm.advantage_kind.has_critic and not algorithm.moves_between_steps,
        why="with one step, which moves no value before",
        cure="set updates_per_iteration or mini_batches above 1, or leave it out",
    ),
    *_idle_algorithm(
        "reward_clip",
        when=lambda algorithm: algorithm.advantage == "none" or algorithm.credits_turns,
        why='with advantage = "none", and none on turns',
    ),
    Rule(
        field="algorithm.on_truncated",
        when=lambda spec: (
            spec.algorithm.on_truncated == "penalise"
            and spec.algorithm.advantage == "none"
            and not spec.algorithm.learns_given
        ),
        says='has no effect with advantage = "none", which learns from no reward',
        cure=LEAVE_OUT,
    ),
    *_idle_algorithm(
        "clip_low clip_high clip_max off_policy_mask_threshold shuffle_rewards kl_placement",
        when=lambda algorithm: algorithm.advantage == "none",
        why='with advantage = "none", which learns from no reward',
    ),
    *_idle_algorithm(
        "truncated_reward",
        when=lambda algorithm: algorithm.on_truncated != "penalise",
        why='without on_truncated = "penalise"',
        cure='set on_truncated = "penalise", or leave it out',
    ),
    Rule(
        field="algorithm.on_truncated",
        when=lambda spec: (
            spec.algorithm.on_truncated == "mask"
            and spec.algorithm.kl_coefficient > 0.0
            and spec.algorithm.kl_placement == "reward"
        ),
        says='"mask" leaves kl_placement = "reward" completions without a KL in their reward',
        cure='set kl_placement = "loss"',
    ),
    Rule(
        field="algorithm.on_truncated",
        when=lambda spec: spec.algorithm.on_truncated == "penalise" and conditions.kind(spec).normalises_components,
        says='"penalise" gives a whole reward, advantage = "gdpo" compares components',
        cure='set "mask"',
    ),
    Rule(
        field="algorithm.on_truncated",
        when=lambda spec: conditions.stages_that_reward(
            spec, spec.algorithm.on_truncated == "penalise" and not spec.trainer.external
        ),
        says='"penalise" gives a completion its whole reward, to which a stage would add ({columns})',
        cure='set it to "mask", or the weight of the stage to 0',
    ),
    # algorithm: credit of turns
    Rule(
        field="algorithm.credit",
        when=lambda spec: (
            spec.algorithm.credits_turns
            and all(environment.max_turns == 1 for environment in spec.environments.values())
        ),
        says='"turn" has no effect where a completion is one turn',
        cure='name an environment of several turns, or set credit = "trajectory"',
    ),
    Rule(
        field="algorithm.credit",
        when=lambda spec: (
            spec.algorithm.credits_turns
            and (not conditions.kind(spec).compares_groups or conditions.kind(spec).is_scaled_late)
        ),
        says='"turn" compares the turns of a group, which advantage = "{spec.algorithm.advantage}" does not',
        cure='choose "grpo", "dr_grpo" or "rloo", or credit = "trajectory"',
    ),
    Rule(
        field="algorithm.kl_placement",
        when=lambda spec: (
            spec.algorithm.credits_turns
            and spec.algorithm.kl_coefficient > 0.0
            and spec.algorithm.kl_placement == "reward"
        ),
        says='"reward" takes the KL of a whole response off its reward, which is no turn\'s with credit = "turn"',
        cure='set kl_placement = "loss"',
    ),
    Rule(
        field="algorithm.shuffle_rewards",
        when=lambda spec: spec.algorithm.credits_turns and spec.algorithm.shuffle_rewards,
        says='permutes the rewards of whole completions, with credit = "turn" those of turns would still teach',
        cure='set credit = "trajectory"',
    ),
    Rule(
        field="algorithm.shuffle_rewards",
        when=lambda spec: spec.algorithm.shuffle_rewards and spec.rollout.group_size == 1 and not spec.trainer.external,
        says="has no effect with rollout.group_size = 1",
        cure="sample 2 or more",
    ),
    *_idle(
        "algorithm shuffle_rewards",
        when=lambda spec: spec.algorithm.distillation_coefficient > 0.0 and spec.algorithm.advantage != "none",
        why="with distillation_coefficient: a teacher teaches all the same",
    ),
    # algorithm: clips of the policy ratio
    *_idle_algorithm(
        "clip_max",
        when=lambda algorithm: not algorithm.takes_clip_max,
        why='with loss = "{spec.algorithm.loss_name}", which has bounds of its own',
    ),
    *_idle_algorithm(
        "clip_low clip_high clip_max",
        # Under a lag as well: the old policy is the trainer's then, too. A loss of a package may use them as it likes.
        when=lambda algorithm: (
            not algorithm.moves_between_steps
            and algorithm.old_policy == "trainer"
            and not isinstance(algorithm.loss, PluginLoss)
            and algorithm.advantage != "none"
        ),
        why='in an iteration\'s one step with old_policy = "trainer": the ratio is exactly 1',
        cure='leave it out, or set updates_per_iteration or mini_batches above 1, or old_policy = "generator"',
    ),
    Rule(
        field="algorithm.clip_max",
        when=lambda spec: (
            {"bound": 1.0 + spec.algorithm.clip_range[1]}
            for clip_max in (spec.algorithm.clip_max,)
            if clip_max is not UNSET and clip_max <= 1.0 + spec.algorithm.clip_range[1]
        ),
        says="{spec.algorithm.clip_max:g} is not above 1 + clip_high, which is {bound:g}",
        cure="raise it, or lower clip_high",
    ),
    # algorithm: KL, entropy, distillation
    *_idle_algorithm(
        "kl_estimator kl_placement",
        when=lambda algorithm: algorithm.kl_coefficient == 0.0,
        why="with kl_coefficient = 0",
        cure="set it above 0, or leave it out",
    ),
    *_idle_algorithm(
        "ref_model_sync_iterations",
        when=lambda algorithm: algorithm.kl_coefficient == 0.0,
        why="with kl_coefficient = 0, without a reference",
    ),
    *_idle_algorithm(
        "ref_model_mixup_alpha",
        when=lambda algorithm: algorithm.ref_model_sync_iterations is UNSET,
        why="without ref_model_sync_iterations",
        cure="set ref_model_sync_iterations, or leave it out",
    ),
    Rule(
        field="algorithm.ref_model_sync_iterations",
        when=lambda spec: spec.algorithm.ref_model_sync_iterations is not UNSET and spec.trainer.lora is not None,
        says="is not possible with trainer.lora, whose reference stays",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="algorithm.ref_model_sync_iterations",
        when=lambda spec: spec.algorithm.ref_model_sync_iterations is not UNSET and conditions.makes_reference(spec),
        says='is not possible with a stage of type "reference", whose reference stays',
        cure="leave one of the two out",
    ),
    Rule(
        field="algorithm.ref_model_sync_iterations",
        when=lambda spec: (
            spec.algorithm.ref_model_sync_iterations is not UNSET
            and spec.algorithm.ref_model_sync_iterations >= spec.iterations
        ),
        says="has no effect: the job ends first",
        cure="lower it, or leave it out",
    ),
    Rule(
        field="algorithm.use_bias_correction_kl",
        when=lambda spec: spec.algorithm.use_bias_correction_kl is True and not spec.algorithm.kl_in_loss,
        says="weighs the KL in the loss, of which there is none",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="algorithm.kl_estimator",
        when=lambda spec: (
            spec.algorithm.kl_in_loss and spec.algorithm.kl_estimator == "k1" and not spec.algorithm.weighs_kl
        ),
        says='"k1" in the loss, unweighed, has a gradient of expectation zero',
        cure='leave use_bias_correction_kl out, or set kl_placement = "reward"',
    ),
    Rule(
        field="algorithm.entropy_coefficient",
        when=lambda spec: conditions.kind(spec).is_scaled_late and spec.algorithm.entropy_coefficient > 0.0,
        says='would be divided by the deviation of the advantages under advantage = "{spec.algorithm.advantage}"',
        cure="set it to 0",
    ),
    Rule(
        field="algorithm.kl_placement",
        when=lambda spec: conditions.kind(spec).is_scaled_late and spec.algorithm.kl_in_loss,
        says='"loss" would be divided by the deviation of the advantages under advantage = '
        '"{spec.algorithm.advantage}"',
        cure='set kl_placement = "reward"',
    ),
    Rule(
        field="algorithm.distillation_coefficient",
        when=lambda spec: conditions.kind(spec).is_scaled_late and spec.algorithm.distillation_coefficient > 0.0,
        says='would be divided by the deviation of the advantages under advantage = "{spec.algorithm.advantage}"',
        cure='choose another advantage, or "none"',
    ),
    *_idle_algorithm(
        "distillation_beta",
        when=lambda algorithm: algorithm.distillation_coefficient == 0.0,
        why="with distillation_coefficient = 0",
        cure="set distillation_coefficient above 0, or leave it out",
    ),
    # algorithm: corrections
    Rule(
        field="algorithm.correction",
        when=lambda spec: conditions.unnamed_correction(spec) and spec.algorithm.old_policy == "generator",
        says="must be named with max_policy_lag = {spec.max_policy_lag}",
        cure='set it to "none", since under old_policy = "generator" the ratio is against the policy that sampled '
        "already",
    ),
    Rule(
        field="algorithm.correction",
        when=lambda spec: conditions.unnamed_correction(spec) and spec.algorithm.old_policy != "generator",
        says="must be named with max_policy_lag = {spec.max_policy_lag}: samples of an older policy make the gradient "
        "a biased one",
        cure='choose "tis", "icepop" or "decoupled_ppo", or "none" to train them as they are',
    ),
    Rule(
        field="algorithm.correction",
        when=lambda spec: spec.algorithm.correction == "decoupled_ppo" and spec.max_policy_lag == 0,
        says='"decoupled_ppo" has no effect of its own with max_policy_lag = 0, where its proximal policy is the one '
        "that sampled",
        cure='choose "tis" or "icepop" against the gap between the engines, or schedule = "delayed" or "bounded"',
    ),
    Rule(
        field="algorithm.correction",
        when=lambda spec: spec.algorithm.correction_name != "none" and spec.algorithm.old_policy == "generator",
        says='would count the generator twice with old_policy = "generator"',
        cure="set one of the two",
    ),
    Rule(
        field="algorithm.correction_level",
        when=lambda spec: (
            spec.algorithm.correction_name != "none"
            and spec.algorithm.correction_level == "token"
            and not spec.algorithm.has_token_ratios
        ),
        says='"token" would undo the one ratio of loss = "{spec.algorithm.loss_name}"',
        cure='set correction_level = "sequence"',
    ),
    Rule(
        field="algorithm.correction_level",
        when=lambda spec: (
            spec.algorithm.correction_name not in ("none", "icepop") and spec.algorithm.correction_level == "geometric"
        ),
        says='"geometric" gives no weight, which {spec.algorithm.correction} needs: it only leaves responses out',
        cure='set correction = "icepop", or correction_level = "sequence"',
    ),
    Rule(
        field="algorithm.correction_high",
        when=lambda spec: (
            spec.algorithm.correction == "icepop"
            and spec.algorithm.correction_level == "geometric"
            and spec.algorithm.correction_high in (None, 1.0)
        ),
        says='has to be set above 1 with correction_level = "geometric": a response\'s mean hardly leaves 1',
        cure="set it near 1, as to 1.001",
    ),
    *_idle_algorithm(
        "correction_level correction_low correction_high",
        when=lambda algorithm: algorithm.correction_name == "none",
        why="without a correction",
        cure="choose one, or leave it out",
    ),
    *_idle_algorithm(
        "correction_low",
        when=lambda algorithm: algorithm.correction_name not in ("none", "icepop"),
        why='with correction = "{spec.algorithm.correction}", which has no lower bound',
    ),
    Rule(
        field="algorithm.correction_low",
        when=lambda spec: (
            spec.algorithm.correction == "icepop"
            and spec.algorithm.correction_low is not None
            and spec.algorithm.correction_range[0] == spec.algorithm.correction_range[1]
        ),
        says="and correction_high leave no room",
        cure="lower correction_low or raise correction_high",
    ),
    *_idle(
        "algorithm correction old_policy",
        when=lambda spec: spec.trainer.packing == "as_sampled" and not spec.schedule_rule.lags,
        why='without a lag: packing = "as_sampled" gives the trainer the generator\'s log-probs',
    ),
    *_idle_algorithm(
        "correction old_policy",
        when=lambda algorithm: (
            algorithm.advantage == "none" and algorithm.distillation_beta is not UNSET and not algorithm.weighs_kl
        ),
        why='with advantage = "none" and distillation_beta: it weighs no sampled token',
    ),
    *_idle(
        "algorithm off_policy_mask_threshold",
        when=lambda spec: (
            spec.trainer.packing == "as_sampled"
            and not spec.schedule_rule.lags
            and not spec.algorithm.moves_between_steps
        ),
        why='without a lag: packing = "as_sampled" gives the trainer the generator\'s log-probs',
    ),
    Rule(
        field="algorithm.off_policy_mask_threshold",
        when=lambda spec: bool(spec.algorithm.off_policy_mask_threshold) and conditions.kind(spec).has_critic,
        says="masks a response by the sign of its advantage, which is each token's own with advantage = "
        '"{spec.algorithm.advantage}"',
        cure=LEAVE_OUT,
    ),
    *(
        Rule(
            field="algorithm.routing_replay",
            when=lambda spec, has=has: spec.algorithm.replays_routes and not has(spec),
            says=f"needs {need}",
            cure="leave it out, or change that",
        )
        for need, has in (
            ("completions that are sampled", lambda spec: not spec.algorithm.learns_given),
            ("no environment: each turn fills the model's memory anew", lambda spec: not spec.environments),
            ("trainer.external = false: the trainer's own model replays", lambda spec: not spec.trainer.external),
            (
                'trainer.packing other than "as_sampled", which leaves no difference to replay',
                lambda spec: spec.trainer.packing != "as_sampled",
            ),
        )
    ),
    # optimizer
    Rule(
        field="optimizer.groups[{place}]",
        when=lambda spec: (
            {"place": place}
            for place, group in enumerate(spec.optimizer.groups or ())
            if group.learning_rate_factor == 1.0 and group.weight_decay is UNSET
        ),
        says="changes nothing",
        cure="set learning_rate_factor or weight_decay in it",
    ),
    Rule(
        field="optimizer.groups[{place}].weight_decay",
        when=lambda spec: (
            {"place": place}
            for place, group in enumerate(spec.optimizer.groups or ())
            if group.learning_rate_factor == 0.0 and group.weight_decay is not UNSET
        ),
        says="has no effect: it is multiplied by the learning rate, which is 0 here",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="optimizer.decay_iterations",
        when=lambda spec: spec.optimizer.schedule == "wsd" and spec.optimizer.decay_iterations is UNSET,
        says='is needed with schedule = "wsd"',
        cure="set it",
    ),
    Rule(
        field="optimizer.decay_iterations",
        when=lambda spec: spec.optimizer.schedule != "wsd" and spec.optimizer.decay_iterations is not UNSET,
        says='has no effect with schedule = "{spec.optimizer.schedule}": "wsd" alone takes it',
        cure='leave it out, or set schedule = "wsd"',
    ),
    Rule(
        field="optimizer.min_learning_rate",
        when=lambda spec: spec.optimizer.min_learning_rate is not UNSET and spec.optimizer.schedule == "constant",
        says='has no effect with schedule = "constant"',
        cure=LEAVE_OUT,
    ),
    Rule(
        field="optimizer.min_learning_rate",
        when=lambda spec: (
            spec.optimizer.min_learning_rate is not UNSET
            and spec.optimizer.schedule != "constant"
            and spec.optimizer.min_learning_rate >= spec.optimizer.learning_rate
        ),
        says="is not below learning_rate, from which it decays",
        cure="lower it",
    ),
    *_idle(
        "optimizer critic_learning_rate_factor",
        when=lambda spec: not conditions.kind(spec).has_critic,
        why='with algorithm.advantage = "{spec.algorithm.advantage}", which trains no critic',
        cure='leave it out, or set algorithm.advantage = "gae"',
    ),
    Rule(
        field="optimizer.type",
        when=lambda spec: spec.optimizer.type == "muon" and spec.trainer.lora is not None,
        says='"muon" trains whole matrices, and trainer.lora trains none',
        cure='set "adamw", or leave trainer.lora out',
    ),
    Rule(
        field="optimizer.offload",
        when=lambda spec: spec.optimizer.offload is not UNSET and spec.optimizer.type == "adamw_8bit",
        says='needs another optimizer.type than "adamw_8bit", whose library keeps its moments on the device',
        cure='leave it out, or set type = "adamw"',
    ),
    # trainer
    Rule(
        field="trainer.offload_activations",
        when=lambda spec: spec.trainer.offloads_activations and spec.trainer.sharding == "fsdp",
        says='needs trainer.sharding = "none": gathered weights would go to the host with the activations',
        cure='set trainer.sharding = "none", or gradient_checkpointing = true in its place',
    ),
    Rule(
        field="trainer.sharding",
        when=lambda spec: (
            spec.trainer.sharding == "fsdp" and spec.trainer.world_size == 1 and conditions.hosts(spec) is None
        ),
        says='"fsdp" needs trainer.world_size above 1, or trainer.hosts',
        cure='set one of them, or sharding = "none"',
    ),
    Rule(
        field="trainer.sharding",
        when=lambda spec: spec.trainer.sharding == "fsdp" and spec.trainer.accumulation != "exact",
        says='"fsdp" needs trainer.accumulation = "exact"',
        cure='set trainer.accumulation = "exact", or sharding = "none"',
    ),
    Rule(
        field="optimizer.type",
        when=lambda spec: (
            spec.trainer.sharding == "fsdp" and spec.optimizer.type == "adamw_8bit" and spec.trainer.lora is None
        ),
        says='"adamw_8bit" needs trainer.sharding = "none": its blocks would depend on the ranks',
        cure='set trainer.sharding = "none", or type = "adamw"',
    ),
    Rule(
        field="optimizer.type",
        when=lambda spec: (
            spec.trainer.sharding == "fsdp" and spec.optimizer.type == "muon" and spec.trainer.lora is None
        ),
        says='"muon" needs trainer.sharding = "none": it steps whole matrices',
        cure='set trainer.sharding = "none", or type = "adamw"',
    ),
    Rule(
        field="algorithm.advantage",
        when=lambda spec: spec.trainer.sharding == "fsdp" and conditions.kind(spec).has_critic,
        says='"{spec.algorithm.advantage}" needs trainer.sharding = "none"',
        cure='set trainer.sharding = "none", or choose another advantage',
    ),
    *(
        Rule(
            field="trainer.packing",
            when=lambda spec, has=has: spec.trainer.packing == "as_sampled" and not has(spec),
            says=f'"as_sampled" needs {need}',
            cure='set packing = "shared_prompt", or change that',
        )
        for need, has in (
            ('model.dtype = "float32"', lambda spec: spec.model.dtype == "float32"),
            ("deterministic = true", lambda spec: spec.deterministic),
            ("no trainer.lora", lambda spec: spec.trainer.lora is None),
            ('trainer.sharding = "none"', lambda spec: spec.trainer.sharding == "none"),
            ("no environment", lambda spec: not spec.environments),
            ("completions that are sampled", lambda spec: not spec.algorithm.learns_given),
        )
    ),
    Rule(
        field="trainer.lora.target_modules",
        when=lambda spec: (
            spec.trainer.lora is not None
            and ALL_LINEAR in spec.trainer.lora.target_modules
            and len(spec.trainer.lora.target_modules) > 1
        ),
        says='names "all-linear" together with other layers',
        cure='name either "all-linear" or the other layers',
    ),
    Rule(
        field="trainer.lora.publish",
        when=lambda spec: (
            spec.trainer.lora is not None and spec.trainer.lora.publish == "adapter" and has_deltas(spec.weights)
        ),
        says='"adapter" leaves deltas nothing to save, since every element of an adapter changes in a step',
        cure='set weights.transport = "file" or "redis", or weights.snapshot_every_versions = 1',
    ),
    Rule(
        field="trainer.wider_sums",
        when=lambda spec: spec.trainer.wider_sums is not UNSET and spec.trainer.accumulation != "exact",
        says='has no effect with accumulation = "float", which has no such range',
        cure=LEAVE_OUT,
    ),
    Rule(
        field="trainer.wider_sums",
        when=conditions.unordered_sums,
        says="must be in ascending order of first_iteration, each of them once",
        cure="sort it",
    ),
    *_idle(
        "trainer mismatch_alarm",
        when=lambda spec: spec.trainer.packing == "as_sampled" and not spec.algorithm.learns_given,
        why='with packing = "as_sampled", which gives the trainer the generator\'s log-probs: any difference is an '
        "alarm",
    ),
    *_idle(
        "trainer mismatch_alarm on_mismatch entropy_alarm",
        when=lambda spec: spec.algorithm.learns_given,
        why=f"with algorithm.{SAMPLES_NOTHING}",
    ),
    *_idle(
        "trainer measure_entropy",
        when=lambda spec: spec.algorithm.entropy_coefficient > 0.0,
        why="with algorithm.entropy_coefficient, which measures it, too",
    ),
    Rule(
        field="trainer.kl_alarm",
        when=lambda spec: spec.trainer.kl_alarm is not UNSET and spec.algorithm.kl_coefficient == 0.0,
        says="has no effect with algorithm.kl_coefficient = 0",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="trainer.stop_on",
        when=conditions.unbreakable,
        says='names "{name}", a warning that this job never gives: {reason}',
        cure="{cure}",
    ),
    Rule(
        field="trainer.hosts.least",
        when=lambda spec: (
            {"hosts": hosts} for hosts in (conditions.hosts(spec),) if hosts and hosts.least > hosts.most
        ),
        says="{hosts.least} is more than most = {hosts.most}",
        cure="swap the two",
    ),
    Rule(
        field="trainer.hosts.regroup_s",
        when=conditions.idle_regroups,
        says="has no effect when least and most are equal",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="trainer.world_size",
        when=lambda spec: conditions.hosts(spec) is not None and spec.trainer.world_size != 1,
        says="has no effect with trainer.hosts",
        cure="set trainer.hosts.ranks, of each host, instead",
    ),
    Rule(
        field="trainer.hosts",
        when=lambda spec: conditions.hosts(spec) is not None and spec.trainer.accumulation != "exact",
        says='needs trainer.accumulation = "exact": else the weights depend on which hosts have come',
        cure='set trainer.accumulation = "exact", or leave hosts out',
    ),
    Rule(
        field="weights.transport",
        when=lambda spec: conditions.hosts(spec) is not None and not spec.weights.elsewhere,
        says='"{spec.weights.name}" is not possible with trainer.hosts: the trainer moves from host to host, and its '
        "folder does not",
        cure='set "redis" or "object"',
    ),
    Rule(
        field="schedule",
        when=lambda spec: conditions.hosts(spec) is not None and spec.schedule == "colocated",
        says='"colocated" is not possible with trainer.hosts: hosts take no turns',
        cure='set "synchronous"',
    ),
    Rule(
        field="{key}",
        when=conditions.keys_beside_external,
        says="has no effect with trainer.external = true, where a process of your own decides it",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="trackers",
        when=lambda spec: spec.trainer.external and bool(spec.trackers),
        says="has no effect with trainer.external = true: your own training process reports its metrics",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="schedule",
        when=lambda spec: spec.trainer.external and spec.schedule != "periodic",
        says='"{spec.schedule}" is not possible with trainer.external = true, which trains the batches of its own '
        "version as they come",
        cure='set schedule = "periodic"',
    ),
    # stages
    Rule(
        field="stages[{place}].name",
        when=lambda spec: (
            {"place": place, "name": name}
            for place, name in conditions.places_of_repeats(stage.name for stage in spec.stages)
        ),
        says='"{name}" is the name of another stage, too',
        cure="name each once",
    ),
    Rule(
        field="stages[{place}]",
        when=conditions.repeated_outputs,
        says='makes a column "{column}", as an earlier output does',
        cure="name each column once",
    ),
    Rule(
        field="stages[{place}].outputs",
        when=conditions.outputs_of_every_rollout,
        says='names "{column}", a column of every rollout',
        cure="rename it",
    ),
    Rule(
        field="stages[{place}].outputs[{number}].width",
        when=conditions.wrong_widths,
        says="counts the numbers of a sampled token",
        cure='set per = "token", with a type of numbers',
    ),
    Rule(
        field="stages[{place}].inputs",
        when=conditions.unknown_inputs,
        says='names "{column}", which is no column',
        cure="the columns are {known}",
    ),
    Rule(
        field="stages",
        when=conditions.circles,
        says="wait for each other's columns in a circle, {way}, so that none can start",
        cure="remove one of these inputs",
    ),
    Rule(
        field="stages[{place}].model",
        when=lambda spec: (
            {"place": place}
            for place, stage in conditions.teachers(spec)
            if (stage.model is UNSET) == (stage.models is UNSET)
        ),
        says="or models has to name the teacher, and not both",
        cure="set one of the two",
    ),
    Rule(
        field="stages[{place}].top_k",
        when=lambda spec: (
            {"place": place} for place, stage in conditions.teachers(spec) if stage.top_k and stage.hidden_size
        ),
        says="has no effect with hidden_size, which has the whole vocabulary",
        cure="leave top_k out",
    ),
    Rule(
        field="stages[{place}].models",
        when=lambda spec: conditions.taught_sources(spec, unknown=False),
        says="has no model for the source `{name}` of dataset.sources",
        cure="name each source once",
    ),
    Rule(
        field="stages[{place}].models",
        when=lambda spec: conditions.taught_sources(spec, unknown=True),
        says="names `{name}`, which is not a source of dataset.sources",
        cure="name each source once",
    ),
    Rule(
        field="stages[{place}].on_failure",
        when=conditions.long_failure_names,
        says="makes a column of its own, which needs a name of the stage of {most} characters at most",
        cure="shorten the name",
    ),
    Rule(
        field="stages[{place}].lowest",
        when=lambda spec: (
            {"place": place} for place, stage in conditions.judges(spec) if stage.lowest >= stage.highest
        ),
        says="is not below highest",
        cure="lower it",
    ),
    Rule(
        field="stages[{place}].prompt",
        when=lambda spec: (
            {"place": place} for place, stage in conditions.judges(spec) if "{completion}" not in stage.prompt
        ),
        says="never shows the completion",
        cure="write {{completion}} in it",
    ),
    Rule(
        field="stages[{place}].answer",
        when=conditions.unreadable_answers,
        says='is neither "number" nor "json", nor a text with one {{number}} in it',
        cure='write {{number}} once, as in "{{number}}/10"',
    ),
    Rule(
        field="stages[{place}].criteria",
        when=lambda spec: (
            {"place": place}
            for place, stage in conditions.judges(spec)
            if stage.criteria is not UNSET and stage.answer != "json"
        ),
        says="are keys of a JSON object",
        cure='set answer = "json"',
    ),
    Rule(
        field="stages[{place}].criteria",
        when=conditions.long_criteria,
        says="make a column {column}",
        cure=f"shorten it to {MAX_COLUMN_NAME} characters",
    ),
    Rule(
        field="stages[{place}].reward_column",
        when=conditions.wrong_reward_columns,
        says='"{column}" is no float32 per rollout among the outputs',
        cure="name one, or leave it out",
    ),
    Rule(
        field="stages[{place}].weight",
        when=conditions.idle_stage_weights,
        says="has no effect without reward_column",
        cure=LEAVE_OUT,
    ),
    Rule(
        field="algorithm.{key}",
        when=conditions.missing_columns,
        says="needs a stage that makes {column}",
        cure="add [[stages]] of type {kind}, or leave it out",
    ),
    Rule(
        field="stages[{place}]",
        when=conditions.malformed_columns,
        says='makes "{column}", which is read by the loss, in another form',
        cure="make it a float32 {form}",
    ),
    Rule(
        field="stages[{place}]",
        when=conditions.unread_columns,
        says="makes {column}, which nothing reads without algorithm.{key}",
        cure="set algorithm.{key}, or remove the stage",
    ),
    Rule(
        field="stages[{place}]",
        when=conditions.wide_batches,
        says="makes {bytes:,} bytes for the {tokens:,} tokens of a batch, more than limits.max_batch_bytes = "
        "{spec.limits.max_batch_bytes:,}",
        cure="{cure}, use smaller batches, or raise limits.max_batch_bytes",
    ),
    Rule(
        field="stages",
        when=lambda spec: conditions.stages_that_reward(spec, spec.algorithm.learns_given),
        says=f"give scores ({{columns}}) that have no effect: {SAMPLES_NOTHING}",
        cure="leave the stage out",
    ),
    Rule(
        field="stages[{place}].name",
        when=conditions.columns_like_components,
        says='makes a column "{column}", which joins the reward by the name of a reward component',
        cure="rename it",
    ),
    Rule(
        field="stages[{place}].on_failure",
        when=conditions.failures_like_others,
        says="needs a name of the stage that neither a reward component nor the environment has",
        cure="give the stage another name",
    ),
    # Products of a spec's numbers.
    Rule(
        field="{key}",
        when=conditions.beyond_products,
        says="{product.factors} make {product.value:,} {product.what}; the limit is {product.limit:,}",
        cure="{product.cure}",
    ),
)
"""Every rule that a spec is judged by."""
