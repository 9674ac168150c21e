"""Trains a job of ours with TRL's GRPOTrainer; `python -m benchmarks trl` starts it under the interpreter that has TRL.

    python -m benchmarks._trl_trainer SPEC.json OUTPUT --threads 2 [--evaluate]

Model, prompts and their order, rewards and learning rates come from our own code, so they are those of the job. It
writes the trained model to OUTPUT/model, and then OUTPUT/run.json. With --evaluate it scores the job's held-out prompts
where the job does: before the first iteration, every `evaluation.every_iterations`, and after the last one.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportAttributeAccessIssue]

from benchmarks._held_out import mean_reward
from benchmarks._lookup_environment import ROWS, Lookup
from consumer.gradient.optimizer import learning_rate_at
from contracts.encoding.wire import decode_json
from contracts.rewards import RewardItem, Scored
from contracts.spec.job import JobSpec
from contracts.spec.root import SpecRoot
from contracts.spec.trainer import ALL_LINEAR
from onbeat.data.datasets.loading import job_examples
from onbeat.data.prompts.pools import pass_order
from onbeat.data.prompts.source import PromptSource
from reward_service.scorers.rubric import score_item


class Recorder(TrainerCallback):
    """Unix times of each step: its begin, the end of its generation, its own end; and what it sampled."""

    def __init__(self, spec: JobSpec) -> None:
        self.steps: list[dict[str, float]] = []
        self._components = spec.reward.components

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.steps.append({"started_s": time.time()})

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps[-1]["ended_s"] = time.time()

    def rewards(
        self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **row: Any
    ) -> list[float]:
        """Scores all completions of a step, as TRL calls a reward function: texts, or lists of messages."""
        generated_s = time.time()
        rewards = []
        for at, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            item = RewardItem(
                prompt=text_of(prompt),
                completion=text_of(completion),
                reference=row["reference"][at],
                task_entry=row["task_entry"][at] if "task_entry" in row else "",
                num_tokens=len(completion_ids[at]),
            )
            scored = score_item(self._components, item)
            if not isinstance(scored, Scored):
                raise RuntimeError(f"a completion could not be scored: {scored}")
            rewards.append(scored.reward + environment_reward(completion, row.get("environments"), at))
        self.steps[-1] |= {
            "generated_s": generated_s,
            "reward_mean": sum(rewards) / len(rewards),
            "num_completions": len(rewards),
            "num_tokens": sum(map(len, completion_ids)),
        }
        return rewards


def environment_reward(completion: str | list[dict[str, Any]], environments: list[Any] | None, at: int) -> float:
    """Returns what an episode's environment gives; nothing where it ended with a call, as in our job."""
    if environments is None or completion[-1].get("tool_calls"):  # pyright: ignore[reportAttributeAccessIssue]
        return 0.0
    return environments[at].reward


def text_of(completion: str | list[dict[str, Any]]) -> str:
    """Returns a text, or the content of the last message."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


class HeldOut(TrainerCallback):
    """Scores the job's held-out prompts while TRL trains, by the model as it is: its adapters are not merged.

    The samples have a random state of their own, so that what is trained is the same with and without them.
    """

    def __init__(self, spec: JobSpec, folder: Path) -> None:
        self.scores: list[dict[str, Any]] = []
        self._spec = spec
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._prompts = prompts_of(spec, folder, tokenizer).evaluation_prompts()

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._score(0, parts)

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        step = state.global_step
        if step % self._spec.evaluation.every_iterations == 0 or step == self._spec.iterations:
            self._score(step, parts)

    def _score(self, version: int, parts: dict[str, Any]) -> None:
        model, tokenizer = parts["model"], parts["processing_class"]
        was_training = model.training
        model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._spec.seed)
            sampled = mean_reward(self._spec, self._prompts, model, tokenizer, do_sample=True)
            greedy = None
            if self._spec.evaluation.greedy:
                greedy = mean_reward(self._spec, self._prompts, model, tokenizer, do_sample=False)
        model.train(was_training)
        self.scores.append({"version": version, "sampled": sampled, "greedy": greedy, "prompts": len(self._prompts)})
        print(f"version {version}: sampled {sampled:.3f} of {len(self._prompts)} held-out prompts", flush=True)


class Trainer(GRPOTrainer):
    """GRPOTrainer with the job's learning rates: its own warm-up begins with a step of 0."""

    job: JobSpec

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        spec = self.job.optimizer

        def factor(step: int) -> float:
            return learning_rate_at(step, spec, num_training_steps) / spec.learning_rate

        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler


def prompts_of(spec: JobSpec, folder: Path, tokenizer: Any) -> PromptSource:
    """Returns the job's prompts, which our own code draws. folder: of its model."""
    return PromptSource(job_examples(spec, SpecRoot(folder)), spec=spec, tokenizer=tokenizer, context_tokens=2**20)


