"""A spec that breaks each rule, and what the rule's cure makes of it: the one builder of specs for rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.trajectories import ENVIRONMENT

OUT = object()
"""In place of a value: the key is left out."""
Fields = dict[str, Any]
"""As `job_spec` of tests/builders.py takes them."""

ROWS: Fields = {"type": "jsonl", "train_path": "rows.jsonl"}
SAVED: Fields = {"type": "huggingface", "train_path": "rows"}
OF_HUB: Fields = {"type": "huggingface", "path": "hub:openai/gsm8k", "config": "main"}
GYM: Fields = {"type": "reasoning_gym", "task": "chain_sum"}
CODEIO: Fields = GYM | {"task": "codeio"}
LAG: Fields = {"schedule": "delayed", "max_policy_lag": 1}
KL: Fields = {"algorithm__kl_coefficient": 0.1}
KL_IN_REWARD: Fields = KL | {"algorithm__kl_placement": "reward"}
FLOAT: Fields = {"deterministic": False, "trainer__accumulation": "float"}
CRITIC: Fields = {"algorithm__advantage": "gae"}
FSDP: Fields = {"trainer__sharding": "fsdp", "trainer__world_size": 2}
SFT: Fields = {
    "algorithm__loss": "sft",
    "algorithm__advantage": "none",
    "rollout__group_size": 1,
}
TEACHER: Fields = {"type": "teacher", "model": "teacher"}
TAUGHT: Fields = {"algorithm__distillation_coefficient": 0.5, "stages": [TEACHER]}
ONLY_TAUGHT: Fields = TAUGHT | {"algorithm__advantage": "none"}
WIDELY_TAUGHT: Fields = ONLY_TAUGHT | {"algorithm__distillation_beta": 0.5, "stages": [TEACHER | {"top_k": 2}]}
PLAYED: Fields = {"environment": ENVIRONMENT}
BY_TURN: Fields = PLAYED | {"algorithm__credit": "turn"}
HOSTS: Fields = {"trainer__hosts": {"least": 1, "most": 2}, "weights": {"transport": "redis"}}
AS_SAMPLED: Fields = {"trainer__packing": "as_sampled"}
LORA: Fields = {"trainer__lora": {"rank": 2}}
TWO_STEPS: Fields = {"algorithm__updates_per_iteration": 2}
MINE: Fields = {"algorithm__loss": {"type": "plugin", "entry_point": "mine"}}
RESAMPLES: Fields = {"rollout__max_resamples": 1}
EXTERNAL: Fields = {"trainer__external": True}
STOPS: Fields = {"evaluation__every_iterations": 1, "evaluation__stop_when": {"held_out": 0.5}}
JUDGE: Fields = {"type": "llm_judge", "model": "judge", "prompt": "{completion}"}
SCORER: Fields = {"type": "reward_model", "model": "scorer"}
MIXTURE: Fields = {
    "type": "mixture",
    "sources": [{"name": "sums", "dataset": {"type": "addition"}}, {"name": "rows", "dataset": ROWS}],
}
POOLS: Fields = {"dataset": {"type": "addition", "difficulty_pools": {}}}
HELD: Fields = {"name": "more", "dataset": ROWS, "num_prompts": 4}


def own(**changes: Any) -> Fields:
    """A stage of one's own."""
    score = {"name": "score", "type": "float32"}
    return {"type": "external", "name": "own", "inputs": ["text"], "outputs": [score]} | changes


def per_token(name: str, **changes: Any) -> Fields:
    """An output that the loss can read."""
    return {"name": name, "type": "float32", "per": "token"} | changes


def rewarded(**component: Any) -> Fields:
    return {"reward__components": [component]}


def sampled(**sampling: Any) -> Fields:
    return {"rollout__sampling": {"max_new_tokens": 5} | sampling}


def judged(**changes: Any) -> Fields:
    """A stage that asks a model."""
    return {"deterministic": False, "stages": [JUDGE | changes]}


def pooled(**pools: Any) -> Fields:
    return {"dataset": {"type": "addition", "difficulty_pools": pools}}


def sets(*tables: Fields, **evaluation: Any) -> Fields:
    return {"evaluation": {"num_prompts": 8, "prompts_per_batch": 4, "sets": list(tables)} | evaluation}


@dataclass(frozen=True)
class Example:
    """A spec that a rule refuses, and one that it doesn't."""

    field: str
    """Key that the refusal names."""
    says: str
    """A part of its words."""
    broken: Fields
    cured: Fields
    """What the cure changes in it; a spec without these fields is refused no more."""

    @property
    def cure(self) -> Fields:
        """The fields of the spec once the cure is taken."""
        return {key: value for key, value in (self.broken | self.cured).items() if value is not OUT}


def without(field_: str, says: str, broken: Fields) -> Example:
    """An example whose cure is to leave the key out."""
    return Example(field_, says, broken, {field_.replace(".", "__"): OUT})


def each(table: str, values: Fields, says: str, beside: Fields, **cured: Any) -> tuple[Example, ...]:
    """An example for each key of a table that has no effect with some other fields."""
    return tuple(
        Example(f"{table}.{key}", says, beside | {f"{table}__{key}": value}, cured or {f"{table}__{key}": OUT})
        for key, value in values.items()
    )


