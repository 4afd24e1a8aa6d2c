"""The page for people who change rocstar: its picture is today's, and the files that it names exist."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
NAMED = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|c))?)`")


def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", ROOT / "scripts" / "house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_picture_is_what_the_imports_say() -> None:
    picture = re.search(r"<!-- picture -->\n```text\n(.*?)\n```", PAGE, re.DOTALL)
    assert picture is not None
    assert picture[1] == house().drawn(), "python scripts/house.py draws it"


def test_every_file_that_the_page_names_is_there() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) > 40
    assert [name for name in named if not ((ROOT / name).exists() or (ROOT / "rocstar" / name).exists())] == []


def test_a_room_stands_above_what_it_imports() -> None:
    assert house().floors({"a": {"b"}, "b": set(), "c": {"b"}}) == [["a", "c"], ["b"]]
