"""The processes that a run starts on its own machine: a sandbox, learner ranks, vLLM servers. by_ray.py has those that
Ray places. The sandbox is started before torch is loaded, while this process is still small."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rocstar.errors import RocstarError, RunHalted
from rocstar.sandbox.client import SandboxClient
from rocstar.support.child import child_command, child_environment
from rocstar.support.exits import need
from rocstar.support.processes import how_ended

if TYPE_CHECKING:
    from rocstar.config.places import ClusterSection, SandboxSection
    from rocstar.config.sections import ModelSection
    from rocstar.engines.vllm_server import StartServer
    from rocstar.learning.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    sandbox: SandboxClient
    """Runs programs."""
    start_ranks: Callable[[], Ranks]
    """Start the learners. Raises ConfigError, Unavailable."""
    start_server: StartServer
    """Start a vLLM server."""
    engines_share_memory: bool
    """Whether all engines can read this machine's shared memory (/dev/shm)."""
    host: str = "127.0.0.1"
    """Address of this machine for engines."""


def start_ranks(
    cluster: ClusterSection, model: ModelSection, environment: Mapping[str, str], gpus: Sequence[int] = ()
) -> Ranks:
    """Rank 0's handles of the other ranks: under torchrun those that it started, else children of this process.

    gpus: index of each rank's GPU among the visible ones; empty: the rank's number. The caller closes the ranks.
    """
    from rocstar.learning.models import device_of
    from rocstar.learning.ranks import ALONE, join, lead

    device, offload = device_of(model).type, cluster.offload_optimizer
    if "TORCHELASTIC_RUN_ID" in environment or "RANK" in environment:
        return join(environment, device, offload=offload)
    if cluster.learners == 1 and not offload:
        return ALONE
    return lead(cluster.learners, device, RankProcess.begin, offload=offload, gpus=gpus)


class RankProcess(subprocess.Popen[bytes]):
    """A rank above 0 as a child of this process (`rocstar.learning.ranks.StartedRank`)."""

    @classmethod
    def begin(cls, variables: Mapping[str, str]) -> RankProcess:
        """variables: torchrun's."""
        command, environment = child_command("rocstar.cluster.here"), child_environment(variables)
        return cls(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def ended(self, seconds: float) -> str | None:
        try:
            return how_ended(self.wait(timeout=seconds))
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        self.kill()
        self.wait()


@contextmanager
def started_sandbox(settings: SandboxSection, *, calls: bool = True) -> Iterator[SandboxClient]:
    """A sandbox for the duration of the context: a child of this process, or those at `urls`; none where nothing calls
    it. Raises SandboxDown if one cannot be started or reached, or is below `min_isolation`."""
    level = settings.min_isolation
    if not calls:
        client = SandboxClient(daemons=0)
    elif settings.urls:
        need("sandbox")
        token = os.environ.get("ROCSTAR_SANDBOX_TOKEN", "")
        client = SandboxClient.connect(settings.urls, token=token, min_isolation=level)
    else:
        client = SandboxClient.start(slots=settings.slots, preload=settings.preload, min_isolation=level)
    with client:
        yield client


def main(arguments: Sequence[str] = ()) -> int:
    """The program of a learner rank that is a child of rank 0 (`support/child.py`)."""
    from rocstar.learning.ranks import serve_rank

    try:
        serve_rank(os.environ)
    except RunHalted:  # rank 0 reports it
        return 1
    except RocstarError as error:
        print(f"rank {os.environ['RANK']}: {error}", file=sys.stderr)
        return 1
    return 0
