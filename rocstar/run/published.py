"""Publishes a run's weights for engines in other processes: a Hugging Face folder for each version, in memory if it has
room (/dev/shm), else in the run folder. Or weights are sent (`cluster.weights`), and the folder holds only config.json.

The newest two versions are kept, since an engine may still read the older. Memory left behind by a killed run is freed
by the next one: a folder belongs to a live run exactly while a process holds its lock, which the kernel releases when
that process ends."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from rocstar.engines.sending import Sending
from rocstar.engines.torch_channel import Channel
from rocstar.learning.models import give_back
from rocstar.learning.policy import Policy
from rocstar.run.stopper import in_thread
from rocstar.sandbox.container import host_bytes
from rocstar.support.scratch import scratch
from rocstar.types import Weights

MEMORY = Path("/dev/shm")
PREFIX = "rocstar-weights-"
ROOM = 2.0  # times the size of the weights must be free in memory: for them, and as much again for everything else


class PublishedWeights:
    """One for the life of a run; `close` it at the end."""

    def __init__(
        self,
        disk: Path,
        memory: Path | None = MEMORY,
        *,
        merged: bool = True,
        channel: Channel | None = None,
        break_off: Callable[[], None] = lambda: None,
    ) -> None:
        """disk: the folder used if memory has no room; created when needed. memory: None if engines on other machines
        read the weights. merged: False if each engine merges adapters itself, into the base model read from the same
        path; the first published weights, which engines start on, are always merged. channel: all after the first are
        sent through it. break_off: see `in_thread`."""
        self._disk, self._merged = disk, merged
        self._channel, self._break_off, self._turn = channel, break_off, asyncio.Lock()
        self._memory: Path | None = None
        self._ends = ExitStack()
        if memory is not None and memory.is_dir():
            with suppress(OSError):  # it cannot be written
                self._memory = self._ends.enter_context(scratch(memory, PREFIX, memory))
                self._memory.chmod(0o700)
        self._kept: list[Path] = []
        self._count = 0
        self.seconds = 0.0
        """Seconds of the last `publish`."""

    def publish(self, policy: Policy, *, sent: bool = True) -> Weights:
        """sent: use the channel, if any. Raises OSError if neither memory nor disk has room, RunHalted for weights that
        are not finite."""
        began = time.monotonic()
        for old in self._kept[:-1]:
            shutil.rmtree(old, ignore_errors=True)
        self._count += 1
        merged = self._merged or self._count == 1
        written = [parameter for parameter in policy.parameters if merged or parameter.requires_grad]
        size = sum(parameter.numel() for parameter in written) * policy.dtype.itemsize
        sent = sent and self._channel is not None and self._count > 1
        folder = self._place(0 if sent else size) / f"{self._count:06d}"
        weights = policy.publish(folder, merged=merged, sent=sent)
        self._kept, self.seconds = [*self._kept[-1:], folder], time.monotonic() - began
        return replace(weights, sender=self._sending(policy, weights)) if sent else weights

    @property
    def bytes(self) -> int:
        """Size of the newest weights, as written, or as sent to each engine."""
        written = sum(file.stat().st_size for file in self._kept[-1].glob("*.safetensors"))
        return written or (self._channel.sent_bytes if self._channel else 0)

    def _sending(self, policy: Policy, weights: Weights) -> Sending:
        channel = self._channel
        assert channel is not None

        def send() -> None:
            policy.send(channel.put, weights)
            channel.end()
            give_back()

        async def send_beside() -> None:
            await in_thread(send, inside=policy.on_device(), break_off=self._break_off)

        return Sending(channel, send_beside, self._turn)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        for folder in self._kept:
            shutil.rmtree(folder, ignore_errors=True)
        self._ends.close()

    def _place(self, size: int) -> Path:
        """A folder with room for so many bytes."""
        if self._memory is not None:
            free = min(shutil.disk_usage(self._memory).free, host_bytes())
            if free >= ROOM * size:
                return self._memory
        return self._disk
