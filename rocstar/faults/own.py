"""rocstar as the trainer of kit.py: the path of a step's attempts, from engine to reward and fault budget, by the parts
that a run puts together; and, for what strikes a whole process, `rocstar train` itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pyarrow.parquet as parquet

from rocstar.agents.agent import Client, GatewayAgent, by_function
from rocstar.answers.plugin import Reward, RewardVerifier
from rocstar.config.sections import RunSection
from rocstar.dialogue.bpe import train_bpe
from rocstar.dialogue.feedback import feedback_text
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.templates import template_named
from rocstar.engines.vllm import VllmEngine
from rocstar.faults.kit import PROBLEMS, SIBLINGS, InjectedFault, TrainerAnswer
from rocstar.faults.script import CELLS, PROGRAM, QUESTION, RIGHT, call_of, reward_of
from rocstar.faults.servers import FaultyDaemon, FaultyEngine
from rocstar.parts.build import opened_fleet
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import AttemptLimits, Conversation
from rocstar.run.report import failed_agents, faults_of, reason_to_halt
from rocstar.sandbox.call import Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.support.exits import failure
from rocstar.tools.choose import make_tools
from rocstar.types import Problem, Sampling, Stop, Trajectory

PATIENCE_SECONDS = 1.5
AGENT_SECONDS = 10.0
SILENT_SECONDS = 5.0  # of a sandbox that holds a call
TEMPLATE = template_named("compact")
MCP_SERVER = """\
import json, os, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "tools/call":
        open(sys.argv[0] + ".called", "w").close()
        print("out of memory", file=sys.stderr, flush=True)
        os._exit(1)
    schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
    info = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "m", "version": "1"}}
    tools = {"tools": [{"name": "python", "description": "Runs Python.", "inputSchema": schema}]}
    result = {"initialize": info, "tools/list": tools}.get(asked["method"], {})
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


async def own_trainer(fault: InjectedFault) -> TrainerAnswer:
    with tempfile.TemporaryDirectory(prefix="rocstar-faults-") as name:
        if fault.seam == "run":
            return await asyncio.to_thread(_run, fault, Path(name))
        return await _step(fault, Path(name))


async def _step(fault: InjectedFault, folder: Path) -> TrainerAnswer:
    """The attempts of one step."""

    def of(*seams: str) -> str:
        return fault.misdeed if fault.seam in seams else ""

    codec = train_bpe(
        [text_of(TEMPLATE.opening(QUESTION, ())), call_of(PROGRAM), RIGHT],
        vocab_size=300,
        markers=TEMPLATE.markers,
        word_merges=False,
    )
    programs = CELLS if fault.seam == "notebook" else () if fault.seam == "agent" else (PROGRAM,)
    engine_misdeed = "gone" if of("agent") == "hides-outage" else of("engine")
    daemon = FaultyDaemon(of("tools"), fault.times, str(folder / "socket"))
    strikes: list[bool] = []
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(_sandbox(fault, daemon, strikes))

        def kill() -> None:
            if fault.seam == "notebook":
                strikes.append(_kill_sandbox(sandbox))

        server = FaultyEngine(engine_misdeed, fault.times, programs=programs, codec=codec, after_program=kill)
        await stack.enter_async_context(server)
        engine = VllmEngine(server.url, vocab_size=codec.vocab_size, patience_seconds=PATIENCE_SECONDS)
        opened = opened_fleet({"engine": engine}, vocab_size=codec.vocab_size, patience_seconds=PATIENCE_SECONDS)
        fleet = await stack.enter_async_context(opened)
        name = {"notebook": "notebook", "mcp": f"mcp:{sys.executable} {folder / 'server.py'}"}.get(fault.seam, "python")
        (folder / "server.py").write_text(MCP_SERVER)
        tools = make_tools([name], sandbox, Limits(wall_seconds=5.0), tool_name="python")
        words = partial(feedback_text, max_chars=200, truncate="middle", errors="short")
        reward = Reward("rocstar.faults", reward_of(of("reward")), "trl", None, chat=False)
        roller = Roller(
            engine=fleet,
            conversation=Conversation(
                codec=codec, template=TEMPLATE, tools=tools.shared, feedback=words, own_tools=tools.own
            ),
            verifier=RewardVerifier(codec, reward, seconds=PATIENCE_SECONDS),
            limits=AttemptLimits(max_turns=4, max_response_tokens=400, max_parallel_calls=1),
            stop_token_ids=codec.stop_ids(TEMPLATE),
            agent=_agent(fault, strikes) if fault.seam == "agent" else None,
        )
        told = await _rolled(roller)
        struck = {
            "engine": server.asked > 0,
            "tools": daemon.asked > 0,
            "mcp": (folder / "server.py.called").exists(),
            "reward": True,  # shown by its words, as InjectedFault.is_told says
        }.get(fault.seam, server.asked > 0 and fault.misdeed == "hides-outage")
        return replace(told, shown=len(server.shown), asked=(server.asked, daemon.asked), struck=struck or any(strikes))