def rows_of(spec: JobSpec, folder: Path) -> list[dict[str, Any]]:
    """Returns the prompts of all iterations in the job's order."""
    if spec.environment is not None:
        return tool_rows(spec, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    source = prompts_of(spec, folder, tokenizer)
    return [
        {"prompt": prompt.text, "reference": prompt.reference, "task_entry": prompt.task_entry}
        for iteration in range(spec.iterations)
        for prompt in source.training_prompts(iteration)
    ]


def tool_rows(spec: JobSpec, folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of a task with a tool: TRL renders their messages itself, with the tool."""
    read = [json.loads(line) for line in (folder / ROWS).read_text().splitlines()]
    number = spec.rollout.prompts_per_iteration
    order = functools.cache(pass_order)
    places = [order(len(read), spec.seed, at // len(read))[at % len(read)] for at in range(spec.iterations * number)]
    return [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reference": row["reference"],
            **json.loads(row["task_entry"]),
        }
        for row in (read[place] for place in places)
    ]


def config_of(spec: JobSpec, output: Path, overrides: dict[str, Any]) -> GRPOConfig:
    """Makes the job's configuration; what is no matter of the job is set to what makes TRL fastest here."""
    rollout, optimizer, algorithm = spec.rollout, spec.optimizer, spec.algorithm
    low, high = algorithm.clip_range
    options: dict[str, Any] = {
        "output_dir": str(output / "trl"),
        "max_steps": spec.iterations,
        "seed": spec.seed,
        "per_device_train_batch_size": rollout.prompts_per_iteration * rollout.group_size,
        "num_generations": rollout.group_size,
        "max_completion_length": spec.longest_completion()[1],
        "temperature": rollout.sampling.temperature,
        "top_p": rollout.sampling.top_p,
        "top_k": rollout.sampling.top_k,
        "repetition_penalty": rollout.sampling.repetition_penalty or 1.0,
        "shuffle_dataset": False,
        "learning_rate": optimizer.learning_rate,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "optim": "adamw_torch_fused",
        "loss_type": algorithm.loss,
        "scale_rewards": "group",
        "epsilon": low,
        "epsilon_high": high,
        "beta": 0.0,
        "model_init_kwargs": {"dtype": spec.model.dtype},
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_vllm": False,
        "report_to": [],
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return GRPOConfig(**options | overrides)


def adapters_of(spec: JobSpec) -> LoraConfig | None:
    """Returns the adapters of a job that trains some: as ours in all linear layers but the head, in float32."""
    if spec.trainer.lora is None:
        return None
    modules = spec.trainer.lora.target_modules
    return LoraConfig(
        r=spec.trainer.lora.rank,
        # Its annotation says int, and it divides by the rank.
        lora_alpha=cast(int, spec.trainer.lora.alpha),
        target_modules=ALL_LINEAR if modules == (ALL_LINEAR,) else list(modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def make_trainer(
    spec: JobSpec,
    output: Path,
    recorder: Recorder,
    overrides: dict[str, Any],
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """Makes the trainer of a whole job; the spec's model path is that of a folder on this machine."""
    folder = Path(spec.model.path).resolve()
    turns = {"environment_factory": Lookup} if spec.environment is not None else {}
    if spec.environment is not None:
        overrides = {"max_tool_calling_iterations": spec.environment.max_turns - 1} | overrides
    trainer = Trainer(
        model=str(folder),
        reward_funcs=recorder.rewards,
        args=config_of(spec, output, overrides),
        train_dataset=Dataset.from_list(rows_of(spec, folder)),
        processing_class=AutoTokenizer.from_pretrained(folder, local_files_only=True),
        callbacks=[recorder, *callbacks],
        peft_config=adapters_of(spec),
        **turns,
    )
    trainer.job = spec
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--config", type=json.loads, default={}, help="fields of GRPOConfig, as a JSON object")
    parser.add_argument("--evaluate", action="store_true", help="scores the held-out prompts on the way")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    spec = decode_json(arguments.spec.read_bytes(), JobSpec)
    recorder = Recorder(spec)
    held_out = []
    if arguments.evaluate:
        held_out.append(HeldOut(spec, Path(spec.model.path).resolve()))
    trainer = make_trainer(spec, arguments.output, recorder, arguments.config, held_out)
    trainer.train()
    trainer.save_model(str(arguments.output / "model"))
    run = {"steps": recorder.steps, "evaluations": [score for callback in held_out for score in callback.scores]}
    (arguments.output / "run.json").write_text(json.dumps(run))


if __name__ == "__main__":
    main()
