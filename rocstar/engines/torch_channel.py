"""Sends weights from the learners' memory to vLLM's workers, chunk by chunk as the learners go through their layers; no
process holds the whole model. Rank 0's end; a worker's is `inside_vllm/rocstar_vllm_receive.py`.

A TCP store holds each chunk's contents and whether it was taken; its bytes lie in a buffer that workers on rank 0's own
GPU (on CPUs: its machine) read directly and that the others receive by a broadcast:

    EXCHANGE/CHUNK          {"size", "tensors": [name, dtype, shape, begin, end]}; {} after the last; {"stopped": why}
    EXCHANGE/CHUNK/awaited  how many workers wait for it; only then it is written, and broadcast
    EXCHANGE/CHUNK/taken    how many workers have taken it

Why not vLLM's own transfer engines: docs/vllm.md. Not protected: any process that reaches the store can send weights,
as with the learners' own store."""

from __future__ import annotations

import json
import os
import pickle
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from rocstar.engines.inside_vllm.rocstar_vllm_receive import TAKEN, joined, memory_of
from rocstar.errors import EngineUnavailable, first_line

CHUNK_BYTES = 128 << 20  # minimum size of the buffer; larger if a tensor is
ALIGNED = 16  # bytes; each tensor starts at a multiple, so that it can be viewed as its dtype
LOOK_SECONDS = 0.0005


class Channel:
    """Rank 0's end, for the life of a run."""

    def __init__(self, device: torch.device, host: str, *, largest: int = 0, shares: bool = True) -> None:
        """host: where workers find this process. largest: bytes of the largest tensor. shares: False sends bytes even
        to workers that could map the buffer."""
        self._device, self._host = device, host
        self._memory = memory_of(device) if shares else ""
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
        self._buffer = _Buffer(device, max(CHUNK_BYTES, largest))
        self._group: Any = None
        self._members: tuple[str, ...] = ()
        self._group_id = ""
        self._exchange = ""
        self._chunk = self._used = self._takers = 0
        self._tensors: list[Any] = []
        self._stopped = threading.Event()
        self._why = ""
        self.sent_bytes = 0
        """Of the last exchange."""

    def plans(self, engines: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Begin an exchange. engines: facts of each worker of each (`RocstarWorker.rocstar_open`). Returns each
        engine's plan for its workers. Raises OSError if the buffer can't be allocated."""
        self._buffer.open()
        named = [[f"{worker['name']}/{number}" for number, worker in enumerate(engine)] for engine in engines]
        named_workers = zip(chain(*named), chain(*engines), strict=True)
        far = tuple(name for name, worker in named_workers if worker["memory"] != self._memory)
        if far != self._members:
            self._group, self._members, self._group_id = None, far, secrets.token_hex(8)
        self._exchange, self._takers = secrets.token_hex(8), sum(map(len, engines))
        self._chunk = self._used = self.sent_bytes = 0
        self._tensors = []
        self._stopped.clear()
        common = {
            "address": [self._host, self._store.port],
            "exchange": self._exchange,
            "group": self._group_id,
            "size": len(far) + 1,
            "buffer": self._buffer.address,
        }
        ranks = {name: rank for rank, name in enumerate(far, start=1)}
        return [{**common, "ranks": [ranks.get(name, 0) for name in names]} for names in named]

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Send a tensor, at the latest with `end`. Raises EngineUnavailable if the workers do not take the data before
        it."""
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        if self._used + flat.numel() > self._buffer.size:
            self._flush()
        begin, end = self._used, self._used + flat.numel()
        self._buffer.bytes[begin:end].copy_(flat)
        self._tensors.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), begin, end])
        self._used = -(-end // ALIGNED) * ALIGNED
        self.sent_bytes += flat.numel()

    def end(self) -> None:
        """Send what is left. Raises EngineUnavailable."""
        self._flush()
        self._store.set(self._key, "{}")
        self._buffer.free()

    def missing(self, what: str) -> int:
        """How many workers have not yet "awaited", or "taken", this chunk. Raises EngineUnavailable once stopped."""
        if self._stopped.is_set():
            raise EngineUnavailable(self._why)
        return self._takers - self._store.add(f"{self._key}/{what}", 0)

    def stop(self, why: str) -> None:
        """From any thread: the exchange under way fails, here and for its workers."""
        self._why = why
        self._stopped.set()

    def give_up(self, why: str) -> None:
        """Make the workers' exchange fail."""
        self._buffer.free()
        self._group, self._members = None, ()  # a member that waits in a broadcast loses its connection
        for chunk in (self._chunk, self._chunk + 1):  # some may have taken the current one
            self._store.set(f"{self._exchange}/{chunk}", json.dumps({"stopped": why}))

    def close(self) -> None:
        self._group = None
        self._buffer.close()

    @property
    def _key(self) -> str:
        return f"{self._exchange}/{self._chunk}"

    def _flush(self) -> None:
        if not self._tensors:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._await("awaited")
        self._store.set(self._key, json.dumps({"size": self._used, "tensors": self._tensors}))
        if self._members:
            try:
                if self._group is None:
                    size = len(self._members) + 1
                    self._group = joined(self._store, self._group_id, 0, size, self._device, self._host)
                self._group.broadcast(self._buffer.bytes[: self._used], 0, TAKEN).wait(TAKEN)
            except RuntimeError as error:
                raise EngineUnavailable(f"weights could not be sent: {first_line(error)}") from error
        self._await("taken")  # the buffer is filled again after this
        for key in (self._key, f"{self._key}/awaited", f"{self._key}/taken"):
            self._store.delete_key(key)
        self._chunk, self._used, self._tensors = self._chunk + 1, 0, []

    def _await(self, what: str) -> None:
        deadline = time.monotonic() + TAKEN.total_seconds()
        while missing := self.missing(what):
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f"{missing} of {self._takers} workers have not {what} some of the weights in {TAKEN.seconds} s"
                )
            time.sleep(LOOK_SECONDS)


class _Buffer:
    """Bytes on a device that other processes can map. On a GPU they are freed after each exchange. On CPUs they stay,
    since the descriptor of a closed file might be reused for another one."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, self.size = device, size
        self._file: int | None = None
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.address: dict[str, Any] = {}

    def open(self) -> None:
        """Raises OSError."""
        if self._device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            self.free()
            self.bytes = torch.empty(self.size, dtype=torch.uint8, device=self._device)
            handle = pickle.dumps(reduce_tensor(self.bytes)[1]).hex()  # type: ignore[no-untyped-call]
            self.address = {"handle": handle}
        elif self._file is None:
            name = f"rocstar-weights-{secrets.token_hex(8)}"
            self._file = os.memfd_create(name)  # gone with this process, however it ends
            os.truncate(self._file, self.size)
            path = f"/proc/{os.getpid()}/fd/{self._file}"
            self.bytes = torch.from_file(path, shared=True, size=self.size, dtype=torch.uint8)
            self.address = {"path": path, "size": self.size, "name": os.readlink(path)}

    def free(self) -> None:
        if self._device.type == "cuda":
            self.bytes, self.address = torch.empty(0, dtype=torch.uint8), {}
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self.free()
        if self._file is not None:
            os.close(self._file)
            self._file = None
