"""docs/configuration.md says what the config types say, and says it of every key."""

from __future__ import annotations

import re
import tomllib

import msgspec

from contracts.encoding.docstrings import field_docstrings
from contracts.encoding.wire import convert
from contracts.rewards import ExactReward, LengthReward
from contracts.spec.job import JobSpec, RolloutSpec
from contracts.spec.rules import RULES
from docs.make_configuration import PAGE, configuration_page, field_of, undocumented_fields, without_places


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text() == configuration_page(), "python -m docs.make_configuration > docs/configuration.md"


def test_every_config_field_has_a_docstring_under_it() -> None:
    assert undocumented_fields() == []


def test_a_docstring_belongs_to_the_field_above_it_and_is_inherited() -> None:
    assert field_docstrings(RolloutSpec)["group_size"] == "G, the number of completions of each prompt."
    assert field_docstrings(ExactReward).keys() == {"weight", "on_unscorable", "sources", "ignore_case"}


def test_each_member_of_a_union_has_its_own_table() -> None:
    page = configuration_page()
    for tag in ("addition", "jsonl", "exact", "plugin"):
        assert f'### `type = "{tag}"`' in page
    scorers = page.partition("## `reward.components`")[2].partition("\n## ")[0]
    shared, *sections = scorers.split("### `type = ")
    length = next(section for section in sections if section.startswith('"length"'))
    assert all((f"| `{name}` |" in shared) != (f"| `{name}` |" in length) for name in LengthReward.__struct_fields__)


def test_every_section_of_a_job_has_a_heading() -> None:
    page = configuration_page()
    tables = [field.name for field in msgspec.structs.fields(JobSpec) if f"| `{field.name}` | table |" in page]
    assert {"model", "rollout", "optimizer", "limits"} <= set(tables)
    assert all(f"## `[{name}]`" in page for name in tables)


def test_the_job_in_the_page_of_the_start_is_a_valid_spec() -> None:
    block = re.search(r"```toml\n(name = .*?)```", (PAGE.parent / "commands.md").read_text(), re.DOTALL)
    assert block is not None
    assert convert(tomllib.loads(block[1]), JobSpec).rollout.prompts_per_iteration == 64


def test_every_rule_of_the_judge_has_a_row_with_its_key_and_no_open_place() -> None:
    section = configuration_page().partition("\n## Rules\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    for rule in RULES:
        key, says = field_of(rule.field), without_places(rule.says).replace("|", "\\|")
        assert any(f"`{key}`" in row and f"| {says} |" in row for row in rows), rule.field
    assert not re.search(r"\{(?:spec|place|field)", section)
    assert (
        "| `DATASET.chat` | has no effect with an environment: ….renderer formats its messages | leave it out |" in rows
    )
    assert "| `stages[i].prompt` | never shows the completion | write {completion} in it |" in rows
