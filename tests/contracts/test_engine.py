"""What every Engine promises, run over every kind of engine (engines.py). What only an engine with a model can show is
asked only of those."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from rocstar.errors import ConfigError
from rocstar.protocols import Engine, SleepingEngine
from rocstar.types import Completion, Finish, Sampling, Weights, spans_of
from tests.contracts.engines import KINDS, Kind
from tests.engines.models import VOCAB, naive_logprobs, saved
from tests.engines.plain import until

PROMPT = tuple(range(3, 13))
LONG_PROMPT = tuple(n * 7 % VOCAB for n in range(90))
PAGE = 64  # tokens; caches are counted in pages, and none has larger ones
SHORT = 250  # tokens that a test can wait for
TOLERANCE = 1e-4  # nats, between an engine in fp32 and a plain forward
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"top_p": 0.7, "top_k": 20}, {"temperature": 0.0}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    kind: Kind
    engine: Engine

    def model(self, seed: int) -> Any:
        assert self.kind.model is not None
        return self.kind.model(seed)

    def made(self, version: int, place: str, folder: Path, seed: int = 1) -> tuple[Any, Weights]:
        """A model, and its weights as new ones."""
        model = self.model(seed)
        published = saved(model, folder, version)
        return model, Weights(version=version, tensors=model.state_dict()) if place == "memory" else published


@pytest.fixture(params=KINDS)
async def case(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    kind = KINDS[request.param]
    async with kind.open() as engine:
        yield Case(kind=kind, engine=engine)


@pytest.fixture(params=[name for name, kind in KINDS.items() if kind.model])
async def real(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    """An engine with a model: its requests take time, and its logprobs mean something."""
    async with KINDS[request.param].open() as engine:
        yield Case(kind=KINDS[request.param], engine=engine)


@pytest.fixture(params=[(name, place) for name, kind in KINDS.items() if kind.model for place in kind.places], ids=str)
async def placed(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Case, str]]:
    """An engine with a model, and where it takes new weights from."""
    name, place = request.param
    async with KINDS[name].open() as engine:
        yield Case(kind=KINDS[name], engine=engine), place


async def ask(
    engine: Engine, ids: Sequence[int] = PROMPT, *, session: str = "s", turn: int = 0, tokens: int = 6, **sampling: Any
) -> Completion:
    asked = Sampling(max_new_tokens=tokens, **{"seed": 7, **sampling})
    return await engine.generate(ids, asked, request_id=f"{session}/{turn}", session_id=session)


def asking(engine: Engine, **asked: Any) -> asyncio.Task[Completion]:
    return asyncio.create_task(ask(engine, **asked))


async def running(engine: Engine, count: int = 1) -> None:
    await until(lambda: engine.load().running >= count)


async def written_of(real: Case, request: asyncio.Task[Completion], session: str) -> Completion:
    """What a long request comes to: all of it, or up to its session's end where all of it would take long."""
    if real.kind.long > SHORT:
        await real.engine.close_session(session)
    return await request


async def idle(engine: Engine) -> None:
    await until(lambda: not engine.load().running and not engine.load().waiting)


async def empty(engine: Engine) -> None:
    await idle(engine)
    await until(lambda: engine.load().used_tokens == 0)


def versions_of(completion: Completion) -> list[int]:
    return [span.version for span in completion.version_spans]


def assert_exact(models: Mapping[int, Any], ids: Sequence[int], completion: Completion, **sampling: Any) -> None:
    """Each token's logprob is the one that a plain forward of the version stamped on it gives."""
    asked = Sampling(max_new_tokens=1, **sampling)
    at = 0
    for version, tokens in completion.version_spans:
        laws = naive_logprobs(models[version], ids, completion.token_ids, asked)
        assert completion.logprobs[at : at + tokens] == pytest.approx(laws[at : at + tokens], abs=TOLERANCE)
        at += tokens
    assert at == len(completion.token_ids) == len(completion.logprobs)


# -- completions -----------------------------------------------------------------------------------------------------


