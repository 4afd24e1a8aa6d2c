"""What every Engine promises, run over the scripted one and the torch one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rocstar.engines.scripted import ScriptedEngine
from rocstar.protocols import Engine
from rocstar.types import Completion, Finish, Sampling, Weights

pytest.importorskip("torch")

from rocstar.engines.torch_engine import TorchEngine
from tests.engines.models import MODELS, VOCAB, saved, until

PROMPT = tuple(range(3, 13))


class Letters:
    """A codec with one token per letter; letters are below VOCAB after a shift."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 64 for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token + 64) for token in token_ids)


def scripted() -> ScriptedEngine:
    return ScriptedEngine(Letters(), ["HELLOWORLD", "AGAIN", "MORE"])


MAKERS: dict[str, Callable[[], Any]] = {
    "scripted": scripted,
    "torch_qwen": lambda: TorchEngine(MODELS["qwen"](0), rows=4, positions=512),
    "torch_llama": lambda: TorchEngine(MODELS["llama"](0), rows=4, positions=512),
}
TORCH = [name for name in MAKERS if name.startswith("torch")]


@pytest.fixture(params=MAKERS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    made = MAKERS[request.param]()
    yield made
    if isinstance(made, TorchEngine):
        await made.close()


@pytest.fixture(params=TORCH)
async def slow_engine(request: pytest.FixtureRequest) -> AsyncIterator[TorchEngine]:
    """An engine whose requests last long enough to be interrupted."""
    made = MAKERS[request.param]()
    yield made
    await made.close()


async def ask(
    engine: Engine, ids: Sequence[int] = PROMPT, *, session: str = "s", turn: int = 0, tokens: int = 6, **sampling: Any
) -> Completion:
    asked = Sampling(max_new_tokens=tokens, **{"seed": 7, **sampling})
    return await engine.generate(ids, asked, request_id=f"{session}/{turn}", session_id=session)


async def started(engine: Engine, running: int = 1) -> None:
    """Wait until so many requests decode."""
    await until(lambda: engine.load().running >= running)


async def idle(engine: Engine) -> None:
    await until(lambda: not engine.load().running and not engine.load().waiting)


async def test_a_completion_has_a_finite_logprob_for_each_token(engine: Engine) -> None:
    completion = await ask(engine)
    assert len(completion.token_ids) == len(completion.logprobs) == 6
    assert all(0 <= token < VOCAB for token in completion.token_ids)
    assert all(-1e4 < value <= 0 for value in completion.logprobs)


@pytest.mark.parametrize("tokens", [1, 2, 5])
async def test_no_more_tokens_are_written_than_allowed(engine: Engine, tokens: int) -> None:
    completion = await ask(engine, tokens=tokens)
    assert (len(completion.token_ids), completion.finish) == (tokens, Finish.LENGTH)


async def test_a_stop_token_ends_the_completion_and_is_part_of_it(engine: Engine) -> None:
    free = await ask(engine, tokens=12)
    stop = free.token_ids[-1]
    completion = await ask(engine, session="other", tokens=60, stop_token_ids=(stop,))
    assert completion.finish is Finish.STOP
    assert completion.token_ids.index(stop) == len(completion.token_ids) - 1


async def test_a_stop_token_at_the_last_allowed_place_still_counts_as_stop(engine: Engine) -> None:
    stop = (await ask(engine, tokens=12)).token_ids[-1]
    length = len((await ask(engine, session="free", tokens=60, stop_token_ids=(stop,))).token_ids)
    completion = await ask(engine, session="capped", tokens=length, stop_token_ids=(stop,))
    assert (completion.finish, len(completion.token_ids)) == (Finish.STOP, length)
    if length > 1:
        shorter = await ask(engine, session="shorter", tokens=length - 1, stop_token_ids=(stop,))
        assert (shorter.finish, shorter.token_ids) == (Finish.LENGTH, completion.token_ids[:-1])


async def test_the_same_identity_gets_the_same_completion(engine: Engine) -> None:
    first = await ask(engine)
    await engine.close_session("s")
    assert await ask(engine) == first


async def test_a_session_goes_on_from_what_it_wrote(engine: Engine) -> None:
    first = await ask(engine)
    ids = [*PROMPT, *first.token_ids, 5, 6, 7]
    second = await ask(engine, ids, turn=1, tokens=4)
    assert len(second.token_ids) == 4


async def test_ids_it_never_heard_of_are_ignored(engine: Engine) -> None:
    await engine.abort("nobody")
    await engine.close_session("nobody")
    assert len((await ask(engine)).token_ids) == 6


@pytest.mark.parametrize("place", ["folder", "memory"])
async def test_new_weights_change_the_version_of_later_tokens(
    engine: Engine, request: pytest.FixtureRequest, tmp_path: Path, place: str
) -> None:
    assert ((await ask(engine)).policy_versions, engine.load().policy_version) == ((0, 0), 0)
    model = MODELS[request.node.callspec.params["engine"].removeprefix("torch_").replace("scripted", "qwen")](1)
    weights = saved(model, tmp_path, 3) if place == "folder" else Weights(version=3, tensors=model.state_dict())
    await engine.load_weights(weights)
    assert engine.load().policy_version == 3
    assert (await ask(engine, session="later")).policy_versions == (3, 3)


async def test_a_second_request_of_a_session_that_decodes_is_queued(engine: Engine) -> None:
    first, second = await asyncio.gather(ask(engine, tokens=5), ask(engine, turn=1, tokens=3))
    assert (len(first.token_ids), len(second.token_ids)) == (5, 3)
    await engine.close_session("s")
    await idle(engine)


async def test_load_counts_requests(engine: Engine) -> None:
    assert (engine.load().running, engine.load().waiting) == (0, 0)
    assert engine.load().capacity_tokens >= engine.load().used_tokens >= 0


async def test_an_aborted_request_ends_with_what_it_has(slow_engine: TorchEngine) -> None:
    request = asyncio.create_task(ask(slow_engine, tokens=480))
    await started(slow_engine)
    await slow_engine.abort("s/0")
    completion = await request
    assert completion.finish is Finish.ABORTED
    assert len(completion.token_ids) == len(completion.logprobs) < 480


async def abort(engine: TorchEngine, session: str) -> None:
    await engine.abort(f"{session}/0")


async def close_session(engine: TorchEngine, session: str) -> None:
    await engine.close_session(session)


@pytest.mark.parametrize("end", [abort, close_session])
async def test_a_waiting_request_can_be_aborted_and_ends_with_its_session(
    slow_engine: TorchEngine, end: Callable[[TorchEngine, str], Awaitable[None]]
) -> None:
    running = [asyncio.create_task(ask(slow_engine, session=f"r{n}", tokens=400)) for n in range(4)]
    await started(slow_engine, 4)
    waiting = asyncio.create_task(ask(slow_engine, session="w"))
    await until(lambda: slow_engine.load().waiting > 0)
    await end(slow_engine, "w")
    assert (await waiting).finish is Finish.ABORTED
    for n in range(4):
        await end(slow_engine, f"r{n}")
    assert {(await task).finish for task in running} == {Finish.ABORTED}


async def test_cancelling_whoever_waits_and_closing_frees_the_row(slow_engine: TorchEngine) -> None:
    requests = [asyncio.create_task(ask(slow_engine, session=f"r{n}", tokens=480)) for n in range(4)]
    await started(slow_engine, 4)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await idle(slow_engine)
    for n in range(4):
        await slow_engine.close_session(f"r{n}")
    assert len((await ask(slow_engine, session="next")).token_ids) == 6
    await idle(slow_engine)


async def test_closing_sessions_gives_their_memory_back(slow_engine: TorchEngine) -> None:
    await ask(slow_engine)
    assert slow_engine.load().used_tokens > 0
    await slow_engine.close_session("s")
    await ask(slow_engine, session="t", tokens=1)
    await slow_engine.close_session("t")
    await until(lambda: slow_engine.load().used_tokens == 0)
