"""Every shipped recipe, tried: `python -m tests.recipe_runs [NAME …]`, which `make recipes` runs.

    configs/recipes/NAME.toml ─▶ its own keys, with a tiny twin of its model and a few rows ─▶ a stack, one iteration
    ─▶ tests/recipe_results.json ─▶ a table of docs/recipes.md

A twin has the architecture of the recipe's model, and random weights of some thousand parameters. What is replaced are
the model, the data, and sizes that a tiny model has no room for; the rest of the file is the job's. The exit status is
1 where a job doesn't succeed. With recipes named, theirs alone run, and nothing is written. With `--table` the table of
the last run is printed, for the page. With `--reckon` the comments of the files get the bytes that `onbeat doctor`
counts now.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from transformers.utils import logging as transformers_logging

from contracts.encoding.wire import decode_json, encode_json
from contracts.spec.reading import spec_of_values
from onbeat.doctor.finding import GIB
from onbeat.doctor.model.job import num_ranks
from onbeat.doctor.model.known import KNOWN, known_sizes
from onbeat.doctor.model.memory import memory_of
from tests.builders import char_tokenizer
from tests.families import family_config

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.toml"))
RESULTS = ROOT / "tests" / "recipe_results.json"
PAGE = ROOT / "docs" / "recipes.md"
PACKAGES = ("transformers", "torch")
RECKONED = "# Reckoned by `onbeat doctor`: "
"""Begins the line of a recipe that has its bytes."""
CONTEXT_TOKENS = 4096
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""It ends an answer with a special token, as the templates of the recipes' models do: an environment needs it."""
TOOL_TOKENS = ["<tool_call>", "</tool_call>"]
"""Tokens of the recipes' models that are no special ones."""
ROWS = [
    {
        "question": f"What is {number} + 2?",
        "answer": f"It is {number + 2}. #### {number + 2}",
        "prompt": f"Write a function that adds {number}.",
        "code": f"def add(a): return a + {number}",
        "test_list": [f"assert add(1) == {number + 1}"],
    }
    for number in range(24)
]
"""Rows with the columns of all data sets of the recipes."""
SECONDS = 300.0


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe, as its twin ran."""

    recipe: str
    family: str
    """The family of the recipe's model, and so of the twin."""
    result: str
    """The job's last state and version, or what it ended with."""
    seconds: float
    """Time of the whole run, the stack's start and end among them."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """A run of all recipes."""

    date: str
    commit: str
    versions: dict[str, str]
    rows: list[Row]


def read_results() -> Results:
    return decode_json(RESULTS.read_bytes(), Results)


def table_of(results: Results) -> str:
    """Returns the table of docs/recipes.md: what was run, when, and how it ended."""
    packages = ", ".join(f"{package} {number}" for package, number in results.versions.items())
    lines = [
        f"Last run of all twins: {results.date}, commit `{results.commit}`, {packages}, on a CPU.",
        "",
        "recipe | its twin's family | its job",
        "---|---|---",
        *(f"`{row.recipe}` | {row.family} | {row.result}" for row in results.rows),
    ]
    return "\n".join(lines)


def read(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text())


def known_name(path: str) -> str:
    """Returns the known model whose name begins the last part of a path, or of a name of the hub.

    models/Qwen3-0.6B-sft is a Qwen3-0.6B. If no known model fits, the answer is "".
    """
    last = path.partition("@")[0].rpartition("/")[2]
    names = (folder.name for folder in KNOWN.iterdir() if last.startswith(folder.name))
    # Of two that fit, the longer one says more.
    return max(names, key=len, default="")


def reckoned(values: dict[str, Any]) -> str:
    """Returns the line of a recipe that says what its trainer needs, and what a generator's weights take."""
    spec = spec_of_values(json.loads(json.dumps(values)))
    sizes = known_sizes(known_name(spec.model.path), spec.trainer.lora)
    memory = memory_of(sizes, spec, device="cuda")
    ranks = f"each of {num_ranks(spec)} ranks" if num_ranks(spec) > 1 else "the trainer"
    words = f"{RECKONED}{ranks} needs {memory.peak_bytes / GIB:.1f} GiB of its card at the peak"
    on_host = sum(part.num_bytes for part in memory.elsewhere)
    if on_host:
        words += f" and {on_host / GIB:.1f} GiB on the host"
    weights = sum(parameter.num_items for parameter in sizes.parameters) * 2
    return f"{words}; a generator {weights / GIB:.1f} GiB of weights, and its cache."


def family_of(path: str) -> str:
    """Returns the family of a recipe's model."""
    return json.loads((KNOWN / known_name(path) / "config.json").read_text())["model_type"]


