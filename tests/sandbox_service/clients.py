"""Loads modules of other people's checkouts without installing them: what they import and we lack is a stand-in."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.sandbox_service.support import Http


def load(monkeypatch: pytest.MonkeyPatch, name: str, path: Path) -> Any:
    """The module at `path`, known as `name` until the test ends."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> ModuleType:
    """A module that holds `members` only; the packages above it are made too."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        above = ".".join(parts[:end])
        if above not in sys.modules:
            package = ModuleType(above)
            package.__path__ = []
            monkeypatch.setitem(sys.modules, above, package)
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module


class Reply:
    """What the test clients of others return."""

    def __init__(self, status_code: int, body: Any) -> None:
        self.status_code = status_code
        self.body = body

    def json(self) -> Any:
        return self.body


class TestClient:
    """Stands in for the test client of a web framework; asks a running service instead of an application."""

    __test__ = False

    def __init__(self, http: Http, prefix: str = "") -> None:
        self.http = http
        self.prefix = prefix

    def get(self, path: str) -> Reply:
        return Reply(*self.http.get(self.prefix + path))

    def post(self, path: str, json: Any) -> Reply:
        return Reply(*self.http.post(f"{self.prefix}/{path.lstrip('/')}", json))
