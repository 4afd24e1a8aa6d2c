"""The faults, and the requirements on a trainer: no fault becomes a reward or reaches the model as a tool result.

Under each fault the trainer makes ATTEMPTS attempts that would all earn 1 without it (stand_ins.py). It is rocstar
itself (own.py), or any program that takes its engine, tools and reward function from the environment, prints a line of
JSON for each attempt and reports errors on stderr; docs/faults.md explains the variables and figures.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from rocstar.errors import ConfigError
from rocstar.faults.stand_ins import CELLS, PROGRAM, FaultyServer
from rocstar.support.processes import run_to_end

PROBLEMS, SIBLINGS = 8, 4
ATTEMPTS = PROBLEMS * SIBLINGS
"""One lost attempt is below rocstar's `run.fault_budget`, so that a run may continue without it."""
SECONDS = 300.0  # for a trainer's whole work under a fault; a run of rocstar takes twenty
FAULTS: Mapping[str, str] = {
    "engine-refuses": "The engine ends, refuses connections and is back after 0.5 s.",
    "engine-dies": "The connection breaks while the engine writes.",
    "engine-gone": "The engine ends in its first request and does not come back.",
    "engine-half-answer": "An answer ends in its middle.",
    "engine-late": "An answer comes after 6 s, when rocstar no longer waits for it.",
    "engine-not-json": "A page of HTML comes with status 200.",
    "engine-half-surrogate": "An answer holds half of a surrogate pair, which is no Unicode.",
    "engine-wrong-version": "Tokens come from weights that the engine was not given.",
    "engine-nan-logprobs": "Log-probabilities are no numbers.",
    "engine-too-many-tokens": "An answer has more tokens than were asked for.",
    "tools-refuses": "The tool service ends, refuses connections and is back after 0.5 s.",
    "tools-dies": "The connection breaks while a program runs.",
    "tools-gone": "The tool service ends in its first call and does not come back.",
    "tools-half-answer": "A result ends in its middle.",
    "tools-hangs": "A call gets no answer, while the service goes on to answer others.",
    "tools-other-call": "A call is answered with the result of another.",
    "tools-twice": "A call is answered twice, the second time wrongly.",
    "tools-killed": "The worker that runs a program is killed.",
    "notebook-reset": "The sandbox is killed between two cells of a notebook.",
    "mcp-gone": "An MCP server lists its tools, ends in its first call and does not come back.",
    "reward-raises": "The reward function raises an error.",
    "reward-hangs": "The reward function does not return.",
    "reward-nan": "The reward function returns nan.",
    "agent-reset": "An agent's connection breaks before the answer is there, and it asks again.",
    "agent-hides-outage": "The engine is gone; the agent catches the error and gives the reward 0.",
    "agent-leaves-engine": "The engine stands still; the agent gives its request up and gives the reward 0.",
    "agent-leaves-tool": "The tool service is away for 0.5 s; the agent gives its call up and gives the reward 0.",
    "run-disk-full-rollouts": "The disk is full when a step's attempts are written, then free again.",
    "run-disk-full-checkpoint": "The disk is full when a checkpoint is written, then free again.",
    "run-killed": "The run is killed (-9) in mid-step and resumed.",
}
"""By name: the place of the fault, what happens there, and its description. Each fault is injected once."""
SPEAKS_ROCSTAR = ("engine-wrong-version", "tools-other-call", "tools-twice", "tools-killed")
ROCSTARS_OWN = (*SPEAKS_ROCSTAR, "notebook", "mcp", "agent", "run")
"""Prefixes of faults that only rocstar supports: other trainers' protocols have no versions and no call ids."""
ITS_PARTS = {"hides-outage": ("gone", ""), "leaves-engine": ("stands-still", ""), "leaves-tool": ("", "refuses")}
"""What the engine and tools do to such an agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAnswer:
    """A trainer's behaviour under a fault."""

    rewards: Sequence[float | None]
    """The reward of each recorded attempt; None: no reward."""
    shown: int = 0
    """Prompts that held a fault in place of a program's output."""
    halted: bool = False
    words: str = ""
    """The trainer's messages; the report shows the last line."""
    asked: tuple[int, int] = (0, 0)
    """Requests for work received by the engine and by the tools."""
    struck: bool = False
    """Whether the fault happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFinding:
    """A row of the table; docs/faults.md says what its figures count."""

    fault: str
    rewarded: int
    shown: int
    lost: int
    run: str
    """went on, halted, hung."""
    words: str
    """The trainer's message about it."""
    as_promised: bool
    """The fault happened; no reward, nothing shown, no hang, and every loss or halt is reported."""


Trainer = Callable[[str], Coroutine[Any, Any, TrainerAnswer]]
"""From the name of a fault, or "" for none."""


async def refuse_unsound(trainer: Trainer) -> str:
    """The trainer's messages without a fault. Raises ConfigError if attempts do not all earn 1 then, with requests to
    engine and tools: runs with a fault would prove nothing."""
    found = await trainer("")
    if found.halted or list(found.rewards) != [1.0] * ATTEMPTS or min(found.asked) < ATTEMPTS:
        raise ConfigError(
            f"without any fault the trainer gave {len(found.rewards)} rewards, {sum(r == 1.0 for r in found.rewards)} "
            f"of them 1, and sent {found.asked[0]} requests to the engine and {found.asked[1]} to the tools, where its "
            f"{ATTEMPTS} attempts earn 1 each and need one to each at least; it must ask the addresses it is given; it "
            f"last said: {_last(found.words, '') or 'nothing'}"
        )
    return found.words


