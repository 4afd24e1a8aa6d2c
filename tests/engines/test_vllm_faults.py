"""What the vLLM engine makes of a server that fails: a clear error within its patience, and no half result. A stand-in
takes the server's place, so this needs no vLLM."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rocstar.engines.vllm import VllmEngine
from rocstar.engines.vllm_server import VllmSettings
from rocstar.errors import ConfigError, ContractBroken, EngineUnavailable
from rocstar.types import Canary, Finish, Sampling, Weights
from tests.engines import plain
from tests.engines.plain import until
from tests.engines.vllm_stand_in import (
    VOCAB,
    Fault,
    StandIn,
    broken,
    cut_short,
    drop_by_drop,
    flood,
    no_answer,
    no_http,
    says,
    send,
    server_error,
)

GENERATE = "/inference/v1/generate"
SHORT = 2.0  # seconds of patience, where a test waits for its end; a busy machine answers in less
NEW = Weights(version=3, folder="anywhere", canary=(Canary(token_ids=(1, 2, 3), logprobs=(-1.0, -1.0)),))
QUICK: dict[str, Fault] = {
    "reset": broken,
    "cut short": cut_short,
    "too long": flood,
    "no HTTP": no_http,
    "500": server_error,
    "404": says("<html>Not Found</html>", 404),
    "redirect": says("", 302),
    "HTML": says("<html>Welcome to nginx</html>"),
    "empty": says(""),
    "other JSON": says('{"choices": 5, "results": 5, "status": 5, "success": 5, "weight_version": 5}'),
    "deep JSON": says("[" * 100_000),
}
ask = partial(plain.ask, ids=(1, 2), tokens=4)
FAULTS = [pytest.param(fault, id=name) for name, fault in QUICK.items()]


@asynccontextmanager
async def opened(server: StandIn, patience: float = 60.0) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(server.url, vocab_size=VOCAB, patience_seconds=patience)
    await engine.restart(None)
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def server() -> AsyncIterator[StandIn]:
    async with StandIn() as server:
        yield server


@pytest.fixture
async def engine(server: StandIn) -> AsyncIterator[VllmEngine]:
    async with opened(server) as engine:
        yield engine


@pytest.mark.parametrize(("device", "seed"), [("cuda", 2**62 + 5), ("cpu", None)])
async def test_a_request_brings_its_seed_where_the_server_bears_one(device: str, seed: int | None) -> None:
    """vLLM 0.32 on CPUs dies of it."""
    async with StandIn(device=device) as server, opened(server) as engine:
        sampling = Sampling(max_new_tokens=1, seed=2**62 + 5)
        await engine.generate((1, 2), sampling, request_id="s/0", session_id="s")
        (body,) = [body for _, path, body in server.asked if path == "/inference/v1/generate"]
    assert body["sampling_params"].get("seed") == seed


def patience(fault: Fault) -> float:
    """Short where the fault lasts until patience ends."""
    return SHORT if fault in (no_answer, drop_by_drop) else 60.0


def is_one_sentence(error: pytest.ExceptionInfo[Exception], server: StandIn) -> bool:
    return server.url in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


# -- starting takes long ---------------------------------------------------------------------------------------------


class Started:
    """The stand-in, to whoever started it as a server."""

    pid = 1

    def __init__(self, server: StandIn) -> None:
        self.url = server.url

    async def close(self) -> None:
        """It is the test's."""


async def test_weights_may_be_deleted_while_a_server_starts_on_them(server: StandIn, tmp_path: Path) -> None:
    def published(version: int) -> Weights:
        folder = tmp_path / f"{version:06d}"
        folder.mkdir()
        (folder / "config.json").write_text('{"made": "for all versions"}')
        return replace(NEW, version=version, folder=str(folder))

    begun: list[VllmSettings] = []

    async def start(settings: VllmSettings) -> Started:
        begun.append(settings)
        if len(begun) > 1:  # two steps pass
            shutil.rmtree(newest[-1].folder or "")
            newest.append(published(3))
        return Started(server)

    newest = [published(1)]
    first = VllmSettings(
        model=Path(newest[0].folder or ""), python=Path("python"), log=tmp_path / "v.log", max_tokens=64
    )
    engine = VllmEngine(first, vocab_size=VOCAB, start=start)
    await engine.restart(None)
    await engine.restart(lambda: newest[-1])
    loaded = [body["args"] for _, path, body in server.asked if body.get("method") == "rocstar_load"]
    assert loaded == [[newest[1].folder]]
    assert [span.version for span in (await ask(engine)).version_spans] == [3]
    assert [settings.reads_weights for settings in begun] == [True, False]
    assert (begun[1].model / "config.json").read_text() == '{"made": "for all versions"}'
    assert engine.whereabouts() == {"pid": 1, "url": server.url, "log": str(tmp_path / "v.log")}
    await engine.close()


