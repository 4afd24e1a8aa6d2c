"""What libraries want done after a fork, put off to the forks that programs make.

`random` draws a seed from the system, `threading` and `logging` make new locks: 0.1 to 0.3 ms in every call, for
nothing. A nursery has one thread, none of its locks is held when a slot forks, and every program is seeded explicitly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PUT_OFF = {"random", "threading", "logging"}

Hooks = list[dict[str, Callable[[], Any]]]
"""Arguments of `os.register_at_fork`."""


@contextmanager
def put_off() -> Iterator[Hooks]:
    """Collect the hooks that the modules above register within the context; those of others are registered as ever."""
    register = os.register_at_fork
    collected: Hooks = []

    def consider(**hooks: Callable[[], Any]) -> None:
        if {getattr(hook, "__module__", None) for hook in hooks.values()} <= PUT_OFF:
            collected.append(hooks)
        else:
            register(**hooks)

    os.register_at_fork = consider  # type: ignore[assignment]
    try:
        yield collected
    finally:
        os.register_at_fork = register


def restore(hooks: Hooks) -> None:
    for hook in hooks:
        os.register_at_fork(**hook)
