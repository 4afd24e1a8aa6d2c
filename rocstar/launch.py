"""Starting a run in the right order: environment variables, sandbox, and only then anything that loads torch.

The sandbox is a process tree of its own, started while this process is still small, and the thread policy must be in
the environment before torch reads it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rocstar.exits import need
from rocstar.sandbox.call import SandboxDown
from rocstar.sandbox.client import SandboxClient

if TYPE_CHECKING:
    from rocstar.config import SandboxSection
    from rocstar.runs.folder import RunFolder
    from rocstar.screen import Screen
    from rocstar.training.material import Material


def run(material: Material, folder: RunFolder, screen: Screen, *, resume: bool) -> None:
    """Carry out a recipe's stages in `folder`, which is locked meanwhile. Raises KeyboardInterrupt when told to stop,
    after a save where there is something to save."""
    recipe = material.recipe
    quiet_torch(recipe.run.threads)
    with folder.locked(), started_sandbox(recipe.sandbox) as sandbox:
        from rocstar.train import train
        from rocstar.training.stopper import Stopper

        stopper = Stopper(screen.note)
        with stopper.installed():
            asyncio.run(train(material, folder, screen, sandbox, resume=resume, stopper=stopper))


def serve_rank() -> None:
    """Learn along with rank 0, as torchrun's variables say, until it ends. Raises RunHalted when it is gone."""
    quiet_torch(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from rocstar.learning.ranks import serve_rank as serve

    serve(os.environ)


def quiet_torch(threads: int) -> None:
    """Threads that wait must sleep: spinning costs several times the work itself on a busy machine.

    Matrix products must keep one summation order whatever the batch: MKL promises that in its strict mode only, which
    costs about 5% (measured on an AVX-512 Xeon, where the default mode breaks the engine's bit-for-bit invariance).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextmanager
def started_sandbox(settings: SandboxSection) -> Iterator[SandboxClient]:
    """A sandbox for as long as the context: a child of this process, or those at `urls`. Raises SandboxDown where one
    cannot be started or reached, and below `min_isolation`."""
    with _remote(settings) if settings.urls else _child(settings) as client:
        yield client


def _child(settings: SandboxSection) -> SandboxClient:
    return SandboxClient.start(slots=settings.slots, preload=settings.preload, min_isolation=settings.min_isolation)


def _remote(settings: SandboxSection) -> SandboxClient:
    need("sandbox")
    client = SandboxClient.connect(settings.urls, token=os.environ.get("ROCSTAR_SANDBOX_TOKEN", ""))
    for node in client.nodes:
        level = node.info.isolation if node.info else ""
        if level < settings.min_isolation:
            client.close()
            raise SandboxDown(
                f"the sandbox at {node.label} offers isolation {level}, and sandbox.min_isolation is "
                f"{settings.min_isolation}; lower it, or take that sandbox out of sandbox.urls"
            )
    return client
