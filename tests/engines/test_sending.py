"""Weights that learners send past any file: every byte arrives under its name, by a buffer that both see and by a
broadcast; who waits for whom; and what a fault of one end does to the other. Real servers: test_vllm_engine.py."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch

from rocstar.engines import torch_channel
from rocstar.engines.inside_vllm.rocstar_vllm_receive import Receiver, memory_of
from rocstar.engines.sending import Sending
from rocstar.engines.torch_channel import Channel
from rocstar.errors import EngineUnavailable, RunHalted

CPU = torch.device("cpu")
HOST = "127.0.0.1"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Of three types, odd sizes, several chunks of 4 KiB, one larger than such a chunk."""
    chance = torch.Generator().manual_seed(seed)
    found = {f"layers.{n}.weight": torch.randn(7, 11 + n, generator=chance).bfloat16() for n in range(20)}
    return {
        "embed.weight": torch.randn(50, 30, generator=chance).bfloat16(),
        **found,
        "norm.weight": torch.randn(13, generator=chance),
        "scale": torch.tensor(float(seed)),
        "head.weight": torch.randn(9, 9, generator=chance).half(),
    }


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_channel, "CHUNK_BYTES", 4096)


class Server:
    """Workers of a server, each in a thread: they take what they are sent, and keep it."""

    def __init__(self, name: str, workers: int = 1) -> None:
        self.told = [{"name": name, "memory": memory_of(CPU)} for _ in range(workers)]
        self.receivers = [Receiver(CPU) for _ in range(workers)]
        self.taken: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]
        self.fails_after: int | None = None

    async def call(self, method: str, plan: dict[str, Any]) -> list[dict[str, Any]]:
        assert method == "rocstar_receive"
        return await asyncio.gather(*(asyncio.to_thread(self._take, plan, n) for n in range(len(self.told))))

    def _take(self, plan: dict[str, Any], worker: int) -> dict[str, Any]:
        taken = self.taken[worker] = {}
        try:
            for name, tensor in self.receivers[worker].tensors(plan, worker):
                if len(taken) == self.fails_after:
                    return {"failed": "its memory is full"}
                taken[name] = tensor
        except RuntimeError as error:
            return {"refused": str(error)}
        return {}


def sending(channel: Channel, weights: Mapping[str, torch.Tensor]) -> Sending:
    def send() -> None:
        for name, tensor in weights.items():
            channel.put(name, tensor)
        channel.end()

    return Sending(channel, lambda: asyncio.to_thread(send), asyncio.Lock())


async def give(sender: Sending, servers: Sequence[Server]) -> list[list[dict[str, Any]]]:
    async def to(server: Server) -> list[dict[str, Any]]:
        with sender.expecting() as send:
            return await send(server.call, server.told)

    return await asyncio.gather(*map(to, servers))


def assert_taken(server: Server, weights: Mapping[str, torch.Tensor]) -> None:
    for taken in server.taken:
        assert list(taken) == list(weights)
        assert all(torch.equal(taken[name], each) and taken[name].dtype == each.dtype for name, each in weights.items())


@pytest.mark.parametrize("shares", [True, False], ids=["seen", "broadcast"])
async def test_every_byte_arrives_at_every_worker_again_and_again(shares: bool) -> None:
    channel = Channel(CPU, HOST, largest=3000, shares=shares)
    servers = [Server("a"), Server("b", workers=2)]
    for seed in range(3):
        weights = tensors(seed)
        assert await give(sending(channel, weights), servers) == [[{}], [{}, {}]]
        for server in servers:
            assert_taken(server, weights)
        assert channel.sent_bytes == sum(each.numel() * each.element_size() for each in weights.values())
    channel.close()


@pytest.mark.parametrize("shares", [True, False], ids=["seen", "broadcast"])
async def test_a_server_that_was_begun_anew_joins_those_that_were_there(shares: bool) -> None:
    channel, weights = Channel(CPU, HOST, largest=3000, shares=shares), tensors(5)
    stays = Server("a")
    await give(sending(channel, tensors(4)), [stays, Server("b")])
    again = Server("b, begun anew")
    assert await give(sending(channel, weights), [stays, again]) == [[{}], [{}]]
    assert_taken(stays, weights)
    assert_taken(again, weights)
    channel.close()


