"""What the pages for people keep to: short lines, short guides, links that lead somewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lp
from scripts import api_page
from tests.conftest import ROOT

TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*/*.md"))]
WRITTEN_BY_CODE = ("docs/reference/config.md", "docs/reference/api.md", "docs/experiments/results.md")
PART_BY_CODE = re.compile(r"^<!-- (?!end)[^>]*-->\n.*?^<!-- end[^>]*-->$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]*))?\)")
MAX_WIDTH, MAX_GUIDE_LINES = 120, 150


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def long_lines(text: str) -> Iterator[str]:
    """Lines that are too long, but for rows of tables and parts that code writes."""
    for line in PART_BY_CODE.sub("", text).splitlines():
        if len(line) > MAX_WIDTH and not line.startswith("|"):
            yield line


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page: Path) -> Iterator[str]:
    """Relative links to a file or a heading that is not there."""
    for path, fragment in LINK.findall(BLOCK.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / path if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            yield f"{path}#{fragment}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_fit(page: Path) -> None:
    """A line that runs out of the window is read in no editor and no diff."""
    if name_of(page) not in WRITTEN_BY_CODE:
        assert not list(long_lines(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "guide").glob("*.md")), ids=name_of)
def test_guides_are_short(page: Path) -> None:
    """A guide that grows into a log book loses its reader; figures and reasons have folders of their own."""
    assert len(page.read_text(encoding="utf-8").splitlines()) <= MAX_GUIDE_LINES


def test_api_page_is_up_to_date() -> None:
    """A public name, an argument or a docstring that is new must be so in the page too."""
    assert api_page.PAGE.read_text(encoding="utf-8") == api_page.page(), "run python scripts/api_page.py"


def test_api_page_has_every_public_name() -> None:
    """A name whose definition is not found would be left out in silence."""
    sections = re.findall(r"^## (\w+)$", api_page.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(sections) == sorted(lp.__all__) and "LookaheadDecoder" in sections


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """A page or a heading that was renamed leaves links behind."""
    assert not list(dead_links(page))


def test_every_page_is_reached_from_the_readme() -> None:
    """A page without a link to it is found by nobody."""
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = Path(os.path.normpath(todo.pop()))
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            todo += [page.parent / path for path, _ in LINK.findall(page.read_text(encoding="utf-8")) if path]
    assert not [name_of(page) for page in PAGES if page not in reached | {ROOT / "CHANGELOG.md"}]