async def test_completions_are_whole_counted_and_given_back(case: Case) -> None:
    """From a fresh engine to one whose sessions are closed."""
    engine = case.engine
    load = engine.load()
    assert (load.running, load.waiting, load.used_tokens) == (0, 0, 0), "it does nothing"
    assert (load.produced_tokens, load.recomputed_tokens, load.evictions) == (0, 0, 0) and load.capacity_tokens > 0
    await engine.close_session("nobody")
    first = await ask(engine)
    assert len(first.token_ids) == len(first.logprobs) == 6
    assert all(0 <= token < VOCAB for token in first.token_ids) and all(-1e4 < value <= 0 for value in first.logprobs)
    stamped = [version for version, tokens in first.version_spans for _ in range(tokens)]
    assert len(stamped) == 6 and first.version_spans == spans_of(stamped), "each token has a version"
    again = await ask(engine, [*PROMPT, *first.token_ids, 5, 6, 7], turn=1, tokens=4)
    assert len(again.token_ids) == 4, "a session goes on"
    both = await asyncio.gather(ask(engine, session="t", tokens=5), ask(engine, session="t", turn=1, tokens=3))
    assert [len(each.token_ids) for each in both] == [5, 3], "of one session at once"
    await until(lambda: engine.load().produced_tokens == 6 + 4 + 5 + 3)
    assert (engine.load().recomputed_tokens, engine.load().evictions) == (0, 0)
    await engine.close_session("s")
    if case.kind.seeded:
        assert await ask(engine) == first, "the same identity gets the same completion"
        await engine.close_session("s")
    await engine.close_session("t")
    await empty(engine)


async def test_completions_end_at_the_limit_or_at_a_stop_token_which_is_part_of_them(case: Case) -> None:
    engine = case.engine
    for tokens in (1, 5):
        completion = await ask(engine, session=f"{tokens}", tokens=tokens)
        assert (len(completion.token_ids), completion.finish) == (tokens, Finish.LENGTH)
    free = await ask(engine, session="free", tokens=12, temperature=0.0)
    asked: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": (free.token_ids[-1],)}
    stopped = await ask(engine, session="stopped", tokens=60, **asked)
    length = len(stopped.token_ids)
    assert stopped.finish is Finish.STOP and stopped.token_ids.index(free.token_ids[-1]) == length - 1
    capped = await ask(engine, session="capped", tokens=length, **asked)
    assert (capped.finish, capped.token_ids) == (Finish.STOP, stopped.token_ids), "at the last allowed place"
    if length > 1:
        shorter = await ask(engine, session="shorter", tokens=length - 1, **asked)
        assert (shorter.finish, shorter.token_ids) == (Finish.LENGTH, stopped.token_ids[:-1])
    rare = [token for token in range(VOCAB) if token not in free.token_ids]
    any_of = {**asked, "stop_token_ids": (*rare, free.token_ids[3])}
    several = await ask(engine, session="several", tokens=4, **any_of)
    assert several.finish is Finish.STOP and several.token_ids[-1] in any_of["stop_token_ids"]


async def test_logprobs_are_those_of_a_plain_forward(real: Case) -> None:
    model = real.model(0)
    for sampling, ids in zip(SETTINGS, (PROMPT, LONG_PROMPT, LONG_PROMPT, PROMPT), strict=True):
        if "top_k" in sampling and not real.kind.truncates:
            with pytest.raises(ConfigError, match="top_p"):
                await ask(real.engine, **sampling)
            continue
        for turn in range(3):  # each extends the session
            completion = await ask(real.engine, ids, session=str(sampling), turn=turn, tokens=12, **sampling)
            assert_exact({0: model}, ids, completion, **sampling)
            if sampling.get("temperature") == 0.0:
                with torch.no_grad():
                    logits = model(input_ids=torch.tensor([[*ids, *completion.token_ids]]), use_cache=False).logits
                assert completion.token_ids == tuple(logits[0, len(ids) - 1 : -1].argmax(-1).tolist())
            ids = (*ids, *completion.token_ids, *LONG_PROMPT[: 2 + 20 * turn])


async def test_siblings_that_share_their_prompt_differ_by_their_seeds_and_are_exact_each(real: Case) -> None:
    asked = [asking(real.engine, ids=LONG_PROMPT, session=f"sibling{n}", tokens=20, seed=n) for n in range(6)]
    siblings = await asyncio.gather(*asked)
    assert len({sibling.token_ids for sibling in siblings}) > 1
    for sibling in siblings:
        assert_exact({0: real.model(0)}, LONG_PROMPT, sibling)


