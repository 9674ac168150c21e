"""Makes models/chain-sums-train.jsonl and models/chain-sums-held-out.jsonl: what configs/smollm2-sft.toml learns.

    python configs/models/make_chain_sums.py

A row has a question of configs/smollm2-chain-sum.toml and, of those that it trains, the bare answer as completion; the
held-out ones are that job's own, in its order. Equal bytes each time; the files are not committed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from contracts.spec.root import SpecRoot
from onbeat.client.spec_file import load_spec
from onbeat.data.datasets.loading import job_examples
from onbeat.data.prompts.examples import Example

REPOSITORY = Path(__file__).resolve().parents[2]
SPEC = REPOSITORY / "configs/smollm2-chain-sum.toml"
NUM_ROWS = 256
"""These first ones of the pool show the form of an answer, and leave arithmetic to learn."""


def write_rows(path: Path, examples: Sequence[Example]) -> None:
    rows = [
        {
            "prompt": example.question,
            "reference": example.reference,
            "completion": example.reference,
            "task_entry": example.task_entry,
        }
        for example in examples
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    examples = job_examples(load_spec(SPEC, ()), SpecRoot(REPOSITORY))
    write_rows(REPOSITORY / "models/chain-sums-train.jsonl", examples.train[:NUM_ROWS])
    write_rows(REPOSITORY / "models/chain-sums-held-out.jsonl", examples.evaluation)


if __name__ == "__main__":
    main()
