"""House rules that a reviewer should not have to remember: cheap, over every tracked file."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from broker import keys
from onbeat.base.process.crash_points import CRASH_POINTS
from onbeat.base.process.own_packages import PACKAGES
from tests.every_key import every_key

ROOT = Path(__file__).parents[2]
DOCSTRING_LINES = ("Consumes:", "Waits for:", "Unblocked by:", "Produces:")
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:work|root|home/\w+|Users/\w+)/")
REGISTRY_HOST = re.compile(
    r"(?:pypi\.org|pythonhosted\.org|registry\.npmjs|deb\.debian|huggingface\.co)", re.IGNORECASE
)
MARKDOWN_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
NAMED_PATH = re.compile(r"`((?:[\w-]+/)+[\w.-]+\.(?:py|lua|md|toml|yml))`")
KEY_ROW = re.compile(r"^\| (onbeat:\S+) \|", re.MULTILINE)
OPEN_ENDS = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|X" r"XX)\b")
NAMED_FILE = re.compile(r"(?<![\w/.<>*{}-])((?:[\w-]+/)*[\w-]+\.(?:py|lua|md))(?![\w/(-])")
MAX_FOLDER_FILES = 12
MAX_README_ROWS = 10
MAX_PACKAGES = 7
MAX_ARROWS = 18
"""The most pairs of packages of which one imports the other."""
LARGE_FOLDERS = {
    "broker": "a side of the fence, a store, a table or a view of it each",
    "contracts": "a subject each, as their names say",
    "contracts/spec": "a table of a job each, and the rules between them",
    "onbeat/base/process": "how any process starts, waits, fails and ends, a file each, and code of others in it",
}
"""Folder → the reason why it has more than MAX_FOLDER_FILES modules."""
ENTRY_POINT_GROUPS = {
    "onbeat.agents",
    "onbeat.commands",
    "onbeat.datasets",
    "onbeat.environments",
    "onbeat.losses",
    "onbeat.rewards",
    "onbeat.trackers",
    "onbeat.trl_environments",
}
"""What packages of others implement. What only Onbeat could is imported plainly."""
GROUP_LINE = re.compile(r'^GROUP = "(onbeat\.\w+)"$', re.MULTILINE)
VAGUE_SUBJECT = re.compile(r"\b(?:no|some|any|every)bo" r"dy\b|\bwho" r"ever\b", re.IGNORECASE)


def tracked(*patterns: str) -> list[Path]:
    """Files that a clone has. Skips where the tests run outside a clone."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *patterns]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git clone")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def package_files() -> list[Path]:
    return tracked(*(f"{package}/*.py" for package in PACKAGES))


class Fact(NamedTuple):
    """What a rule asks of a module: one import, call or handler of it, or a text that a person reads."""

    place: str
    """`file:line`."""
    kind: str
    """import, from, call, template, bare or text."""
    text: str


