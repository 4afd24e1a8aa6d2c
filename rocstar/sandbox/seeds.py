"""Random numbers of a program: the same for the same seed, others for another, wherever they come from.

Covered: `random`, and the global generators of numpy and sympy, also where the program imports them itself. Not
covered: what asks the system for entropy (`os.urandom`, `secrets`, `uuid4`, `numpy.random.default_rng()`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader

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
    import random  # here: whoever loads us decides when, because of what it registers to be done after forks

    random.seed(seed)
    modules = sys.modules
    return {name: seeder for name, seeder in SEEDERS.items() if not seeded(modules.get(name), seeder, seed)}


def seeded(module: ModuleType | None, seeder: Seeder, seed: int) -> bool:
    if module is not None:
        seeder(module, seed)
    return module is not None


class SeedOnImport:
    """Finds nothing itself: of the modules it waits for it lets others find the loader, and puts itself around."""

    def __init__(self, seed: int, seeders: dict[str, Seeder]) -> None:
        self.seed = seed
        self.seeders = seeders

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        seeder = self.seeders.pop(name, None)  # popped first: the search below comes here again
        if seeder is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        loader = SeedingLoader(spec.loader, lambda module: seeder(module, self.seed))
        spec.loader = loader  # type: ignore[assignment]  # the base class loads tempfile and more: 17 ms
        return spec


class SeedingLoader:
    """Loads as `inner` does, then calls `then`."""

    def __init__(self, inner: Loader, then: Callable[[ModuleType], None]) -> None:
        self.inner = inner
        self.then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        self.then(module)
