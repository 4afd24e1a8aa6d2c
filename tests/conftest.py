"""What all tests run under, set before anything loads torch: as `support.threads.quiet_torch` sets it for a run."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from rocstar.support.child import uncollected
from rocstar.support.threads import quiet_torch
from tests.forks import ADDRESS, address, write_worker

# What is never freed, nanobind calls a leak as the process ends. No sooner: pytest collects garbage twice before that.
atexit.register(gc.unfreeze)
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
quiet_torch(threads=1)
with suppress(ModuleNotFoundError):  # of the adapters' environments
    from hypothesis import HealthCheck, settings

    # On a busy machine an example takes as long as it takes; who needs more examples asks for them.
    patient = [HealthCheck.too_slow]
    settings.register_profile("whenever", deadline=None, max_examples=50, suppress_health_check=patient)
    settings.load_profile("whenever")

BY_TEST = ("test_tutorials", "test_train", "test_killed_run", "test_faults", "test_stages_run")
"""Files whose tests take long and share only what `tiny_run.once` made: several processes may take part in one."""
LONGEST = (
    *BY_TEST,
    *("test_browser", "test_invariance", "test_blocks", "test_precision", "test_engine", "test_ranks"),
    *("test_agent_run", "test_judged", "test_cli", "test_daemon_sessions", "test_daemon_calls", "test_lora"),
    *("test_material", "test_lora_run", "test_neighbours", "test_served_agent", "test_sandbox_bench", "test_watchers"),
    *("test_stopper", "test_forks", "test_hostile", "test_plan", "test_starts", "test_using_up"),
)
"""Files that take five seconds of CPU or more, those that take most first: where several processes share the tests,
the others must not wait for one of these at the end."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` means: two more than there are cores. Tests wait for programs and processes more than half of
    their time: with one more, two cores were used to 72%. Four more gain nothing beside what else `.ci/run` does."""
    return (os.cpu_count() or 1) + 2


class ByFile(LoadFileScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return nodeid if Path(file).stem in BY_TEST else file


def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Each process is forked from one that has imported the tests."""
    os.environ[ADDRESS] = address()
    stub = Path(address()).with_name("worker")
    write_worker(stub, config.invocation_params.dir, *config.args)
    for spec in specs:
        spec.python = str(stub)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """In the place of `--dist loadfile`, whose name pyproject.toml gives."""
    return ByFile(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected, and what its modules import, stays."""
    with uncollected():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))


@pytest.fixture
def own_ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, whatever handler this process has else: those that share the tests lack
    Python's own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[Path]:
    """A folder to write modules of the user's own into; out of reach again after the test."""
    before, path = set(sys.modules), list(sys.path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