def dotted(node: ast.expr) -> str:
    """`a.b` of a name with its attributes, "" of anything else."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def facts_of(path: Path) -> list[Fact]:
    """Each module is parsed once, for all rules."""
    return [Fact(f"{path.relative_to(ROOT)}:{line}", *rest) for line, *rest in _facts_of(ast.parse(path.read_text()))]


def _facts_of(tree: ast.Module) -> Iterator[tuple[Any, ...]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (node.lineno, "import", f"{name.name} as {name.asname}" if name.asname else name.name)
                for name in node.names
            )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from ((node.lineno, "from", f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Attribute) and node.attr == "apply_chat_template":
            yield node.lineno, "template", ""
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare", ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, "text", node.value.value
        called = dotted(node.func) if isinstance(node, ast.Call) else ""
        if called:
            yield node.lineno, "call", called
        if isinstance(node, ast.Raise) or called.startswith("log."):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, "text", part.value


def facts(*kinds: str, paths: list[Path] | None = None) -> Iterator[Fact]:
    """The facts of these kinds of all packages, or of other files."""
    return (fact for path in paths or package_files() for fact in facts_of(path) if fact.kind in kinds)


def sentences(path: Path) -> Iterator[tuple[str, str]]:
    """(place, text) of what a reader of this file reads as English: docstrings, comments and messages of a module."""
    is_module = path.suffix == ".py"
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        text = line[line.find("#") :] if is_module and "#" in line else "" if is_module else line
        if text:
            yield f"{path.relative_to(ROOT)}:{number}", text
    if is_module:
        yield from ((fact.place, fact.text) for fact in facts_of(path) if fact.kind == "text")


def english_files() -> list[Path]:
    patterns = ("*.py", "*.lua", "*.md", "*.toml", "*.yml", "*.sh", "Makefile", "*Dockerfile")
    return [path for path in tracked(*patterns) if path != Path(__file__)]


def text_lines() -> Iterator[tuple[str, str]]:
    for path in tracked():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if path != Path(__file__):
            name = path.relative_to(ROOT)
            for number, line in enumerate(text.splitlines(), start=1):
                yield f"{name}:{number}", line


def test_every_package_of_the_tree_is_checked_for_being_ours() -> None:
    linted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    assert sorted(linted) == sorted(PACKAGES)
    assert {path.parent.name for path in tracked("*/__init__.py") if path.parent.parent == ROOT} - set(PACKAGES) == {
        "benchmarks"
    }


def test_a_package_init_is_only_its_docstring() -> None:
    """onbeat and onbeat/client are what programs of one's own import: their `__init__` name their parts, and import
    none of them."""
    for path in package_files():
        if path.name == "__init__.py" and path.parent not in (ROOT / "onbeat", ROOT / "onbeat" / "client"):
            tree = ast.parse(path.read_text())
            assert not tree.body or (len(tree.body) == 1 and ast.get_docstring(tree)), path


@pytest.mark.parametrize("package", PACKAGES)
def test_each_top_level_package_says_what_it_consumes_awaits_and_produces(package: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    found = [word for line in docstring.splitlines() for word in DOCSTRING_LINES if line.startswith(word)]
    assert found == list(DOCSTRING_LINES)


def test_nothing_is_pickled() -> None:
    banned = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
    for fact in facts("import", "from", "call"):
        is_call = fact.kind == "call"
        assert fact.text not in ("torch.load", "torch.save") if is_call else parents(fact.text).isdisjoint(banned), fact


def parents(name: str) -> set[str]:
    """`a.b.c` → a, a.b, a.b.c: the module that is imported, and those that it lies in."""
    parts = name.partition(" ")[0].split(".")
    return {".".join(parts[:number]) for number in range(1, len(parts) + 1)}


def test_every_http_client_is_made_in_one_place() -> None:
    """Elsewhere httpx is for its types and errors."""
    makes = {"Client", "AsyncClient", "HTTPTransport", "AsyncHTTPTransport", "Proxy"}
    makes |= {"get", "post", "put", "patch", "delete", "head", "options", "request", "stream"}
    makes = {f"httpx.{name}" for name in makes}
    others = {"requests", "urllib3", "aiohttp", "httpcore", "httpx2", "httplib2", "pycurl", "websockets"}
    others |= {"urllib.request", "http.client", "xmlrpc.client"}
    allowed = {"onbeat/base/http/outgoing.py": makes | others}
    paths = [*package_files(), *tracked("benchmarks/*.py", "examples/*.py", "docs/*.py")]
    for fact in facts("import", "from", "call", paths=paths):
        assert not fact.text.startswith("httpx as "), fact
        found = {fact.text} & makes if fact.kind == "call" else parents(fact.text) & (others | makes)
        assert found <= allowed.get(fact.place.partition(":")[0], set()), (
            f"{fact.place}: make it by onbeat/base/http/outgoing.py"
        )


def test_a_chat_template_is_run_in_a_process_of_its_own_alone() -> None:
    """Jinja is imported by that process's module and by what starts it, and the tokenizer's own door is never used."""
    assert [fact.place for fact in facts("template")] == []
    places = {fact.place.partition(":")[0] for fact in facts("import", "from") if "jinja2" in parents(fact.text)}
    assert places == {"onbeat/data/rendering/template_process.py"}
    taken = {fact.text for fact in facts("from") if fact.text.startswith("onbeat.data.rendering.template_process.")}
    names = {name.rpartition(".")[2] for name in taken}
    assert names == {"MAX_TEXT_BYTES", "MEMORY_MB", "OWN_VARIABLES", "TemplateAnswer", "TemplateTask"}


def test_packages_write_through_loggers_and_not_by_print() -> None:
    assert [fact.place for fact in facts("call") if fact.text == "print"] == []


def messages_of(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of what a module says to its user: what it raises, logs, and finds."""
    for node in ast.walk(tree):
        is_call = isinstance(node, ast.Call)
        is_said = is_call and (
            dotted(node.func).startswith("log.")
            or dotted(node.func) in ("ok", "warn", "bad")
            or any(keyword.arg == "cure" for keyword in node.keywords)
        )
        if is_said or isinstance(node, ast.Raise):
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def test_no_message_names_a_source_file() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in package_files()
        for line, text in messages_of(ast.parse(path.read_text()))
        if re.search(r"\b(?:\w+/)+\w+\.(?:py|lua)\b", text)
    ]
    assert named == [], "say what to do: who reads a message may have no source"


