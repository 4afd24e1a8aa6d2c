"""Weights that learners send past any file: every byte arrives under its name, by a buffer that both see and by a
broadcast; who waits for whom; and what a fault of one end does to the other. Real servers: test_vllm_engine.py."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch")

import torch

from rocstar.engines import sending as sending_module
from rocstar.engines import torch_channel
from rocstar.engines.inside_vllm import rocstar_vllm_receive
from rocstar.engines.inside_vllm.rocstar_vllm_receive import Receiver, memory_of, shared_buffer
from rocstar.engines.sending import Sending
from rocstar.engines.torch_channel import Channel
from rocstar.engines.vllm import VllmEngine
from rocstar.errors import EngineUnavailable, RunHalted
from rocstar.types import Canary, Weights
from tests.engines.vllm_stand_in import VOCAB, StandIn

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
        await asyncio.sleep(0.01)  # a request takes its time
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


def sending(channel: Channel, weights: Mapping[str, torch.Tensor], turn: asyncio.Lock | None = None) -> Sending:
    def send() -> None:
        for name, tensor in weights.items():
            channel.put(name, tensor)
        channel.end()

    return Sending(channel, lambda: asyncio.to_thread(send), turn or asyncio.Lock())


async def give(sender: Sending, servers: Sequence[Server]) -> list[list[dict[str, Any]]]:
    async def to(server: Server) -> list[dict[str, Any]]:
        with sender.expecting() as send:
            return await send(server.call, server.told)

    return await asyncio.gather(*map(to, servers))


async def never(method: str, plan: dict[str, Any]) -> list[dict[str, Any]]:
    await asyncio.Event().wait()
    return []


def assert_taken(server: Server, weights: Mapping[str, torch.Tensor]) -> None:
    for taken in server.taken:
        assert list(taken) == list(weights)
        assert all(torch.equal(taken[name], each) and taken[name].dtype == each.dtype for name, each in weights.items())


every_way = pytest.mark.parametrize("shares", [True, False], ids=["seen", "broadcast"])


@every_way
async def test_every_byte_arrives_at_every_worker_again_and_again(shares: bool) -> None:
    """Also where a server was begun anew and joins those that were there."""
    channel = Channel(CPU, HOST, largest=3000, shares=shares)
    stays = Server("a")
    for seed, other in ((0, Server("b", workers=2)), (1, again := Server("b, begun anew")), (2, again)):
        weights = tensors(seed)
        assert await give(sending(channel, weights), [stays, other]) == [[{}], [{} for _ in other.told]]
        assert_taken(stays, weights)
        assert_taken(other, weights)
        assert channel.sent_bytes == sum(each.numel() * each.element_size() for each in weights.values())
    channel.close()


async def is_lost(method: str, plan: dict[str, Any]) -> list[dict[str, Any]]:
    raise EngineUnavailable("the connection was broken")


FAULTS: dict[str, Callable[[Server], Any]] = {
    "fails": lambda server: setattr(server, "fails_after", 3),
    "is lost": lambda server: setattr(server, "call", is_lost),
    "hangs": lambda server: setattr(server, "call", never),
    "hangs and is given up": lambda server: setattr(server, "call", never),
}


@every_way
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_server_that_fails_ends_the_pass_for_all_and_the_others_are_sent_the_weights_again(
    fault: str, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one server that dies takes all others out of service with it, for as long as they take to start; one that
    hangs is waited for until others give it up, or for less time than a fleet has patience."""
    channel, weights, turn = Channel(CPU, HOST, largest=3000, shares=shares), tensors(1), asyncio.Lock()
    well, ill = Server("a"), Server("b")
    FAULTS[fault](ill)
    if fault == "hangs":
        monkeypatch.setattr(sending_module, "LOOKS", 20)
    sender = sending(channel, weights, turn)
    giving, failing = asyncio.create_task(give(sender, [well])), asyncio.create_task(give(sender, [ill]))
    if fault == "hangs and is given up":
        await asyncio.sleep(0.1)
        failing.cancel()
    assert await giving == [[{}]]
    assert_taken(well, weights)
    assert failing.done() != (fault == "hangs")
    failing.cancel()
    (ended,) = await asyncio.gather(failing, return_exceptions=True)
    assert ended == [[{"failed": "its memory is full"}]] or isinstance(
        ended, EngineUnavailable | asyncio.CancelledError
    )
    again = tensors(2)
    assert await give(sending(channel, again, turn), [well, Server("b")]) == [[{}], [{}]]
    assert_taken(well, again)
    channel.close()


