"""The faults, and what a trainer is held to: none becomes a reward, and none reaches the model as a tool result.

Under each fault the trainer makes ATTEMPTS attempts that would all earn 1 without it (script.py). It is rocstar itself
(own.py), or any program that takes its engine, its tools and its reward function from the environment:

    FAULTS_ENGINE     http://127.0.0.1:port   /v1/chat/completions, OpenAI's
    FAULTS_TOOLS      http://127.0.0.1:port   /run_code, SandboxFusion's
    FAULTS_REWARD     what its reward function does wrong, once: raises, hangs, nan, or nothing
    stdout            {"reward": 1.0 or null} for each attempt, one a line
    exit code         other than 0 where it halted
    stderr            its last line that it does not write without a fault, too, is what a person is told
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rocstar.errors import ConfigError
from rocstar.faults.servers import FaultyEngine, FaultyTools
from rocstar.support.processes import process_group, words_of

PROBLEMS, SIBLINGS = 8, 4
ATTEMPTS = PROBLEMS * SIBLINGS
"""One that is lost is less than rocstar's `run.fault_budget`, so that a run may go on without it."""
SECONDS = 300.0  # for all that a trainer does under a fault; a run of rocstar takes twenty


@dataclass(frozen=True, slots=True)
class InjectedFault:
    seam: str
    """Where it strikes: engine, tools, notebook, mcp, reward, agent, run."""
    misdeed: str
    """What happens there."""
    times: int | None
    """How many requests it strikes; None: all."""
    sentence: str

    @property
    def name(self) -> str:
        return f"{self.seam}-{self.misdeed}"

    @property
    def has_address(self) -> bool:
        """Whether another trainer can be pointed at it. The protocols there know no call ids and no versions."""
        own = ("other-call", "twice", "wrong-version", "killed")
        return self.seam in ("engine", "tools", "reward") and self.misdeed not in own

    @property
    def is_the_agents(self) -> bool:
        """Whether the agent itself is at fault: its attempt is judged, not lost, and a person is told."""
        return self.seam == "agent" and self.misdeed in ("crashes", "overstays")

    @property
    def is_told(self) -> bool:
        """Whether a person is told even where nothing is lost. No server sees a reward function fail, so nothing but
        the words shows that a trainer asked it."""
        return self.is_the_agents or self.seam == "reward"

    @property
    def loses_nothing(self) -> bool:
        """Whether no attempt may be lost: a resumed run makes those again that it has not recorded."""
        return self.is_the_agents or self.seam == "run"


FAULTS = tuple(
    InjectedFault(*told)
    for told in (
        ("engine", "refuses", 1, "The engine ends, refuses connections and is back after 0.5 s."),
        ("engine", "dies", 1, "The connection breaks while the engine writes."),
        ("engine", "gone", None, "The engine ends in its first request and does not come back."),
        ("engine", "half-answer", 1, "An answer ends in its middle."),
        ("engine", "late", 1, "An answer comes after 3 s, when rocstar no longer waits for it."),
        ("engine", "not-json", 1, "A page of HTML comes with status 200."),
        ("engine", "half-surrogate", 1, "An answer holds half of a surrogate pair, which is no Unicode."),
        ("engine", "wrong-version", 1, "Tokens come from weights that nobody gave the engine."),
        ("engine", "nan-logprobs", 1, "Log-probabilities are no numbers."),
        ("engine", "too-many-tokens", 1, "An answer has more tokens than were asked for."),
        ("tools", "refuses", 1, "The tool service ends, refuses connections and is back after 0.5 s."),
        ("tools", "dies", 1, "The connection breaks while a program runs."),
        ("tools", "gone", None, "The tool service ends in its first call and does not come back."),
        ("tools", "half-answer", 1, "A result ends in its middle."),
        ("tools", "hangs", 1, "A call gets no answer, while the service goes on to answer others."),
        ("tools", "other-call", 1, "A call is answered with the result of another."),
        ("tools", "twice", 1, "A call is answered twice, the second time wrongly."),
        ("tools", "killed", 1, "The worker that runs a program is killed."),
        ("notebook", "reset", 1, "The sandbox is killed between two cells of a notebook."),
        ("mcp", "gone", None, "An MCP server lists its tools and ends in every call."),
        ("reward", "raises", 1, "The reward function raises an error."),
        ("reward", "hangs", 1, "The reward function does not return."),
        ("reward", "nan", 1, "The reward function returns nan."),
        ("agent", "crashes", 1, "An agent crashes after its answer, by its own fault."),
        ("agent", "overstays", 1, "An agent does not end after its answer."),
        ("agent", "reset", 1, "An agent's connection breaks before the answer is there, and it asks again."),
        ("agent", "hides-outage", None, "The engine is gone; the agent catches the error and gives the reward 0."),
        ("run", "disk-full-rollouts", 1, "The disk is full when a step's attempts are written, then free again."),
        ("run", "disk-full-checkpoint", 1, "The disk is full when a checkpoint is written, then free again."),
        ("run", "killed", 1, "The run is killed (-9) in mid-step and resumed."),
    )
)


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
    """A row of the table."""

    fault: str
    rewarded: int
    """Attempts with a reward that the fault made."""
    shown: int
    """Prompts in which the model read the fault as a tool result."""
    lost: int
    """Attempts without a reward."""
    run: str
    """went on, halted, hung."""
    words: str
    """What a person reads of it."""
    as_promised: bool
    """The fault struck; no reward, nothing shown, no hanging, and what was lost or halted is told in words."""