def test_no_bare_except() -> None:
    assert [fact.place for fact in facts("bare")] == []


def test_the_packages_and_their_arrows_stay_few() -> None:
    """Lines, files and words are reported by `make lint` (`python -m tests.sizes`), and limit nothing."""
    arrows = {(fact.place.partition("/")[0], fact.text.partition(".")[0]) for fact in facts("import", "from")}
    between = {(source, target) for source, target in arrows if target in PACKAGES and source != target}
    assert len(PACKAGES) <= MAX_PACKAGES
    assert len(between) <= MAX_ARROWS


def test_entry_points_are_for_what_others_implement() -> None:
    asking = [path for path in package_files() if path.name != "entry_points.py"]
    asking = [path for path in asking if "base.process.entry_points import" in path.read_text()]
    groups = {group for path in asking for group in GROUP_LINE.findall(path.read_text())}
    assert groups == ENTRY_POINT_GROUPS
    assert "entry-points" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_no_folder_is_a_long_list() -> None:
    folders: dict[str, int] = {}
    for path in package_files():
        if path.stem not in ("__init__", "__main__"):
            folder = str(path.parent.relative_to(ROOT))
            folders[folder] = folders.get(folder, 0) + 1
    large = {folder for folder, number in folders.items() if number > MAX_FOLDER_FILES}
    assert large <= set(LARGE_FOLDERS), "split it, or give the reason"


def test_the_unit_tests_mirror_the_rooms_of_the_packages() -> None:
    unit = ROOT / "tests" / "unit"
    rooms = {path.parent.relative_to(unit) for path in tracked("tests/unit/*.py")}
    assert [room for room in sorted(rooms) if not (ROOT / room).is_dir()] == []


def test_a_sentence_has_a_subject_and_it_is_named() -> None:
    for path in english_files():
        for place, text in sentences(path):
            assert not VAGUE_SUBJECT.search(text), f"{place}: name the process, the client or the person: {text}"
            is_prose = path.suffix == ".py" and not text.startswith("#")
            assert not (is_prose and re.match(r"\s*Of\b", text)), f"{place}: begin with the subject: {text}"


def test_the_readme_stays_short_and_each_result_of_a_benchmark_has_a_row() -> None:
    table = (ROOT / "README.md").read_text().partition("| measured ")[2].partition("\n\n")[0]
    assert len(table.splitlines()[2:]) <= MAX_README_ROWS
    pages = [ROOT / "docs" / "benchmarks.md", ROOT / "benchmarks" / "results" / "README.md"]
    lines = [line for page in pages for line in page.read_text().splitlines()]
    for path in tracked("benchmarks/results/*.json"):
        rows = [row for row in lines if re.search(rf"[(/]{re.escape(path.name)}\)", row)]
        assert rows, f"{path.name} has no row"
        result = json.loads(path.read_bytes())
        for row in rows:
            assert result["date"][:10] in row, path.name
            assert result.get("commit", "") in row, path.name


def test_nothing_is_left_to_be_done_in_a_comment() -> None:
    for place, line in text_lines():
        assert not OPEN_ENDS.search(line), place


def test_no_tracked_file_names_a_registry_host_or_a_path_of_one_machine() -> None:
    for place, line in text_lines():
        assert not REGISTRY_HOST.search(line), place
        assert not MACHINE_PATH.search(line), place


def test_every_link_of_the_documents_leads_to_a_file() -> None:
    for path in tracked("*.md"):
        for target in MARKDOWN_LINK.findall(path.read_text()):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


def test_every_file_that_the_documents_name_exists() -> None:
    for path in tracked("*.md"):
        for name in NAMED_PATH.findall(path.read_text()):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def test_every_file_that_a_package_names_in_a_sentence_exists() -> None:
    """By its path, or from some folder on."""
    parts = [path.relative_to(ROOT).parts for path in tracked()]
    everything = {"/".join(names[start:]) for names in parts for start in range(len(names))}
    for path in package_files():
        for place, sentence in sentences(path):
            assert set(NAMED_FILE.findall(sentence)) <= everything, place