@pytest.mark.parametrize("shares", [True, False], ids=["seen", "broadcast"])
async def test_a_worker_that_fails_ends_the_pass_for_all_and_the_next_one_succeeds(shares: bool) -> None:
    channel, weights = Channel(CPU, HOST, largest=3000, shares=shares), tensors(1)
    well, ill = Server("a"), Server("b")
    ill.fails_after = 3
    first, second = await give(sending(channel, weights), [well, ill])
    assert second == [{"failed": "its memory is full"}]
    assert list(first[0]) == ["refused"]
    ill.fails_after = None
    assert await give(sending(channel, weights), [well, ill]) == [[{}], [{}]]
    assert_taken(well, weights)
    assert_taken(ill, weights)
    channel.close()


async def test_a_server_that_is_lost_fails_alone_but_for_those_that_were_sent_to_with_it() -> None:
    channel, well = Channel(CPU, HOST, largest=3000), Server("a")
    lost = Server("b")

    async def dies(method: str, plan: dict[str, Any]) -> list[dict[str, Any]]:
        raise EngineUnavailable("the connection was broken")

    lost.call = dies  # type: ignore[method-assign]
    sender = sending(channel, tensors(2))
    both = await asyncio.gather(give(sender, [well]), give(sender, [lost]), return_exceptions=True)
    assert isinstance(both[0], list)
    assert "the connection was broken" in both[0][0][0]["refused"]
    assert isinstance(both[1], EngineUnavailable)
    assert await give(sending(channel, tensors(2)), [well]) == [[{}]]
    channel.close()


async def test_learners_that_have_other_weights_by_now_are_no_fault_of_the_server() -> None:
    channel, server = Channel(CPU, HOST, largest=3000), Server("a")

    async def send() -> None:
        raise EngineUnavailable("weights 3 have changed")

    found = await give(Sending(channel, send, asyncio.Lock()), [server])
    assert found == [[{"refused": "weights 3 have changed"}]]
    channel.close()


async def test_learners_that_end_end_the_run() -> None:
    channel, server = Channel(CPU, HOST, largest=3000), Server("a")

    async def send() -> None:
        raise RunHalted("learner ranks lost one another")

    with pytest.raises(RunHalted, match="lost one another"):
        await give(Sending(channel, send, asyncio.Lock()), [server])
    channel.close()


class Noted:
    """A channel that notes its passes, and sends nothing."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = []

    def plans(self, engines: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        self.passes.append([engine[0]["name"] for engine in engines])
        return [{} for _ in engines]

    def stop(self, why: str) -> None: ...

    def give_up(self, why: str) -> None: ...


async def nothing() -> None: ...


async def taken(method: str, plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [{}]


Ask = Callable[[], Awaitable[list[dict[str, Any]]]]


async def test_one_pass_serves_all_that_were_given_the_weights_however_late_they_ask() -> None:
    noted, late = Noted(), asyncio.Event()
    sender = Sending(cast(Any, noted), nothing, asyncio.Lock())

    async def engine(name: str, ready: asyncio.Event | None = None) -> list[dict[str, Any]]:
        with sender.expecting() as send:
            if ready:
                await ready.wait()
            return await send(taken, [{"name": name}])

    asked = asyncio.gather(engine("a"), engine("b", late), engine("c"))
    await asyncio.sleep(0.01)
    assert noted.passes == []
    late.set()
    await asked
    assert sorted(map(sorted, noted.passes)) == [["a", "b", "c"]]
    await engine("d")
    assert noted.passes[1:] == [["d"]]


async def test_who_leaves_without_asking_is_not_waited_for() -> None:
    noted, leaves = Noted(), asyncio.Event()
    sender = Sending(cast(Any, noted), nothing, asyncio.Lock())

    async def fails() -> None:
        with sender.expecting():
            await leaves.wait()
            raise EngineUnavailable("it could not be paused")

    async def asks() -> list[dict[str, Any]]:
        with sender.expecting() as send:
            return await send(taken, [{"name": "a"}])

    both = asyncio.gather(asks(), fails(), return_exceptions=True)
    await asyncio.sleep(0.01)
    assert noted.passes == []
    leaves.set()
    assert (await both)[0] == [{}]
    assert noted.passes == [["a"]]


async def test_who_is_no_longer_waited_for_does_not_hold_the_others_up() -> None:
    """A fleet cancels an engine that takes too long."""
    noted, begun = Noted(), threading.Event()
    sender = Sending(cast(Any, noted), nothing, asyncio.Lock())

    async def hangs() -> None:
        with sender.expecting():
            begun.set()
            await asyncio.Event().wait()

    async def asks() -> list[dict[str, Any]]:
        with sender.expecting() as send:
            return await send(taken, [{"name": "a"}])

    hanging = asyncio.create_task(hangs())
    asking = asyncio.create_task(asks())
    await asyncio.sleep(0.01)
    assert begun.is_set() and not asking.done()
    hanging.cancel()
    assert await asking == [{}]
