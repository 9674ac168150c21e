"""Finds the files of a split in a data set's repository, as the `datasets` library would choose them.

    README.md with `configs` ─▶ the patterns of the configuration ─▶ files of each split, in order
    README.md without        ─▶ folders and names of files: train, validation, test, or all are train

Only text is read: parquet, JSON lines and CSV. The code of a data set is never run, and the metadata are a stranger's:
each step takes a time that is bounded by their length.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Any

from contracts.errors import InvalidInput
from contracts.hub_names import DEFAULT_CONFIG

SUFFIXES = {".parquet": ".parquet", ".jsonl": ".jsonl", ".ndjson": ".jsonl", ".json": ".jsonl", ".csv": ".csv"}
"""End of a file's name in a repository → the form that its reader goes by. A .json has a JSON object a line."""
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split → words of folders and files that stand for it."""
METADATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
"""JSON that describes a data set."""
MOST_CONFIGS = 4096
MOST_PATTERNS = 256
FIELD = "path"
CONVERTED = "the hub converts most data sets: try @refs/convert/parquet behind the name"
FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?\n)---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


def files_of_split(
    names: Sequence[str], metadata: Mapping[str, Any], *, config: str, split: str, what: str
) -> list[str]:
    """Returns the names of the files that are a split, in the order of their rows.

    Args:
        names: All files of the repository.
        metadata: The head of its README.md; {} where it has none.
        config: The configuration; "" for the only one, or the default.
        split: The split.
        what: The data set's name, for the refusal.

    Raises:
        InvalidInput: There is no such configuration or split, or its files are of a form that isn't read.
    """
    tables = sorted(name for name in names if _suffix(name) in SUFFIXES and not _is_metadata(name))
    patterns = _patterns(metadata, config=config, what=what)
    if patterns is None:
        by_split = _by_words(tables, config=config, what=what)
    else:
        by_split = {name: _matching(tables, of_split) for name, of_split in patterns.items()}
    chosen = _of_one_form(by_split.get(split, []))
    if chosen:
        return chosen
    if not tables:
        others = sorted({_suffix(name) for name in names if _suffix(name)})
        raise InvalidInput(
            f"{what} has no file of parquet, JSON lines or CSV: it has {', '.join(others[:8]) or 'none'}",
            field=FIELD,
            cure=CONVERTED,
        )
    splits = [name for name, of_split in by_split.items() if of_split]
    raise InvalidInput(
        f"{what} has no split `{split}`", field=FIELD, cure=f"its splits are: {', '.join(splits[:16]) or 'none'}"
    )


def front_matter(readme: str) -> str:
    """Returns the YAML at the head of a README.md; "" where there is none."""
    head = FRONT_MATTER.match(readme)
    return head[1] if head else ""


def _suffix(name: str) -> str:
    stem = name.rpartition("/")[2]
    return f".{stem.rpartition('.')[2].lower()}" if "." in stem.lstrip(".") else ""


def _is_metadata(name: str) -> bool:
    """Returns True for JSON that describes a data set and has no rows."""
    stem = name.rpartition("/")[2]
    return stem.startswith(".") or stem in METADATA


def _patterns(metadata: Mapping[str, Any], *, config: str, what: str) -> dict[str, list[str]] | None:
    """Returns split → patterns of files; None where the metadata name no configuration."""
    listed = metadata.get("configs")
    if not isinstance(listed, list) or not listed:
        return None
    configs: dict[str, Mapping[str, Any]] = {}
    for table in listed[:MOST_CONFIGS]:
        if isinstance(table, Mapping) and isinstance(table.get("config_name", "default"), str):
            configs[table.get("config_name", "default")] = table
    chosen = config
    # What a spec without a configuration has is kept as the default one, whatever its name.
    if not chosen or (chosen == DEFAULT_CONFIG and chosen not in configs):
        defaults = [name for name, table in configs.items() if table.get("default") is True]
        if len(configs) == 1:
            defaults = list(configs)
        elif "default" in configs:
            defaults = defaults or ["default"]
        chosen = defaults[0] if defaults else ""
    if chosen not in configs:
        problem = f"{what} has no configuration `{chosen}`"
        if not chosen:
            problem = f"{what} has several configurations, and none is named"
        cure = f"set config to one of: {', '.join(list(configs)[:16])}"
        raise InvalidInput(problem, field=FIELD, cure=cure)
    return _patterns_of_config(configs[chosen])


def _patterns_of_config(table: Mapping[str, Any]) -> dict[str, list[str]]:
    folder = table.get("data_dir")
    prefix = f"{folder.strip('/')}/" if isinstance(folder, str) and folder.strip("/") else ""
    files = table.get("data_files")
    if files is None:
        return {"train": [f"{prefix}**"]}
    by_split: dict[str, list[str]] = {}
    if isinstance(files, Mapping):
        pairs = list(files.items())
    elif isinstance(files, list) and all(isinstance(entry, Mapping) for entry in files):
        pairs = [(entry.get("split", "train"), entry.get("path")) for entry in files]
    else:
        pairs = [("train", files)]
    for split, paths in pairs[:MOST_PATTERNS]:
        texts = paths if isinstance(paths, list) else [paths]
        own = [f"{prefix}{path.removeprefix('./')}" for path in texts[:MOST_PATTERNS] if isinstance(path, str)]
        by_split.setdefault(str(split), []).extend(own)
    return by_split


def _matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Returns the names that match, in the order of the patterns and then of the names, each once."""
    chosen: dict[str, None] = {}
    for pattern in patterns:
        parts = pattern.split("/")
        chosen |= dict.fromkeys(name for name in names if _matches(name.split("/"), parts))
    return list(chosen)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns True where the parts of a path match those of a pattern; `**` stands for any number of them."""
    reached = {0}  # places in the pattern that the parts so far lead to
    for part in parts:
        following: set[int] = set()
        for place in _after_double_stars(reached, pattern):
            if place == len(pattern):
                continue
            if pattern[place] == "**":
                following.add(place)
            elif fnmatch.fnmatchcase(part, pattern[place]):
                following.add(place + 1)
        reached = following
    return len(pattern) in _after_double_stars(reached, pattern)


def _after_double_stars(places: set[int], pattern: Sequence[str]) -> set[int]:
    """Returns the places, and those behind each `**`, which may stand for nothing."""
    reached = set(places)
    for place in sorted(places):
        while place < len(pattern) and pattern[place] == "**":
            place += 1
            reached.add(place)
    return reached


def _by_words(names: Sequence[str], *, config: str, what: str) -> dict[str, list[str]]:
    """Returns split → files by the words of their folders and names; all are train where no word says otherwise.

    A configuration without metadata is a folder, as in the hub's own conversion to parquet.
    """
    inside = [name for name in names if name.startswith(f"{config}/")] if config else list(names)
    if config and not inside and config != DEFAULT_CONFIG:
        folders = sorted({name.partition("/")[0] for name in names if "/" in name})
        raise InvalidInput(
            f"{what} has no configuration `{config}`",
            field=FIELD,
            cure=f"set config to one of: {', '.join(folders[:16])}" if folders else "leave config out",
        )
    inside = inside or list(names)
    by_split: dict[str, list[str]] = {}
    for name in inside:
        words = re.split(r"[^A-Za-z0-9]+", name.removeprefix(f"{config}/").rpartition(".")[0].lower())
        splits = [split for split, synonyms in SPLIT_WORDS.items() if any(word in synonyms for word in words)]
        by_split.setdefault(splits[0] if splits else "", []).append(name)
    unnamed = by_split.pop("", [])
    return by_split or {"train": unnamed}


def _of_one_form(names: Sequence[str]) -> list[str]:
    """Returns the files of one form: the same rows often are there as parquet and as JSON lines."""
    for suffix in (".parquet", ".jsonl", ".csv"):
        chosen = [name for name in names if SUFFIXES[_suffix(name)] == suffix]
        if chosen:
            return chosen
    return []


def form_of(name: str) -> str:
    """Returns the end of the name by which a reader knows the form of a file: `.jsonl` of `rows.json`."""
    return SUFFIXES[_suffix(name)]
