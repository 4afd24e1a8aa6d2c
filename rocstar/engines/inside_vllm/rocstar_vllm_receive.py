"""Receives weights in vLLM's workers that a learner sends layer by layer, without a file. The learner's end is
`rocstar/engines/torch_channel.py`, which defines the messages in the store.

A worker on the learner's own GPU or machine reads a shared buffer: CUDA IPC on the same GPU, a mapped file on CPUs of
one machine. All others receive the buffer's bytes by NCCL or gloo."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

SECONDS = timedelta(minutes=5)  # for the next tensors to come
TAKEN = timedelta(minutes=1)  # for all workers to take a chunk; less than a fleet waits for weights
FOREVER = timedelta(days=30)  # timeout of NCCL's own watchdog, which would end the process


class Receiver:
    """A worker's end, for the life of its process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._store: Any = None
        self._address: tuple[str, int] | None = None
        self._group: Any = None
        self._group_id = ""
        self._seen: torch.Tensor | None = None

    def tensors(self, plan: dict[str, Any], worker: int) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of one exchange, by name; the caller may keep them. worker: this worker's number on its server.
        Raises RuntimeError with the learner's reason if it stops the exchange, or if it is gone."""
        try:
            yield from self._chunks(self._open(plan["address"]), plan, plan["ranks"][worker])
        finally:
            self._seen = None  # so the learner can free its memory

    def _chunks(self, store: Any, plan: dict[str, Any], rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for number in count():
            chunk = f"{plan['exchange']}/{number}"
            store.add(f"{chunk}/awaited", 1)
            message = json.loads(store.get(chunk))
            if "stopped" in message:
                raise RuntimeError(message["stopped"])
            if "size" not in message:
                return
            size = message["size"]
            flat = self._sent(store, plan, rank, size) if rank else self._shared(plan["buffer"])[:size].clone()
            if flat.is_cuda:
                torch.cuda.synchronize(self._device)
            store.add(f"{chunk}/taken", 1)
            for name, kind, shape, begin, end in message["tensors"]:
                yield name, flat[begin:end].view(getattr(torch, kind)).view(shape)

    def _open(self, address: list[Any]) -> Any:
        host, port = address
        if self._address != (host, port):
            self._store = TCPStore(host, port, is_master=False, timeout=SECONDS)
            self._address = host, port
        return self._store

    def _sent(self, store: Any, plan: dict[str, Any], rank: int, size: int) -> torch.Tensor:
        """The next bytes of the plan's group, which is joined first."""
        if self._group_id != plan["group"]:
            self._group = None
            self._group = joined(store, plan["group"], rank, plan["size"], self._device, plan["address"][0])
            self._group_id = plan["group"]
        flat = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._group.broadcast(flat, 0, TAKEN).wait(TAKEN)
        return flat

    def _shared(self, buffer: dict[str, Any]) -> torch.Tensor:
        if self._seen is None:
            self._seen = shared_buffer(buffer, self._device)
        return self._seen


def joined(store: Any, name: str, rank: int, size: int, device: torch.device, host: str) -> Any:
    """The group of that name, once all its members have joined. host: address of the member that has the store."""
    own = PrefixStore(name, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        return dist.ProcessGroupNCCL(own, rank, size, options)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_address_towards(host))]
    gloo._timeout = TAKEN
    return dist.ProcessGroupGloo(own, rank, size, gloo)


def memory_of(device: torch.device) -> str:
    """Identifies the memory that processes can share tensors in: a GPU, or a machine's memory."""
    if device.type == "cuda":
        return f"GPU {torch.cuda.get_device_properties(device).uuid}"
    return f"machine {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def shared_buffer(buffer: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Another process's buffer. Raises OSError if this process can't map it."""
    if "path" in buffer:
        if (found := os.readlink(buffer["path"])) != buffer["name"]:
            raise OSError(f"{buffer['path']} is {found} here, not the learner's {buffer['name']}")
        return torch.from_file(buffer["path"], shared=True, size=buffer["size"], dtype=torch.uint8)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(pickle.loads(bytes.fromhex(buffer["handle"])))
    arguments[6] = torch.cuda.current_device() if device.index is None else device.index  # the owner's number of it
    whole: torch.Tensor = rebuild_cuda_tensor(*arguments)  # type: ignore[no-untyped-call]
    return whole


def _address_towards(host: str) -> str:
    """The address at which `host` reaches this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # of a datagram socket: sends nothing
        return str(probe.getsockname()[0])
