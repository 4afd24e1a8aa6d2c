"""The faults, and what a trainer is held to: none becomes a reward, and none reaches the model as a tool result.

Under each fault the trainer makes ATTEMPTS attempts that would all earn 1 without it (stand_ins.py). It is rocstar
itself (own.py), or any program that takes its engine, tools and reward function from the environment, prints a line of
JSON for each attempt and says on stderr what went wrong; docs/faults.md has the variables and what each figure means.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rocstar.errors import ConfigError
from rocstar.faults.stand_ins import CELLS, PROGRAM, FaultyServer
from rocstar.support.processes import run_to_end

PROBLEMS, SIBLINGS = 8, 4
ATTEMPTS = PROBLEMS * SIBLINGS
"""One that is lost is less than rocstar's `run.fault_budget`, so that a run may go on without it."""
SECONDS = 300.0  # for all that a trainer does under a fault; a run of rocstar takes twenty
FAULTS: Mapping[str, str] = {
    "engine-refuses": "The engine ends, refuses connections and is back after 0.5 s.",
    "engine-dies": "The connection breaks while the engine writes.",
    "engine-gone": "The engine ends in its first request and does not come back.",
    "engine-half-answer": "An answer ends in its middle.",
    "engine-late": "An answer comes after 3 s, when rocstar no longer waits for it.",
    "engine-not-json": "A page of HTML comes with status 200.",
    "engine-half-surrogate": "An answer holds half of a surrogate pair, which is no Unicode.",
    "engine-wrong-version": "Tokens come from weights that nobody gave the engine.",
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
    "agent-crashes": "An agent crashes after its answer, by its own fault.",
    "agent-overstays": "An agent does not end after its answer.",
    "agent-reset": "An agent's connection breaks before the answer is there, and it asks again.",
    "agent-hides-outage": "The engine is gone; the agent catches the error and gives the reward 0.",
    "agent-leaves-engine": "The engine stands still; the agent gives its request up and gives the reward 0.",
    "agent-leaves-tool": "The tool service is away for 0.5 s; the agent gives its call up and gives the reward 0.",
    "run-disk-full-rollouts": "The disk is full when a step's attempts are written, then free again.",
    "run-disk-full-checkpoint": "The disk is full when a checkpoint is written, then free again.",
    "run-killed": "The run is killed (-9) in mid-step and resumed.",
}
"""Where each strikes, what happens there, and that in a sentence. It strikes once."""
SPEAKS_ROCSTAR = ("engine-wrong-version", "tools-other-call", "tools-twice", "tools-killed")
ROCSTARS_OWN = (*SPEAKS_ROCSTAR, "notebook", "mcp", "agent", "run")
"""How those begin that other trainers cannot be pointed at: the protocols there know no versions and no call ids."""
ITS_PARTS = {"hides-outage": ("gone", ""), "leaves-engine": ("stands-still", ""), "leaves-tool": ("", "refuses")}
"""What engine and tools do to such an agent."""
AGENTS_OWN = ("agent-crashes", "agent-overstays")
"""The agent itself is at fault: its attempt is judged, not lost, and a person is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerAnswer:
    """What a trainer made of a fault."""

    rewards: Sequence[float | None]
    """Of each attempt that was recorded; None: it has none."""
    shown: int = 0
    """Prompts that held a fault in place of a program's output."""
    halted: bool = False
    words: str = ""
    """Lines of which a person reads the last."""
    asked: tuple[int, int] = (0, 0)
    """Requests for work that engine and tools got."""
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
    """What a person reads of it."""
    as_promised: bool
    """The fault struck; no reward, nothing shown, no hanging, and what was lost or halted is told in words."""


Trainer = Callable[[str], Coroutine[Any, Any, TrainerAnswer]]
"""From the name of a fault, or "" for none."""


async def refuse_unsound(trainer: Trainer) -> str:
    """What it says without any fault. Raises ConfigError where attempts do not all earn 1 then, by asking engine and
    tools: nothing would follow from those with a fault."""
    told = await trainer("")
    if told.halted or list(told.rewards) != [1.0] * ATTEMPTS or min(told.asked) < ATTEMPTS:
        raise ConfigError(
            f"without any fault the trainer gave {len(told.rewards)} rewards, {sum(r == 1.0 for r in told.rewards)} of "
            f"them 1, and sent {told.asked[0]} requests to the engine and {told.asked[1]} to the tools, where its "
            f"{ATTEMPTS} attempts earn 1 each and need one to each at least; it must ask the addresses it is given; it "
            f"last said: {_last(told.words, '') or 'nothing'}"
        )
    return told.words


