"""Every family of models, tried: `python -m tests.family_runs [FAMILY …]`, which `make families` runs.

    a tiny random folder of each family ─▶ a column each, a function ─▶ tests/family_results.json ─▶ docs/models.md

A column answers ✔, *refused* where Onbeat says by name that a family can't have something and what to do, or ✘ for
everything else. The exit status is 1 where there is a ✘. With families named, theirs alone are tried, and nothing is
written.
"""

from __future__ import annotations

import datetime
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from consumer.gradient.assembly import make_learner
from consumer.gradient.learner import Learner, OptimizerStep
from consumer.gradient.saved_state import adapter_state
from consumer.model.adapters import left_frozen
from consumer.model.checkpoint import read_checkpoint, write_checkpoint
from contracts.encoding.wire import decode_json, encode_json
from contracts.errors import InvalidInput, first_line
from contracts.run_folder import RunFolder
from contracts.settings import StackSettings
from onbeat.export.export import export
from onbeat.weights.hashing import tensors_digest
from tests.builders import job_spec, rollout_batch
from tests.families import ALL_FAMILIES, MULTI_MODAL, family_folder

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "family_results.json"
PACKAGES = ("transformers", "torch", "peft")
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
PROMPTS = ([5, 6, 7], [8])
MATMUL = "onednn"
"""As the gateway chooses for a job on most CPUs: an architecture may write on a product in place, for example, which
torch's own layer takes and ours may not."""
LOGITS_TOLERANCE = 1e-4
"""Experts' products have other last bits where their weights lie elsewhere in memory."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What a column says of a family."""

    result: Literal["yes", "padded", "refused", "no"]
    text: str = ""
    """What holds, the refusal with its cure, or the first line of what went wrong."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A family, as it was tried."""

    family: str
    architecture: str
    """The class that is trained; "" where none is."""
    cells: dict[str, Cell]
    """By the names of COLUMNS."""


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """A run over all families."""

    date: str
    commit: str
    versions: dict[str, str]
    rows: list[Row]


class Trial:
    """A family under trial, in a folder of its own: the columns of its row share what they made."""

    def __init__(self, family: str, root: Path) -> None:
        self.family = family
        self.root = root
        self.folder = family_folder(root, family)
        self.settings = StackSettings(run_root=str(root / "runs"), model_root=str(root))
        self.learner: Learner | None = None

    def make(self, **changes: Any) -> Learner:
        """Makes the numerics of a job on the family."""
        options = {"model__matmul": MATMUL, "trainer__packing": "padded", "optimizer__learning_rate": 0.01} | changes
        return make_learner(self.settings, job_spec(model__path=self.family, **options))

    @property
    def trained(self) -> Learner:
        """The learner with padded rows; `trains` moves it first."""
        if self.learner is None:
            self.learner = self.make()
        return self.learner


def step(learner: Learner, iteration: int = 0) -> float:
    """Trains a batch and steps; returns the gradient's norm."""
    trained = learner.train(rollout_batch())
    assert trained.stats.num_tokens > 0
    return learner.step(OptimizerStep(iteration=iteration, divisor=8.0, learning_rate=0.01, is_last=True))


def digest_of(learner: Learner) -> str:
    return tensors_digest(learner.policy.weights())


def save(learner: Learner, folder: RunFolder) -> Path:
    """Writes the checkpoint after iteration 0."""
    place = folder.checkpoint_after(0)
    write_checkpoint(
        place,
        job_id=folder.job_id,
        iteration=0,
        weights_digest=digest_of(learner),
        save=learner.save,
        adapters=adapter_state(learner.policy),
    )
    return place


def trains(trial: Trial) -> str:
    """Tries a step of all weights; what it says are the tensors that no gradient reaches."""
    learner = trial.trained
    before = {name: tensor.clone() for name, tensor in learner.policy.weights().items()}
    norm = step(learner)
    assert 0.0 < norm < float("inf"), f"the gradient's norm is {norm}"
    after = dict(learner.policy.weights().items())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert not moved & learner.policy.out_of_reach
    assert moved, "no tensor has moved"
    left = sorted(learner.policy.out_of_reach)
    words = ["its text"] if trial.family in MULTI_MODAL else []
    if left:
        words.append(f"no gradient reaches {len(left)} tensors, as {left[0]}")
    return "; ".join(words)


def shares_prompts(trial: Trial) -> Cell:
    """Tries the layout that a job has by default, and says which one the trainer chose for the model."""
    learner = trial.make(trainer__packing="shared_prompt")
    assert learner.train(rollout_batch()).stats.num_tokens > 0
    passes = learner.policy.passes
    assert passes is not None
    if passes.packing == "padded":
        return Cell(result="padded", text=passes.reason)
    if passes.packing == "prompt_cache":
        return Cell(result="yes", text="by the model's cache")
    return Cell(result="yes")


