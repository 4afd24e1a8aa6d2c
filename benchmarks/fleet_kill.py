"""Does anything get lost when one of two engines is killed in the middle of a step, time after time?

    python benchmarks/fleet_kill.py [--kills 10] [--attempts 64] [--turns 3] [--tokens 96]

Two torch engines in processes of their own do steps of attempts of several turns with a pause for a tool between them.
Each step one of the two, in turn, gets `kill -9` after a random number of tokens. The same attempts are then made by an
engine inside this process that nobody disturbs, and by a plain transformers forward. Counted are attempts that did not
end, that ended twice, whose tokens differ from the undisturbed engine's, and the largest difference of a logprob from
transformers'. Prints a table, a line a step, and last one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import os
import random
import signal
import tempfile
from typing import Any, NamedTuple

from frame import Table, environment, parser, qwen3, report, spent

VOCAB = 512
PROMPT_TOKENS = 24
REPLY_TOKENS = 8
TOOL_SECONDS = 0.02  # mean of an exponential wait


class Step(NamedTuple):
    killed: str
    turns_lost: int
    moved: int
    finished: int
    repeated: int
    """Attempts recorded more than once."""
    differing: int
    gap: float
    seconds: float
    engines: int
    """That did something in it."""


def main() -> None:
    options = parsed()
    os.environ |= environment()
    from rocstar.support.threads import quiet_torch

    quiet_torch(threads=1)
    steps = asyncio.run(measured(options))
    figures = {
        "kills": len(steps),
        "attempts": options.attempts * len(steps),
        "finished": sum(step.finished for step in steps),
        "finished_twice": sum(step.repeated for step in steps),
        "differing_tokens": sum(step.differing for step in steps),
        "logprob_gap_max": max(step.gap for step in steps),
        "turns_lost": sum(step.turns_lost for step in steps),
        "turns_moved": sum(step.moved for step in steps),
        "seconds": round(sum(step.seconds for step in steps), 1),
    }
    report(**figures)
    whole = figures["finished"] == figures["attempts"] and not figures["finished_twice"]
    raise SystemExit(0 if whole and not figures["differing_tokens"] and figures["logprob_gap_max"] < 1e-4 else 1)


def parsed() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, default=10)
    arguments.add_argument("--attempts", type=int, default=64)
    arguments.add_argument("--turns", type=int, default=3)
    arguments.add_argument("--tokens", type=int, default=96, help="of a turn, at most")
    return arguments.parse_args()


async def measured(options: argparse.Namespace) -> list[Step]:
    import torch

    from rocstar.engines.process import EngineSettings, ProcessEngine
    from rocstar.engines.torch_engine import TorchEngine
    from rocstar.rollout.fleet import Fleet
    from rocstar.rollout.kv_scheduler import KvScheduler

    torch.set_num_threads(1)
    rows, positions = options.attempts, 1024
    model = qwen3(VOCAB, 96, 3, 3, 1, 256, max_position_embeddings=2 * positions)
    told: list[tuple[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = EngineSettings(folder=folder, rows=rows, positions=positions, vocab_size=VOCAB)
        engines = {name: ProcessEngine(settings) for name in ("a", "b")}
        await asyncio.gather(*(engine.restart(None) for engine in engines.values()))
        undisturbed = TorchEngine(copy.deepcopy(model), rows=rows, positions=positions, vocab_size=VOCAB)
        fleet = Fleet(
            engines, KvScheduler(), vocab_size=VOCAB, tell=lambda event, **details: told.append((event, details))
        )
        draw, steps = random.Random(0), []
        table = Table(*Step._fields, first=8)
        for number in range(options.kills):
            name = "ab"[number % 2]
            steps.append(await one_step(number, name, engines, fleet, undisturbed, model, told, draw, options))
            table.row(*steps[-1])
        await fleet.close()
        await asyncio.gather(*(engine.close() for engine in (*engines.values(), undisturbed)))
    return steps


async def one_step(
    number: int,
    name: str,
    engines: dict[str, Any],
    fleet: Any,
    undisturbed: Any,
    model: Any,
    told: list[tuple[str, dict[str, Any]]],
    draw: random.Random,
    options: argparse.Namespace,
) -> Step:
    """Both engines are up at its beginning; `name` is killed in its middle."""
    await all_up(fleet, engines)
    told.clear()
    fleet.take_counts()
    before = {each: engine.load().produced_tokens for each, engine in engines.items()}
    expected = options.attempts * options.turns * options.tokens // 2
    at = fleet.load().produced_tokens + draw.randrange(expected // 10, expected // 2)
    ended: list[int] = []

    async def attempt(engine: Any, sibling: int) -> list[tuple[list[int], Any]]:
        made = await turns(engine, number, sibling, options)
        if engine is fleet:
            ended.append(sibling)
        return made

    with spent() as taken:
        attempts = [asyncio.create_task(attempt(fleet, sibling)) for sibling in range(options.attempts)]
        while fleet.load().produced_tokens < at:  # noqa: ASYNC110 - facts come from other processes
            await asyncio.sleep(0.005)
        os.kill(engines[name].pid, signal.SIGKILL)
        found = await asyncio.gather(*attempts, return_exceptions=True)
    wanted = await asyncio.gather(*(attempt(undisturbed, sibling) for sibling in range(options.attempts)))
    whole = [made for made in found if not isinstance(made, BaseException)]
    differing = sum(
        isinstance(made, BaseException) or streams(made) != streams(other)
        for made, other in zip(found, wanted, strict=True)
    )
    lost = [details for event, details in told if event == "engine_lost"]
    counts = fleet.take_counts()
    assert [details["engine"] for details in lost] == [name] and counts["engine/lost"] == 1
    return Step(
        killed=name,
        turns_lost=sum(details["turns"] for details in lost),
        moved=int(counts["engine/moved_turns"] + counts["engine/repeated_turns"]),
        finished=len(whole),
        repeated=len(ended) - len(set(ended)),
        differing=differing,
        gap=max((gap(model, ids, completion) for made in whole[:8] for ids, completion in made), default=0.0),
        seconds=taken.wall,
        engines=sum(engine.load().produced_tokens > before[each] for each, engine in engines.items()),
    )


async def turns(engine: Any, step: int, sibling: int, options: argparse.Namespace) -> list[tuple[list[int], Any]]:
    """One attempt: for each turn what was continued, and the completion."""
    from rocstar.types import Sampling

    prompt, draw = random.Random(f"{step}/{sibling // 8}"), random.Random(f"{step}/{sibling}")
    ids = [prompt.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]
    session, made = f"{step}/{sibling}", []
    for turn in range(options.turns):
        count = draw.randint(1, options.tokens)
        sampling = Sampling(max_new_tokens=count, seed=draw.randrange(2**31))
        completion = await engine.generate(ids, sampling, request_id=f"{session}/turn{turn}", session_id=session)
        assert len(completion.token_ids) == len(completion.logprobs) == count
        made.append((ids, completion))
        await asyncio.sleep(draw.expovariate(1 / TOOL_SECONDS))
        ids = [*ids, *completion.token_ids, *(draw.randrange(VOCAB) for _ in range(REPLY_TOKENS))]
    await engine.close_session(session)
    return made


def streams(made: list[tuple[list[int], Any]]) -> list[tuple[list[int], tuple[int, ...], tuple[float, ...]]]:
    return [(ids, completion.token_ids, completion.logprobs) for ids, completion in made]


def gap(model: Any, ids: list[int], completion: Any) -> float:
    """Largest difference from the logprobs of a plain transformers forward, nats."""
    import torch

    written = list(completion.token_ids)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*ids, *written]]), use_cache=False).logits[0, :, :VOCAB].double()
    laws = torch.log_softmax(logits[len(ids) - 1 : -1], -1)
    plain = laws.gather(1, torch.tensor(written).unsqueeze(1)).squeeze(1)
    return float((plain - torch.tensor(completion.logprobs).double()).abs().max())


async def all_up(fleet: Any, engines: dict[str, Any]) -> None:
    """Wait for the engine that was killed in the step before."""
    capacity = max(engine.load().capacity_tokens for engine in engines.values())
    while fleet.load().capacity_tokens < len(engines) * capacity:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.05)


if __name__ == "__main__":
    main()