async def _rolled(roller: Roller) -> TrainerAnswer:
    problems = [Problem(id=str(n), question=QUESTION.format(n), answer="42378") for n in range(PROBLEMS)]
    try:
        groups = await roller.roll(problems, attempts=SIBLINGS, seed=1, sampling=Sampling(max_new_tokens=1))
    except Exception as error:
        told = failure(error)
        return TrainerAnswer(rewards=(), halted=True, words=told[1] if told else f"a traceback of {error!r}")
    halted = reason_to_halt(faults_of(groups), failed_agents(groups), RunSection().fault_budget)
    made = [trajectory for group in groups for trajectory in group.trajectories]
    words = halted or next((one.fault for one in made if one.fault), "")
    return TrainerAnswer(
        rewards=[_reward(one) for one in made], halted=halted is not None, words=" ".join(words.split())
    )


def _reward(trajectory: Trajectory) -> float | None:
    """What the attempt is worth to a learner."""
    if trajectory.stop is Stop.ENVIRONMENT_FAILED or trajectory.outcome is None:
        return None
    return trajectory.outcome.reward


@asynccontextmanager
async def _sandbox(fault: InjectedFault, daemon: FaultyDaemon, strikes: list[bool]) -> AsyncIterator[SandboxClient]:
    """A real one where a process of it is killed, else a stand-in at an address."""
    if fault.seam == "notebook" or fault.name == "tools-killed":

        async def kill() -> None:
            strikes.append(await _kill_worker(real))

        with SandboxClient.start(slots=2, preload=(), min_isolation="L1") as real:
            killing = asyncio.create_task(kill()) if fault.seam == "tools" else None
            yield real
            if killing:
                killing.cancel()
        return
    async with daemon:
        connect = partial(SandboxClient.connect, [daemon.url], silent_seconds=SILENT_SECONDS)
        with await asyncio.to_thread(connect) as client:
            yield client


def _children(pid: int) -> list[int]:
    """All processes below it."""
    with suppress(OSError):
        found = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [*found, *(deeper for one in found for deeper in _children(one))]
    return []


async def _kill_worker(sandbox: SandboxClient) -> bool:
    """Kill, once, what runs programs while some are asked for. Whether there was a process to kill."""
    while not sandbox.nodes[0].held:  # noqa: ASYNC110 - no event
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.01)
    # of the last slot: its keeper, it, its program
    return any([_killed(pid) for pid in _children(_daemon(sandbox))[-3:]])


def _kill_sandbox(sandbox: SandboxClient) -> bool:
    return _killed(_daemon(sandbox))