async def test_a_strangers_server_on_the_same_port_is_noticed(server: StandIn, tmp_path: Path) -> None:
    """Whoever answered /health was believed, so two runs at one version could exchange tokens unnoticed."""

    async def start(settings: VllmSettings) -> Started:
        assert settings.name
        return Started(server)

    place = VllmSettings(model=tmp_path, python=Path("python"), log=tmp_path / "v.log", max_tokens=64)
    engine = VllmEngine(place, vocab_size=VOCAB, start=start)
    server.facts["name"] = "another"
    told = f"{server.url} is not the one that was started .* called another"
    with pytest.raises(EngineUnavailable, match=told):
        await engine.restart(None)
    assert server.paths() == ["/collective_rpc"], "nothing of it was changed"
    del server.facts["name"]
    await engine.restart(None)
    assert len((await ask(engine)).token_ids) == 4
    server.faults[GENERATE] = broken
    with pytest.raises(EngineUnavailable, match=rf"\(log: {place.log}\) broke the connection"):
        await ask(engine)
    server.facts["name"] = "another"
    before = len(server.asked)
    with pytest.raises(EngineUnavailable, match=told):
        await engine.load_weights(NEW)
    assert not {"/pause", "/update_weight_version"} & set(server.paths()[before:])
    with pytest.raises(EngineUnavailable, match=told):
        await ask(engine)
    await engine.close()


# -- one fault at a time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_completion_that_fails_is_unavailable_and_the_next_one_is_whole(server: StandIn, fault: Fault) -> None:
    async with opened(server) as engine:
        server.faults[GENERATE] = fault
        with pytest.raises(EngineUnavailable) as error:
            await ask(engine)
        assert is_one_sentence(error, server)
        assert fault is not flood or "with more than" in str(error.value)
        server.faults.clear()
        completion = await ask(engine)
    assert (completion.token_ids, completion.finish) == ((1, 1, 1, 1), Finish.LENGTH)


async def test_a_server_that_cannot_be_opened_says_why_and_opens_later(server: StandIn) -> None:
    engine = VllmEngine(server.url, vocab_size=VOCAB)
    server.faults["/collective_rpc"] = QUICK["HTML"]
    with pytest.raises(EngineUnavailable, match=r"docs/vllm\.md lists the options") as error:
        await engine.restart(None)
    assert is_one_sentence(error, server)
    with pytest.raises(EngineUnavailable):
        await ask(engine)
    server.faults.clear()
    await engine.restart(None)
    assert len((await ask(engine)).token_ids) == 4
    await engine.close()


@pytest.mark.parametrize("path", ["/resume", "/weight_info", "/update_weight_version", "/metrics"])
async def test_each_step_of_opening_may_fail(server: StandIn, path: str) -> None:
    server.faults[path] = server_error
    with pytest.raises(EngineUnavailable, match=path):
        async with opened(server):
            pass


