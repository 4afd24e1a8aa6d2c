"""rocstar as the trainer of kit.py: the path of a step's attempts, from engine to reward and fault budget, with the
parts of a run; and, for faults of a whole process, `rocstar train` itself."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import pyarrow.parquet as parquet

from rocstar.agents.agent import Client, GatewayAgent, by_function
from rocstar.answers.grade import Grader
from rocstar.answers.plugin import Reward, RewardVerifier
from rocstar.config.layers import recipes_folder
from rocstar.config.recipe import load_recipe
from rocstar.engines.vllm import VllmEngine
from rocstar.errors import RocstarError
from rocstar.faults.kit import PROBLEMS, SIBLINGS, TrainerAnswer, at_addresses
from rocstar.faults.stand_ins import PRINTED, PROGRAM, QUESTION, TEMPLATE, codec, reward_of
from rocstar.parts.build import AttemptParts, opened_fleet
from rocstar.rollout.collect import Roller
from rocstar.run.report import failed_agents, faults_of, reason_to_halt
from rocstar.sandbox.client import SandboxClient
from rocstar.support.processes import run_to_end
from rocstar.types import Problem, Stop, Trajectory

PATIENCE_SECONDS = 4.0  # enough for a busy machine to make progress in
AGENT_SECONDS = 10.0
GIVES_UP_SECONDS = 0.3  # after which an agent gives up an engine or a tool
SILENT_SECONDS = 5.0  # after which a sandbox that does not answer a call is given up


async def own_trainer(fault: str) -> TrainerAnswer:
    if fault.startswith("run"):
        with tempfile.TemporaryDirectory(prefix="rocstar-faults-") as folder:
            return await _run(fault, Path(folder))
    return await at_addresses(partial(_step, fault), fault)


async def _step(fault: str, given: Mapping[str, str]) -> TrainerAnswer:
    tool = {"notebook-reset": "notebook", "mcp-gone": f"mcp:{given['FAULTS_TOOLS']}"}.get(fault, "python")
    settings = (f'sandbox.tools=["{tool}"]', "sandbox.timeout_seconds=5", "rollout.max_response_tokens=400")
    recipe = load_recipe(recipes_folder() / "first.toml", settings)
    words, left, judge = codec(), {fault}, reward_of(given["FAULTS_REWARD"])
    engine = VllmEngine(given["FAULTS_ENGINE"], vocab_size=words.vocab_size, patience_seconds=PATIENCE_SECONDS)
    opened = opened_fleet({"engine": engine}, vocab_size=words.vocab_size, patience_seconds=PATIENCE_SECONDS)
    connect = partial(SandboxClient.connect, [given["FAULTS_TOOLS"]], silent_seconds=SILENT_SECONDS)
    reward = Reward("rocstar.faults", judge, "trl", None, chat=False, seconds=PATIENCE_SECONDS)
    with await asyncio.to_thread(connect) as sandbox:
        async with opened as fleet:
            make = partial(AttemptParts(recipe).roller, recipe.rollout, codec=words, template=TEMPLATE)
            roller = await asyncio.to_thread(make, engine=fleet, sandbox=sandbox, grader=Grader())
            roller = replace(roller, verifier=RewardVerifier(words, reward))
            if fault.startswith("agent"):
                asks = partial(by_function, partial(_agent, left))
                agent = GatewayAgent(asks, seconds=AGENT_SECONDS, at_once=None, right_above=0.5)
                roller = replace(roller, agent=agent)
            return replace(await _rolled(roller, recipe.run.fault_budget), struck=not left)


async def _rolled(roller: Roller, fault_budget: float) -> TrainerAnswer:
    problems = [Problem(id=str(n), question=QUESTION.format(n), answer=PRINTED) for n in range(PROBLEMS)]
    try:
        groups = await roller.roll(problems, attempts=SIBLINGS, seed=1)
    except RocstarError as error:
        return TrainerAnswer(rewards=(), halted=True, words=str(error))
    faults, failures = faults_of(groups), failed_agents(groups)
    halted = reason_to_halt(faults, failures, fault_budget)
    words = halted or faults[1] or failures[1] or ""
    rewards = [_reward(trajectory) for group in groups for trajectory in group.trajectories]
    return TrainerAnswer(rewards=rewards, halted=halted is not None, words=" ".join(words.split()))


def _reward(trajectory: Trajectory) -> float | None:
    """The attempt's reward for a learner."""
    return trajectory.outcome.reward if trajectory.outcome and trajectory.stop is not Stop.ENVIRONMENT_FAILED else None