EXAMPLES: tuple[Example, ...] = (
    # Top level.
    Example("trackers", "has the same name twice", {"trackers": ["wandb", "wandb"]}, {"trackers": ["wandb"]}),
    Example("tags", "has the same name twice", {"tags": ["seeds", "seeds"]}, {"tags": ["seeds"]}),
    Example("deterministic", 'needs trainer.accumulation = "exact"', {"trainer__accumulation": "float"}, FLOAT),
    Example(
        "deterministic",
        'is not possible with schedule = "bounded"',
        {"schedule": "bounded", "max_policy_lag": 1, "algorithm__correction": "tis"},
        {"deterministic": False},
    ),
    Example(
        "deterministic",
        'is not possible with stage "llm_judge"',
        {"stages": [JUDGE]},
        {"deterministic": False},
    ),
    Example(
        "iterations",
        "0 trains nothing, and evaluation.num_prompts = 0 evaluates nothing",
        {"iterations": 0, "evaluation__num_prompts": 0},
        {"evaluation__num_prompts": 4},
    ),
    Example(
        "iterations",
        "0 leaves nothing to do for a trainer of your own",
        EXTERNAL | {"iterations": 0},
        {"iterations": 1},
    ),
    Example(
        "max_policy_lag",
        '2 has no effect with schedule = "periodic"',
        {"max_policy_lag": 2, "algorithm__correction": "tis"},
        {"schedule": "delayed"},
    ),
    Example(
        "schedule",
        '"delayed" with max_policy_lag = 0 is the same as schedule = "periodic"',
        {"schedule": "delayed", "algorithm__correction": "tis"},
        {"max_policy_lag": 1},
    ),
    Example(
        "max_policy_lag",
        "4 is too large: it must be below iterations = 4",
        LAG | {"max_policy_lag": 4, "algorithm__correction": "tis"},
        {"iterations": 5},
    ),
    Example(
        "fork",
        "is not possible with trainer.external",
        EXTERNAL | {"fork": {"job": "another", "version": 3}},
        {"fork": OUT},
    ),
    Example(
        "fork",
        'is not possible with a stage of type "reference"',
        KL | {"fork": {"job": "another", "version": 3}, "stages": [{"type": "reference"}]},
        {"stages": []},
    ),
    # model
    without(
        "model.matmul", 'has no effect with dtype = "bfloat16"', {"model__matmul": "onednn", "model__dtype": "bfloat16"}
    ),
    without("model.cast_lm_head_to_fp32", 'with dtype = "float32"', {"model__cast_lm_head_to_fp32": True}),
    # dataset
    Example(
        "dataset.task",
        "`chain_summ` is no task of reasoning-gym",
        {"dataset": GYM | {"task": "chain_summ"}},
        {"dataset": GYM},
    ),
    Example(
        "dataset.sources[1].dataset.task",
        "`codeio` makes no prompts here: it executes the programs of its data file",
        {"dataset": MIXTURE | {"sources": [MIXTURE["sources"][0], {"name": "gym", "dataset": CODEIO}]}},
        {"dataset": MIXTURE},
    ),
    Example(
        "dataset.task",
        "`n_queens` is not scored: its scorer evaluates what the model wrote",
        {"dataset": GYM | {"task": "n_queens"}} | rewarded(type="reasoning_gym"),
        rewarded(type="exact"),
    ),
    Example(
        "evaluation.sets[0].dataset.task",
        "`n_queens` is not scored",
        {"evaluation__sets": [HELD | {"dataset": GYM | {"task": "n_queens"}}], "evaluation__num_prompts": 4}
        | {"reward__components": [{"type": "exact"}, {"type": "reasoning_gym", "sources": ["more"]}]},
        {"reward__components": [{"type": "exact"}]},
    ),
    Example(
        "dataset.params.data_file",
        "names one of the package's own files, never a path",
        {"dataset": GYM | {"task": "spell_backward", "params": {"data_file": "../../x"}}},
        {"dataset": GYM | {"task": "spell_backward", "params": {"data_file": "words.txt"}}},
    ),
    Example(
        "reward.components[1].type",
        '"reasoning_gym" needs task entries, and the data set of type "addition" has none',
        {"reward__components": [{"type": "exact"}, {"type": "reasoning_gym"}]},
        {"reward__components": [{"type": "exact"}]},
    ),
    Example(
        "dataset.sources[1].name",
        "`sums` is the name of another source",
        {"dataset": MIXTURE | {"sources": [MIXTURE["sources"][0]] * 2}},
        {"dataset": MIXTURE},
    ),
    Example(
        "model.path", "`hub:gpt2` is no name of the hub", {"model__path": "hub:gpt2"}, {"model__path": "hub:a/gpt2@v1"}
    ),
    Example(
        "stages.teacher.model",
        "`hub:datasets/a/b` is no name of the hub",
        TAUGHT | {"stages": [TEACHER | {"model": "hub:datasets/a/b"}]},
        {"stages": [TEACHER | {"model": "hub:a/b"}]},
    ),
    Example(
        "dataset.path",
        "`openai/gsm8k` is no name of the hub",
        {"dataset": OF_HUB | {"path": "openai/gsm8k"}},
        {"dataset": OF_HUB},
    ),
    Example("dataset.train_path", "is required", {"dataset": {"type": "huggingface"}}, {"dataset": SAVED}),
    Example(
        "dataset.train_path",
        "and path both name rows",
        {"dataset": OF_HUB | {"train_path": "rows"}},
        {"dataset": OF_HUB},
    ),
    Example(
        "dataset.split",
        "has no effect without path",
        {"dataset": SAVED | {"split": "train"}},
        {"dataset": OF_HUB | {"split": "train"}},
    ),
    Example(
        "dataset.evaluation_split",
        "is the split that is trained, too",
        {"dataset": OF_HUB | {"evaluation_split": "train"}},
        {"dataset": OF_HUB | {"evaluation_split": "test"}},
    ),
    Example(
        "dataset.train_path",
        "is a name of the hub, and a file or folder is named here",
        {"dataset": ROWS | {"train_path": "hub:openai/gsm8k"}},
        {"dataset": OF_HUB},
    ),
    Example(
        "dataset.prompt_template",
        "and columns.prompt both say what the prompt is",
        {"dataset": ROWS | {"prompt_template": "{q}", "columns": {"prompt": "question"}}},
        {"dataset": ROWS | {"prompt_template": "{q}", "columns": {"reference": "answer"}}},
    ),
    Example(
        "dataset.prompt_template",
        "names no column, or has a brace that is open",
        {"dataset": ROWS | {"prompt_template": "{question"}},
        {"dataset": ROWS | {"prompt_template": "{{{question}}}"}},
    ),
    Example(
        "dataset.curriculum",
        "both choose which prompts are drawn",
        {"dataset": ROWS | {"difficulty_pools": {}, "curriculum": {"column": "level", "iterations": 2}}},
        {"dataset": ROWS | {"difficulty_pools": {}}},
    ),
    Example(
        "dataset.difficulty_pools.hard_threshold",
        "must be below easy_threshold",
        pooled(hard_threshold=0.5, easy_threshold=0.5),
        pooled(hard_threshold=0.4, easy_threshold=0.5),
    ),
    Example(
        "dataset.difficulty_pools.easy_fraction",
        "add up to more than 1",
        pooled(easy_fraction=0.6, hard_fraction=0.5),
        pooled(easy_fraction=0.5, hard_fraction=0.5),
    ),
    Example(
        "dataset.difficulty_pools",
        "all 1 iterations are opened before the first one is measured",
        POOLS | {"iterations": 1},
        {"iterations": 2},
    ),
    Example(
        "dataset.metadata_columns",
        "no reward of type plugin reads it",
        {"dataset": ROWS | {"metadata_columns": ["tests"]}},
        rewarded(type="plugin", entry_point="own"),
    ),
    Example(
        "dataset.sources[1].dataset.metadata_columns",
        "no reward of type plugin reads it",
        {
            "dataset": MIXTURE
            | {"sources": [MIXTURE["sources"][0], {"name": "b", "dataset": ROWS | {"metadata_columns": ["tests"]}}]}
        },
        {"dataset": MIXTURE},
    ),
    Example(
        "dataset.type",
        "takes its tasks from an environment",
        {"dataset": {"type": "environment"}},
        PLAYED,
    ),
    # environment
    Example(
        "dataset.sources[0].environment",
        "has no effect: the table environment plays all sources",
        PLAYED
        | {
            "dataset": MIXTURE
            | {"sources": [MIXTURE["sources"][0] | {"environment": ENVIRONMENT}, MIXTURE["sources"][1]]}
        },
        {"environment": OUT},
    ),
    Example(
        "environment.chat_format",
        'has no effect with environment.renderer = "text"',
        {"environment": ENVIRONMENT | {"renderer": "text", "chat_format": "qwen3"}},
        {"environment": ENVIRONMENT | {"renderer": "chat", "chat_format": "qwen3"}},
    ),
    Example(
        "dataset.chat",
        "environment.renderer formats its messages",
        PLAYED | {"dataset": ROWS | {"chat": {}}},
        {"dataset": ROWS},
    ),
    Example(
        "rollout.sampling.stop",
        "would end turns that environment.renderer can't read",
        PLAYED | sampled(stop=["x"]),
        sampled(),
    ),
    Example(
        "environment.max_context_tokens",
        "above max_tokens",
        {"environment": ENVIRONMENT | {"max_tokens": 64, "max_context_tokens": 65}},
        {"environment": ENVIRONMENT | {"max_tokens": 64, "max_context_tokens": 64}},
    ),
    Example(
        "environment.max_tokens",
        "4 is too small for one turn",
        {"environment": ENVIRONMENT | {"max_tokens": 4}},
        {"environment": ENVIRONMENT | {"max_tokens": 5}},
    ),
    Example(
        "environment.max_context_tokens",
        "a padded pass has all parts of a trajectory",
        {"environment": ENVIRONMENT | {"max_tokens": 64, "max_context_tokens": 32}, "trainer__packing": "padded"},
        {"trainer__packing": "shared_prompt"},
    ),
    # reward
    Example("reward.components", "is empty, so nothing scores the job", {"reward": {}}, PLAYED),
    Example(
        "evaluation.num_prompts",
        "held-out rewards would all be 0",
        {"reward": {}, "stages": [SCORER], "evaluation": {"num_prompts": 4}},
        {"evaluation": {"num_prompts": 0}},
    ),
    Example(
        "reward.components",
        "has no reward that scores `rows`",
        {"dataset": MIXTURE} | rewarded(type="exact", sources=["sums"]),
        rewarded(type="exact", sources=["sums", "rows"]),
    ),
    Example(
        "reward.components[0].sources",
        "names `others`, which is n",
        {"dataset": MIXTURE} | rewarded(type="exact", sources=["sums", "rows", "others"]),
        rewarded(type="exact"),
    ),
    Example(
        "reward.components[0].compare",
        "without a group `answer`",
        rewarded(type="regex", pattern="x", compare="number"),
        rewarded(type="regex", pattern="(?P<answer>x)", compare="number"),
    ),
    Example(
        "reward.components[0].max_chars",
        "must be above target_chars",
        rewarded(type="length", target_chars=5, max_chars=5),
        rewarded(type="length", target_chars=5, max_chars=6),
    ),
    Example(
        "reward.components[0].buffer_tokens",
        "must be max_tokens or less",
        rewarded(type="overlong", max_tokens=4, buffer_tokens=5),
        rewarded(type="overlong", max_tokens=5, buffer_tokens=5),
    ),
    Example(
        "reward.components[0].max_tokens",
        "begins above 5 tokens, a completion has at most 5",
        rewarded(type="overlong", max_tokens=9, buffer_tokens=4),
        rewarded(type="overlong", max_tokens=8, buffer_tokens=4),
    ),
    # rollout
    Example(
        "rollout.group_size",
        'must be 2 or more with algorithm.advantage = "grpo"',
        {"rollout__group_size": 1},
        CRITIC,
    ),
    Example("rollout.group_size", "2 has no effect", SFT | {"rollout__group_size": 2}, {"rollout__group_size": 1}),
    Example(
        "rollout.prompts_per_batch",
        "their tokens are whitened only by each other",
        CRITIC | {"rollout__group_size": 1, "rollout__prompts_per_batch": 1},
        {"algorithm__whiten_advantages": False},
    ),
    Example(
        "rollout.max_resamples",
        "trajectories of equal rewards may have unequal turns",
        BY_TURN | RESAMPLES,
        {"algorithm__credit": "trajectory"},
    ),
    Example(
        "rollout.max_resamples",
        'under algorithm.advantage = "gae" equal rewards have an advantage',
        RESAMPLES | CRITIC,
        {"algorithm__advantage": "rloo"},
    ),
    Example(
        "rollout.max_resamples",
        "the KL makes their rewards differ",
        RESAMPLES | KL_IN_REWARD,
        {"algorithm__kl_placement": "loss"},
    ),
    Example(
        "rollout.max_resamples",
        "the teacher judges every completion",
        RESAMPLES | TAUGHT,
        {"rollout__max_resamples": 0},
    ),
    Example(
        "rollout.max_resamples",
        "drops groups of equal reward before stages add to it (reward_model)",
        RESAMPLES | {"stages": [SCORER]},
        {"rollout__max_resamples": 0},
    ),
    Example("rollout.max_resamples", "difficulty_pools needs", RESAMPLES | POOLS, {"rollout__max_resamples": 0}),
    Example("rollout.max_resamples", "has no effect", RESAMPLES | SFT, {"rollout__max_resamples": 0}),
    Example("rollout.sampling.temperature", "must be above 0", sampled(temperature=0.0), sampled(temperature=1.0)),
    Example("rollout.sampling.top_k", "leaves only one token to draw", sampled(top_k=1), sampled(top_k=2)),
    Example("rollout.sampling.min_p", "leaves only one token to draw", sampled(min_p=1.0), sampled(min_p=0.9)),
    Example("rollout.sampling.min_new_tokens", "6 is above max_new_tokens", sampled(min_new_tokens=6), sampled()),
    Example("rollout.sampling", "only max_new_tokens counts", SFT | sampled(top_p=0.9), sampled()),
    *(
        Example(
            f"rollout.sampling.{key}", "no row tells an external trainer", EXTERNAL | sampled(**{key: value}), sampled()
        )
        for key, value in {"min_new_tokens": 2, "repetition_penalty": 1.1, "logit_bias": {"5": 1.0}}.items()
    ),
    *(
        Example(
            f"rollout.sampling.{key}",
            "no column tells stage own the distribution",
            TAUGHT | {"stages": [own(outputs=[per_token("teacher_logprobs")])]} | sampled(**{key: value}),
            {"stages": [TEACHER]},
        )
        for key, value in {"top_p": 0.9, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1}.items()
    ),
    # evaluation
    Example(
        "evaluation.sampling.temperature",
        "must be above 0: an evaluation decodes greedily anyway",
        {"evaluation__sampling": {"max_new_tokens": 4, "temperature": 0.0}},
        {"evaluation__sampling": {"max_new_tokens": 4}},
    ),
    Example(
        "evaluation.sampling.max_new_tokens",
        "is above rollout.sampling.max_new_tokens",
        {"evaluation__sampling": {"max_new_tokens": 6}},
        {"evaluation__sampling": {"max_new_tokens": 5}},
    ),
    Example(
        "evaluation.pass_reward",
        "has no effect with one sample",
        {"evaluation__pass_reward": 0.5},
        {"evaluation__group_size": 2},
    ),
    Example("evaluation.sets[0].num_prompts", "must be above 0 in a set", sets(HELD | {"num_prompts": 0}), sets(HELD)),
    Example(
        "evaluation.sets[0].dataset.curriculum",
        "has no effect in a set",
        sets(HELD | {"dataset": ROWS | {"curriculum": {"column": "level", "iterations": 10}}}),
        sets(HELD),
    ),
    Example("evaluation.sets[1].name", "`more` is the name of another set", sets(HELD, HELD), sets(HELD)),
    Example(
        "evaluation.sets[0].name",
        "or of the held-out prompts of dataset",
        sets(HELD | {"name": "held_out"}),
        sets(HELD),
    ),
    Example(
        "evaluation.sets[0].name",
        "`sums` is the name of a source of dataset",
        {"dataset": MIXTURE} | sets(HELD | {"name": "sums"}),
        sets(HELD),
    ),
    Example(
        "evaluation.stop_when",
        "names nothing by which the job ends",
        STOPS | {"evaluation__stop_when": {}},
        STOPS,
    ),
    Example(
        "evaluation.stop_when",
        "no version between the first and the last is evaluated",
        {"evaluation__stop_when": {"patience": 2}},
        STOPS,
    ),
    without("evaluation.stop_when", "a trainer of your own decides when it ends", EXTERNAL | STOPS),
    Example(
        "evaluation.best",
        "`another` is not the name of an evaluation set",
        sets(HELD, best="another"),
        sets(HELD, best="more"),
    ),
    Example(
        "evaluation.num_prompts",
        "0 leaves evaluation.best without a score",
        sets(HELD, num_prompts=0),
        sets(HELD, num_prompts=0, best="more"),
    ),
    # algorithm: loss and advantage
    Example(
        "algorithm.advantage",
        "whatever their reward",
        SFT | {"algorithm__advantage": "grpo"},
        {"algorithm__advantage": "none"},
    ),
    *(
        without(f"algorithm.{key}", 'has no effect with loss = "sft"', SFT | {f"algorithm__{key}": value})
        for key, value in {"kl_coefficient": 0.1, "correction": "tis", "on_truncated": "mask", "clip_low": 0.1}.items()
    ),
    Example("dataset.type", "gives no completions to learn", SFT | {"dataset": GYM}, {"dataset": ROWS}),
    Example("environment", 'has no effect with algorithm.loss = "sft"', SFT | PLAYED, {"environment": OUT}),
    Example(
        "schedule",
        "nothing is sampled",
        SFT | LAG,
        {"schedule": "periodic", "max_policy_lag": 0},
    ),
    Example("dataset.difficulty_pools", 'with algorithm.loss = "sft"', SFT | POOLS, {"dataset": ROWS}),
    Example(
        "algorithm.advantage",
        "leaves nothing to learn from",
        {"algorithm__advantage": "none"},
        TAUGHT,
    ),
    Example(
        "algorithm.advantage",
        "the loss `mine` takes one a response",
        MINE | CRITIC,
        {"algorithm__advantage": "grpo"},
    ),
    Example("algorithm.credit", "the loss `mine` takes one a response", MINE | BY_TURN, {"algorithm__credit": OUT}),
    Example("algorithm.advantage", "trains a critic, which is a whole model", CRITIC | LORA, {"trainer__lora": OUT}),
    Example(
        "algorithm.mini_batches",
        "3 does not divide rollout.batches_per_iteration = 4",
        {"algorithm__mini_batches": 3},
        {"algorithm__mini_batches": 2},
    ),
    without(
        "algorithm.advantage_epsilon",
        'has no effect with advantage = "rloo"',
        {"algorithm__advantage": "rloo", "algorithm__advantage_epsilon": 0.1},
    ),
    *each(
        "algorithm",
        {"gae_lambda": 0.9, "discount": 0.9, "value_coefficient": 0.5, "whiten_advantages": True},
        'has no effect with advantage = "grpo"',
        {},
        algorithm__advantage="gae",
    ),
    Example(
        "algorithm.value_clip",
        'has no effect with advantage = "grpo"',
        TWO_STEPS | {"algorithm__value_clip": 0.2},
        CRITIC,
    ),
    Example("algorithm.value_clip", "with one step", CRITIC | {"algorithm__value_clip": 0.2}, TWO_STEPS),
    without("algorithm.reward_clip", "none on turns", BY_TURN | {"algorithm__reward_clip": 1.0}),
    without("algorithm.on_truncated", "learns from no reward", ONLY_TAUGHT | {"algorithm__on_truncated": "penalise"}),
    *each(
        "algorithm",
        {"clip_low": 0.1, "clip_high": 0.1, "clip_max": 3.0, "off_policy_mask_threshold": 1.0, "shuffle_rewards": True},
        "which learns from no reward",
        ONLY_TAUGHT | TWO_STEPS,
    ),
    without("algorithm.kl_placement", "which learns from no reward", ONLY_TAUGHT | KL_IN_REWARD),
    Example(
        "algorithm.truncated_reward",
        'without on_truncated = "penalise"',
        {"algorithm__truncated_reward": -1.0},
        {"algorithm__on_truncated": "penalise"},
    ),
    Example(
        "algorithm.on_truncated",
        "without a KL in their reward",
        KL_IN_REWARD | {"algorithm__on_truncated": "mask"},
        {"algorithm__kl_placement": "loss"},
    ),
    Example(
        "algorithm.on_truncated",
        "gives a whole reward",
        {"algorithm__advantage": "gdpo", "algorithm__on_truncated": "penalise"},
        {"algorithm__on_truncated": "mask"},
    ),
    Example(
        "algorithm.on_truncated",
        "to which a stage would add (score)",
        {"algorithm__on_truncated": "penalise", "stages": [own(reward_column="score")]},
        {"algorithm__on_truncated": "mask"},
    ),
    # algorithm: credit of turns
    Example("algorithm.credit", "where a completion is one turn", {"algorithm__credit": "turn"}, PLAYED),
    Example(
        "algorithm.credit",
        "where a completion is one turn",
        BY_TURN | {"environment": ENVIRONMENT | {"max_turns": 1}},
        PLAYED,
    ),
    Example(
        "algorithm.credit",
        'the turns of a group, which advantage = "reinforce++_baseline" does not',
        BY_TURN | {"algorithm__advantage": "reinforce++_baseline"},
        {"algorithm__advantage": "rloo"},
    ),
    Example(
        "algorithm.kl_placement", "which is no turn's", BY_TURN | KL_IN_REWARD, {"algorithm__kl_placement": "loss"}
    ),
    Example(
        "algorithm.shuffle_rewards",
        "would still teach",
        BY_TURN | {"algorithm__shuffle_rewards": True},
        {"algorithm__credit": "trajectory"},
    ),
    Example(
        "algorithm.shuffle_rewards",
        "with rollout.group_size = 1",
        CRITIC | {"rollout__group_size": 1, "algorithm__shuffle_rewards": True},
        {"rollout__group_size": 2},
    ),
    without(
        "algorithm.shuffle_rewards", "a teacher teaches all the same", TAUGHT | {"algorithm__shuffle_rewards": True}
    ),
    # algorithm: clips of the policy ratio
    without(
        "algorithm.clip_max",
        'with loss = "cispo", which has bounds of its own',
        TWO_STEPS | {"algorithm__loss": "cispo", "algorithm__clip_max": 6.0},
    ),
    *(
        example
        for loss in ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo")
        for acting in (TWO_STEPS, {"algorithm__mini_batches": 2}, {"algorithm__old_policy": "generator"})
        for example in each(
            "algorithm",
            {"clip_low": 0.28, "clip_high": 0.28} | ({} if loss == "cispo" else {"clip_max": 3.0}),
            "the ratio is exactly 1",
            {"algorithm__loss": loss},
            **acting,
        )
    ),
    Example(
        "algorithm.clip_high",
        "the ratio is exactly 1",
        LAG | {"algorithm__correction": "none", "algorithm__clip_high": 0.28},
        MINE,
    ),
    Example(
        "algorithm.clip_max",
        "1.2 is not above 1 + clip_high, which is 1.28",
        TWO_STEPS | {"algorithm__clip_max": 1.2},
        {"algorithm__clip_max": 1.3},
    ),
    # algorithm: KL, entropy, distillation
    Example("algorithm.kl_estimator", "with kl_coefficient = 0", {"algorithm__kl_estimator": "k2"}, KL),
    Example("algorithm.kl_placement", "with kl_coefficient = 0", {"algorithm__kl_placement": "reward"}, KL),
    Example(
        "algorithm.ref_model_sync_iterations", "without a reference", {"algorithm__ref_model_sync_iterations": 2}, KL
    ),
    Example(
        "algorithm.ref_model_mixup_alpha",
        "without ref_model_sync_iterations",
        KL | {"algorithm__ref_model_mixup_alpha": 0.5},
        {"algorithm__ref_model_sync_iterations": 2},
    ),
    Example(
        "algorithm.ref_model_sync_iterations",
        "is not possible with trainer.lora",
        KL | LORA | {"algorithm__ref_model_sync_iterations": 2},
        {"trainer__lora": OUT},
    ),
    Example(
        "algorithm.ref_model_sync_iterations",
        'is not possible with a stage of type "reference"',
        KL | {"algorithm__ref_model_sync_iterations": 2, "stages": [{"type": "reference"}]},
        {"stages": []},
    ),
    Example(
        "algorithm.ref_model_sync_iterations",
        "the job ends first",
        KL | {"algorithm__ref_model_sync_iterations": 4},
        {"algorithm__ref_model_sync_iterations": 3},
    ),
    without("algorithm.use_bias_correction_kl", "of which there is none", {"algorithm__use_bias_correction_kl": True}),
    Example(
        "algorithm.kl_estimator",
        "has a gradient of expectation zero",
        KL | {"algorithm__kl_estimator": "k1", "algorithm__use_bias_correction_kl": False},
        {"algorithm__use_bias_correction_kl": OUT},
    ),
    *(
        Example(
            f"algorithm.{key}",
            'would be divided by the deviation of the advantages under advantage = "lite_ppo"',
            {"algorithm__advantage": "lite_ppo"} | broken,
            {"algorithm__advantage": "grpo"},
        )
        for key, broken in {
            "entropy_coefficient": {"algorithm__entropy_coefficient": 0.1},
            "kl_placement": KL,
            "distillation_coefficient": TAUGHT,
        }.items()
    ),
    Example(
        "algorithm.distillation_beta",
        "with distillation_coefficient = 0",
        {"algorithm__distillation_beta": 0.5, "stages": [TEACHER | {"top_k": 2}]},
        {"algorithm__distillation_coefficient": 0.5},
    ),
    # algorithm: corrections
    Example(
        "algorithm.correction",
        "must be named with max_policy_lag = 1",
        LAG | {"algorithm__old_policy": "generator"},
        {"algorithm__correction": "none"},
    ),
    Example(
        "algorithm.correction",
        "samples of an older policy make the gradient a biased one",
        LAG,
        {"algorithm__correction": "tis"},
    ),
    Example(
        "algorithm.correction",
        "has no effect of its own with max_policy_lag = 0",
        {"algorithm__correction": "decoupled_ppo"},
        {"algorithm__correction": "tis"},
    ),
    Example(
        "algorithm.correction",
        "would count the generator twice",
        {"algorithm__correction": "tis", "algorithm__old_policy": "generator"},
        {"algorithm__old_policy": "trainer"},
    ),
    Example(
        "algorithm.correction_level",
        'would undo the one ratio of loss = "gspo"',
        {"algorithm__correction": "tis", "algorithm__loss": "gspo"},
        {"algorithm__correction_level": "sequence"},
    ),
    Example(
        "algorithm.correction_level",
        "which tis needs",
        {
            "algorithm__correction": "tis",
            "algorithm__correction_level": "geometric",
            "algorithm__correction_high": 1.001,
        },
        {"algorithm__correction": "icepop"},
    ),
    Example(
        "algorithm.correction_high",
        "a response's mean hardly leaves 1",
        {"algorithm__correction": "icepop", "algorithm__correction_level": "geometric"},
        {"algorithm__correction_high": 1.001},
    ),
    *each(
        "algorithm",
        {"correction_level": "sequence", "correction_low": 0.5, "correction_high": 2.0},
        "without a correction",
        {},
        algorithm__correction="icepop",
    ),
    Example(
        "algorithm.correction_low",
        "which has no lower bound",
        {"algorithm__correction": "tis", "algorithm__correction_low": 0.5},
        {"algorithm__correction": "icepop"},
    ),
    Example(
        "algorithm.correction_low",
        "leave no room",
        {"algorithm__correction": "icepop", "algorithm__correction_low": 1.0, "algorithm__correction_high": 1.0},
        {"algorithm__correction_high": 2.0},
    ),
    *each(
        "algorithm",
        {"correction": "tis", "old_policy": "generator", "off_policy_mask_threshold": 0.1},
        "gives the trainer the generator's log-probs",
        AS_SAMPLED,
    ),
    *each("algorithm", {"correction": "tis", "old_policy": "generator"}, "weighs no sampled token", WIDELY_TAUGHT),
    Example(
        "algorithm.off_policy_mask_threshold",
        "which is each token's own",
        CRITIC | {"algorithm__off_policy_mask_threshold": 0.1},
        {"algorithm__advantage": "grpo"},
    ),
    # optimizer
    Example(
        "optimizer.groups[0]",
        "changes nothing",
        {"optimizer__groups": [{"parameters": ["*"]}]},
        {"optimizer__groups": [{"parameters": ["*"], "weight_decay": 0.1}]},
    ),
    Example(
        "optimizer.groups[0].weight_decay",
        "it is multiplied by the learning rate, which is 0 here",
        {"optimizer__groups": [{"parameters": ["*"], "learning_rate_factor": 0.0, "weight_decay": 0.1}]},
        {"optimizer__groups": [{"parameters": ["*"], "learning_rate_factor": 0.0}]},
    ),
    Example(
        "optimizer.decay_iterations",
        'is needed with schedule = "wsd"',
        {"optimizer__schedule": "wsd"},
        {"optimizer__decay_iterations": 2},
    ),
    Example(
        "optimizer.decay_iterations",
        'with schedule = "cosine"',
        {"optimizer__schedule": "cosine", "optimizer__decay_iterations": 2},
        {"optimizer__schedule": "wsd"},
    ),
    Example(
        "optimizer.min_learning_rate",
        'with schedule = "constant"',
        {"optimizer__min_learning_rate": 1e-8},
        {"optimizer__schedule": "linear"},
    ),
    Example(
        "optimizer.min_learning_rate",
        "is not below learning_rate",
        {"optimizer__schedule": "linear", "optimizer__min_learning_rate": 1e-3},
        {"optimizer__min_learning_rate": 1e-8},
    ),
    Example(
        "optimizer.critic_learning_rate_factor",
        "which trains no critic",
        {"optimizer__critic_learning_rate_factor": 2.0},
        CRITIC,
    ),
    Example(
        "optimizer.type",
        "trainer.lora trains none",
        LORA | {"optimizer__type": "muon"},
        {"trainer__lora": OUT},
    ),
    Example(
        "optimizer.offload",
        "keeps its moments on the device",
        {"optimizer__type": "adamw_8bit", "optimizer__offload": "host"},
        {"optimizer__type": "adamw"},
    ),
    # trainer
    Example(
        "trainer.offload_activations",
        'needs trainer.sharding = "none"',
        FSDP | {"trainer__offload_activations": True},
        {"trainer__sharding": "none"},
    ),
    Example(
        "trainer.sharding",
        "needs trainer.world_size above 1",
        {"trainer__sharding": "fsdp"},
        {"trainer__world_size": 2},
    ),
    Example(
        "trainer.sharding",
        'needs trainer.accumulation = "exact"',
        FSDP | FLOAT,
        {"trainer__accumulation": "exact"},
    ),
    Example("optimizer.type", "its blocks would depend on the ranks", FSDP | {"optimizer__type": "adamw_8bit"}, LORA),
    Example(
        "optimizer.type", "it steps whole matrices", FSDP | {"optimizer__type": "muon"}, {"optimizer__type": "adamw"}
    ),
    Example("algorithm.advantage", 'needs trainer.sharding = "none"', CRITIC | FSDP, {"trainer__sharding": "none"}),
    *(
        without("algorithm.routing_replay", f"needs {need}", broken | {"algorithm__routing_replay": True})
        for need, broken in (
            ("completions that are sampled", SFT),
            ("no environment", PLAYED),
            ("trainer.external = false", EXTERNAL),
            ('trainer.packing other than "as_sampled"', AS_SAMPLED),
        )
    ),
    *(
        Example("trainer.packing", f"needs {need}", AS_SAMPLED | broken, {"trainer__packing": "shared_prompt"})
        for need, broken in {
            'model.dtype = "float32"': {"model__dtype": "bfloat16"},
            "deterministic = true": {"deterministic": False},
            "no trainer.lora": LORA,
            'trainer.sharding = "none"': FSDP,
            "no environment": PLAYED,
            "completions that are sampled": SFT,
        }.items()
    ),
    Example(
        "trainer.lora.target_modules",
        'names "all-linear" together with other layers',
        {"trainer__lora": {"target_modules": ["all-linear", "lm_head"]}},
        {"trainer__lora": {"target_modules": ["all-linear"]}},
    ),
    Example(
        "trainer.lora.publish",
        "leaves deltas nothing to save",
        {"trainer__lora": {"publish": "adapter"}, "weights": {"transport": "delta"}},
        {"weights": {"transport": "file"}},
    ),
    Example(
        "trainer.lora.publish",
        "leaves deltas nothing to save",
        {
            "trainer__lora": {"publish": "adapter"},
            "weights": {"transport": "object", "snapshot_every_versions": 2},
        },
        {"weights": {"transport": "object", "snapshot_every_versions": 1}},
    ),
    without(
        "trainer.wider_sums",
        'with accumulation = "float"',
        FLOAT | {"trainer__wider_sums": [{"first_iteration": 0, "bits": 1}]},
    ),
    Example(
        "trainer.wider_sums",
        "must be in ascending order",
        {"trainer__wider_sums": [{"first_iteration": 3, "bits": 1}, {"first_iteration": 3, "bits": 2}]},
        {"trainer__wider_sums": [{"first_iteration": 2, "bits": 1}, {"first_iteration": 3, "bits": 2}]},
    ),
    without("trainer.mismatch_alarm", "any difference is an alarm", AS_SAMPLED | {"trainer__mismatch_alarm": 0.5}),
    *each(
        "trainer",
        {"mismatch_alarm": 0.5, "on_mismatch": "fail", "entropy_alarm": 0.1},
        'loss = "sft" samples nothing',
        SFT,
    ),
    without(
        "trainer.measure_entropy",
        "which measures it, too",
        {"trainer__measure_entropy": False, "algorithm__entropy_coefficient": 0.1},
    ),
    Example("trainer.kl_alarm", "with algorithm.kl_coefficient = 0", {"trainer__kl_alarm": 0.1}, KL),
    *(
        Example(
            "trainer.stop_on",
            f'names "{name}", a warning that this job never gives: ',
            broken | {"trainer__stop_on": [name]},
            {"trainer__stop_on": OUT},
        )
        for name, broken in (
            ("entropy_gone", SFT),
            ("reward_collapsed", SFT),
            ("truncations_rising", SFT),
            ("completions_cut", SFT),
            ("completions_unscorable", SFT),
            ("mismatch_unusual", SFT),
            ("mismatch_unusual", LAG | {"algorithm__correction": "tis"}),
            ("mismatch_high", SFT),
            ("mismatch_high", LAG | {"algorithm__correction": "tis"}),
            ("score_collapsed", {}),
            ("score_collapsed", {"evaluation__every_iterations": 4}),
            ("score_collapsed", {"evaluation": {"num_prompts": 0, "every_iterations": 1}}),
            ("lag_too_large", {}),
            ("groups_equal", CRITIC),
        )
    ),
    Example(
        "trainer.stop_on",
        "without kl_alarm there is no limit",
        KL | {"trainer__stop_on": ["kl_high"]},
        {"trainer__kl_alarm": 0.1},
    ),
    Example(
        "trainer.hosts.least",
        "3 is more than most = 2",
        HOSTS | {"trainer__hosts": {"least": 3, "most": 2}},
        {"trainer__hosts": {"least": 2, "most": 3}},
    ),
    Example(
        "trainer.hosts.regroup_s",
        "has no effect when least and most are equal",
        HOSTS | {"trainer__hosts": {"least": 2, "most": 2, "regroup_s": 30.0}},
        {"trainer__hosts": {"least": 1, "most": 2, "regroup_s": 30.0}},
    ),
    Example(
        "trainer.world_size",
        "has no effect with trainer.hosts",
        HOSTS | {"trainer__world_size": 2},
        {"trainer__world_size": OUT, "trainer__hosts": {"least": 1, "most": 2, "ranks": 2}},
    ),
    Example(
        "trainer.hosts",
        'needs trainer.accumulation = "exact"',
        HOSTS | FLOAT,
        {"trainer__accumulation": "exact"},
    ),
    Example(
        "weights.transport",
        '"file" is not possible with trainer.hosts',
        HOSTS | {"weights": {"transport": "file"}},
        {"weights": {"transport": "object"}},
    ),
    Example(
        "schedule",
        '"colocated" is not possible with trainer.hosts',
        HOSTS | {"schedule": "colocated"},
        {"schedule": "synchronous"},
    ),
    *(
        without(field_, "where a process of your own decides it", EXTERNAL | {field_.replace(".", "__"): value})
        for field_, value in {
            "trainer.world_size": 2,
            "algorithm.loss": "grpo",
            "algorithm.entropy_coefficient": 0.1,
            "optimizer.learning_rate": 0.1,
        }.items()
    ),
    without("trackers", "your own training process reports its metrics", EXTERNAL | {"trackers": ["wandb"]}),
    Example(
        "schedule",
        '"synchronous" is not possible with trainer.external',
        EXTERNAL | {"schedule": "synchronous"},
        {"schedule": "periodic"},
    ),
    # stages
    Example(
        "stages[1].name",
        '"own" is the name of another stage',
        {"stages": [own(), own(outputs=[{"name": "other", "type": "float32"}])]},
        {"stages": [own(), own(name="second", outputs=[{"name": "other", "type": "float32"}])]},
    ),
    Example(
        "stages[1]",
        'makes a column "score", as an earlier output does',
        {"stages": [own(), own(name="second")]},
        {"stages": [own(), own(name="second", outputs=[{"name": "other", "type": "float32"}])]},
    ),
    Example(
        "stages[0].outputs",
        'names "reward", a column of every rollout',
        {"stages": [own(outputs=[{"name": "reward", "type": "float64"}])]},
        {"stages": [own()]},
    ),
    Example(
        "stages[0].outputs[0].width",
        "counts the numbers of a sampled token",
        {"stages": [own(outputs=[{"name": "words", "type": "text", "width": 3}])]},
        {"stages": [own(outputs=[per_token("words", width=3)])]},
    ),
    Example(
        "stages[0].inputs",
        'names "missing", which is no column',
        {"stages": [own(inputs=["missing"])]},
        {"stages": [own(inputs=["text"])]},
    ),
    Example(
        "stages",
        "own → second → own",
        {
            "stages": [
                own(inputs=["other"]),
                own(name="second", inputs=["score"], outputs=[{"name": "other", "type": "float32"}]),
            ]
        },
        {"stages": [own()]},
    ),
    Example(
        "stages[0].model",
        "has to name the teacher",
        TAUGHT | {"stages": [{"type": "teacher"}]},
        {"stages": [TEACHER]},
    ),
    Example(
        "stages[0].top_k",
        "which has the whole vocabulary",
        WIDELY_TAUGHT | {"stages": [TEACHER | {"top_k": 2, "hidden_size": 2}]},
        {"stages": [TEACHER | {"hidden_size": 2}]},
    ),
    Example(
        "stages[0].models",
        "has no model for the source `rows` of dataset.sources",
        TAUGHT | {"dataset": MIXTURE, "stages": [{"type": "teacher", "models": {"sums": "a"}}]},
        {"stages": [{"type": "teacher", "models": {"sums": "a", "rows": "b"}}]},
    ),
    Example(
        "stages[0].models",
        "names `others`, which is n",
        TAUGHT
        | {"stages": [{"type": "teacher", "models": {"sums": "a", "rows": "b", "others": "c"}}]}
        | {"dataset": MIXTURE},
        {"stages": [{"type": "teacher", "models": {"sums": "a", "rows": "b"}}]},
    ),
    Example(
        "stages[0].on_failure",
        "needs a name of the stage of 56 characters at most",
        {"stages": [SCORER | {"name": "n" * 57, "on_failure": 0.0}]},
        {"stages": [SCORER | {"name": "n" * 56, "on_failure": 0.0}]},
    ),
    Example("stages[0].lowest", "is not below highest", judged(lowest=10.0), judged(lowest=9.0)),
    Example("stages[0].prompt", "never shows the completion", judged(prompt="Is it right?"), judged()),
    Example("stages[0].answer", "with one {number} in it", judged(answer="x"), judged(answer="{number}/10")),
    Example(
        "stages[0].criteria",
        "are keys of a JSON object",
        judged(criteria={"right": 1.0}),
        judged(criteria={"right": 1.0}, answer="json"),
    ),
    Example(
        "stages[0].criteria",
        f"make a column llm_judge_{'n' * 60}",
        judged(criteria={"n" * 60: 1.0}, answer="json"),
        judged(criteria={"n" * 54: 1.0}, answer="json"),
    ),
    Example(
        "stages[0].reward_column",
        '"other" is no float32 per rollout',
        {"stages": [own(reward_column="other")]},
        {"stages": [own(reward_column="score")]},
    ),
    Example(
        "stages[0].weight",
        "without reward_column",
        {"stages": [own(weight=2.0)]},
        {"stages": [own(weight=2.0, reward_column="score")]},
    ),
    Example(
        "algorithm.distillation_coefficient",
        "needs a stage that makes teacher_logprobs",
        {"algorithm__distillation_coefficient": 0.5},
        TAUGHT,
    ),
    Example(
        "algorithm.distillation_beta",
        "needs a stage that makes teacher_top",
        TAUGHT | {"algorithm__distillation_beta": 0.5},
        {"stages": [TEACHER | {"top_k": 2}]},
    ),
    Example(
        "stages[0]",
        'makes "reference_logprobs", which is read by the loss, in another form',
        KL | {"stages": [own(outputs=[{"name": "reference_logprobs", "type": "float32"}])]},
        {"stages": [own(outputs=[per_token("reference_logprobs")])]},
    ),
    Example(
        "stages[0]",
        "which nothing reads without algorithm.kl_coefficient",
        {"stages": [{"type": "reference"}]},
        KL,
    ),
    Example(
        "stages[0]",
        "bytes for the 40 tokens of a batch, more than limits.max_batch_bytes = 1,024",
        WIDELY_TAUGHT | {"limits__max_batch_bytes": 1024, "stages": [TEACHER | {"top_k": 16}]},
        {"stages": [TEACHER | {"top_k": 2}]},
    ),
    Example(
        "stages",
        'give scores (reward_model) that have no effect: loss = "sft"',
        SFT | {"stages": [SCORER]},
        {"stages": []},
    ),
    Example(
        "stages[0].name",
        "by the name of a reward component",
        {"stages": [SCORER | {"name": "exact"}]},
        {"stages": [SCORER]},
    ),
    Example(
        "stages[0].on_failure",
        "that neither a reward component nor the environment has",
        PLAYED | {"stages": [JUDGE | {"name": "environment", "on_failure": 0.0}], "deterministic": False},
        {"stages": [JUDGE | {"on_failure": 0.0}]},
    ),
    # Products.
    Example(
        "evaluation.prompts_per_batch",
        "make 20,480 completions of an evaluation batch; the limit is 16,384",
        {"evaluation__prompts_per_batch": 4096, "evaluation__group_size": 5, "evaluation__num_prompts": 4096},
        {"evaluation__prompts_per_batch": 2048},
    ),
)
