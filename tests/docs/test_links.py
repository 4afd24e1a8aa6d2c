"""Every link of every page leads somewhere: to a file of this repository and a heading in it, or to a written-out URL.

What lies behind a URL is asked only by `scripts/docs --external`, because tests do without a network."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links

LINKING = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "LOG.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
HOST = re.compile(r"([a-z0-9-]+\.)+[a-z]{2,}|localhost|127\.0\.0\.1", re.IGNORECASE)


def fault(page: Path, target: str) -> str | None:
    """What is wrong with a link, if anything."""
    parts = urlsplit(target)
    if parts.scheme:
        right = parts.scheme in ("http", "https") and HOST.fullmatch(parts.hostname or "") and " " not in target
        return None if right else "is no URL"
    place = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not place.is_file():
        return "is no file"
    if not place.is_relative_to(ROOT):
        return "leaves the repository"
    return None if not parts.fragment or parts.fragment in anchors(place) else "names no heading there"


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    faults = {target: fault(page, target) for target in links(page)}
    assert {target: what for target, what in faults.items() if what} == {}


def test_wrong_links_are_found(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    wrong = (
        "docs/absent.md",
        "docs",
        "docs/recipes.md#no-such-heading",
        "#nor-here",
        "https://x",
        "htp://a.org/",
        "/etc",
    )
    assert [target for target in wrong if fault(page, target) is None] == []
    assert fault(page, "docs/recipes.md#when-a-stage-ends") is None
    assert fault(page, "https://arxiv.org/abs/2508.20722") is None
