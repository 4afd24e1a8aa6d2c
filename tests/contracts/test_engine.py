"""What every Engine promises, run over every kind of engine (engines.py). What only an engine with a model can show is
asked only of those."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
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

PROMPT = tuple(range(3, 13))
LONG_PROMPT = tuple(n * 7 % VOCAB for n in range(90))
PAGE = 64  # tokens; caches are counted in pages, and none has larger ones
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
        """A model, and its weights as new ones. A kind without a model takes a version."""
        if self.kind.model is None:
            return None, Weights(version=version, folder=str(folder))
        model = self.model(seed)
        published = saved(model, folder, version)
        return model, Weights(version=version, tensors=model.state_dict()) if place == "memory" else published

    async def give(self, version: int, place: str, folder: Path) -> Any:
        """Make them and load them; returns the model."""
        model, weights = self.made(version, place, folder)
        await self.engine.load_weights(weights)
        return model


@pytest.fixture(params=KINDS)
async def case(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    kind = KINDS[request.param]
    async with kind.open() as engine:
        yield Case(kind=kind, engine=engine)


@pytest.fixture(params=KINDS)
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    async with KINDS[request.param].open() as engine:
        yield engine


@pytest.fixture(params=[name for name, kind in KINDS.items() if kind.model])
async def real(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    """An engine with a model: its requests take time, and its logprobs mean something."""
    kind = KINDS[request.param]
    async with kind.open() as engine:
        yield Case(kind=kind, engine=engine)


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


async def until(condition: Callable[[], bool]) -> None:
    """A test that never gets there ends at the suite's own limit."""
    while not condition():  # noqa: ASYNC110 - an engine's load tells nobody when it changes
        await asyncio.sleep(0.001)


async def running(engine: Engine, count: int = 1) -> None:
    await until(lambda: engine.load().running >= count)


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


async def test_a_completion_has_a_finite_logprob_for_each_token(engine: Engine) -> None:
    completion = await ask(engine)
    assert len(completion.token_ids) == len(completion.logprobs) == 6
    assert all(0 <= token < VOCAB for token in completion.token_ids)
    assert all(-1e4 < value <= 0 for value in completion.logprobs)


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT], ids=["short", "long"])
async def test_logprobs_are_those_of_a_plain_forward(
    real: Case, prompt: tuple[int, ...], sampling: dict[str, Any]
) -> None:
    models, ids = {0: real.model(0)}, prompt
    if "top_k" in sampling and not real.kind.truncates:
        with pytest.raises(ConfigError, match="top_p"):
            await ask(real.engine, **sampling)
        return
    for turn in range(3):  # each extends the session
        completion = await ask(real.engine, ids, turn=turn, tokens=12, **sampling)
        assert_exact(models, ids, completion, **sampling)
        ids = (*ids, *completion.token_ids, *LONG_PROMPT[: 2 + 20 * turn])


async def test_temperature_zero_takes_the_likeliest_token(real: Case) -> None:
    completion = await ask(real.engine, LONG_PROMPT, tokens=20, temperature=0.0)
    with torch.no_grad():
        logits = real.model(0)(input_ids=torch.tensor([[*LONG_PROMPT, *completion.token_ids]]), use_cache=False).logits
    assert completion.token_ids == tuple(logits[0, len(LONG_PROMPT) - 1 : -1].argmax(-1).tolist())


async def test_siblings_that_share_their_prompt_are_exact_each(real: Case) -> None:
    asked = [asking(real.engine, ids=LONG_PROMPT, session=f"sibling{n}", tokens=20, seed=n) for n in range(6)]
    siblings = await asyncio.gather(*asked)
    assert len({sibling.token_ids for sibling in siblings}) > 1
    for sibling in siblings:
        assert_exact({0: real.model(0)}, LONG_PROMPT, sibling)


async def test_the_same_identity_gets_the_same_completion(case: Case) -> None:
    if not case.kind.seeded:
        pytest.skip("this kind promises nothing about seeds")
    first = await ask(case.engine)
    await case.engine.close_session("s")
    assert await ask(case.engine) == first


async def test_another_seed_gets_another_completion(real: Case) -> None:
    one, other = [await ask(real.engine, session=str(seed), tokens=30, seed=seed) for seed in (1, 2)]
    assert one.token_ids != other.token_ids


async def test_a_session_goes_on_from_what_it_wrote(engine: Engine) -> None:
    first = await ask(engine)
    ids = [*PROMPT, *first.token_ids, 5, 6, 7]
    second = await ask(engine, ids, turn=1, tokens=4)
    assert len(second.token_ids) == 4


async def test_ids_it_never_heard_of_are_ignored(engine: Engine) -> None:
    await engine.abort("nobody")
    await engine.close_session("nobody")
    assert len((await ask(engine)).token_ids) == 6


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 5])
async def test_no_more_tokens_are_written_than_allowed(engine: Engine, tokens: int) -> None:
    completion = await ask(engine, tokens=tokens)
    assert (len(completion.token_ids), completion.finish) == (tokens, Finish.LENGTH)