def _killed(pid: int) -> bool:
    """Whether there was a process to kill."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def _daemon(sandbox: SandboxClient) -> int:
    connection: Any = sandbox.nodes[0].connection
    return int(connection.process.pid)


def _agent(fault: InjectedFault, struck: list[bool]) -> GatewayAgent:
    left = [1]

    async def agent(problem: Problem, client: Client) -> float | None:
        strikes, left[0] = bool(left[0]), 0
        body = {"messages": [{"role": "user", "content": problem.question}]}
        if strikes and fault.misdeed == "reset":
            await _asked_and_gone(client, json.dumps(body).encode())
            struck.append(True)
        headers = {"authorization": f"Bearer {client.api_key}"}
        try:
            async with httpx.AsyncClient(base_url=client.base_url, headers=headers, timeout=60.0, verify=False) as http:
                (await http.post("/chat/completions", json=body)).raise_for_status()
        except httpx.HTTPError:
            return 0.0
        if strikes and fault.is_the_agents:
            struck.append(True)
        if strikes and fault.misdeed == "crashes":
            raise KeyError("its own mistake")
        if strikes and fault.misdeed == "overstays":
            await asyncio.sleep(60.0)
        return None

    return GatewayAgent(partial(by_function, agent), seconds=AGENT_SECONDS, at_once=None, right_above=0.5)


async def _asked_and_gone(client: Client, body: bytes) -> None:
    """Ask over a connection that breaks at once."""
    host, port = client.origin.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {client.api_key}\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    await writer.drain()
    await asyncio.sleep(0.01)
    writer.transport.abort()


# -- whole runs ------------------------------------------------------------------------------------------------------

STEPS = 2
RUN_SECONDS = 150.0
RECIPE = """\
[run]
name = "run"
folder = "runs"
checkpoint_seconds = 0
checkpoint_cost = 1
threads = 1
[model]
hidden_size = 32
num_layers = 1
num_heads = 1
num_kv_heads = 1
intermediate_size = 64
max_positions = 256
vocab_size = 320
[data]
source = "arithmetic"
families = ["gcd"]
[rollout]
problems_per_step = {problems}
attempts_per_problem = {siblings}
max_response_tokens = 16
max_turns = 1
template = "compact"
truncated = "graded"
[sft]
rows_file = "rows.jsonl"
batch_rows = 4
[sandbox]
tools = []
[resample]
keep = 2
[evaluate]
problems = 0
verifier = "rocstar.faults.script:always"
[[stage]]
name = "sft"
kind = "sft"
steps = 1
[[stage]]
name = "rl"
kind = "rl"
steps = {steps}
"""
DISK_FULL = """\
import errno, os, sys
whole, full = os.fsync, sys.argv.pop(1)
def fsync(handle):
    if full in os.readlink(f"/proc/self/fd/{handle}"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    whole(handle)
os.fsync = fsync
from rocstar.cli.main import main
main()
"""


def _run(fault: InjectedFault, folder: Path) -> TrainerAnswer:
    """A run of STEPS steps that the fault ends, and its resumption: ATTEMPTS attempts in all, and all are lost where
    the resumption fails."""
    (folder / "recipe.toml").write_text(RECIPE.format(problems=PROBLEMS, siblings=SIBLINGS // STEPS, steps=STEPS))
    words = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": RIGHT}]
    (folder / "rows.jsonl").write_text(json.dumps({"messages": words}) + "\n")
    full = {"disk-full-rollouts": "/rollouts", "disk-full-checkpoint": "/checkpoints"}.get(fault.misdeed)
    first = _command(folder, full, "train", "recipe.toml")
    second = _command(folder, None, "train", "--resume", "run")
    files = sorted((folder / "runs" / "run" / "rollouts").glob("*.parquet"))
    rewards = [row["reward"] for file in files for row in parquet.read_table(file).to_pylist()]
    code, said = first if full and second[0] == 0 else second
    return TrainerAnswer(
        rewards=[] if second[0] else rewards,
        halted=code != 0,
        words=said if code else "",
        struck=first[0] != 0 if full else first[0] == -signal.SIGKILL,
    )


def _command(folder: Path, full: str | None, *arguments: str) -> tuple[int, str]:
    """(exit code, last line on stderr). full: part of the paths that cannot be written; None, and not a resumption:
    it is killed once it has recorded a step."""
    command = [sys.executable, "-c", DISK_FULL, full or "nowhere", *arguments]
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said, start_new_session=True)
        try:
            while full is None and "--resume" not in arguments and process.poll() is None:
                if list(folder.glob("runs/run/rollouts/*.parquet")):
                    process.kill()
                time.sleep(0.005)
            process.wait(RUN_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, (folder / "said").read_text().strip().rpartition("\n")[2]
