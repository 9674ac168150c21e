"""docs/memory.md, made of the bytes that `onbeat doctor` counts: `python -m docs.make_memory > docs/memory.md`.

known_models/NAME/config.json ─▶ onbeat/doctor/model/known.py ─▶ one page
"""

from __future__ import annotations

import sys
from pathlib import Path

from onbeat.doctor.model.known import TABLE_JOB, sizes_table
from onbeat.doctor.model.view import COLUMN_NAMES, sizes_cells

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "memory.md"
INTRO = """\
# What fits on your card

This page is generated: `python -m docs.make_memory > docs/memory.md`. `onbeat doctor --sizes` prints the same table.
`onbeat doctor MODEL --spec my-job.toml` counts the bytes of a model and a job of yours, with the same keys one by one.

The table has what a trainer needs on a GPU at its peak, in GiB: in bfloat16, with AdamW and exact sums, in passes of
8,192 tokens. Each column has the keys of those before it. **No key changes a bit of the weights**, but for adapters,
which are another job. The numbers are counted from shapes. Activations are an estimate that is right within a factor
of two, and nothing above 1.5 B has been run. For a model of 7 B take the rows of Qwen3-8B;
[choose](choose.md#memory) goes through them, and says which combinations of keys are refused.

"""
KEYS: dict[str, tuple[str, str]] = {
    "trainer.gradient_checkpointing = true": (
        "Only the inputs of layers wait for the backward pass.",
        "a third more time",
    ),
    "trainer.free_gradients = true": (
        "The gradient of a parameter goes as soon as the backward pass has added it to the sums. On a CPU the memory "
        "of the sums goes back to the machine as they are stepped on.",
        "a call for each parameter and pass",
    ),
    'optimizer.offload = "host"': (
        "The float32 weights and the moments, 12 bytes a parameter, are in the host's memory between two steps. A step "
        "brings a group of parameters at a time, 256 MiB or the largest tensor.",
        "for each step, copies of 12 bytes a parameter to the GPU and back",
    ),
    'optimizer.offload = "disk"': (
        "The same, in a file of the run root without a name, which ends with its process. It is the form for a CPU, "
        'whose memory is the host\'s: `"host"` has no effect there, and the log has a line about it.',
        "for each step, the disk's time to read and write 12 bytes a parameter",
    ),
    "trainer.offload_activations = true": (
        "What a pass saves for its backward pass waits in page-locked memory of the host, but for pieces below 1 MiB "
        "and those with gaps. It has no effect on a CPU, and the log has a line about it. "
        '`sharding = "fsdp"` refuses it.',
        "the copies, which the pass waits for",
    ),
    "trainer.lora.rank = 16": (
        "Adapters are trained. This is another job.",
        "[adapters](adapters.md) says what they learn",
    ),
}
"""A key → what it does, and what it costs."""
END = """
If a generator shares the card, its weights and its cache come on top. With `schedule = "colocated"`
the trainer gives the memory of its sums, 8 bytes a parameter, back while generators sample. Any key can be set on the
command line, too: `onbeat submit my-job.toml --set optimizer.offload=host`.

## Measured

On two CPU cores a trainer of 0.6 B parameters, whole, with `optimizer.offload = "disk"` and `free_gradients`, has 7.4
GB of memory of its own at its peak: `python -m benchmarks memory --alone`,
[memory](../benchmarks/results/README.md#memory).

The copies to and from a GPU have not been run on a GPU. In the tests a CPU plays the GPU for activations, and a state
on disk goes the same way as one on the host.
"""


def memory_page() -> str:
    """Returns the whole page, ending in one line break."""
    heads = ["model", "trained", "plain", *(f"`{name}`" for name in COLUMN_NAMES.values()), "then on the host"]
    lines = [" | ".join(heads).replace("`+ ", "+ `"), "|".join(["---"] * len(heads))]
    lines += [" | ".join([row.model, row.trained, *sizes_cells(row)]) for row in sizes_table()]
    job = ", ".join(f"`{key}`" for key in TABLE_JOB)
    keys = ["key | what it does | what it costs", "---|---|---"]
    keys += [f"`{key}` | {does} | {costs}" for key, (does, costs) in KEYS.items()]
    table = "\n".join(lines)
    return f"{INTRO}{table}\n\nThe job has the defaults and {job}.\n\n" + "\n".join(keys) + f"\n{END}"


def main() -> None:
    sys.stdout.write(memory_page())


if __name__ == "__main__":
    main()