async def test_a_sequence_ends_where_the_positions_end(real: Case) -> None:
    completion = await ask(real.engine, (1,) * (real.kind.positions - 6), tokens=100)
    assert (len(completion.token_ids), completion.finish) == (6, Finish.LENGTH)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_prompt_that_leaves_no_room_is_a_completion_without_tokens(real: Case, times: int) -> None:
    completion = await ask(real.engine, (1,) * (times * real.kind.positions))
    assert (completion.token_ids, completion.finish, completion.version_spans) == ((), Finish.LENGTH, ())


async def test_a_stop_token_ends_the_completion_and_is_part_of_it(engine: Engine) -> None:
    free = await ask(engine, tokens=12, temperature=0.0)
    stop = free.token_ids[-1]
    completion = await ask(engine, session="other", tokens=60, temperature=0.0, stop_token_ids=(stop,))
    assert completion.finish is Finish.STOP
    assert completion.token_ids.index(stop) == len(completion.token_ids) - 1


async def test_any_of_several_stop_tokens_ends_the_completion(engine: Engine) -> None:
    free = await ask(engine, tokens=4, temperature=0.0)
    rare = [token for token in range(VOCAB) if token not in free.token_ids]
    stops = (*rare, free.token_ids[-1])
    completion = await ask(engine, session="other", tokens=4, temperature=0.0, stop_token_ids=stops)
    assert completion.finish is Finish.STOP and completion.token_ids[-1] in stops


async def test_a_stop_token_at_the_last_allowed_place_still_counts_as_stop(engine: Engine) -> None:
    stop = (await ask(engine, tokens=12, temperature=0.0)).token_ids[-1]
    asked: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": (stop,)}
    length = len((await ask(engine, session="free", tokens=60, **asked)).token_ids)
    completion = await ask(engine, session="capped", tokens=length, **asked)
    assert (completion.finish, len(completion.token_ids)) == (Finish.STOP, length)
    if length > 1:
        shorter = await ask(engine, session="shorter", tokens=length - 1, **asked)
        assert (shorter.finish, shorter.token_ids) == (Finish.LENGTH, completion.token_ids[:-1])


# -- one session, several requests -----------------------------------------------------------------------------------


async def test_two_requests_of_one_session_at_once_are_both_answered(engine: Engine) -> None:
    first, second = await asyncio.gather(ask(engine, tokens=5), ask(engine, turn=1, tokens=3))
    assert (len(first.token_ids), len(second.token_ids)) == (5, 3)
    await engine.close_session("s")
    await idle(engine)


async def test_a_second_request_of_a_session_waits_for_the_first(real: Case) -> None:
    first = asking(real.engine, tokens=real.kind.long)
    await running(real.engine)
    second = asking(real.engine, turn=1, tokens=3)
    await until(lambda: real.engine.load().waiting == 1)
    assert real.engine.load().running == 1 and not first.done() and not second.done()
    await real.engine.abort("s/0")
    assert_exact({0: real.model(0)}, PROMPT, await first)
    assert_exact({0: real.model(0)}, PROMPT, await second)


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
    first = [asking(engine, session=f"r{n}", tokens=tight.kind.long, seed=n) for n in range(2 * tight.kind.rows)]
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


async def test_new_weights_change_the_version_of_later_tokens(case: Case, tmp_path: Path) -> None:
    assert (versions_of(await ask(case.engine)), case.engine.load().policy_version) == ([0], 0)
    await case.give(3, case.kind.places[0], tmp_path)
    assert (versions_of(await ask(case.engine, session="later")), case.engine.load().policy_version) == ([3], 3)


async def test_later_tokens_are_those_of_the_new_weights_with_nothing_cached_of_the_old(
    placed: tuple[Case, str], tmp_path: Path
) -> None:
    real, place = placed
    first = await ask(real.engine, LONG_PROMPT)
    assert_exact({0: real.model(0)}, LONG_PROMPT, first)
    new = await real.give(3, place, tmp_path)
    assert real.engine.load().policy_version == 3
    ids = (*LONG_PROMPT, *first.token_ids, 5, 6)
    for session, asked in (("s", ids), ("sibling", LONG_PROMPT)):
        later = await ask(real.engine, asked, session=session, turn=1, tokens=20)
        assert versions_of(later) == [3]
        assert_exact({3: new}, asked, later)


async def test_a_swap_of_weights_in_flight_is_exact_on_either_side_of_it(
    placed: tuple[Case, str], tmp_path: Path
) -> None:
    """A request that ends before it is interrupted shows nothing about that, so another, longer one is asked."""
    real, place = placed
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


async def test_an_engine_that_sleeps_writes_nothing_loses_nothing_and_goes_on_with_new_weights(
    real: Case, tmp_path: Path
) -> None:
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
    completion = await request
    assert len(completion.token_ids) == tokens and versions_of(completion) in ([0, 1], [1])
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
    for n in range(rows):
        await engine.abort(f"r{n}/0")
    models = {0: real.model(0), 3: new}
    for request in decoding:
        completion = await request
        assert versions_of(completion) == [0, 3]
        assert_exact(models, PROMPT, completion)
    for request in waiting:
        completion = await request
        assert versions_of(completion) == [3] and len(completion.token_ids) == 20
        assert_exact(models, PROMPT, completion)