def resumes(trial: Trial) -> str:
    """Tries a checkpoint: a successor has its weights, and its next step the same bits."""
    learner = trial.trained
    folder = RunFolder(trial.root / "runs", "resumed")
    place = save(learner, folder)
    successor = trial.make()
    successor.restore(read_checkpoint(place))
    assert digest_of(successor) == digest_of(learner), "the weights are others"
    step(learner, 1)
    step(successor, 1)
    assert digest_of(successor) == digest_of(learner), "the next step has other bits"
    return ""


def adapts(trial: Trial) -> str:
    """Tries a step of adapters in all linear layers; what it says are the matrices that none reaches."""
    learner = trial.make(trainer__lora={"rank": 2})
    before = digest_of(learner)
    step(learner)
    assert digest_of(learner) != before, "no tensor has moved"
    adapters = learner.policy.adapters
    assert adapters is not None
    return left_frozen(learner.policy.model, adapters.layers)


def samples(trial: Trial) -> str:
    """Tries the transformers engine: it loads a version of the policy, and samples groups with it.

    What it says is how the engine decodes several batches.
    """
    from tests.contract.engine_rigs import transformers_rig

    tensors = {name: tensor.numpy().copy() for name, tensor in trial.trained.policy.weights().items()}
    rig = transformers_rig(trial.family, trial.root, trial.root / "sampled")
    try:
        completions = rig.generate(rig.load(1, tensors), PROMPTS)
        decoding = getattr(rig.engine, "decoding", "")
    finally:
        rig.close()
    assert all(completion.num_tokens > 0 for group in completions for completion in group)
    return decoding


def exports(trial: Trial) -> str:
    """Tries an export: it loads as the folder's own class, with all its tensors, and computes what the policy does."""
    learner = trial.trained
    folder = RunFolder(trial.root / "runs", "exported")
    save(learner, folder)
    target = trial.root / "export"
    export(folder, learner.spec, target, model_folder=trial.folder, versions=None)
    auto: Any = AutoModelForImageTextToText if trial.family in MULTI_MODAL else AutoModelForCausalLM
    model, loading = auto.from_pretrained(target, output_loading_info=True)
    lost = sorted([*loading["missing_keys"], *loading["unexpected_keys"]])
    assert not lost, f"{lost[0]} isn't where transformers looks for it"
    gap = _gap(model.eval(), learner.policy.model)
    assert gap < LOGITS_TOLERANCE, f"its logits are {gap:.1e} away from the policy's"
    return ""


@torch.no_grad()
def _gap(model: Any, policy: Any) -> float:
    expected: Tensor = policy(input_ids=TOKENS, use_cache=False).logits
    actual: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return float((actual - expected).abs().max() / expected.abs().max())


COLUMNS: dict[str, Callable[[Trial], str | Cell]] = {
    "trains": trains,
    "shares prompts": shares_prompts,
    "samples": samples,
    "adapts": adapts,
    "resumes": resumes,
    "exports": exports,
}
"""Name → the function that tries it: it returns a cell, or what there is to say where it holds, and raises where the
family can't have it."""


def cell_of(trial: Trial, column: Callable[[Trial], str | Cell]) -> Cell:
    """Tries one column."""
    try:
        cell = column(trial)
        return cell if isinstance(cell, Cell) else Cell(result="yes", text=cell)
    except InvalidInput as error:
        # A refusal is complete with its cure.
        return Cell(result="refused" if error.cure else "no", text=first_line(error))
    except Exception as error:
        # A row of the table is red, whatever a family raises.
        return Cell(result="no", text=f"{type(error).__name__}: {first_line(error)}")


def row_of(family: str) -> Row:
    """Tries all columns of a family."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(family, Path(folder))
        cells = {name: cell_of(trial, column) for name, column in COLUMNS.items()}
        architecture = type(trial.learner.policy.model).__name__ if trial.learner is not None else ""
    # The folder's name is another at each run.
    shown = {
        name: msgspec.structs.replace(cell, text=cell.text.replace(f"{folder}/", "")) for name, cell in cells.items()
    }
    return Row(family=family, architecture=architecture, cells=shown)


def read_results() -> Results:
    return decode_json(RESULTS.read_bytes(), Results)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(families: list[str]) -> int:
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for family in families or ALL_FAMILIES:
        started_s = time.monotonic()
        row = row_of(family)
        rows.append(row)
        marks = " ".join(f"{name}: {cell.result}" for name, cell in row.cells.items())
        say(f"{family:18} {time.monotonic() - started_s:5.1f} s  {marks}")
        for name, cell in row.cells.items():
            if cell.result == "no":
                say(f"    {name}: {cell.text}")
    if not families:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        results = Results(
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            commit=commit.stdout.strip()[:12],
            versions={package: version(package) for package in PACKAGES},
            rows=rows,
        )
        text = json.dumps(json.loads(encode_json(results)), indent=1, ensure_ascii=False)
        RESULTS.write_text(f"{text}\n")
    return int(any(cell.result == "no" for row in rows for cell in row.cells.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
