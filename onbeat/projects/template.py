"""The texts of a new project, by their paths in it."""

from __future__ import annotations

SPEC = """
# Every key: docs/configuration.md of Onbeat. Paths start at this project's folder, since it has configs/.
name = "my job"
iterations = 20
seed = 0

[model]
path = "configs/models/two-digit-addition"   # any Hugging Face causal LM: config.json, tokenizer, safetensors

[dataset]
type = "jsonl"
train_path = "data/sums.jsonl"          # {"prompt": "...", "reference": "..."} on each line; the last two are held out

[reward]
components = [{ type = "plugin", file = "rewards.py", entry_point = "right_digits" }]

[rollout]
batches_per_iteration = 4
prompts_per_batch = 2
group_size = 16                         # completions of each prompt
sampling = { max_new_tokens = 5 }

[optimizer]
learning_rate = 3e-4

[evaluation]
num_prompts = 2
prompts_per_batch = 2
"""

REWARDS = '''
"""How good a completion is. A reward gets those of prompt, completion, reference and others that it names."""


def right_digits(completion: str, reference: str) -> float:
    """Returns the share of digits that are right in their places, from 0 to 1."""
    right = sum(mine == asked for mine, asked in zip(completion, reference))
    return right / max(len(completion), len(reference))
'''

TEST = '''
"""python -m pytest"""

import json
from pathlib import Path

from rewards import right_digits


def test_right_digits_count_in_their_places():
    assert right_digits("64", "64") == 1.0
    assert right_digits("74", "64") == 0.5
    assert right_digits("", "64") == 0.0
    assert right_digits("645", "64") == 2 / 3


def test_each_answer_of_the_data_has_the_whole_reward():
    rows = [json.loads(line) for line in Path("data/sums.jsonl").read_text().splitlines()]
    assert [right_digits(row["reference"], row["reference"]) for row in rows] == [1.0] * len(rows)
'''

PROGRAM = '''
"""python train.py [ITERATIONS]"""

import sys

import onbeat

changes = {"iterations": int(sys.argv[1])} if len(sys.argv) > 1 else {}

with onbeat.train("configs/job.toml", **changes) as run:
    for iteration in run:
        print(iteration.number, f"{iteration.reward_mean:.3f}")
    print("verified" if run.verify().verified else "not verified")
    run.save_model(f"trained-{run.id}")
'''

README = """
# My job

file | has
---|---
`configs/job.toml` | the job
`rewards.py`, `test_rewards.py` | its reward, and the reward's test
`data/sums.jsonl` | ten rows, two of them held out
`configs/models/` | the model that is trained
`train.py` | trains, and saves what was trained

```console
$ python -m pytest                          # the reward does what it says
$ python train.py                           # a stack for this job alone, about a minute
$ onbeat demo --spec configs/job.toml       # the same, with a live panel, curves and a verdict
$ onbeat up                                 # or a stack that stays, and in another terminal:
$ onbeat submit configs/job.toml --wait
```

Next: put your rows into `data/`, your model into `configs/models/`, and write your reward. A look at a few iterations
shows whether rewards rise, and whether they differ within a group: equal ones teach nothing.
"""

FILES = {
    "README.md": README,
    "configs/job.toml": SPEC,
    "rewards.py": REWARDS,
    "test_rewards.py": TEST,
    "train.py": PROGRAM,
}