async def examined(trainer: Trainer, fault: str, *, usual: str = "", seconds: float = SECONDS) -> FaultFinding:
    """A trainer's behaviour under a fault. usual: its messages without one, which do not count as a report."""
    answer, run = TrainerAnswer(rewards=()), "hung"
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            answer = await trainer(fault)
            run = "halted" if answer.halted else "went on"
    given = [reward for reward in answer.rewards if reward is not None]
    rewarded = sum(reward != 1.0 for reward in given) + max(0, len(given) - ATTEMPTS)
    lost, words = max(0, ATTEMPTS - len(given)), _last(answer.words, usual)
    silent = not words and (lost or answer.halted or fault.startswith("reward"))
    lacking = lost and fault.startswith("run")  # a resumed run makes what it has not recorded
    well = answer.struck and not (rewarded or answer.shown or silent or lacking)  # one that hung gave no answer
    if not answer.struck and run != "hung":
        words = f"the fault never struck; the trainer said: {words or 'nothing'}"
    elif silent and run != "hung":
        words = "the trainer did not report it" + "; does it read FAULTS_REWARD?" * fault.startswith("reward")
    return FaultFinding(
        fault=fault, rewarded=rewarded, shown=answer.shown, lost=lost, run=run, words=words, as_promised=well
    )


async def findings(trainer: Trainer, faults: Sequence[str], *, seconds: float = SECONDS) -> list[FaultFinding]:
    """The findings of all faults in order, with progress on stderr. Raises ConfigError like `refuse_unsound`."""
    usual, found = await refuse_unsound(trainer), []
    for fault in faults:
        print(f"{fault} ...", file=sys.stderr)
        found.append(await examined(trainer, fault, usual=usual, seconds=seconds))
    return found


def _last(words: str, usual: str) -> str:
    """The last line that is not among the usual ones."""
    known = {"", *(line.strip() for line in usual.splitlines())}
    return next((line.strip() for line in reversed(words.splitlines()) if line.strip() not in known), "")


def faults_named(names: Sequence[str], *, at_addresses: bool) -> list[str]:
    """All faults if none is named. at_addresses: only those that can be injected at addresses. Raises ConfigError."""
    for name in names:
        if name not in FAULTS:
            raise ConfigError(f"there is no fault {name!r}; rocstar faults --list names them")
        if at_addresses and name.startswith(ROCSTARS_OWN):
            raise ConfigError(
                f"{name} exists only for a run of rocstar itself and cannot be injected into another trainer; leave "
                "--trainer out, or choose one that rocstar faults --list --trainer COMMAND names"
            )
    return [name for name in names or FAULTS if not (at_addresses and name.startswith(ROCSTARS_OWN))]


async def at_addresses(made: Callable[[Mapping[str, str]], Awaitable[TrainerAnswer]], fault: str) -> TrainerAnswer:
    """The answer of a trainer that takes FAULTS_ENGINE, FAULTS_TOOLS and FAULTS_REWARD; the engine records what its
    model was shown."""
    seam, _, misdeed = fault.partition("-")
    at = defaultdict(str, {"tools" if seam in ("mcp", "notebook") else seam: misdeed})
    at["engine"], at["tools"] = ITS_PARTS.get(misdeed, (at["engine"], at["tools"]))
    programs = {"notebook": CELLS, "agent": ()}.get(seam, (PROGRAM,))
    async with FaultyServer(at["engine"], programs) as engine, FaultyServer(at["tools"], programs) as tools:
        answer = await made({"FAULTS_ENGINE": engine.url, "FAULTS_TOOLS": tools.url, "FAULTS_REWARD": at["reward"]})
        spoilt = (at["engine"] and engine.asked) or (at["tools"] and tools.asked)
        struck = answer.struck or bool(spoilt) or seam == "reward"  # only its messages can show it
        return replace(answer, shown=engine.shown, asked=(engine.asked, tools.asked), struck=struck)


def trainer_of(command: str) -> Trainer:
    """A trainer that is a program. command: for the shell."""

    async def made(given: Mapping[str, str]) -> TrainerAnswer:
        code, stdout, words = await run_to_end("sh", "-c", command, env={**os.environ, **given})
        rewards: list[float | None] = []
        for line in (line for line in re.split(r"[\r\n]", stdout) if line.startswith('{"reward"')):
            try:
                printed = msgspec.json.decode(line, type=dict[str, msgspec.Raw])  # other keys are the trainer's own
                rewards.append(msgspec.json.decode(printed["reward"], type=float | None))
            except (msgspec.DecodeError, RecursionError):
                rewards.append(float("nan"))
                words += f"\n{line[:100]} on stdout holds neither a number nor null"
        return TrainerAnswer(rewards=rewards, halted=code != 0, words=words)

    return partial(at_addresses, made)
