"""Guards whose absence none of their tests notices, each with the reason why it stays."""

from __future__ import annotations

KEPT: dict[str, str] = {
    "broker/generator_side.py _sampled_by: (batch.policy_version, batch.weights_digest) == (version, digest)": (
        "most batches are made for the version that samples them: it saves a copy of their prompts"
    ),
    "broker/scripts/prelude.lua if job_id == JOB_ID then return end": (
        "the keys of a job have the same names at each call: it saves making them anew"
    ),
    "broker/trainer_side.py TrainerSide.stages_with_work: not self._graph.stages": (
        "a job without stages has nothing in work: it saves a call of the server in each look"
    ),
    "broker/scripts/generator.lua if #ids < AT_ONCE then return nil end": (
        "the next look at claims behind the last one finds none: it saves this look"
    ),
    "consumer/gradient/accumulation.py give_back: first == end": (
        "where no page is given back, the lines for the rest set all sums to 0: it says so in one line"
    ),
    "consumer/gradient/accumulation.py _joined: len(gradients) == 1": (
        "one gradient joined with none is itself: it saves a copy"
    ),
    "gateway/submission.py check_plugins: not plugins": (
        "a trial of no functions fails in none: it saves a request to the reward service"
    ),
    "gateway/submission.py check_scorers: not INSTALL_SCORER.keys() & set(kinds)": (
        "a reward that needs no package lacks none: it saves a request to the reward service"
    ),
    (
        "gateway/submission.py with_packages: all((not isinstance(component, PluginReward) or component.source for "
        "component in components))"
    ): "components without a package stay as they are: it saves a request to the reward service",
    "onbeat/data/named_files.py digest_of_file: digest": (
        "the same is looked up again behind the lock: it saves waiting for another file's turn"
    ),
    "onbeat/data/named_files.py reading_model: digests is UNSET": (
        "check_model compares nothing without digests: it saves looking at each file of the folder"
    ),
    "producer/served_model.py ServedModel.show: probe is UNSET": (
        "no caller shows a version without a probe: it tells the type checker that there is one"
    ),
    "contracts/settings.py settings_from: error.field not in own": (
        "every value of a setting is refused by the setting's name: it tells the type checker that there is a name"
    ),
    "onbeat/loop/gathering.py with_stage_rewards: not weights": (
        "without weights nothing is added to a reward: it saves building each rollout anew"
    ),
    "onbeat/loop/gathering.py _marked: not marks": (
        "without marks a rollout's are joined with none: it saves building each anew"
    ),
    "onbeat/stages/llm_judge.py JudgeService.values: not isinstance(judge, LlmJudgeStage)": (
        "a worker gives a service items of its own kinds only: it names the kind for the type checker"
    ),
    "onbeat/weights/delta/reader.py _apply: tensor is None": (
        "a receiver that holds the base has its names checked: it says what is wrong with a file that was changed since"
    ),
}
"""`Guard.name` → reason."""
