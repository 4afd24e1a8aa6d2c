"""Answers of an endpoint on disk, one SQLite file: what was paid for once is never asked for again."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rocstar.errors import ConfigError


class AnswerCache:
    """Request -> answer. Every answer is committed before it is used, so a kill loses at most those under way."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file is something else."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._base = sqlite3.connect(path)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"{path} is not a cache of answers ({error}); give endpoint.cache another name") from None

    def get(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        found = self._base.execute("SELECT answer FROM answers WHERE key = ?", (request_key(request),)).fetchone()
        answer: dict[str, Any] | None = json.loads(found[0]) if found else None
        return answer

    def put(self, request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        with self._base:
            self._base.execute(
                "INSERT OR REPLACE INTO answers VALUES (?, ?)", (request_key(request), json.dumps(answer))
            )

    def close(self) -> None:
        self._base.close()


def request_key(request: Mapping[str, Any]) -> str:
    """SHA-256 of the request's body: model, messages and parameters."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
