"""The page is served without a key, under a policy that lets no other script run, and as it was built."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from contracts.settings import StackSettings
from gateway.page.files import STATIC, page_router, read_page
from onbeat.base.http.access import Access, AccessRules
from onbeat.base.http.problems import answer_with_problems
from tests.served import asked

ROOT = Path(__file__).parents[4]
ERASED = "src/types.ts"
"""Types leave nothing in the build; test_sources.py compares them with the records."""
SOURCES = ("index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "src")
FOREIGN = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


def app_of(folder: Path = STATIC) -> FastAPI:
    app = FastAPI(openapi_url=None)
    router = page_router(read_page(folder))
    app.include_router(router)
    answer_with_problems(app, (router,), service="the gateway")
    settings = StackSettings(redis_url="redis://none", api_key="test-key")
    app.add_middleware(Access, AccessRules.of(settings, key="test-key", key_setting="ONBEAT_API_KEY", has_page=True))
    return app


def ask(method: str, path: str, headers: dict[str, str] | None = None, *, app: FastAPI | None = None) -> httpx.Response:
    return asked(app or app_of(), method, path, headers=headers)


def test_the_page_needs_no_key_and_forbids_scripts_frames_and_other_origins() -> None:
    answer = ask("GET", "/")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-store"
    policy = answer.headers["Content-Security-Policy"].split("; ")
    assert "default-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_no_markup_of_the_page_needs_what_the_policy_forbids() -> None:
    html = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\ssrc=\"/assets/)|\son\w+=|\sstyle=|<style|javascript:", html)
    code = "".join(path.read_text() for path in STATIC.glob("assets/*.js"))
    assert not re.search(r"\beval\(|new Function\(|\.outerHTML\s*=|insertAdjacentHTML|document\.write", code)


def test_every_part_that_the_page_names_is_served_for_ever_and_to_head() -> None:
    parts = re.findall(r'(?:src|href)="(/assets/[^"]+)"', ask("GET", "/").text)
    assert {Path(part).suffix for part in parts} == {".js", ".css", ".svg"}
    for part in parts:
        answer, head = ask("GET", part), ask("HEAD", part)
        assert answer.status_code == head.status_code == 200
        assert "immutable" in answer.headers["Cache-Control"]
        assert head.content == b""
        assert head.headers["Content-Length"] == str(len(answer.content))


@pytest.mark.parametrize("path", ["/assets/none.js", "/assets/..%2findex.html", "/assets/%2e%2e/files.py", "/assets/"])
def test_what_the_build_has_not_is_not_found(path: str) -> None:
    answer = ask("GET", path)
    assert answer.status_code == 404
    assert answer.headers["Content-Type"] == "application/problem+json"


def test_a_link_of_another_site_leads_to_the_page_and_to_nothing_else() -> None:
    assert ask("GET", "/", FOREIGN).status_code == 200
    assert ask("GET", "/", FOREIGN | {"Sec-Fetch-Dest": "iframe"}).status_code == 403
    assert ask("GET", "/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "cors"}).status_code == 403
    assert ask("GET", "/assets/none.js", FOREIGN).status_code == 403
    assert ask("GET", "/healthz", FOREIGN).status_code == 403


def test_a_gateway_without_a_built_page_says_how_to_build_it(tmp_path: Path) -> None:
    answer = ask("GET", "/", app=app_of(tmp_path))
    assert (answer.status_code, answer.json()["cure"]) == (404, "build it by `make page`, or use the terminal")


def test_the_committed_build_is_of_the_present_sources() -> None:
    """The digest is computed as `recordSources` of page/vite.config.ts does it: over names, lengths and contents."""
    page = ROOT / "page"
    paths = [path for name in SOURCES for path in [page / name, *(page / name).rglob("*")] if path.is_file()]
    files = [(path.relative_to(page).as_posix(), path) for path in paths]
    # The specs that a new job can begin with are in the build, too.
    files += [(f"../configs/{path.name}", path) for path in (ROOT / "configs").glob("*.toml")]
    digest = hashlib.sha256()
    for name, path in sorted(files):
        if name == ERASED:
            continue
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    built = json.loads((STATIC / "sources.json").read_bytes())["sha256"]
    assert built == digest.hexdigest(), "page/ or a spec of configs/ has changed: `make page` builds the page"


def test_the_wheel_carries_the_page(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE", "gateway"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    carried = set(zipfile.ZipFile(wheel).namelist())
    built = {f"gateway/page/static/{path.relative_to(STATIC)}" for path in STATIC.rglob("*") if path.is_file()}
    assert len(built) >= 4
    assert built <= carried