async def test_a_sequence_ends_where_the_positions_end(real: Case) -> None:
    completion = await ask(real.engine, (1,) * (real.kind.positions - 6), tokens=100)
    assert (len(completion.token_ids), completion.finish) == (6, Finish.LENGTH)
    for times in (1, 2):
        completion = await ask(real.engine, (1,) * (times * real.kind.positions), turn=times)
        assert (completion.token_ids, completion.finish, completion.version_spans) == ((), Finish.LENGTH, ())


# -- too little room -------------------------------------------------------------------------------------------------


@pytest.fixture(params=[name for name, kind in KINDS.items() if kind.tight])
async def tight(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    """An engine with a model and a small cache."""
    kind = KINDS[request.param]
    assert kind.tight is not None
    async with kind.tight() as engine:
        yield Case(kind=kind, engine=engine)


async def test_a_cache_that_was_given_up_and_built_again_changes_no_token(tight: Case) -> None:
    engine, models = tight.engine, {0: tight.model(0)}
    first = [asking(engine, session=f"r{n}", tokens=tight.kind.long, seed=n) for n in range(tight.kind.rows + 2)]
    completions = await asyncio.gather(*first)
    later = [
        asking(engine, ids=(*PROMPT, *completion.token_ids, 5), session=f"r{n}", turn=1, tokens=20, seed=n)
        for n, completion in enumerate(completions)
    ]
    for completion, again in zip(completions, await asyncio.gather(*later), strict=True):
        assert_exact(models, PROMPT, completion)
        assert_exact(models, (*PROMPT, *completion.token_ids, 5), again)
    load = engine.load()
    assert load.evictions > 0 and load.recomputed_tokens > 0
    assert load.used_tokens <= load.capacity_tokens
    assert load.produced_tokens == sum(len(c.token_ids) for c in completions) + 20 * len(later)


# -- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.model])
async def test_new_weights_change_the_version_of_later_tokens(name: str, tmp_path: Path) -> None:
    """Of an engine without a model, which has nothing else to show of them."""
    async with KINDS[name].open() as engine:
        assert (versions_of(await ask(engine)), engine.load().policy_version) == ([0], 0)
        await engine.load_weights(Weights(version=3, folder=str(tmp_path)))
        assert (versions_of(await ask(engine, session="later")), engine.load().policy_version) == ([3], 3)


async def test_later_tokens_are_of_the_new_weights_alone(placed: tuple[Case, str], tmp_path: Path) -> None:
    real, place = placed
    first = await ask(real.engine, LONG_PROMPT)
    assert_exact({0: real.model(0)}, LONG_PROMPT, first)
    new, weights = real.made(3, place, tmp_path)
    await real.engine.load_weights(weights)
    assert real.engine.load().policy_version == 3
    ids = (*LONG_PROMPT, *first.token_ids, 5, 6)
    for session, asked in (("s", ids), ("sibling", LONG_PROMPT)):
        later = await ask(real.engine, asked, session=session, turn=1, tokens=20)
        assert versions_of(later) == [3]
        assert_exact({3: new}, asked, later)


async def test_a_swap_of_weights_in_flight_is_exact_on_either_side_of_it(real: Case, tmp_path: Path) -> None:
    """A request that ends before it is interrupted shows nothing about that, so another, longer one is asked."""
    place = real.kind.places[-1]
    room = real.kind.positions - len(LONG_PROMPT)
    made = [real.made(0, place, tmp_path / str(seed), seed) for seed in (0, 1)]
    for version in range(1, 20):
        models = {version - 1: made[(version - 1) % 2][0], version: made[version % 2][0]}
        before = real.engine.load().produced_tokens
        tokens = min(200 * version, room)
        request = asking(real.engine, ids=LONG_PROMPT, session=f"s{version}", tokens=tokens)
        await until(lambda before=before: real.engine.load().produced_tokens > before + 5)  # type: ignore[misc]
        await real.engine.load_weights(replace(made[version % 2][1], version=version))
        completion = await request
        assert (len(completion.token_ids), completion.finish) == (tokens, Finish.LENGTH)
        assert_exact(models, LONG_PROMPT, completion)
        if versions_of(completion) == [version - 1, version]:
            return
    pytest.fail("no swap came while a request was decoded")


async def test_an_engine_sleeps_until_it_has_new_weights(real: Case, tmp_path: Path) -> None:
    """Twice, and once while something is decoded; what it had cached is not used again."""
    engine, tokens = real.engine, real.kind.long
    assert isinstance(engine, SleepingEngine)
    new, weights = real.made(1, real.kind.places[0], tmp_path)
    request = asking(engine, ids=LONG_PROMPT, tokens=tokens)
    await running(engine)
    await engine.sleep()
    late = asking(engine, session="late")
    await engine.sleep()
    await asyncio.sleep(0.3)  # a server's last tokens may be on their way
    produced = engine.load().produced_tokens
    await asyncio.sleep(0.3)
    assert not request.done() and not late.done() and engine.load().produced_tokens == produced < tokens
    await engine.load_weights(weights)
    await until(lambda: engine.load().produced_tokens > produced + 10)
    completion = await written_of(real, request, "s")
    assert versions_of(completion) in ([0, 1], [1])
    assert_exact({0: real.model(0), 1: new}, LONG_PROMPT, completion)
    assert_exact({1: new}, PROMPT, await late)


async def test_weights_reach_whoever_waits_for_its_turn(real: Case, tmp_path: Path) -> None:
    engine, rows = real.engine, real.kind.rows
    new, weights = real.made(3, real.kind.places[0], tmp_path)
    decoding = [asking(engine, session=f"r{n}", tokens=real.kind.long) for n in range(rows)]
    await running(engine, rows)
    waiting = [asking(engine, session=f"w{n}", tokens=20) for n in range(2)]
    await until(lambda: engine.load().waiting == 2)
    await engine.load_weights(weights)
    swapped = engine.load().produced_tokens
    await until(lambda: engine.load().produced_tokens > swapped + 10 * rows)
    models = {0: real.model(0), 3: new}
    for n, request in enumerate(decoding):
        completion = await written_of(real, request, f"r{n}")
        assert versions_of(completion) == [0, 3]
        assert_exact(models, PROMPT, completion)
    for request in waiting:
        completion = await request
        assert versions_of(completion) == [3] and len(completion.token_ids) == 20
        assert_exact(models, PROMPT, completion)


# -- ending early ----------------------------------------------------------------------------------------------------


async def test_a_request_decodes_before_the_next_of_its_session_until_it_is_cancelled(real: Case) -> None:
    engine, models, seen = real.engine, {0: real.model(0)}, [0]
    first = asking(engine, tokens=real.kind.long)
    await running(engine)
    second = asking(engine, turn=1, tokens=3)
    await until(lambda: engine.load().waiting == 1)
    assert engine.load().running == 1 and not first.done() and not second.done()
    while seen[-1] < 200 and not first.done():
        seen.append(engine.load().used_tokens)
        await asyncio.sleep(0.001)
    written = engine.load().produced_tokens
    first.cancel()
    following = await second
    assert first.cancelled() and written < real.kind.long
    assert_exact(models, PROMPT, following)
    assert seen == sorted(seen) and (len(set(seen)) > 5 or real.kind.block > PAGE)
    most = len(PROMPT) + real.kind.long + max(real.kind.block, PAGE)
    assert len(PROMPT) < max(seen) <= min(most, engine.load().capacity_tokens)
    ids = (*PROMPT, *following.token_ids, 5)
    assert_exact(models, ids, await ask(engine, ids, turn=2))
    await engine.close_session("s")
    await empty(engine)


async def test_requests_are_counted_can_be_cancelled_and_end_with_their_session(real: Case) -> None:
    """While they wait and while they decode; then the engine is empty, and serves the next."""
    engine, rows = real.engine, real.kind.rows
    decoding = [asking(engine, session=f"r{n}", tokens=real.kind.long) for n in range(rows)]
    await running(engine, rows)
    waiting = [asking(engine, session=f"w{n}") for n in range(2)]
    await until(lambda: (engine.load().running, engine.load().waiting) == (rows, 2))
    waiting[0].cancel()
    await engine.close_session("w1")
    assert (await waiting[1]).finish is Finish.ABORTED and waiting[0].cancelled()
    decoding[0].cancel()
    for n in range(1, rows):
        await engine.close_session(f"r{n}")
    assert {(await task).finish for task in decoding[1:]} == {Finish.ABORTED}
    await idle(engine)
    assert decoding[0].cancelled()
    for session in ("r0", "w0"):
        await engine.close_session(session)
    await empty(engine)
    assert len((await ask(engine, session="next")).token_ids) == 6
