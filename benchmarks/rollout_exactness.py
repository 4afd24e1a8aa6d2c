"""Is what the engine records exact, whatever happens to it? Ids and logprobs of many trajectories against transformers.

    python benchmarks/rollout_exactness.py [--trajectories 2000] [--swaps 8] [--faults 4] [--kv-tokens 768]
        [--at-once 64] [--shape qwen3_5] [--deviation 0.16]
    python benchmarks/rollout_exactness.py --kills 10      # engines in processes, which get SIGKILL in turn

Groups of siblings with a prompt in common go on for up to three turns, with a tool's reply and its wait between them,
on a fleet of two torch engines whose caches hold a fraction of the sessions that are open, so that caches are given up
and built again. Meanwhile the weights are swapped, in the middle of completions, and each engine dies with what it had
in flight and comes back, returns logprobs that are no numbers, token ids that no tokenizer has, and a wrong policy
version. Then each recorded token is looked at again with a plain transformers forward of the policy version that is
stamped on it, over everything that stood before it (a gated delta rule is summed in float64 there, as a learner does):

    logprob     differs by at most 1e-4 nats
    id          is the one that the token's own random number draws from that law, to 1e-5 of probability

With --kills the two engines are processes of their own and have no other faults; no trajectory begins before both are
up again.

Prints a table and last one JSON line; exit code 1 where a token differs or a kill was not seen. One thread.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from frame import ROOT, parser, print_figures, report, spent
from transformers.utils.logging import disable_progress_bar

sys.path.insert(0, str(ROOT))

from rocstar.engines.process import EngineSettings, ProcessEngine
from rocstar.engines.torch_decoder import uniforms
from rocstar.engines.torch_engine import TorchEngine
from rocstar.rollout.fleet import Fleet
from rocstar.rollout.kv_scheduler import KvScheduler
from rocstar.support.layers import sum_in_float64
from rocstar.support.threads import quiet_torch
from rocstar.types import Completion, Sampling, Weights, seed_for
from tests.engines.models import MODELS, lively
from tests.faulty import Fault, FaultKind, FaultyEngine

VOCABULARY, POSITIONS = 512, 192
GROUP, TURNS = 4, 3
LOGPROB_TOLERANCE = 1e-4  # nats, fp32
LAW_TOLERANCE = 1e-5  # of probability: a running sum over the vocabulary, in fp32
KINDS = (FaultKind.DEATH, FaultKind.NAN, FaultKind.GARBAGE, FaultKind.WRONG_VERSION)
DEAD_FOR = 5  # requests that find an engine dead: more than a fleet takes for a request's own fault
FORWARD_ROWS = 32  # trajectories in one pass of the plain forward


@dataclass(slots=True)
class Record:
    """One trajectory as it was recorded."""

    ids: list[int]
    """[T] everything, the prompt first."""
    completions: list[tuple[int, Sampling, Completion]] = field(default_factory=list)
    """Where each begins in `ids`, how it was asked for, what came back."""

    def tokens(self) -> Iterator[tuple[int, int, int, float, Sampling]]:
        """(place in `ids`, policy version, number in its completion, logprob, sampling) of each sampled token."""
        for start, sampling, completion in self.completions:
            versions = [span.version for span in completion.version_spans for _ in range(span.tokens)]
            assert len(versions) == len(completion.token_ids) == len(completion.logprobs)
            for n, (version, logprob) in enumerate(zip(versions, completion.logprobs, strict=True)):
                yield start + n, version, n, logprob, sampling


@dataclass(slots=True)
class Errors:
    """What the plain forward found."""

    tokens: int = 0
    logprob_sum: float = 0.0
    logprob_max: float = 0.0
    logprob_beyond: int = 0
    law_max: float = 0.0
    law_beyond: int = 0


def main() -> int:
    options = parsed()
    quiet_torch(1)
    disable_progress_bar()
    torch.set_num_threads(1)
    with spent() as rolling:
        records, facts = asyncio.run(rolled(options))
    with spent() as checking:
        errors = checked(records, options)
    spans = [completion.version_spans for record in records for _, _, completion in record.completions]
    figures = {
        "trajectories": len(records),
        "completions": len(spans),
        "tokens": errors.tokens,
        **facts,
        "completions_of_two_versions_or_more": sum(len(span) > 1 for span in spans),
        "logprob_error_mean": errors.logprob_sum / errors.tokens,
        "logprob_error_max": errors.logprob_max,
        "logprobs_beyond_1e-4": errors.logprob_beyond,
        "law_error_max": errors.law_max,
        "ids_not_as_drawn": errors.law_beyond,
        "cpu_seconds_rollout": round(rolling.cpu, 1),
        "cpu_seconds_check": round(checking.cpu, 1),
    }
    print_figures(figures)
    report(**figures)
    return 1 if errors.logprob_beyond or errors.law_beyond or facts["engines_lost"] < options.kills else 0


def parsed() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--trajectories", type=int, default=2000)
    arguments.add_argument("--swaps", type=int, default=8, help="of weights, spread over the rollout")
    arguments.add_argument("--faults", type=int, default=4, help="of each engine, spread over the rollout")
    arguments.add_argument("--kills", type=int, default=0, help="of engines in processes of their own, in all")
    arguments.add_argument("--rows", type=int, default=16, help="sequences that an engine decodes at once")
    arguments.add_argument("--kv-tokens", type=int, default=768, help="of cache that an engine has")
    arguments.add_argument("--at-once", type=int, default=64, help="trajectories that are open at once")
    arguments.add_argument("--shape", choices=MODELS, default="qwen", help="of the model")
    arguments.add_argument(
        "--deviation", type=float, default=1.5, help="of weights, times the root of what is summed; 0.16 is usual"
    )
    arguments.add_argument("--seed", type=int, default=0)
    return arguments.parse_args()


def model(version: int, options: argparse.Namespace) -> Any:
    """Small, but each token depends strongly on what came before; another law per version."""
    seed = seed_for("exactness", version)
    return lively(MODELS[options.shape](seed, vocab_size=VOCABULARY), seed, options.deviation)


# -- rolling ---------------------------------------------------------------------------------------------------------


async def rolled(options: argparse.Namespace) -> tuple[list[Record], dict[str, int]]:
    """All trajectories, and what the engines went through meanwhile."""
    with TemporaryDirectory() as folder:
        async with opened(options, Path(folder)) as (fleet, engines):
            records = await all_trajectories(fleet, engines, options, Path(folder))
            load, counts = fleet.load(), fleet.take_counts()
    facts = {"swaps": load.policy_version, "evictions": load.evictions, "recomputed_tokens": load.recomputed_tokens}
    taken = {name: int(counts[f"engine/{name}"]) for name in ("lost", "back", "moved_turns", "repeated_turns")}
    return records, {**facts, **{f"engines_{name}" if "turns" not in name else name: n for name, n in taken.items()}}


@asynccontextmanager
async def opened(options: argparse.Namespace, folder: Path) -> AsyncIterator[tuple[Fleet, Sequence[Any]]]:
    """Two engines that fail by schedule, or that can be killed; as one, and each."""
    size = {"rows": options.rows, "positions": POSITIONS, "kv_tokens": options.kv_tokens, "vocab_size": VOCABULARY}
    engines: list[Any]
    if options.kills:
        settings = EngineSettings(folder=str(published(0, options, folder / "0").folder), **size)
        engines = [ProcessEngine(settings) for _ in range(2)]
        await asyncio.gather(*(engine.restart(None) for engine in engines))
        used = dict(zip("01", engines, strict=True))
    else:
        engines = [TorchEngine(model(0, options), **size) for _ in range(2)]
        used = {str(n): FaultyEngine(engine, faults_of(options, n)) for n, engine in enumerate(engines)}
    fleet = Fleet(used, KvScheduler(), vocab_size=VOCABULARY)
    try:
        yield fleet, engines
    finally:
        await fleet.close()
        for engine in engines:
            await engine.close()


def faults_of(options: argparse.Namespace, place: int) -> list[Fault]:
    """Evenly spread over the requests that one of two engines gets, about one a trajectory; the engines take turns."""
    pause = options.trajectories / (options.faults + 1)
    kinds = [KINDS[n % len(KINDS)] for n in range(options.faults)]
    return [
        Fault(kind=kind, first=int(pause * (n + 0.5 + place / 2)), count=DEAD_FOR if kind is FaultKind.DEATH else 1)
        for n, kind in enumerate(kinds)
    ]


async def all_trajectories(
    fleet: Fleet, engines: Sequence[Any], options: argparse.Namespace, folder: Path
) -> list[Record]:
    places, ended, version, kills = asyncio.Semaphore(options.at_once), 0, 0, 0
    both_up = asyncio.Event()
    both_up.set()

    async def one(number: int) -> Record:
        nonlocal ended, version, kills
        async with places:
            await both_up.wait()
            record = await trajectory(fleet, number, options.seed)
            ended += 1
            if kills < options.kills and (options.kills + 1) * ended // options.trajectories > kills:
                kills += 1
                both_up.clear()
                await kill(engines[kills % 2], fleet)
                both_up.set()
        if version < options.swaps and (options.swaps + 1) * ended // options.trajectories > version:
            version += 1
            await fleet.load_weights(published(version, options, folder / str(version)))
        return record

    return await asyncio.gather(*map(one, range(options.trajectories)))


async def kill(victim: ProcessEngine, fleet: Fleet) -> None:
    """Until it is up again."""
    capacity = fleet.load().capacity_tokens
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    while victim.pid is not None:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    while fleet.load().capacity_tokens < capacity:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.05)


def published(version: int, options: argparse.Namespace, folder: Path) -> Weights:
    """In a folder, from which an engine that was away can take them later."""
    model(version, options).save_pretrained(folder)
    return Weights(version=version, folder=str(folder))


async def trajectory(engine: Fleet, number: int, seed: int) -> Record:
    """Siblings share their prompt; lengths, replies and waits follow from identity."""
    shared, own = (random.Random(seed_for(seed, *name)) for name in (("prompt", number // GROUP), ("own", number)))
    record = Record(drawn(shared, 16, 56))
    session, temperature = f"t{number}", own.choice((1.0, 0.7))
    for turn in range(own.randint(1, TURNS)):
        sampling = Sampling(
            max_new_tokens=own.randint(4, 36), temperature=temperature, seed=seed_for(seed, number, turn)
        )
        completion = await engine.generate(record.ids, sampling, request_id=f"{session}/{turn}", session_id=session)
        record.completions.append((len(record.ids), sampling, completion))
        record.ids += completion.token_ids
        await asyncio.sleep(own.choice((0.0, 0.001, 0.02)))  # the tool
        record.ids += drawn(own, 1, 12)
    await engine.close_session(session)
    return record


def drawn(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(least, most))]


# -- looking at it again ---------------------------------------------------------------------------------------------


def checked(records: Sequence[Record], options: argparse.Namespace) -> Errors:
    """Each sampled token against a plain forward of its version."""
    by_version: defaultdict[int, list[Record]] = defaultdict(list)
    for record in records:
        for version in {version for _, version, _, _, _ in record.tokens()}:
            by_version[version].append(record)
    errors = Errors()
    for version, found in sorted(by_version.items()):
        plain = model(version, options)
        sum_in_float64(plain)
        for rows in pieces(sorted(found, key=lambda record: len(record.ids)), FORWARD_ROWS):
            check(errors, plain, version, rows)
    return errors


@torch.no_grad()
def check(errors: Errors, plain: Any, version: int, records: Sequence[Record]) -> None:
    longest = max(len(record.ids) for record in records)
    ids = torch.tensor([record.ids + [0] * (longest - len(record.ids)) for record in records])  # causal: no effect
    logits = plain(input_ids=ids, use_cache=False).logits.double()
    for row, record in enumerate(records):
        mine = [token for token in record.tokens() if token[1] == version]
        places = torch.tensor([token[0] for token in mine])
        chosen = ids[row, places].unsqueeze(1)
        temperatures = torch.tensor([token[4].temperature for token in mine]).unsqueeze(1)
        laws = torch.softmax(logits[row, places - 1] / temperatures, -1)
        logprobs = laws.gather(1, chosen).squeeze(1).log()
        noise = uniforms(np.array([token[4].seed for token in mine]), np.array([token[2] for token in mine]))
        recorded = torch.tensor([token[3] for token in mine], dtype=torch.float64)
        note(errors, (recorded - logprobs).abs(), missed(laws, chosen, torch.from_numpy(noise)))


def missed(laws: torch.Tensor, chosen: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """[n] by how much of probability each random number lies outside the stretch of the token that was recorded."""
    ends = laws.cumsum(-1).gather(1, chosen).squeeze(1)
    begins = ends - laws.gather(1, chosen).squeeze(1)
    return torch.clamp(torch.maximum(begins - noise, noise - ends), min=0.0)


def note(errors: Errors, logprobs: torch.Tensor, laws: torch.Tensor) -> None:
    errors.tokens += len(logprobs)
    errors.logprob_sum += float(logprobs.sum())
    errors.logprob_max = max(errors.logprob_max, float(logprobs.max()))
    errors.logprob_beyond += int((logprobs > LOGPROB_TOLERANCE).sum())
    errors.law_max = max(errors.law_max, float(laws.max()))
    errors.law_beyond += int((laws > LAW_TOLERANCE).sum())


def pieces(records: Sequence[Record], size: int) -> Iterable[Sequence[Record]]:
    return (records[start : start + size] for start in range(0, len(records), size))


if __name__ == "__main__":
    sys.exit(main())
