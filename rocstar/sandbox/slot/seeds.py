"""Random numbers of a program: equal for equal seeds.

Covered: `random`, and the global generators of numpy and sympy, also if the program imports them itself. Not covered:
generators that draw entropy from the system (`os.urandom`, `secrets`, `uuid4`, `numpy.random.default_rng()`).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = ("random", "numpy.random", "sympy.core.random")
NUMPY_SEEDS = 2**32


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
