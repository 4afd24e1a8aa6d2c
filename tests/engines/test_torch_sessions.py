"""Sessions that come, go, wait for their tools and vanish: nobody waits forever, and no page is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("torch")

import torch

from rocstar.engines.pages import PAGE, cache_bytes
from rocstar.engines.torch_cache import cache_shape
from rocstar.engines.torch_engine import TorchEngine
from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.sandbox.container import host_bytes
from rocstar.types import Completion, Sampling, Weights
from tests.engines.models import VOCAB, llama, qwen, resident
from tests.engines.plain import until


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    made = TorchEngine(qwen(0), rows=4, positions=256)
    yield made
    await made.close()


async def ask(engine: TorchEngine, ids: list[int], session: str, request: str, tokens: int = 8) -> Completion:
    sampling = Sampling(max_new_tokens=tokens, seed=len(ids))
    return await engine.generate(ids, sampling, request_id=request, session_id=session)


async def test_sessions_that_vanish_at_random_leave_nothing_behind(engine: TorchEngine) -> None:
    """Opened, cancelled, closed in the middle and reused, 60 of them on four rows."""
    rng = random.Random(0)

    async def live(number: int) -> None:
        session = str(number % 45)  # some names come back while their first owner still decodes
        ids = [rng.randrange(VOCAB) for _ in range(rng.choice((3, 20, 60)))]
        for turn in range(3):
            request = asyncio.create_task(ask(engine, ids, session, f"{number}/{turn}", rng.randrange(1, 60)))
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            match rng.randrange(5):
                case 0 | 1:
                    request.cancel()
                case 2:
                    await engine.close_session(session)
            (result,) = await asyncio.gather(request, return_exceptions=True)
            if isinstance(result, Completion):
                ids = [*ids, *result.token_ids, 5]
        await engine.close_session(session)

    await asyncio.gather(*(live(number) for number in range(60)))
    await until(lambda: not engine.load().running and not engine.load().used_tokens)
    assert engine.load().waiting == 0
    assert not engine._decoder._table._sessions


async def test_a_loop_that_ends_in_the_middle_leaves_an_engine_that_goes_on(engine: TorchEngine) -> None:
    """A second event loop asks, and is gone before its answer."""

    async def leave() -> None:
        await asyncio.wait_for(ask(engine, [1, 2, 3], "left", "left", tokens=200), 0.01)

    def elsewhere() -> None:
        with pytest.raises(TimeoutError):
            asyncio.run(leave())

    await asyncio.to_thread(elsewhere)
    await engine.close_session("left")
    assert len((await ask(engine, [1, 2, 3], "stays", "stays")).token_ids) == 8
    await engine.close_session("stays")
    await until(lambda: not engine.load().used_tokens)


async def test_a_request_that_cannot_begin_fails_and_the_engine_goes_on(engine: TorchEngine) -> None:
    beyond = Sampling(max_new_tokens=8, seed=0, top_k=2**70)  # fits into no array
    with pytest.raises(OverflowError):
        await asyncio.wait_for(engine.generate([1, 2], beyond, request_id="a", session_id="a"), 60)
    assert len((await asyncio.wait_for(ask(engine, [1, 2], "b", "b"), 60)).token_ids) == 8
    assert engine.load().used_tokens > 0
    await engine.close_session("b")
    await until(lambda: engine.load().used_tokens == 0)


async def test_a_newcomer_throws_nobody_out(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 sessions x 3 turns, four at once, with room for 12 at full length: every token is fed once, but for those
    of the newest when room is short at the end."""
    # A busy machine may stand still for a second.
    monkeypatch.setattr("rocstar.engines.torch_engine.PATIENCE_SECONDS", 60.0)
    thrown_out: list[None] = []
    monkeypatch.setattr(engine._decoder, "evict", lambda: thrown_out.append(None))
    own = 0

    async def live(number: int) -> None:
        nonlocal own
        ids = [number, *range(20, 45)]
        for turn in range(3):
            completion = await ask(engine, ids, str(number), f"{number}/{turn}")
            await asyncio.sleep(0.002)  # the tool
            ids = [*ids, *completion.token_ids]
            own += 0 if turn < 2 else len(ids) - 1  # the last token is never fed
            ids += [7, 8, 9]
        await engine.close_session(str(number))

    await asyncio.gather(*(live(number) for number in range(16)))
    assert not thrown_out
    load = engine.load()
    assert engine._decoder.fed_tokens == own + load.recomputed_tokens
    assert load.recomputed_tokens < 0.1 * own and load.evictions <= 2
    assert load.produced_tokens == 16 * 3 * 8


async def test_a_session_that_nobody_closes_gives_its_pages_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocstar.engines.torch_engine.PATIENCE_SECONDS", 0.01)
    engine = TorchEngine(qwen(0), rows=4, positions=64, kv_tokens=64)
    for number in range(9):
        assert len((await ask(engine, [1, 2, number], str(number), str(number))).token_ids) == 8
    await engine.close()


async def test_used_tokens_are_those_of_the_pages_held(engine: TorchEngine) -> None:
    prompt = list(range(2 * PAGE + 3))
    await ask(engine, prompt, "a", "a", tokens=PAGE)
    assert (engine.load().used_tokens, engine.load().capacity_tokens) == (4 * PAGE, 1024)
    await ask(engine, prompt, "b", "b", tokens=2)
    assert engine.load().used_tokens == 5 * PAGE, "two pages are the same for both"
    await engine.close_session("a")
    await until(lambda: engine.load().used_tokens == 3 * PAGE)
    await engine.close_session("b")
    await until(lambda: engine.load().used_tokens == 0)


