"""docs/models.md, made of the last run over all families: `python -m docs.make_models > docs/models.md`.

tests/family_results.json, which `make families` writes ─▶ a row for each family ─▶ one page
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.family_runs import COLUMNS, Cell, Results, Row, read_results

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
MARKS = {"yes": "✔", "padded": "padded", "refused": "refused", "no": "✘"}
INTRO = """\
# Which models

This page is generated from a run over all families: `make families`, which takes some minutes. Each family is a tiny
model with random weights. Whatever transformers loads as a causal language model can be named in `model.path`; these
are the families that were tried.

- **trains**: a step of all weights, in padded rows.
- **shares prompts**: the layout that a job has by default, in which a prompt goes through once for its group
  ([`trainer.packing`](hardware.md#shared-prompts)). *Padded* means that the trainer found no way to share prompts
  for this family, and makes a row of each completion.
- **samples**: the transformers engine loads a version and samples with it. Below the table stands how it decodes
  several batches: they [share steps](sampling.md#shared-steps) if the engine's self-test finds that a row has the same
  bits in any company, and go one at a time otherwise.
- **adapts**: a step of [adapters](adapters.md) in all linear layers.
- **resumes**: a successor goes on from a checkpoint with the same bits.
- **exports**: an export loads as the class of the model's folder, and computes what the policy computes.

✔ holds. *Refused* means that a job that asks for it ends within seconds, with the reason and the cure, which stand
below the table. ✘ is a fault of Onbeat's or of transformers', with the words that it ends with.
"""
RULES = """\
## What holds for your folder

`onbeat doctor MODEL` makes the trials of a trainer and of a generator, by their own functions, before you submit a job:

```console
$ onbeat doctor configs/models/two-digit-addition
```

MODEL is a folder, or a name of the hub that was fetched (`hub:OWNER/NAME`). A relative path starts at the current
folder, else at the model root. The answers are for a job with the defaults, or for the one of `--spec FILE`, whose
files are found [as when it is submitted](commands.md#where-paths-start); `--set KEY.PATH=VALUE`
changes keys, such as `--set model.dtype=bfloat16`. Each line is `ok`, `warn`, or `bad` where such a job would be
refused. The exit code is 1 if any line is `bad`. With `--json` it prints one JSON object.

line | says
---|---
`job` | keys of the job that the model can't have; there is no such line if it can have all
`files` | the class that is trained, and its size, or why no trainer could load the folder
`loads` | whether all tensors are there, and what the trials were made on
`trains` | which tensors [no gradient reaches](#tensors-that-no-gradient-reaches)
`lays out` | how a prompt is shared by its completions, or why it isn't
`samples` | how the transformers engine decodes, with as many threads as here
`adapts` | how many layers take adapters, and which share of the parameters none reaches
`shards` | whether ranks can share the model by rows
`exports` | how many tensors an export has, by whose names
`vLLM` | the class and the names that vLLM is asked for; vLLM itself isn't started
`memory` | the bytes that a rank of the trainer keeps, and needs at its peak; a table below has them one by one

A model of up to 2 GiB is loaded. A larger one isn't, unless you say `--load`: names and bytes come from its config and
from the heads of its files. The trials of it are made on a *twin* with random weights: the same class and width, with a
few of its layers, experts and tokens. The line `loads` says which. Where no twin can be made, the line `trains` says
that nothing was tried. A twin doesn't tell whether batches share steps, which depends on all shapes of the model; a
generator finds it out when it has loaded the model.

A folder that has a config.json and no weights, as of a model that you are yet to fetch or to make, is answered for by
its shapes: size, adapters, sharding and memory. The line `files` says so, by `warn`, and nothing is tried. A job needs
the weights and the tokenizer's files.

## Folders with pictures or sound

A multi-modal folder, such as one of Gemma 3 or Qwen3-VL, is trained by its *text*. The trainer says so in one line.
The towers for pictures and sound take no memory while the job trains and are in no version; an export takes them from
the folder as they are, so that it loads as the folder's own class. Prompts have no pictures.

## Tensors that no gradient reaches

When a trainer loads a model, it sends sixteen tokens through it and follows the graph of the logits back to the
weights. A tensor is *out of reach* where no path leads to it, nor to a tensor of the same name but for the numbers
behind the layer's: the indexer of a sparse attention, or a bias that only routes tokens. An expert that none of the
sixteen tokens chose is within reach, since others of its layer are. The rule depends on the architecture alone, so it
gives the same answer on each rank and after a resume.

Tensors out of reach are neither summed nor stepped nor decayed, have no state in the optimizer, and get no adapters.
Should a later batch have a gradient for one after all, the job ends and names it.

## Rows with padding

Where a job takes padded rows, since its spec says `trainer.packing = "padded"` or since the model can't share prompts,
the trainer sends a short row through the model next to a long one, and compares it with the short row by itself. It
refuses a model that gives other states for a padded row: DeepSeek-V4, whose attention compresses positions in blocks,
RWKV and RecurrentGemma. It also refuses an encoder, such as BERT, whose tokens see those behind them.

## Folders that no trainer can load

The gateway looks at the files of `model.path` before it accepts a job, and a trainer looks again. It refuses, in one
line with the cure:

- a folder without a tokenizer, or with one whose ids exceed the embedding;
- an architecture that the installed transformers doesn't know, or that needs code from the folder: it is never run;
- quantized weights, since a step is smaller than what they tell apart;
- pickled weights, and GGUF;
- an index that names a file that is missing, and a file that is cut off;
- weights that lack tensors of the model, or have other shapes than config.json says (the trainer finds these).
"""


def models_page(results: Results) -> str:
    """Returns the whole page, ending in one line break."""
    versions = ", ".join(f"{name} {number}" for name, number in results.versions.items())
    tried = f"Tried on {results.date} with {versions}, at commit `{results.commit}`: {len(results.rows)} families.\n"
    names = list(COLUMNS)
    head = [
        " | ".join(["family", "class that is trained", *names]),
        "|".join(["---"] * (len(names) + 2)),
    ]
    rows = [_row(row, names) for row in results.rows]
    parts = [INTRO, tried, "\n".join([*head, *rows]) + "\n", "## Why\n", *_reasons(results.rows, names), RULES]
    return "\n".join(parts)


def _row(row: Row, names: Iterable[str]) -> str:
    marks = [MARKS[row.cells[name].result] for name in names]
    architecture = f"`{row.architecture}`" if row.architecture else "none"
    return " | ".join([f"`{row.family}`", architecture, *marks])


def _reasons(rows: Iterable[Row], names: Iterable[str]) -> Iterator[str]:
    """Yields a section for each column: each text once, with the families that have it."""
    for name in names:
        families_of: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            cell = row.cells[name]
            if cell.text:
                families_of.setdefault((MARKS[cell.result], _plain(cell)), []).append(f"`{row.family}`")
        if not families_of:
            continue
        lines = [f"- {', '.join(families)}: {mark} {text}" for (mark, text), families in families_of.items()]
        yield f"### {name.capitalize()}\n"
        yield "\n".join(lines) + "\n"


def _plain(cell: Cell) -> str:
    """Returns a text as one of Markdown: code, in which no star or underscore has a meaning."""
    return f"`{cell.text.replace('`', chr(39))}`"


if __name__ == "__main__":
    sys.stdout.write(models_page(read_results()))
