"""The page at /: it needs nothing from outside, and shows a text by its steps in a real browser, where there is one."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import launch.serve
from tests.support.serving import Running

PAGE = Path(launch.serve.__file__).with_name("page.html").read_text(encoding="utf-8")


def test_nothing_comes_from_outside() -> None:
    assert not re.search(r"https?://|\bsrc=|<link|@import|url\(|\binnerHTML\b", PAGE)


def test_every_field_has_a_label() -> None:
    for field in re.findall(r"<(?:input|textarea)[^>]*>", PAGE):
        name = re.search(r'id="(\w+)"', field)
        labelled = bool(name and f'for="{name[1]}"' in PAGE)
        inside = re.search(rf"<label>[^/]*{re.escape(field)}", PAGE)
        assert labelled or inside, field


def test_it_is_served_and_calls_what_there_is(demo_server: Running) -> None:
    http = demo_server.http()
    answer = http.get("/")
    assert answer.text == PAGE and "default-src 'self'" in answer.headers["Content-Security-Policy"]
    for path in set(re.findall(r'"(/[\w/]+)"', PAGE)):
        assert http.get(path).status_code in (200, 405), path
    assert http.get("/props").json()["plain_tokens_per_s"] > 0


def test_in_a_browser(demo_server: Running) -> None:
    """A completion by keyboard: its text, in spans of steps, beside plain decoding's rate."""
    playwright: Any = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    installed = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)  # else playwright's own
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(executable_path=installed, args=["--no-sandbox"])  # of our own page
        except playwright.Error as error:
            pytest.skip(f"there is no Chromium: {error.message.splitlines()[0]}")
        page = browser.new_page()
        page.goto(demo_server.url)
        page.fill("#prompt", "import os\n")
        page.fill("#tokens", "40")
        page.keyboard.press("Control+Enter")
        playwright.expect(page.locator("#n")).to_have_text("40", timeout=30_000)
        tokens = demo_server.decoder.generate(demo_server.encode("import os\n"), 40).tokens
        assert page.text_content("#output") == "import os\n" + demo_server.decode(tokens)
        assert page.locator("#output .step").count() == int(page.text_content("#steps") or 0) < 40
        browser.close()
