"""Random numbers of a program: equal for equal seeds.

Covered: `random`, and the global generators of numpy and sympy, also if the program imports them itself. Not covered:
generators that draw entropy from the system (`os.urandom`, `secrets`, `uuid4`, `numpy.random.default_rng()`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = ("random", "numpy.random", "sympy.core.random")
NUMPY_SEEDS = 2**32
POSTPONED = {"random", "threading", "logging"}

Hooks = list[dict[str, Callable[[], Any]]]
"""Arguments of `os.register_at_fork`."""


class Seeder:
    """Seeds the loaded generators, and others when they are imported: it is a module finder that leaves the search to
    the other finders. Created in the zygote after a tier's modules have been loaded."""

    def __init__(self) -> None:
        self.loaded = [sys.modules[name] for name in MODULES if name in sys.modules]
        self.awaited = {name for name in MODULES if name not in sys.modules}
        self.seed = 0
        if self.awaited:
            sys.meta_path.insert(0, self)

    def reseed(self, seed: int) -> None:
        self.seed = seed
        for module in self.loaded:
            self.seed_module(module)

    def seed_module(self, module: Any) -> None:
        module.seed(self.seed % NUMPY_SEEDS if module.__name__ == "numpy.random" else self.seed)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.awaited:
            return None
        self.awaited.remove(name)  # first, because the search below calls this method again
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def load_and_seed(module: ModuleType) -> None:
                load(module)
                self.loaded.append(module)
                self.seed_module(module)

            spec.loader.exec_module = load_and_seed  # type: ignore[method-assign]
        return spec


@contextmanager
def postponed_hooks() -> Iterator[Hooks]:
    """Collect the fork hooks that the POSTPONED modules register within the context; others are registered as usual.

    `random` draws a seed from the system after each fork, `threading` and `logging` make new locks: 0.1 to 0.3 ms per
    call, without benefit. A zygote has one thread, no lock is held when a slot forks, and every program is seeded. So
    the hooks are registered in the program's process, for the forks that it makes (`register_hooks`)."""
    register = os.register_at_fork
    collected: Hooks = []

    def collect_or_register(**hooks: Callable[[], Any]) -> None:
        if {getattr(hook, "__module__", None) for hook in hooks.values()} <= POSTPONED:
            collected.append(hooks)
        else:
            register(**hooks)

    os.register_at_fork = collect_or_register  # type: ignore[assignment]
    try:
        yield collected
    finally:
        os.register_at_fork = register


def register_hooks(hooks: Hooks) -> None:
    for hook in hooks:
        os.register_at_fork(**hook)
