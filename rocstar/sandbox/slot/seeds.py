"""Random numbers of a program: the same for the same seed, others for another, wherever they come from.

Covered: `random`, and the global generators of numpy and sympy, also where the program imports them itself. Not
covered: what asks the system for entropy (`os.urandom`, `secrets`, `uuid4`, `numpy.random.default_rng()`).
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

NUMPY_SEEDS = 2**32


def seed_numpy(module: ModuleType, seed: int) -> None:
    module.seed(seed % NUMPY_SEEDS)


def seed_sympy(module: ModuleType, seed: int) -> None:
    module.seed(seed)


Seeder = Callable[[ModuleType, int], None]
SEEDERS: dict[str, Seeder] = {"numpy.random": seed_numpy, "sympy.core.random": seed_sympy}


def reseed(seed: int) -> None:
    """In a program's process: seed what is loaded, and see to it that what is loaded later is seeded too."""
    later = seed_loaded(seed)
    if later:
        sys.meta_path.insert(0, SeedOnImport(seed, later))


def seed_loaded(seed: int) -> dict[str, Seeder]:
    """Seed what is loaded; the seeders of what is not."""
    import random  # here: the zygote loads it where its fork hooks are postponed

    random.seed(seed)
    modules = sys.modules
    return {name: seeder for name, seeder in SEEDERS.items() if not seeded(modules.get(name), seeder, seed)}


def seeded(module: ModuleType | None, seeder: Seeder, seed: int) -> bool:
    if module is not None:
        seeder(module, seed)
    return module is not None


class SeedOnImport:
    """A finder that leaves the search to others, and has the modules it waits for seeded as soon as they are loaded."""

    def __init__(self, seed: int, seeders: dict[str, Seeder]) -> None:
        self.seed = seed
        self.seeders = seeders

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        seeder = self.seeders.pop(name, None)  # popped first: the search below comes here again
        spec = importlib.util.find_spec(name) if seeder else None
        if seeder and spec and spec.loader:
            load, seed = spec.loader.exec_module, self.seed

            def load_and_seed(module: ModuleType) -> None:
                load(module)
                seeder(module, seed)

            spec.loader.exec_module = load_and_seed  # type: ignore[method-assign]
        return spec


# Fork hooks of libraries: `random` draws a seed from the system after each fork, `threading` and `logging` make new
# locks: 0.1 to 0.3 ms in every call, for nothing. A zygote has one thread, none of its locks is held when a slot forks,
# and every program is seeded. So they are postponed to the forks that programs make.

POSTPONED = {"random", "threading", "logging"}
Hooks = list[dict[str, Callable[[], Any]]]
"""Arguments of `os.register_at_fork`."""


@contextmanager
def postponed_hooks() -> Iterator[Hooks]:
    """Collect the hooks that the modules above register within the context; others are registered as usual."""
    register = os.register_at_fork
    collected: Hooks = []

    def consider(**hooks: Callable[[], Any]) -> None:
        if {getattr(hook, "__module__", None) for hook in hooks.values()} <= POSTPONED:
            collected.append(hooks)
        else:
            register(**hooks)

    os.register_at_fork = consider  # type: ignore[assignment]
    try:
        yield collected
    finally:
        os.register_at_fork = register


def register_hooks(hooks: Hooks) -> None:
    """In a program's process."""
    for hook in hooks:
        os.register_at_fork(**hook)
