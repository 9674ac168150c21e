"""docs/memory.md has the bytes that `onbeat doctor` counts."""

from __future__ import annotations

import re

from docs.make_memory import PAGE, memory_page
from onbeat.doctor.model.known import sizes_table


def test_the_page_is_made_of_what_doctor_counts() -> None:
    assert PAGE.read_text() == memory_page(), "python -m docs.make_memory > docs/memory.md"


def test_each_key_leaves_a_model_less_to_keep_and_adapters_less_than_all() -> None:
    rows = sizes_table(["Qwen3-0.6B"])
    whole, adapters = rows
    peaks = [step.peak_bytes for step in whole.steps]
    assert peaks == sorted(peaks, reverse=True)
    assert len(whole.steps) == 5
    assert adapters.steps[0].peak_bytes < peaks[0]
    # 596 M parameters: 12 bytes of each are on the host, beside activations.
    assert whole.steps[3].elsewhere_bytes == 12 * 596_049_920


def test_the_example_of_choose_has_the_numbers_of_the_table() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("Qwen3-8B | ")]
    numbers = {"all weights": rows[0], "adapters": rows[1]}
    example = (PAGE.parent / "choose.md").read_text().partition("as an example.**")[2].partition("The gateway")[0]
    shown = [line.split(" | ") for line in example.splitlines() if line.startswith(("all weights", "adapters"))]
    assert len(shown) == 4
    for trained, keys, peak in shown:
        assert peak in numbers[trained], f"docs/choose.md: {keys}"
        for number in re.findall(r"(\d+\.\d+) GiB", keys):
            assert number in numbers[trained][-1]