async def test_a_group_that_does_not_come_about_is_a_fault_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended a run, as a rank that was lost where there are several."""
    channel, server = Channel(CPU, HOST, largest=3000, shares=False), Server("a")

    def fails(*_: Any) -> Any:
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer")

    with monkeypatch.context() as patch:
        patch.setattr(torch_channel, "joined", fails)
        patch.setattr(rocstar_vllm_receive, "joined", fails)
        found = await give(sending(channel, tensors(1)), [server])
    assert list(found[0][0]) == ["refused"]
    assert await give(sending(channel, tensors(1)), [server]) == [[{}]]
    channel.close()


async def test_a_pass_goes_on_while_the_event_loop_waits_for_its_learners() -> None:
    """A lock keeps updates and passes apart, and rank 0 saves, say, in the thread that would send the requests."""
    channel, servers, lock = Channel(CPU, HOST, largest=3000), [Server("a"), Server("b")], threading.Lock()

    def send() -> None:
        with lock:
            for name, tensor in tensors(3).items():
                channel.put(name, tensor)
            channel.end()

    giving = asyncio.create_task(give(Sending(channel, lambda: asyncio.to_thread(send), asyncio.Lock()), servers))
    while not lock.locked():  # noqa: ASYNC110 - no event
        await asyncio.sleep(0)
    assert lock.acquire(timeout=30)
    lock.release()
    assert await giving == [[{}], [{}]]
    channel.close()


def test_a_file_that_is_not_the_learners_is_left_as_it_is(tmp_path: Path) -> None:
    """In a container of its own a worker finds another process under the number of the learner's."""
    with (tmp_path / "other").open("wb") as file:
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        with pytest.raises(OSError, match=r"is .*/other here, not the learner's /memfd:mine"):
            shared_buffer({"path": path, "size": 4096, "name": "/memfd:mine (deleted)"}, CPU)
    assert (tmp_path / "other").stat().st_size == 0


@every_way
async def test_many_exchanges_leave_nothing_behind(shares: bool) -> None:
    channel, servers = Channel(CPU, HOST, largest=3000, shares=shares), [Server("a"), Server("b")]
    held: list[tuple[int, int]] = []
    for number in range(15):
        servers[1].fails_after = 3 if number % 3 == 1 else None  # a broken group is made anew
        await give(sending(channel, tensors(number)), servers)
        held.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert max(held[-6:]) <= max(held[:6])
    channel.close()


async def test_learners_with_other_weights_by_now_are_no_fault_of_the_server_and_those_that_end_end_the_run() -> None:
    channel, server = Channel(CPU, HOST, largest=3000), Server("a")

    async def refuses() -> None:
        raise EngineUnavailable("weights 3 have changed")

    async def ends() -> None:
        raise RunHalted("learner ranks lost one another")

    assert await give(Sending(channel, refuses, asyncio.Lock()), [server]) == [[{"refused": "weights 3 have changed"}]]
    with pytest.raises(RunHalted, match="lost one another"):
        await give(Sending(channel, ends, asyncio.Lock()), [server])
    channel.close()