# -- ending early ----------------------------------------------------------------------------------------------------


async def test_an_aborted_request_ends_with_what_it_has_and_its_session_goes_on(real: Case) -> None:
    request = asking(real.engine, tokens=real.kind.long)
    await until(lambda: real.engine.load().produced_tokens > 0)
    await real.engine.abort("s/0")
    completion = await request
    assert completion.finish is Finish.ABORTED
    assert len(completion.token_ids) < real.kind.long
    models = {0: real.model(0)}
    assert_exact(models, PROMPT, completion)
    ids = (*PROMPT, *completion.token_ids, 5)
    assert_exact(models, ids, await ask(real.engine, ids, turn=1))


async def abort(engine: Engine, session: str) -> None:
    await engine.abort(f"{session}/0")


async def close_session(engine: Engine, session: str) -> None:
    await engine.close_session(session)


@pytest.mark.parametrize("end", [abort, close_session])
async def test_a_waiting_request_can_be_aborted_and_ends_with_its_session(
    real: Case, end: Callable[[Engine, str], Awaitable[None]]
) -> None:
    engine, rows = real.engine, real.kind.rows
    decoding = [asking(engine, session=f"r{n}", tokens=real.kind.long) for n in range(rows)]
    await running(engine, rows)
    waiting = asking(engine, session="w")
    await until(lambda: engine.load().waiting > 0)
    await end(engine, "w")
    assert (await waiting).finish is Finish.ABORTED
    for n in range(rows):
        await end(engine, f"r{n}")
    assert {(await task).finish for task in decoding} == {Finish.ABORTED}


async def test_cancelling_whoever_waits_frees_the_request(real: Case) -> None:
    engine, rows = real.engine, real.kind.rows
    requests = [asking(engine, session=f"r{n}", tokens=real.kind.long) for n in range(rows + 1)]
    await running(engine, rows)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    await idle(engine)
    for n in range(rows + 1):
        await engine.close_session(f"r{n}")
    await empty(engine)
    assert len((await ask(engine, session="next")).token_ids) == 6


async def test_an_abort_frees_the_cache_once_its_session_is_closed(real: Case) -> None:
    engine = real.engine
    request = asking(engine, ids=LONG_PROMPT, tokens=real.kind.long)
    await until(lambda: engine.load().used_tokens > len(LONG_PROMPT))
    await engine.abort("s/0")
    await request
    await engine.close_session("s")
    await empty(engine)


async def test_closing_sessions_gives_their_cache_back(engine: Engine) -> None:
    await asyncio.gather(*(ask(engine, session=session) for session in "stu"))
    for session in "stu":
        await engine.close_session(session)
    await empty(engine)


# -- what load says --------------------------------------------------------------------------------------------------


async def test_an_engine_that_does_nothing_says_so(engine: Engine) -> None:
    load = engine.load()
    assert (load.running, load.waiting, load.used_tokens) == (0, 0, 0)
    assert (load.produced_tokens, load.recomputed_tokens, load.evictions) == (0, 0, 0)
    assert load.capacity_tokens > 0


async def test_load_counts_the_requests_that_decode_and_those_that_wait(real: Case) -> None:
    engine, rows = real.engine, real.kind.rows
    requests = [asking(engine, session=f"r{n}", tokens=real.kind.long) for n in range(rows + 2)]
    await until(lambda: (engine.load().running, engine.load().waiting) == (rows, 2))
    for n in range(rows + 2):
        await engine.close_session(f"r{n}")
    await asyncio.gather(*requests)
    await empty(engine)


async def test_used_tokens_grow_with_what_is_written_and_never_past_the_capacity(real: Case) -> None:
    engine = real.engine
    request = asking(engine, tokens=real.kind.long)
    seen = [0]
    while seen[-1] < 200 and not request.done():
        seen.append(engine.load().used_tokens)
        await asyncio.sleep(0.001)
    await engine.abort("s/0")
    written = len((await request).token_ids)
    assert seen == sorted(seen) and (len(set(seen)) > 5 or real.kind.block > PAGE)
    most = len(PROMPT) + written + max(real.kind.block, PAGE)
    assert len(PROMPT) < max(seen) <= min(most, engine.load().capacity_tokens)


async def test_produced_tokens_are_those_of_all_completions(engine: Engine) -> None:
    before = engine.load().produced_tokens
    completions = await asyncio.gather(*(ask(engine, session=session) for session in "stu"))
    written = sum(len(completion.token_ids) for completion in completions)
    await until(lambda: engine.load().produced_tokens == before + written)
    assert (engine.load().recomputed_tokens, engine.load().evictions) == (0, 0)


async def test_each_token_is_stamped_with_a_version(engine: Engine) -> None:
    completion = await ask(engine)
    stamped = [version for version, tokens in completion.version_spans for _ in range(tokens)]
    assert len(stamped) == len(completion.token_ids)
    assert completion.version_spans == spans_of(stamped)
