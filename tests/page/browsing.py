"""A headless Chromium that looks at the gateway's page, for the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 900}
PATIENCE_MS = 60_000
SANDBOX = ["--no-sandbox"]
"""Tests run as root in containers, where Chromium's own sandbox can't start; they load no page but ours."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips the test where there is no Chromium, or no Playwright."""
    if not CHROMIUM:
        pytest.skip("there is no chromium on PATH: `apt-get install chromium`")
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: `pip install playwright`")
    api.expect.set_options(timeout=PATIENCE_MS)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=SANDBOX)
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser,
    url: str,
    key: str,
    place: str,
    *,
    size: dict[str, int] = DESK,
    scheme: Literal["light", "dark"] = "light",
    may_log: str = "",
) -> Iterator[Page]:
    """The page at `#/place`, with its key; at the end it must have logged no error and broken no rule of its policy.

    may_log: what an error that the test provokes begins with.
    """
    said: list[str] = []
    context = browser.new_context(viewport=size, color_scheme=scheme, accept_downloads=True)  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text) if _is_fault(message) else None)
    page.goto(f"{url}/#key={key}")
    page.goto(f"{url}/#/{place}")
    try:
        yield page
        unexpected = [text for text in said if not (may_log and text.startswith(may_log))]
        assert unexpected == []
    finally:
        context.close()


def spec_editor(page: Page) -> Locator:
    """Returns the text of the screen New job, which is no input: read it by `spec_text`, write it by `write_spec`."""
    return page.get_by_role("textbox", name="Spec of the job")


def write_spec(page: Page, text: str) -> None:
    """Replaces the whole text of the editor, as a person who pastes does."""
    spec_editor(page).focus()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text(text)


def spec_text(page: Page) -> str:
    """Returns the whole text that the tab keeps: the editor has only the lines that are in sight."""
    return str(page.evaluate("JSON.parse(sessionStorage.getItem('onbeat.draft')).text"))


def _is_fault(message: Any) -> bool:
    """An answer of 4xx or 5xx, which the browser logs as well, is part of what is tested."""
    return message.type == "error" and "Failed to load resource" not in message.text