class Noted:
    """A channel that notes its passes, and sends nothing."""

    def __init__(self) -> None:
        self.passes: list[list[str]] = []

    def plans(self, engines: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        self.passes.append([engine[0]["name"] for engine in engines])
        return [{} for _ in engines]

    def missing(self, what: str) -> int:
        return 0

    def stop(self, why: str) -> None: ...

    def give_up(self, why: str) -> None: ...


async def nothing() -> None: ...


async def taken(method: str, plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [{}]


async def given(sender: Sending, name: str, ready: asyncio.Event | None = None) -> list[dict[str, Any]]:
    """An engine that is given the weights now, and asks for them when it is ready."""
    with sender.expecting() as send:
        if ready:
            await ready.wait()
        return await send(taken, [{"name": name}])


async def test_one_pass_serves_all_that_were_given_the_weights_however_late_they_ask() -> None:
    noted, late = Noted(), asyncio.Event()
    sender = Sending(cast(Any, noted), nothing, asyncio.Lock())

    engine = partial(given, sender)
    asked = asyncio.gather(engine("a"), engine("b", late), engine("c"))
    await asyncio.sleep(0.01)
    assert noted.passes == []
    late.set()
    await asked
    assert sorted(map(sorted, noted.passes)) == [["a", "b", "c"]]
    await engine("d")
    assert noted.passes[1:] == [["d"]]


async def test_a_server_that_is_never_paused_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience of both began at one time, so one server that was stopped took all others out with it."""
    monkeypatch.setattr(sending_module, "TOGETHER_SECONDS", 0.05)
    noted, is_paused = Noted(), asyncio.Event()
    sender = Sending(cast(Any, noted), nothing, asyncio.Lock())

    engine = partial(given, sender)
    hangs = asyncio.create_task(engine("a", is_paused))
    assert await engine("b") == [{}]
    assert noted.passes == [["b"]] and not hangs.done()
    is_paused.set()
    assert await hangs == [{}]
    assert noted.passes == [["b"], ["a"]]


async def test_who_leaves_without_asking_is_not_waited_for() -> None:
    """Its server could not be paused, or a fleet has cancelled it because it took too long."""
    noted = Noted()
    sender = Sending(cast(Any, noted), nothing, asyncio.Lock())

    async def hangs() -> None:
        with sender.expecting():
            await asyncio.Event().wait()

    hanging, asking = asyncio.create_task(hangs()), asyncio.create_task(given(sender, "a"))
    await asyncio.sleep(0.01)
    assert noted.passes == [] and not asking.done()
    hanging.cancel()
    assert await asking == [{}]
    assert noted.passes == [["a"]]


async def test_who_asked_and_is_given_up_then_is_not_sent_to() -> None:
    """Its server may be begun anew by the time that the others are there."""
    noted, late = Noted(), asyncio.Event()
    sender = Sending(cast(Any, noted), nothing, asyncio.Lock())

    engine = partial(given, sender)
    given_up, other = asyncio.create_task(engine("a")), asyncio.create_task(engine("b", late))
    await asyncio.sleep(0.01)
    given_up.cancel()
    await asyncio.wait({given_up})
    again = asyncio.create_task(engine("a, begun anew"))
    late.set()
    assert await asyncio.gather(other, again) == [[{}], [{}]]
    assert noted.passes == [["b", "a, begun anew"]] or noted.passes == [["a, begun anew", "b"]]


@pytest.fixture
async def exchange(tmp_path: Path) -> AsyncIterator[tuple[StandIn, VllmEngine, Weights, Noted]]:
    noted = Noted()
    sender = Sending(cast(Any, noted), nothing, asyncio.Lock())
    canary = (Canary(token_ids=(1, 2), logprobs=(-1.0,)),)
    async with StandIn() as server:
        engine = VllmEngine(server.url, vocab_size=VOCAB)
        await engine.restart(None)
        yield server, engine, Weights(version=3, folder=str(tmp_path), canary=canary, sender=sender), noted
        await engine.close()


async def test_an_engine_that_is_given_weights_twice_takes_them_twice(
    exchange: tuple[StandIn, VllmEngine, Weights, Noted],
) -> None:
    """A fleet whose engines are all out gives weights to one that is just begun anew with them; the first exchange
    waited for the second, and the second for the first."""
    _, engine, weights, noted = exchange
    await asyncio.gather(*(engine.load_weights(weights) for _ in range(2)))
    assert len(noted.passes) == 2 and engine.load().policy_version == 3


async def test_an_engine_that_is_closed_while_it_waits_for_the_others_is_unavailable(
    exchange: tuple[StandIn, VllmEngine, Weights, Noted],
) -> None:
    """Its client raised what ended the run."""
    server, engine, weights, _ = exchange
    assert weights.sender
    with weights.sender.expecting():
        given = asyncio.create_task(engine.load_weights(weights))
        await server.asked_for("/pause")
        await asyncio.sleep(0.1)
        await engine.close()
    with pytest.raises(EngineUnavailable, match="asked /collective_rpc after its engine was closed"):
        await given


class Scripted(Noted):
    """Its workers wait for weights once they are called; one exchange at a time, and none is stopped by another."""

    def __init__(self) -> None:
        super().__init__()
        self.why, self.called, self.under_way = "", 0, False

    def plans(self, engines: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        assert not self.under_way
        self.under_way, self.why, self.called = True, "", 0
        self.over = asyncio.get_running_loop().create_future()
        return [{"over": self.over} for _ in super().plans(engines)]

    def missing(self, what: str) -> int:
        self.check()
        return len(self.passes[-1]) - self.called

    def check(self) -> None:
        if self.why:
            raise EngineUnavailable(self.why)

    def stop(self, why: str) -> None:
        assert self.under_way, "an exchange that is over was stopped"
        self.why = why

    def give_up(self, why: str) -> None:
        self.end({"refused": why})

    def end(self, said: dict[str, Any]) -> None:
        assert self.under_way
        self.under_way = False
        self.over.set_result(said)


async def ticks(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(30))
async def test_whatever_fails_nobody_waits_for_ever(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, channel, turn = random.Random(seed), Scripted(), asyncio.Lock()
    monkeypatch.setattr(sending_module, "LOOK_SECONDS", 0)
    monkeypatch.setattr(sending_module, "TOGETHER_SECONDS", chance.choice((0.0, 15.0)))
    changed = chance.random() < 0.2

    async def send() -> None:
        for _ in range(chance.randrange(6)):
            await ticks(1)
            channel.check()
        if changed:
            raise EngineUnavailable("weights have changed")
        channel.end({})

    senders = [Sending(cast(Any, channel), send, turn) for _ in range(2)]

    async def call(method: str, plan: dict[str, Any]) -> list[dict[str, Any]]:
        await ticks(chance.randrange(4))
        if chance.random() < 0.15:
            raise EngineUnavailable("lost before it began")
        channel.called += plan["over"] is channel.over
        if chance.random() < 0.1:
            await asyncio.Event().wait()
        said = await asyncio.shield(plan["over"])
        await ticks(chance.randrange(3))
        if chance.random() < 0.15:
            raise EngineUnavailable("lost after it ended")
        return [said]

    async def engine(name: str) -> list[dict[str, Any]]:
        await ticks(chance.randrange(12))
        with chance.choice(senders).expecting() as sent:
            await ticks(chance.randrange(4))
            if chance.random() < 0.15:
                raise EngineUnavailable("not paused")
            return await sent(call, [{"name": name}])

    engines = [asyncio.create_task(engine(str(n))) for n in range(6)]
    for given_up in chance.sample(engines, chance.randrange(4)):
        await ticks(chance.randrange(10))
        given_up.cancel()
    done, hanging = await asyncio.wait(engines, timeout=0.2)
    for task in hanging:  # a fleet gives them up
        task.cancel()
    done, hanging = await asyncio.wait(engines, timeout=10)
    assert not hanging and not turn.locked() and not channel.under_way
    assert not any(sender._expected or sender._passes for sender in senders)
    for task in done:
        assert task.cancelled() or isinstance(task.exception(), EngineUnavailable | None)
    sent = [name for each in channel.passes for name in each]
    assert max(map(sent.count, sent), default=0) <= 2
    assert {str(n) for n, task in enumerate(engines) if not task.cancelled() and not task.exception()} <= set(sent)
