"""How long new weights take to another process: through a folder in memory, and sent past any file.

    python benchmarks/weights.py [--gigabytes 0.5] [--rounds 3] [--device cpu]

*folder* is what a run writes to /dev/shm and what a vLLM worker of ours reads; *seen* is a buffer that both processes
see (a mapped file; on a GPU, CUDA IPC), *broadcast* one that is sent (gloo; NCCL, to a second GPU, where there is one).
Layers of bf16 as a model of such a size has them, embeddings included. The receiving process keeps a copy of each
tensor and adds up all bytes, after its clock has stopped. Rounds by turns; medians. Prints a table, last one JSON line;
ends with 1 where a byte is another than was sent.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from frame import ROOT, Worker, parser, print_rows, report
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(ROOT))

from rocstar.engines.inside_vllm.rocstar_vllm_receive import Receiver, memory_of
from rocstar.engines.sending import Sending
from rocstar.engines.torch_channel import Channel

HIDDEN, VOCAB = 896, 32_000
WAYS = ("folder", "seen", "broadcast")


def layers(size: float, device: str) -> dict[str, torch.Tensor]:
    """Of about so many bytes."""
    chance = torch.Generator().manual_seed(0)
    shapes = {
        "q": (HIDDEN, HIDDEN),
        "kv": (256, HIDDEN),
        "up": (4864, HIDDEN),
        "down": (HIDDEN, 4864),
        "norm": (HIDDEN,),
    }
    found, number = {"embed": torch.randn(VOCAB, HIDDEN, generator=chance).bfloat16()}, 0
    while sum(each.nbytes for each in found.values()) < size:
        found |= {
            f"layers.{number}.{name}": torch.randn(shape, generator=chance).bfloat16() for name, shape in shapes.items()
        }
        number += 1
    return {name: each.to(device) for name, each in found.items()}


def added_up(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(
        int(each.view(-1).view(torch.uint8).sum(dtype=torch.int64)) * (n + 1) for n, each in enumerate(tensors.values())
    )


def receive(device: str) -> None:
    """The other process: takes what each line of its input tells, and says how it went."""
    receiver = Receiver(torch.device(device))
    print(json.dumps({"name": "other", "memory": memory_of(torch.device(device))}), flush=True)
    for line in sys.stdin:
        told = json.loads(line)
        if "folder" in told:
            with safe_open(told["folder"], "pt") as file:
                taken = {name: file.get_tensor(name).to(device, copy=True) for name in file.keys()}  # noqa: SIM118
        else:
            taken = dict(receiver.tensors(told, 0))
        if device != "cpu":
            torch.cuda.synchronize()
        print("taken", flush=True)
        print(added_up({name: taken[name] for name in told.get("names", taken)}), flush=True)


class Other(Worker):
    """That process, as this one sees it."""

    def __init__(self, device: str) -> None:
        super().__init__([sys.executable, __file__, "--receive", device])
        self.told: dict[str, Any] = json.loads(self.line())

    def take(self, told: Mapping[str, Any]) -> None:
        assert self.ask(json.dumps(told)) == "taken\n"


def passed_on(way: str, weights: Mapping[str, torch.Tensor], to: Other, channel: Channel) -> float:
    """Seconds until the other process has them."""
    began = time.perf_counter()
    if way == "folder":
        with tempfile.NamedTemporaryFile(dir="/dev/shm", suffix=".safetensors") as file:
            save_file({name: each.cpu() for name, each in weights.items()}, file.name)
            to.take({"folder": file.name, "names": list(weights)})
            return time.perf_counter() - began

    def send() -> None:
        for name, each in weights.items():
            channel.put(name, each)
        channel.end()

    async def call(method: str, plan: dict[str, Any]) -> list[dict[str, Any]]:
        await asyncio.to_thread(to.take, plan)
        return [{}]

    async def exchange() -> None:
        with Sending(channel, lambda: asyncio.to_thread(send), asyncio.Lock()).expecting() as pass_on:
            await pass_on(call, [to.told])

    asyncio.run(exchange())
    return time.perf_counter() - began


def measured(size: float, rounds: int, device: str) -> tuple[dict[str, float], bool]:
    """Seconds by way, and whether every byte arrived."""
    weights = layers(size, device)
    right, largest, here = added_up(weights), max(each.nbytes for each in weights.values()), torch.device(device)
    seconds: dict[str, list[float]] = {}
    whole = True
    several = device != "cpu" and torch.cuda.device_count() > 1
    with Other(device) as near, Other("cuda:1" if several else device) as far:
        channels = {way: Channel(here, "127.0.0.1", largest=largest, shares=way == "seen") for way in WAYS}
        ways = [way for way in WAYS if device == "cpu" or several or way != "broadcast"]
        for number in range(rounds + 1):
            for way in ways:
                to = far if way == "broadcast" else near
                took = passed_on(way, weights, to, channels[way])
                whole &= int(to.line()) == right
                if number:  # the first starts groups and fills caches
                    seconds.setdefault(way, []).append(took)
    return {way: median(each) for way, each in seconds.items()}, whole


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--gigabytes", type=float, default=0.5)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--receive", metavar="DEVICE", help="be the process that receives")
    asked = arguments.parse_args()
    if asked.receive:
        receive(asked.receive)
        return 0
    seconds, whole = measured(asked.gigabytes * 1e9, asked.rounds, asked.device)
    print_rows(
        [
            {"way": way, "seconds": took, "GB/s": asked.gigabytes / took, "of a folder's": took / seconds["folder"]}
            for way, took in seconds.items()
        ]
    )
    if not whole:
        print("bytes arrived that were not sent", file=sys.stderr)
    report(gigabytes=asked.gigabytes, device=asked.device, seconds=seconds, whole=whole)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
