"""Starts a run in the right order: machines first, and only then slow imports."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rocstar.cluster import opened_machines
from rocstar.record.show import note_failure
from rocstar.record.trackers import tracked
from rocstar.support.child import uncollected
from rocstar.support.exits import failure

if TYPE_CHECKING:
    from rocstar.record.folder import RunFolder
    from rocstar.run.material import Material
    from rocstar.support.screen import Screen


def run(material: Material, folder: RunFolder, screen: Screen, *, resume: bool) -> None:
    """Carry out a recipe's stages in `folder`, which is locked meanwhile. Raises KeyboardInterrupt when asked to stop,
    after saving unsaved progress. Other errors are recorded in the run's events."""
    recipe = material.recipe
    identity, trackers = folder.path.resolve() / "run.json", recipe.run.trackers
    with (
        folder.locked(),  # first: a start that is refused must not send steps of the run that goes on
        tracked(folder, trackers, screen.note),
        _failure_noted(folder),
        opened_machines(recipe, identity, material.placement) as machines,
    ):
        with uncollected():
            from rocstar.run.stopper import Stopper
            from rocstar.train import train

        stopper = Stopper(screen.note)
        with stopper.installed():
            asyncio.run(train(material, folder, screen, machines, resume=resume, stopper=stopper))


@contextmanager
def _failure_noted(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        report = failure(error)
        with suppress(OSError):  # a full disk may be what ended it
            note_failure(folder, report[1] if report else f"a fault of rocstar itself: {type(error).__name__}: {error}")
        raise
