"""What all tests run under, set before anything loads torch: as `support.threads.quiet_torch` sets it for a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rocstar.support.threads import quiet_torch

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
quiet_torch(threads=1)
with suppress(ModuleNotFoundError):  # of the adapters' environments
    from hypothesis import settings

    settings.register_profile("whenever", deadline=None)  # on a busy machine an example takes as long as it takes
    settings.load_profile("whenever")

LONGEST = (
    "test_tutorials.py",
    *("test_train.py", "test_stages_run.py", "test_engine.py", "test_daemon_sessions.py", "test_daemon_calls.py"),
    *("test_starts.py", "test_watchers.py", "test_command.py", "test_cli.py", "test_families.py", "test_using_up.py"),
    *(
        "test_blocks.py",
        "test_word_problems.py",
        "test_browser.py",
        "test_invariance.py",
        "test_verifier.py",
        "test_gateway.py",
        "test_stalled_run.py",
        "test_own_model.py",
    ),
)
"""Files that take more than five seconds of CPU, those that take most first: where several processes share the tests,
the others must not wait for one of these at the end."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means: two more than there are cores. Tests wait for programs and processes more than half of
    their time: with one more, two cores were used to 72%. Four more gain nothing beside what else `.ci/run` does."""
    return (os.cpu_count() or 1) + 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[Path]:
    """A folder to write modules of the user's own into; out of reach again after the test."""
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