async def _agent(left: set[str], problem: Problem, client: Client) -> float | None:
    """left: the fault, until it has happened."""
    headers = {"authorization": f"Bearer {client.api_key}"}
    body = {"messages": [{"role": "user", "content": problem.question}]}
    async with httpx.AsyncClient(base_url=client.base_url, headers=headers, timeout=60.0, verify=False) as http:
        ask = partial(http.post, "/chat/completions", json=body)
        if "agent-reset" in left:
            left.clear()
            with suppress(httpx.ReadTimeout):  # which breaks the connection
                await ask(timeout=httpx.Timeout(60.0, read=0.01))
                left.add("agent-reset")
        hasty = httpx.Timeout(60.0, read=GIVES_UP_SECONDS)
        try:
            (await ask(timeout=hasty if "agent-leaves-engine" in left else 60.0)).raise_for_status()
            if "agent-leaves-tool" in left:
                await http.post("/tools/python", json={"code": PROGRAM}, timeout=hasty)
        except httpx.HTTPError:
            return 0.0
    return None


STEPS = 2
RUN = f"""
run.checkpoint_seconds=0 run.checkpoint_cost=1 data.pool=32 stage.sft.steps=1 stage.rl.steps={STEPS}
rollout.problems_per_step={PROBLEMS} rollout.attempts_per_problem={SIBLINGS // STEPS} resample.keep=2
rollout.max_response_tokens=16 rollout.max_turns=1 rollout.truncated=graded sandbox.tools=[]
learning.updates_per_step=1 evaluate.problems=0 evaluate.verifier=rocstar.faults.stand_ins:always
"""
"""Settings that make recipes/first.toml a run of ATTEMPTS attempts."""
WHERE = {
    "run-disk-full-rollouts": "/rollouts/",
    "run-disk-full-checkpoint": "/checkpoints/",
    "run-killed": f"/checkpoints/.step={STEPS:06d}",
}
"""The path a run is writing when its fault happens; the killed run has recorded the attempts of its first step."""
STRUCK = """\
import errno, os, sys
whole, where, fault = os.fsync, sys.argv.pop(1), sys.argv.pop(1)
def fsync(handle):
    if where not in os.readlink(f"/proc/self/fd/{handle}"):
        return whole(handle)
    if fault == "run-killed":
        os.kill(os.getpid(), 9)
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
os.fsync = fsync
from rocstar.cli.main import main
main()
"""


async def _run(fault: str, folder: Path) -> TrainerAnswer:
    """A run of STEPS steps that the fault ends, and its resumption: ATTEMPTS attempts in all, all lost if the
    resumption fails."""
    recipe = str(recipes_folder().absolute() / "first.toml")
    first = await _command(folder, "-c", STRUCK, WHERE[fault], fault, "train", recipe, *RUN.split())
    second = await _command(folder, "-m", "rocstar", "train", "--resume", "first")
    files = [] if second[0] else sorted((folder / "runs" / "first" / "rollouts").glob("*.parquet"))
    rewards = [row["reward"] for file in files for row in parquet.read_table(file).to_pylist()]
    code, message = second if second[0] or fault == "run-killed" else first
    struck = first[0] == -signal.SIGKILL if fault == "run-killed" else first[0] != 0
    return TrainerAnswer(rewards=rewards, halted=code != 0, words=message if code else "", struck=struck)


async def _command(folder: Path, *arguments: str) -> tuple[int, str]:
    """(exit code, last line on stderr) of Python with these arguments."""
    code, _, stderr = await run_to_end(sys.executable, *arguments, cwd=folder)
    return code, stderr.rpartition("\n")[2]