async def test_what_is_fed_again_after_an_eviction_is_counted() -> None:
    engine = TorchEngine(qwen(0), rows=2, positions=128, kv_tokens=128)
    alone = [await ask(engine, [n, 1, 2], f"alone{n}", f"alone{n}", tokens=100) for n in range(2)]
    for n in range(2):
        await engine.close_session(f"alone{n}")
    before = engine.load()

    async def once(number: int) -> Completion:
        completion = await ask(engine, [number, 1, 2], str(number), str(number), tokens=100)
        await engine.close_session(str(number))
        return completion

    fed = engine._decoder.fed_tokens
    assert list(await asyncio.gather(*(once(n) for n in range(2)))) == alone
    after = engine.load()
    assert after.evictions - before.evictions == 1
    again = after.recomputed_tokens - before.recomputed_tokens
    assert 3 < again < 102
    assert engine._decoder.fed_tokens - fed == 2 * 102 + again
    assert after.produced_tokens == 400
    await engine.close()


def test_the_cache_takes_as_many_bytes_as_it_says() -> None:
    for make in (qwen, llama):
        engine = TorchEngine(make(0), rows=6, positions=100)
        cache, tokens = engine._decoder._cache, engine.load().capacity_tokens
        assert tokens == 6 * 7 * PAGE
        assert cache_bytes(cache_shape(make(0).config), tokens + PAGE, 4) == cache.keys.nbytes + cache.values.nbytes


async def test_the_cache_takes_main_memory_only_while_it_is_in_use() -> None:
    engine = TorchEngine(qwen(0), rows=64, positions=2048)  # 134 MB
    cache = engine._decoder._cache
    whole = cache.keys.nbytes + cache.values.nbytes
    empty = resident()
    first = await ask(engine, [1, 2, 3], "s", "r", tokens=20)
    assert resident() - empty < whole / 4
    cache.keys += 0
    cache.values += 0
    full = resident()
    await engine.close_session("s")
    again = await ask(engine, [1, 2, 3], "t", "again", tokens=20)
    assert full - empty > 0.9 * whole and resident() - empty < whole / 4
    assert again == first
    await engine.close()
    assert resident() - empty < whole / 4


def test_sizes_that_do_not_fit_are_refused_in_words() -> None:
    model = qwen(0)
    with pytest.raises(ConfigError, match=r"rollout.kv_tokens 60 is less than the 64 tokens of the longest attempt"):
        TorchEngine(model, rows=2, positions=64, kv_tokens=60)
    positions = host_bytes() // cache_bytes(cache_shape(model.config), 1, 4)
    with pytest.raises(ConfigError, match=r"of \d+ tokens .* GB .* available; lower rollout.kv_tokens"):
        TorchEngine(model, rows=2, positions=positions)
    with pytest.raises(ConfigError, match=f"the tokenizer has 70 ids and the model embeds only {VOCAB}"):
        TorchEngine(model, rows=2, positions=16, vocab_size=70)


async def test_weights_that_are_not_finite_write_no_token() -> None:
    engine = TorchEngine(qwen(0), rows=2, positions=32)
    broken = {name: tensor * float("nan") for name, tensor in qwen(0).state_dict().items()}
    await engine.load_weights(Weights(version=7, tensors=broken))
    with pytest.raises(EngineUnavailable, match="weights of version 7 give logprobs that are not finite"):
        await ask(engine, [1, 2, 3], "s", "r")
    await engine.load_weights(Weights(version=8, tensors=qwen(1).state_dict()))
    assert len((await ask(engine, [1, 2, 3], "s", "again")).token_ids) == 8
    await engine.close()


@pytest.mark.parametrize("shared", [2, 40])
async def test_only_a_session_whose_logprobs_are_not_finite_fails_and_leaves_nothing_to_others(shared: int) -> None:
    model = llama(0)
    with torch.no_grad():  # what reads token 9 is lost; the head that writes is another matrix
        model.get_input_embeddings().weight[9] = float("nan")
    engine = TorchEngine(model, rows=4, positions=64, kv_tokens=160, vocab_size=8)
    opening = [n % 7 + 1 for n in range(shared)]
    asked = ([*opening, 3], [*opening, 9], [*opening, 5])
    alone = [(await ask(engine, ids, f"alone{ids[-1]}", "r")).token_ids for ids in (asked[0], asked[2])]
    for ids in asked:
        await engine.close_session(f"alone{ids[-1]}")
    sound, broken, other = await asyncio.gather(
        *(ask(engine, ids, f"s{ids[-1]}", f"r{ids[-1]}") for ids in asked), return_exceptions=True
    )
    assert isinstance(broken, EngineUnavailable) and "logprobs that are not finite" in str(broken)
    assert [isinstance(found, Completion) and found.token_ids for found in (sound, other)] == alone
    for ids in asked:
        await engine.close_session(f"s{ids[-1]}")
    everywhere = [n * 3 % 7 + 1 for n in range(56)]  # two of these take every page there is
    for found in await asyncio.gather(*(ask(engine, [n, *everywhere], f"t{n}", f"t{n}") for n in (1, 2))):
        assert len(found.token_ids) == 7
    await engine.close()
