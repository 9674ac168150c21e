"""Every path of a spec is found wherever it stands in it."""

from __future__ import annotations

import tomllib

from contracts.spec.paths import with_paths
from contracts.spec.reading import spec_of_values

SPEC = """
name = "paths"
iterations = 1
model = { path = "m" }
rollout = { batches_per_iteration = 1, prompts_per_batch = 2, group_size = 2 }
reward = { components = [{ type = "exact" }, { type = "plugin", entry_point = "f", file = "r.py" }] }
environment = { name = "Game", file = "e.py" }
evaluation = { sets = [{ name = "held", num_prompts = 1, dataset = { type = "jsonl", train_path = "h.jsonl" } }] }

[dataset]
type = "mixture"
sources = [
    { name = "a", dataset = { type = "jsonl", train_path = "a.jsonl", evaluation_path = "b.jsonl" } },
    { name = "b", dataset = { type = "huggingface", train_path = "p/train" } },
]

[[stages]]
name = "teacher"
type = "teacher"
models = { a = "t" }
"""
FIELDS = {
    "model.path": "m",
    "reward.components[1].file": "r.py",
    "environment.file": "e.py",
    "evaluation.sets[0].dataset.train_path": "h.jsonl",
    "dataset.sources[0].dataset.train_path": "a.jsonl",
    "dataset.sources[0].dataset.evaluation_path": "b.jsonl",
    "dataset.sources[1].dataset.train_path": "p/train",
    "stages[0].models.a": "t",
}


def test_each_path_of_a_spec_is_changed_by_its_field_and_nothing_else_is() -> None:
    spec = spec_of_values(tomllib.loads(SPEC))
    fields: dict[str, str] = {}

    def change(field: str, path: str) -> str:
        fields[field] = path
        return f"/models/{path}"

    changed = with_paths(spec, change)
    assert fields == FIELDS
    again: dict[str, str] = {}
    assert with_paths(changed, lambda field, path: again.setdefault(field, path)) == changed
    assert again == {field: f"/models/{path}" for field, path in FIELDS.items()}
    assert with_paths(changed, lambda _, path: path.removeprefix("/models/")) == spec


def test_a_table_that_names_its_files_by_content_keeps_its_paths() -> None:
    values = tomllib.loads(SPEC)
    values["model"]["file_digests"] = {"m/config.json": "0" * 64}
    spec = spec_of_values(values)
    assert with_paths(spec, lambda _, path: f"/models/{path}").model == spec.model
