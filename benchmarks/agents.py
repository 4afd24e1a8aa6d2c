"""The gateway of agents (rocstar/agents) under many sessions at once, with branches and summaries.

    python benchmarks/agents.py --sessions 1000

One process holds the gateway, over an engine that answers at once; another makes six requests a session over HTTP: it
goes on twice, asks again, branches and sums up. Counts sampled tokens that are lost, learnt from twice or after other
tokens than the engine was shown; and the CPU time of a call in the gateway's process over HTTP, less that of the same
requests made in the process. Prints one JSON line."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from frame import parser, report

from rocstar.agents.agent import Gateway
from rocstar.agents.attempt import AgentAttempt
from rocstar.agents.wire import read_chat, write_chat
from rocstar.dialogue.bpe import train_bpe
from rocstar.dialogue.templates import template_named
from rocstar.protocols import ForwardingEngine
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import AttemptLimits, Conversation
from rocstar.types import Completion, EngineLoad, Finish, Problem, Sampling, Trajectory, VersionSpan

TEMPLATE = template_named("compact")
CODEC = train_bpe(
    ["<|im_start|>user\nanswer 12 of question<|im_end|>\n"] * 3,
    vocab_size=300,
    markers=TEMPLATE.markers,
    word_merges=False,
)
STOP = CODEC.token_id(TEMPLATE.stop)
CALLS = 6


class Answering(ForwardingEngine):
    """Answers at once with words of its own; remembers what it was shown for them."""

    def __init__(self) -> None:
        self.given: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, **names: str) -> Completion:
        await asyncio.sleep(0)
        mine = self.given[names["session_id"].split("/")[0]]
        written = (*CODEC.encode(f"answer {len(mine)}"), STOP)
        mine.append((tuple(token_ids), written))
        spans = (VersionSpan(0, len(written)),)
        return Completion(token_ids=written, logprobs=(-0.5,) * len(written), finish=Finish.STOP, version_spans=spans)

    def load(self) -> EngineLoad:
        return EngineLoad(capacity_tokens=1 << 20, used_tokens=0, running=0, waiting=0)

    async def close_session(self, session_id: str) -> None:
        """Nothing is cached."""


def attempts_of(engine: Answering, count: int) -> list[AgentAttempt]:
    conversation = Conversation(codec=CODEC, template=TEMPLATE, tools=(), feedback=str)
    limits = AttemptLimits(max_turns=CALLS, max_response_tokens=10_000, max_parallel_calls=1)
    unjudged: Any = None
    roller = Roller(engine=engine, conversation=conversation, verifier=unjudged, limits=limits, stop_token_ids=(STOP,))
    problem = Problem(id="p", question="question", answer="")
    sampling = Sampling(max_new_tokens=1, stop_token_ids=(STOP,))
    return [AgentAttempt(roller, problem, sampling, str(number)) for number in range(count)]


async def session(ask: Any, number: int) -> None:
    """ask: messages -> the answer's message."""
    asked = [{"role": "user", "content": f"question {number}"}]
    first = await ask(asked)
    further = [*asked, first, {"role": "user", "content": "more"}]
    second = await ask(further)
    third = [*further, second, {"role": "user", "content": "and more"}]
    await asyncio.gather(ask(third), ask([*asked, first, {"role": "user", "content": "or else"}]), ask(asked))
    await ask([{"role": "user", "content": f"a summary of {number}"}])


def clients(origin: str, keys: Sequence[str]) -> None:
    import httpx

    async def run() -> None:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=origin, limits=limits, timeout=600) as http:

            async def one(number: int, key: str) -> None:
                async def ask(messages: list[Any]) -> Any:
                    headers = {"authorization": f"Bearer {key}"}
                    found = await http.post("/v1/chat/completions", json={"messages": messages}, headers=headers)
                    return found.raise_for_status().json()["choices"][0]["message"]

                await session(ask, number)

            await asyncio.gather(*(one(number, key) for number, key in enumerate(keys)))

    asyncio.run(run())


async def over_http(count: int) -> tuple[float, dict[str, int]]:
    """(CPU seconds of this process, what is wrong)."""
    engine, gateway = Answering(), Gateway()
    made, keys, opened = attempts_of(engine, count), [], []
    for attempt in made:
        opened.append(gateway.opened(attempt))
        keys.append(await opened[-1].__aenter__())
    began = time.process_time()
    process = multiprocessing.get_context("spawn").Process(target=clients, args=(gateway.origin, keys))
    await asyncio.to_thread(process.start)
    await asyncio.to_thread(process.join)
    spent = time.process_time() - began
    for one in opened:
        await one.__aexit__(None, None, None)
    if process.exitcode:
        raise SystemExit(f"the clients ended with {process.exitcode}")
    return spent, wrong(engine, made)


async def in_process(count: int) -> float:
    """CPU seconds."""
    made = attempts_of(Answering(), count)

    async def one(number: int, attempt: AgentAttempt) -> None:
        async def ask(messages: list[Any]) -> Any:
            return write_chat(await attempt.complete(*read_chat({"messages": messages})))["choices"][0]["message"]

        await session(ask, number)

    began = time.process_time()
    await asyncio.gather(*(one(number, attempt) for number, attempt in enumerate(made)))
    return time.process_time() - began


def wrong(engine: Answering, made: Sequence[AgentAttempt]) -> dict[str, int]:
    """Completions that are not learnt from, learnt from again, or learnt from after other tokens."""
    lost = again = 0
    for number, attempt in enumerate(made):
        left = list(engine.given[str(number)])
        for learnt in shown_and_learnt(attempt.trajectory(0, None, None, 0.0)):
            if learnt in left:
                left.remove(learnt)
            else:
                again += 1
        lost += len(left)
    calls = sum(map(len, engine.given.values()))
    return {"calls": calls, "lost": lost, "twice_or_elsewhere": again}


def shown_and_learnt(trajectory: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found = []
    for part in trajectory.conversations:
        ids = part.prompt_ids
        for turn in part.turns:
            found.append((ids, turn.completion.token_ids))
            ids = (*ids, *turn.completion.token_ids, *turn.reply_ids)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--sessions", type=int, default=1000)
    count = options.parse_args().sessions
    spent, found = asyncio.run(over_http(count))
    spent -= asyncio.run(in_process(count))
    report(sessions=count, **found, ms_over_direct=round(spent / found["calls"] * 1e3, 3))


if __name__ == "__main__":
    main()