STEPS = ["/pause", "/metrics", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume", GENERATE]
LATE: list[tuple[str, Fault]] = [("/collective_rpc", no_answer), ("/metrics", drop_by_drop)]
EXCHANGE: list[tuple[str, Fault]] = [*((path, broken) for path in STEPS), *LATE]


@pytest.mark.parametrize(("path", "fault"), EXCHANGE)
async def test_a_failed_exchange_serves_nothing_until_one_succeeds(server: StandIn, path: str, fault: Fault) -> None:
    async with opened(server, patience(fault)) as engine:
        server.faults[path] = fault
        with pytest.raises(EngineUnavailable) as error:
            await engine.load_weights(NEW)
        assert is_one_sentence(error, server)
        server.faults.clear()
        with pytest.raises(EngineUnavailable):
            await ask(engine)
        await engine.load_weights(NEW)
        assert [span.version for span in (await ask(engine)).version_spans] == [3]


async def test_two_users_of_a_server_never_take_each_others_tokens(server: StandIn, engine: VllmEngine) -> None:
    """Both have weights 3, each of its own run."""
    await engine.load_weights(NEW)
    assert [span.version for span in (await ask(engine)).version_spans] == [3]
    async with opened(server) as other:
        await other.load_weights(NEW)
        assert [span.version for span in (await ask(other)).version_spans] == [3]
        with pytest.raises(EngineUnavailable, match="another client gave it; give each run a server of its own"):
            await ask(engine)


async def test_a_server_sleeps_until_weights_come(server: StandIn, engine: VllmEngine) -> None:
    """Weights take memory before they are loaded, and the cache after it; a request that comes meanwhile waits."""
    await engine.sleep()
    assert server.asleep and server.paths().count("/collective_rpc") == 2, "on a CPU the cache is freed by ours"
    request = asyncio.create_task(ask(engine))
    await engine.load_weights(NEW)
    assert [span.version for span in (await request).version_spans] == [3] and "/pause" not in server.paths()
    asked = [(path, body.get("query") or body.get("method")) for _, path, body in server.asked]
    order = [("/sleep", "level=2&mode=keep"), ("/wake_up", "tags=weights"), ("/collective_rpc", "rocstar_load")]
    order += [("/update_weight_version", None), ("/wake_up", "tags=kv_cache")]
    assert [each for each in asked[asked.index(order[0]) :] if each in order] == order


@pytest.mark.parametrize(("path", "fault"), [("/sleep", broken), ("/wake_up", no_answer)])
async def test_a_server_that_does_not_sleep_or_wake_serves_nothing(server: StandIn, path: str, fault: Fault) -> None:
    async with opened(server, patience(fault)) as engine:
        server.faults[path] = fault
        with pytest.raises(EngineUnavailable) as error:
            await engine.sleep()
            await engine.load_weights(NEW)
        assert is_one_sentence(error, server) and path in str(error.value)
        with pytest.raises(EngineUnavailable):
            await ask(engine)
        assert engine.load().policy_version == 0


async def test_a_server_that_does_not_wake_has_no_weights(server: StandIn, engine: VllmEngine) -> None:
    await engine.sleep()
    server.asleep.clear()
    server.faults["/wake_up"] = says('{"status": "sleeping"}')
    with pytest.raises(EngineUnavailable, match="did not wake: its status is sleeping"):
        await engine.load_weights(NEW)
    del server.faults["/wake_up"]
    server.faults["/collective_rpc"] = says('{"results": [{"refused": "no such folder"}]}')
    with pytest.raises(EngineUnavailable, match="no such folder"):
        await engine.load_weights(NEW)
    with pytest.raises(EngineUnavailable, match="weights 3 in anywhere were taken in part"):
        await ask(engine)


async def test_what_is_in_flight_while_an_exchange_fails_is_unavailable(server: StandIn, engine: VllmEngine) -> None:
    server.free.clear()
    asked = [asyncio.create_task(ask(engine, f"r{n}")) for n in range(3)]
    await server.asked_for(GENERATE, 3)
    server.faults["/collective_rpc"] = broken
    with pytest.raises(EngineUnavailable):
        await engine.load_weights(NEW)
    for ended in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(ended, EngineUnavailable)


async def test_a_request_that_comes_during_an_exchange_waits_for_its_end(server: StandIn, engine: VllmEngine) -> None:
    loaded = asyncio.Event()

    async def load(writer: asyncio.StreamWriter) -> None:
        await loaded.wait()
        await send(writer, 200, '{"results": [{}]}')

    server.faults["/collective_rpc"] = load
    exchange = asyncio.create_task(engine.load_weights(NEW))
    await server.asked_for("/collective_rpc", 2)  # the first was to open it
    request = asyncio.create_task(ask(engine))
    await asyncio.sleep(0.05)
    assert GENERATE not in server.paths()
    loaded.set()
    await exchange
    assert [span.version for span in (await request).version_spans] == [3]


async def test_one_row_of_the_server_is_left_to_the_canary_rows_which_come_first_and_are_believed() -> None:
    async with StandIn(rows=3) as server, opened(server) as engine:
        server.free.clear()
        asked = [asyncio.create_task(ask(engine, f"r{n}")) for n in range(5)]
        await server.asked_for(GENERATE, 2)
        exchange = asyncio.create_task(engine.load_weights(NEW))
        await server.asked_for(GENERATE, 3)
        bodies = [body for _, path, body in server.asked if path == GENERATE]
        assert [body.get("priority") for body in bodies] == [None, None, -1]
        server.free.set()
        await exchange
        assert [len(completion.token_ids) for completion in await asyncio.gather(*asked)] == [4] * 5
        other = Canary(token_ids=(1, 2, 3), logprobs=(-1.0, -9.0))
        with pytest.raises(EngineUnavailable, match="does not compute with weights 3"):
            await engine.load_weights(replace(NEW, canary=(other,)))


async def test_a_server_without_workers_or_with_an_impossible_cache_is_refused(server: StandIn) -> None:
    for used in ("nan", "-1.0", "1.5"):
        server.used = used
        with pytest.raises(EngineUnavailable, match="KV cache is in use"):
            async with opened(server):
                pass
    server.faults["/collective_rpc"] = says('{"results": []}')
    with pytest.raises(EngineUnavailable, match="no worker"):
        async with opened(server):
            pass


# -- connections -----------------------------------------------------------------------------------------------------


async def test_each_request_has_a_connection_and_an_id_of_its_own_and_none_is_sent_twice(server: StandIn) -> None:
    for _ in range(2):
        async with opened(server) as engine:
            await asyncio.gather(*(ask(engine, f"r{n}") for n in range(3)))
            await engine.load_weights(NEW)
    connections = [number for number, _, _ in server.asked]
    assert len(set(connections)) == len(connections)
    ids = [body["request_id"] for _, path, body in server.asked if path == GENERATE and "priority" not in body]
    assert len(set(ids)) == len(ids) == 6, "also of two engines"
    async with opened(server) as engine:
        server.faults[GENERATE] = broken
        with pytest.raises(EngineUnavailable, match="broke the connection"):
            await ask(engine)
    assert server.paths().count(GENERATE) == 6 + 2 + 1


# -- waits -----------------------------------------------------------------------------------------------------------


async def test_a_server_that_works_is_waited_for_beyond_any_patience(server: StandIn) -> None:
    async with opened(server, SHORT) as engine:
        server.free.clear()
        slow = asyncio.create_task(ask(engine))
        for _ in range(8):
            server.produced += 1
            await asyncio.sleep(SHORT / 4)
        assert not slow.done()
        await until(lambda: engine.load().produced_tokens == 8)  # by which a fleet sees that it does something
        server.free.set()
        assert len((await slow).token_ids) == 4


async def test_a_server_that_vanishes_is_unavailable_at_once(engine: VllmEngine, server: StandIn) -> None:
    server.free.clear()
    asked = [asyncio.create_task(ask(engine, f"r{n}")) for n in range(3)]
    await server.asked_for(GENERATE, 3)
    await server.__aexit__()
    for ended in await asyncio.gather(*asked, return_exceptions=True):
        assert isinstance(ended, EngineUnavailable) and "broke the connection" in str(ended)
    with pytest.raises(EngineUnavailable, match="could not be reached"):
        await ask(engine)


async def test_an_aborted_request_ends_with_what_the_server_wrote(server: StandIn, engine: VllmEngine) -> None:
    server.free.clear()
    request = asyncio.create_task(ask(engine))
    await server.asked_for(GENERATE)
    await engine.close_session("s")
    completion = await request
    assert (completion.token_ids, completion.finish) == ((1,), Finish.ABORTED)


@pytest.mark.parametrize("fault", [None, no_answer, broken], ids=["ignored", "no answer", "reset"])
async def test_an_abort_ends_even_where_the_server_does_not_heed_it(server: StandIn, fault: Fault | None) -> None:
    async with opened(server, SHORT) as engine:
        server.free.clear()
        server.heeds_aborts = False
        if fault:
            server.faults["/abort_requests"] = fault
        request = asyncio.create_task(ask(engine))
        await server.asked_for(GENERATE)
        await engine.close_session("s")
        assert (await request).finish is Finish.ABORTED
        assert engine.load().running + engine.load().waiting == 0


# -- servers that do not suit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://[::1"])
async def test_what_is_no_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match="the URL of a vLLM server must be like"):
        await VllmEngine(url, vocab_size=VOCAB).restart(None)


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"vocab_size": VOCAB - 1}, f"the tokenizer has {VOCAB} ids and the model at http.* embeds {VOCAB - 1}"),
        ({"dtype": "float8_e4m3fn"}, "must be started with --dtype float32 or .*, not float8_e4m3fn"),
        ({"rows": 1}, "has --max-num-seqs 1; start it with 2 or more"),
        ({"scheduling": "fcfs"}, "has --scheduling-policy fcfs; start it with priority"),
        ({"logprobs_mode": "raw_logits"}, "has --logprobs-mode raw_logits; start it with processed_logprobs"),
    ],
)
async def test_a_server_that_cannot_keep_the_promises_is_a_config_error(facts: dict[str, Any], told: str) -> None:
    async with StandIn(**facts) as server:
        with pytest.raises(ConfigError, match=told):
            await VllmEngine(server.url, vocab_size=VOCAB).restart(None)


async def test_what_no_server_could_take_or_no_worker_says_is_refused(server: StandIn, engine: VllmEngine) -> None:
    for weights in (Weights(version=3, folder="/dev/shm"), Weights(version=3, tensors={})):
        with pytest.raises(ContractBroken, match="need a folder and canary rows"):
            await engine.load_weights(weights)
    del server.facts["dtype"]
    with pytest.raises(EngineUnavailable, match="did not report its settings"):
        await VllmEngine(server.url, vocab_size=VOCAB).restart(None)