def test_the_index_of_decisions_has_each_of_them_in_order_by_its_title() -> None:
    folder = ROOT / "docs" / "decisions"
    rows = re.findall(r"^\| \[(\d+)\]\(([\w-]+\.md)\) \| (.+) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    records = sorted(path for path in tracked("docs/decisions/*.md") if path.name != "README.md")
    assert [name for _, name, _ in rows] == [path.name for path in records]
    for number, name, title in rows:
        assert name.startswith(f"{int(number):04}-")
        assert (folder / name).read_text().splitlines()[0] == f"# {number} · {title}"


def test_the_readme_and_the_page_of_promises_count_the_same_runs_of_chaos_as_the_results() -> None:
    results = [json.loads(path.read_bytes()) for path in tracked("benchmarks/results/chaos-*.json")]
    runs, faults = (sum(result[key] for result in results) for key in ("rounds_run", "faults"))
    assert not any(result.get("other_weights") for result in results)
    assert f"other weights, of {runs} with {faults:,} kills and pauses |" in (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "promises.md").read_text()
    assert f"Of {runs} runs of it, with {faults:,} faults, none ended with other weights" in page
    assert "`benchmarks/results/chaos-*.json`" in page


def test_the_readme_shows_every_package_and_the_rooms_of_consumer_and_producer() -> None:
    tree = (ROOT / "README.md").read_text().partition("## What is where")[2].split("```")[1]
    shown: list[str] = []
    for line in tree.strip("\n").splitlines():
        name = line.split()[0].rstrip("/")
        parent = next(folder for folder in reversed(["", *shown]) if "/" not in folder)
        shown.append(f"{parent}/{name}" if line.startswith(" ") else name)
    assert [name for name in shown if not (ROOT / name).is_dir()] == []
    rooms = {f"{path.parent.parent.name}/{path.parent.name}" for path in tracked("consumer/*/*.py", "producer/*/*.py")}
    wanted = {room for room in rooms if room.partition("/")[0] in ("consumer", "producer")}
    assert set(PACKAGES) | wanted <= set(shown)


def test_the_key_table_names_each_key_once_and_every_key_of_a_job() -> None:
    table = KEY_ROW.findall(keys.__doc__ or "")
    assert len(table) == len(set(table))
    job = keys.JobKeys("J", seal="S")
    assert set(every_key(job)) == {name for name in table if "{J}:" in name}
    shared = {value for name, value in vars(keys).items() if name.isupper() and str(value).startswith("onbeat:")}
    assert shared <= set(table)
    lagging = every_key(keys.JobKeys("J", keys.MAX_SLOTS, seal="S"))
    assert len(lagging) == len(set(lagging)) == len(every_key(job)) + keys.MAX_POLICY_LAG * len(job.slots[0])


def test_every_crash_point_is_explained() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text()
    explained = re.findall(r"^`((?:consumer|hosts|producer|environment|stage|tasks)\.\w+)` \|", page, re.MULTILINE)
    assert set(explained) == set(CRASH_POINTS)


def test_each_test_that_the_docs_name_exists() -> None:
    named = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
    for page in tracked("docs/*.md"):
        for path, name in named.findall(page.read_text()):
            assert f"def {name}(" in (ROOT / path).read_text(), f"{page.name} names {path}::{name}"


def test_each_fault_has_a_message_and_a_cure_on_one_page_and_its_tests_on_the_other() -> None:
    def first_cells(page: str, level: str) -> list[tuple[str, list[str]]]:
        """Returns (section, first cells of its table) of each section of a page that has a table of faults."""
        sections = re.split(rf"^{level} ", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)[1:]
        tables = [
            (text.split("\n", 1)[0], re.search(r"^fault \|.*\n---.*\n((?:.+\n)+)", text, re.M)) for text in sections
        ]
        return [(name, [row.split(" | ")[0] for row in table[1].splitlines()]) for name, table in tables if table]

    faults = first_cells("faults.md", "##")
    assert faults == first_cells("evidence.md", "###")
    assert sum(len(rows) for _, rows in faults) > 100


def test_each_sentence_that_the_invariants_name_is_a_test() -> None:
    page = (ROOT / "docs" / "evidence.md").read_text().partition("\n## Faults")[0]
    sentences = set(re.findall(r"`([a-z][a-z0-9]*(?:_[a-z0-9]+){3,})`", page))
    tests = "".join(path.read_text() for path in tracked("tests/*.py"))
    assert len(sentences) > 20
    assert [sentence for sentence in sorted(sentences) if f"def test_{sentence}(" not in tests] == []