Trainer = Callable[[InjectedFault], Coroutine[Any, Any, TrainerAnswer]]


async def refuse_unsound(trainer: Trainer) -> str:
    """What it says without any fault. Raises ConfigError where attempts do not all earn 1 then, by asking engine and
    tools: nothing would follow from those with a fault."""
    told = await trainer(InjectedFault("none", "", 0, ""))
    if told.halted or list(told.rewards) != [1.0] * ATTEMPTS:
        raise ConfigError(
            f"without any fault the trainer gave {len(told.rewards)} rewards, {sum(r == 1.0 for r in told.rewards)} of "
            f"them 1, where {ATTEMPTS} of 1 were expected; it last said: {_last(told.words, '') or 'nothing'}"
        )
    if min(told.asked) < ATTEMPTS:
        raise ConfigError(
            f"without any fault the trainer sent {told.asked[0]} requests to the engine and {told.asked[1]} to the "
            f"tools, where its {ATTEMPTS} attempts need one to each at least; it must ask the addresses it is given"
        )
    return told.words


async def examined(
    trainer: Trainer, fault: InjectedFault, *, usual: str = "", seconds: float = SECONDS
) -> FaultFinding:
    """What a trainer does under a fault. usual: what it says without one, which tells nobody of it."""
    hung = False
    try:
        async with asyncio.timeout(seconds):
            told = await trainer(fault)
    except TimeoutError:
        hung, told = True, TrainerAnswer(rewards=())
    given = [reward for reward in told.rewards if reward is not None]
    earns = (0.0, 1.0) if fault.is_the_agents else (1.0,)
    rewarded = sum(reward not in earns for reward in given) + max(0, len(given) - ATTEMPTS)
    lost, words = max(0, ATTEMPTS - len(given)), _last(told.words, usual)
    silent = not words and (lost or told.halted or fault.is_told)
    missed = not (hung or told.struck)
    return FaultFinding(
        fault=fault.name,
        rewarded=rewarded,
        shown=told.shown,
        lost=lost,
        run="hung" if hung else "halted" if told.halted else "went on",
        words=f"the fault never struck; the trainer said: {words or 'nothing'}" if missed else words,
        as_promised=not (hung or missed or rewarded or told.shown or silent or (lost and fault.loses_nothing)),
    )


def _last(words: str, usual: str) -> str:
    """The last line of words that is not among the usual ones."""
    known = {"", *(line.strip() for line in usual.splitlines())}
    return next((line.strip() for line in reversed(words.splitlines()) if line.strip() not in known), "")


def faults_named(names: Sequence[str], *, at_addresses: bool) -> list[InjectedFault]:
    """All where none is named. at_addresses: only those that a trainer can be pointed at. Raises ConfigError."""
    known = {fault.name: fault for fault in FAULTS if fault.has_address or not at_addresses}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no fault {unknown[0]!r} here; rocstar faults --list names them")
    return [known[name] for name in names or known]


def at_addresses(made: Callable[[Mapping[str, str]], Coroutine[Any, Any, TrainerAnswer]]) -> Trainer:
    """A trainer that takes the variables above; what its model was shown is seen at the engine."""

    async def trainer(fault: InjectedFault) -> TrainerAnswer:
        def of(seam: str) -> str:
            return fault.misdeed if fault.seam == seam else ""

        async with FaultyEngine(of("engine"), fault.times) as engine, FaultyTools(of("tools"), fault.times) as tools:
            given = {"FAULTS_ENGINE": engine.url, "FAULTS_TOOLS": tools.url, "FAULTS_REWARD": of("reward")}
            told = await made(given)
            struck = {"engine": engine.asked, "tools": tools.asked}.get(fault.seam, 1) > 0
            return replace(told, shown=len(engine.shown), asked=(engine.asked, tools.asked), struck=struck)

    return trainer


def trainer_of(command: str) -> Trainer:
    """A program as a trainer. Raises ConfigError where command is none."""
    remedy = "name one, as docs/faults.md says"
    program = words_of(command, said=f"the trainer's command {command!r}", remedy=remedy)

    async def made(given: Mapping[str, str]) -> TrainerAnswer:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # pipes end with the last child only
            async with process_group(*program, env={**os.environ, **given}, stdout=out, stderr=err) as process:
                await process.wait()
            out.seek(0)
            err.seek(0)
            lines = [line for line in out.read().splitlines() if line.startswith(b'{"reward"')]
            words = err.read().decode(errors="replace")
        rewards = [_reward_in(line) for line in lines]
        wrong = [line for line, reward in zip(lines, rewards, strict=True) if reward != reward]
        if wrong:
            words += f"\n{wrong[0][:100].decode(errors='replace')} on stdout holds neither a number nor null"
        return TrainerAnswer(rewards=rewards, halted=process.returncode != 0, words=words)

    return at_addresses(made)


def _reward_in(line: bytes) -> float | None:
    """nan where it is neither a number nor null."""
    try:
        reward = json.loads(line)["reward"]
    except (ValueError, RecursionError):
        return float("nan")
    number = isinstance(reward, int | float) and not isinstance(reward, bool)
    return reward if number or reward is None else float("nan")