def twin_folder(root: Path, name: str, family: str) -> str:
    """Saves a tiny model of a family with a long context; returns its folder's name."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = char_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.add_tokens(TOOL_TOKENS)
    config = family_config(family)
    config.max_position_embeddings = CONTEXT_TOKENS
    config.vocab_size = len(tokenizer)
    if os.environ.get("ONBEAT_DEVICE") == "cuda":
        # The kernels of a GPU's packed attention want heads of 16 or more.
        config.head_dim = 16
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(root / name)
    tokenizer.save_pretrained(root / name)
    return name


def of_twin(values: dict[str, Any], root: Path) -> dict[str, Any]:
    """Returns a recipe's keys with the twin and rows of `root`, in sizes for a machine of two cores."""
    values = json.loads(json.dumps(values))
    values["model"]["path"] = twin_folder(root, "twin", family_of(values["model"]["path"]))
    for number, stage in enumerate(values.get("stages", [])):
        stage["model"] = twin_folder(root, f"stage-{number}", family_of(stage["model"]))
    (root / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    dataset = values["dataset"]
    for key in ("path", "config", "split", "evaluation_split"):
        dataset.pop(key, None)
    dataset |= {"type": "jsonl", "train_path": "rows.jsonl"}
    rollout = values["rollout"]
    rollout["batches_per_iteration"] = 2
    rollout["prompts_per_batch"] = 2
    rollout["group_size"] = min(4, rollout["group_size"])
    # A token of the twin is a character.
    rollout["max_prompt_tokens"] = 2048
    rollout["sampling"]["max_new_tokens"] = 64 if values["algorithm"]["loss"] == "sft" else 16
    if "environment" in values:
        values["environment"] |= {"max_tokens": 512, "max_turns": 2}
    trainer = values["trainer"]
    trainer["world_size"] = min(2, trainer.get("world_size", 1))
    # Rewards of a random model are all 0.0: shuffled ones too. Every row teaches where groups aren't compared.
    values["evaluation"] = {"num_prompts": 2, "prompts_per_batch": 2}
    values["iterations"] = 1
    return values


def run(path: Path) -> str:
    """Runs a recipe's twin on a stack of its own; returns its state, "succeeded", and the version that it made."""
    import onbeat

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        values = of_twin(read(path), root)
        for component in values.get("reward", {}).get("components", []):
            if "file" in component:
                (root / component["file"]).parent.mkdir(parents=True, exist_ok=True)
                (root / component["file"]).write_text((ROOT / component["file"]).read_text())
        job = onbeat.train(
            values, run_dir=root / "runs", model_root=root, generators=1, stage_workers=len(values.get("stages", []))
        )
        try:
            status = job.result(timeout_s=SECONDS)
        finally:
            job.close()
        return f"{status.state.value}, version {status.policy_version}"


def reckon() -> None:
    """Writes the bytes of now into the comments of all recipes."""
    for path in RECIPES:
        line = reckoned(read(path))
        lines = [line if old.startswith((RECKONED, "# @RECKONED@")) else old for old in path.read_text().splitlines()]
        path.write_text("\n".join(lines) + "\n")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def tried(path: Path) -> Row:
    """Runs a recipe's twin, and returns how it went."""
    started_s = time.monotonic()
    try:
        result = run(path)
    except Exception as error:
        # The others are tried all the same, whatever one raises.
        result = f"{type(error).__name__}: {error}"
    seconds = round(time.monotonic() - started_s, 1)
    family = family_of(read(path)["model"]["path"])
    return Row(recipe=path.stem, family=family, result=result, seconds=seconds)


def commit_now() -> str:
    answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return answer.stdout.strip()[:12]


def write_results(rows: list[Row], *, commit: str) -> None:
    """Writes the file of results. commit: the one that the run began at."""
    results = Results(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=commit,
        versions={package: version(package) for package in PACKAGES},
        rows=rows,
    )
    text = json.dumps(json.loads(encode_json(results)), indent=1, ensure_ascii=False)
    RESULTS.write_text(f"{text}\n")


def main(names: list[str]) -> int:
    if names == ["--reckon"]:
        reckon()
        return 0
    if names == ["--table"]:
        say(table_of(read_results()))
        return 0
    unknown = sorted(set(names) - {path.stem for path in RECIPES})
    if unknown:
        say(f"there is no recipe {unknown[0]} in configs/recipes/")
        return 2
    transformers_logging.disable_progress_bar()
    # The tree may go on to another commit meanwhile.
    commit = "" if names else commit_now()
    rows: list[Row] = []
    for path in RECIPES:
        if names and path.stem not in names:
            continue
        row = tried(path)
        rows.append(row)
        say(f"{row.recipe:32} {row.seconds:5.1f} s  {row.result}")
    if not names:
        write_results(rows, commit=commit)
    return int(not all(row.result.startswith("succeeded") for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
