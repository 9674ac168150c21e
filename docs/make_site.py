"""What the site is built from: `python -m docs.make_site FOLDER`, which `make site` runs before MkDocs.

README, docs/*.md, docs/decisions/ ─┬─▶ FOLDER, at the same paths, with every file that they link to
commands, functions, routes, keys ─┴─▶ FOLDER/reference/{commands,python,http,metrics,redis-keys}.md
"""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer
from click import Context
from prometheus_client import CollectorRegistry

import onbeat
from broker import keys
from contracts.settings import StackSettings
from gateway.app import create_app
from gateway.metrics.stack_state import FAMILIES
from gateway.requests import GatewayMetrics
from gateway.services import Services
from onbeat.base.metrics.process_metrics import NUMBERS, ProcessMetrics
from onbeat.cli import app
from reward_service.metrics import EnvironmentMetrics, RewardMetrics

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/decisions").glob("*.md"))]


def linked(page: Path) -> Iterator[Path]:
    """Files of the repository that a page links to or shows, and those that these link to."""
    for target in LINK.findall(page.read_text()):
        path = (page.parent / target).resolve()
        if path.is_file() and path.is_relative_to(ROOT):
            yield path
            if path.suffix == ".md" and path not in pages():
                yield from linked(path)


def commands() -> str:
    """Each command of `onbeat` with its flags."""
    group: Any = typer.main.get_command(app)
    parts = ["# Commands\n"]
    for name in group.commands:
        command = group.imported(name)
        context = Context(command, info_name=f"onbeat {name}")
        parts.append(f"## {name}\n\n{inspect.cleandoc(command.help or '')}\n")
        parts.append(f"```\n{command.get_usage(context)}\n```\n")
        rows = [record for one in command.get_params(context) if (record := one.get_help_record(context))]
        if rows:
            parts.append("| flag | does |\n| --- | --- |")
            parts.append("\n".join(f"| `{cell(flag)}` | {cell(does)} |" for flag, does in rows) + "\n")
    return "\n".join(parts)


def python() -> str:
    """What `import onbeat` has: each name with its signature and docstring, and the methods of its classes."""
    parts = ["# Python\n"]
    for name in sorted(onbeat.__all__):
        value = getattr(onbeat, name)
        parts.append(described(f"## {name}", name, value))
        if inspect.isclass(value):
            members = [one for one in dir(value) if not one.startswith("_")]
            parts += [described(f"### {name}.{one}", one, getattr(value, one)) for one in members]
    return "\n".join(parts)


def described(head: str, name: str, value: Any) -> str:
    shown = f"```python\n{name}{inspect.signature(value)}\n```\n\n" if callable(value) else ""
    said = inspect.getdoc(value) or ""
    return f"{head}\n\n{shown}{said}\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def http() -> str:
    """Each route of a gateway, as its OpenAPI document has it."""
    services = Services(settings=StackSettings(api_key="none"), broker=None)  # pyright: ignore[reportArgumentType]
    parts = ["# HTTP\n"]
    for path, operations in create_app(services).openapi()["paths"].items():
        for method, operation in operations.items():
            parts.append(
                f"## {method.upper()} {path}\n\n{operation.get('description', operation.get('summary', ''))}\n"
            )
            rows = [f"| `{one['name']}` | {one['in']} |" for one in operation.get("parameters", ())]
            if rows:
                parts += ["| parameter | in |\n| --- | --- |", "\n".join(rows) + "\n"]
    return "\n".join(parts)


class Metric(NamedTuple):
    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def metrics() -> Iterator[Metric]:
    """The metrics of all processes, but for the numbers of an iteration, which have a name for each field."""
    for one in FAMILIES:
        yield Metric(one.name + "_total" * (one.kind == "counter"), one.kind, one.labels, one.meaning)
    of_rewards = CollectorRegistry()
    RewardMetrics(of_rewards)
    EnvironmentMetrics(of_rewards)
    made = (GatewayMetrics(), *map(ProcessMetrics, NUMBERS))
    told: set[str] = set()
    for registry in (of_rewards, *(one.registry for one in made)):
        for collector in list(registry._collector_to_names):
            kind, name = getattr(collector, "_type", ""), getattr(collector, "_name", "")
            if name.startswith("onbeat_") and name not in told:
                told.add(name)  # each process has some
                full = name + "_total" * (kind == "counter")
                yield Metric(full, kind, tuple(collector._labelnames), collector._documentation)  # type: ignore[attr-defined]


def metrics_page() -> str:
    parts = ["# Metrics\n", "| metric | type | what |\n| --- | --- | --- |"]
    for one in metrics():
        labels = f"{{{','.join(one.labels)}}}" if one.labels else ""
        parts.append(f"| `{one.name}{labels}` | {one.kind} | {cell(one.meaning)} |")
    return "\n".join(parts) + "\n"


def redis_keys() -> str:
    table = [line for line in inspect.cleandoc(keys.__doc__ or "").splitlines() if line.startswith("|")]
    return "# Keys in Redis\n\n" + "\n".join(table).replace("{", "&#123;").replace("}", "&#125;") + "\n"


def main(folder: Path) -> None:
    for path in {*pages(), *(file for page in pages() for file in linked(page))}:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    reference = folder / "reference"
    reference.mkdir(exist_ok=True)
    (reference / "commands.md").write_text(commands())
    (reference / "python.md").write_text(python())
    (reference / "http.md").write_text(http())
    (reference / "metrics.md").write_text(metrics_page())
    (reference / "redis-keys.md").write_text(redis_keys())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