async def examined(trainer: Trainer, fault: str, *, usual: str = "", seconds: float = SECONDS) -> FaultFinding:
    """What a trainer does under a fault. usual: what it says without one, which tells nobody of it."""
    hung = False
    try:
        async with asyncio.timeout(seconds):
            told = await trainer(fault)
    except TimeoutError:
        hung, told = True, TrainerAnswer(rewards=())
    given = [reward for reward in told.rewards if reward is not None]
    is_judged = fault in AGENTS_OWN
    rewarded = sum(reward not in ((0.0, 1.0) if is_judged else (1.0,)) for reward in given)
    rewarded += max(0, len(given) - ATTEMPTS)
    lost, words = max(0, ATTEMPTS - len(given)), _last(told.words, usual)
    silent = not words and (lost or told.halted or is_judged or fault.startswith("reward"))
    lacking = lost and (is_judged or fault.startswith("run"))  # a resumed run makes what it has not recorded
    missed = not (hung or told.struck)
    if missed:
        words = f"the fault never struck; the trainer said: {words or 'nothing'}"
    elif silent and not hung:
        words = "the trainer said nothing of it" + "; does it read FAULTS_REWARD?" * fault.startswith("reward")
    return FaultFinding(
        fault=fault,
        rewarded=rewarded,
        shown=told.shown,
        lost=lost,
        run="hung" if hung else "halted" if told.halted else "went on",
        words=words,
        as_promised=not (hung or missed or rewarded or told.shown or silent or lacking),
    )


async def findings(trainer: Trainer, faults: Sequence[str], *, seconds: float = SECONDS) -> list[FaultFinding]:
    """Of each fault, one after another; says on stderr which it is at. Raises ConfigError like `refuse_unsound`."""
    usual, found = await refuse_unsound(trainer), []
    for fault in faults:
        print(f"{fault} ...", file=sys.stderr)
        found.append(await examined(trainer, fault, usual=usual, seconds=seconds))
    return found


def _last(words: str, usual: str) -> str:
    """The last line of words that is not among the usual ones."""
    known = {"", *(line.strip() for line in usual.splitlines())}
    return next((line.strip() for line in reversed(words.splitlines()) if line.strip() not in known), "")


def faults_named(names: Sequence[str], *, at_addresses: bool) -> list[str]:
    """All where none is named. at_addresses: only those that a trainer can be pointed at. Raises ConfigError."""
    for name in names:
        if name not in FAULTS:
            raise ConfigError(f"there is no fault {name!r}; rocstar faults --list names them")
        if at_addresses and name.startswith(ROCSTARS_OWN):
            raise ConfigError(
                f"{name} exists only for a run of rocstar itself and cannot be injected into another trainer; leave "
                "--trainer out, or choose one that rocstar faults --list --trainer COMMAND names"
            )
    return [name for name in names or FAULTS if not (at_addresses and name.startswith(ROCSTARS_OWN))]


def at_addresses(made: Callable[[Mapping[str, str]], Coroutine[Any, Any, TrainerAnswer]]) -> Trainer:
    """A trainer that takes FAULTS_ENGINE, FAULTS_TOOLS and FAULTS_REWARD; what its model was shown is seen at the
    engine."""

    async def trainer(fault: str) -> TrainerAnswer:
        seam, _, misdeed = fault.partition("-")
        at = defaultdict(str, {"tools" if seam == "mcp" else seam: misdeed})
        at["engine"], at["tools"] = ITS_PARTS.get(misdeed, (at["engine"], at["tools"]))
        programs = {"notebook": CELLS, "agent": ()}.get(seam, (PROGRAM,))
        engine = FaultyServer(at["engine"], programs)
        async with engine, FaultyServer(at["tools"], programs) as tools:
            told = await made({"FAULTS_ENGINE": engine.url, "FAULTS_TOOLS": tools.url, "FAULTS_REWARD": at["reward"]})
            spoilt = (at["engine"] and engine.asked) or (at["tools"] and tools.asked)
            struck = told.struck or bool(spoilt) or seam == "reward"  # which only words can show
            return replace(told, shown=engine.shown, asked=(engine.asked, tools.asked), struck=struck)

    return trainer


def trainer_of(command: str) -> Trainer:
    """A trainer that is a program. command: for the shell."""

    async def made(given: Mapping[str, str]) -> TrainerAnswer:
        code, said, words = await run_to_end("sh", "-c", command, env={**os.environ, **given})
        rewards: list[float | None] = []
        for line in (line for line in re.split(r"[\r\n]", said) if line.startswith('{"reward"')):
            try:
                printed = msgspec.json.decode(line, type=dict[str, msgspec.Raw])  # other keys are the trainer's own
                rewards.append(msgspec.json.decode(printed["reward"], type=float | None))
            except (msgspec.DecodeError, RecursionError):
                rewards.append(float("nan"))
                words += f"\n{line[:100]} on stdout holds neither a number nor null"
        return TrainerAnswer(rewards=rewards, halted=code != 0, words=words)

    return at_addresses(made)
