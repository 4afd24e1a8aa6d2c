"""Functions and programs of the user's own as agents: how they end, and what they give back."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rocstar.agents import agent as own
from rocstar.agents.agent import GatewayAgent, agent_named
from rocstar.answers.extract import strict_answer
from rocstar.errors import ConfigError, DataError, EngineUnavailable, Unavailable
from rocstar.record.formats import structured, whole
from rocstar.record.rollouts import AttemptRecord, attempts_table, decoded, trajectory_of
from rocstar.rollout.environment import AttemptLimits
from rocstar.types import Problem, Sampling, Status, Stop, ToolCall, ToolResult, Trajectory, Verdict
from tests.agents.examples import Told
from tests.rollout.examples import ANSWER, CODEC, PROBLEM, conversation, roller
from tests.scripted import ScriptedTool, ScriptedVerifier

SAMPLING = Sampling(max_new_tokens=1, seed=3)
SCRIPT = """
import json, os, sys, urllib.request
problem = json.load(sys.stdin)
def ask(messages):
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    body = json.dumps({"messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
said = ask([{"role": "user", "content": problem["question"]}])
"""


def function(tmp_path: Path, text: str, **changes: Any) -> GatewayAgent:
    (tmp_path / "own_agent.py").write_text(text)
    sys.modules.pop("own_agent", None)
    given = {"seconds": 20.0, "at_once": 4, "right_above": 0.5, **changes}
    return agent_named("own_agent:agent", folders=[tmp_path], **given)


def program(tmp_path: Path, text: str, **changes: Any) -> GatewayAgent:
    file = tmp_path / "own_agent.py"
    file.write_text(SCRIPT + text)
    given = {"seconds": 20.0, "at_once": 4, "right_above": 0.5, **changes}
    return agent_named(f"{sys.executable} {file}", **given)


async def made(agent: GatewayAgent, replies: list[str], problem: Problem = PROBLEM, **changes: Any) -> Trajectory:
    """One attempt, verified as a step's attempts are."""
    drawn = replace(roller(Told(replies), agent=agent), **changes)
    (group,) = await drawn.roll([problem], attempts=1, seed=1)
    return group.trajectories[0]


ASKS = "    said = (await client.chat([{'role': 'user', 'content': problem.question}]))['choices'][0]['message']\n"


async def test_a_function_makes_the_attempt_and_sees_no_answer(tmp_path: Path) -> None:
    text = "async def agent(problem, client):\n" + ASKS + "    assert problem.answer == '' and not problem.metadata\n"
    found = await made(function(tmp_path, text), [ANSWER], replace(PROBLEM, metadata={"level": 5}))
    assert found.stop is Stop.ANSWERED and found.outcome and found.outcome.reward == 1.0
    assert CODEC.decode(found.turns[0].completion.token_ids).startswith(ANSWER)


@pytest.mark.parametrize("given", ["'9'", "1.0"])
async def test_what_is_given_back_without_an_answer_of_the_model_is_the_agents_failure(
    tmp_path: Path, given: str
) -> None:
    """There are no tokens to learn from, and a reward would be theirs."""
    found = await made(function(tmp_path, f"async def agent(problem, client):\n    return {given}\n"), [])
    assert found.stop is Stop.AGENT_FAILED and not found.turns
    assert found.fault == f"it gave back {given} without an answer of the model"


async def test_an_agent_that_ends_without_any_answer_has_failed() -> None:
    found = await made(agent_named("true", seconds=20.0, at_once=1, right_above=0.5), [])
    assert found.stop is Stop.AGENT_FAILED and not found.turns
    assert found.fault == "it ended without an answer of the model"


async def test_an_outage_that_ends_an_agent_after_its_time_is_a_fault(tmp_path: Path) -> None:
    text = "import asyncio\nfrom rocstar.errors import Unavailable\nasync def agent(problem, client):\n" + ASKS
    late = "    try:\n        await asyncio.sleep(60)\n    finally:\n        raise Unavailable('gone')\n"
    found = await made(function(tmp_path, text + late, seconds=1.0), [ANSWER])
    assert found.stop is Stop.ENVIRONMENT_FAILED and found.fault == "gone" and found.outcome is None


@pytest.mark.parametrize("error", ["StopIteration", "GeneratorExit"])
async def test_what_no_coroutine_can_raise_is_an_agents_failure_in_a_thread(tmp_path: Path, error: str) -> None:
    found = await made(function(tmp_path, f"def agent(problem, client):\n    raise {error}\n"), [])
    assert found.stop is Stop.AGENT_FAILED and error in str(found.fault)


async def test_an_outage_that_a_function_tells_of_is_a_fault_and_no_reward(tmp_path: Path) -> None:
    text = "from rocstar.errors import Unavailable\nasync def agent(problem, client):\n" + ASKS
    found = await made(function(tmp_path, text + "    raise Unavailable('the game server is gone')\n"), [ANSWER])
    assert found.stop is Stop.ENVIRONMENT_FAILED and found.fault == "the game server is gone" and not found.outcome


async def test_a_plain_function_runs_in_a_thread_and_asks_over_http(tmp_path: Path) -> None:
    text = """
import httpx
def agent(problem, client):
    body = {"messages": [{"role": "user", "content": problem.question}]}
    headers = {"authorization": f"Bearer {client.api_key}"}
    httpx.post(f"{client.base_url}/chat/completions", json=body, headers=headers, timeout=20).raise_for_status()
"""
    found = await made(function(tmp_path, text), [ANSWER])
    assert found.stop is Stop.ANSWERED and len(found.turns) == 1


@pytest.mark.parametrize(
    ("gives", "verdict", "reward"),
    [("1", Verdict.RIGHT, 1.0), ("0.25", Verdict.WRONG, 0.25), ("True", Verdict.RIGHT, 1.0)],
)
async def test_a_number_is_the_reward(tmp_path: Path, gives: str, verdict: Verdict, reward: float) -> None:
    text = f"async def agent(problem, client):\n{ASKS}    return {gives}\n"
    found = await made(function(tmp_path, text), ["no box"])
    assert found.outcome and (found.outcome.verdict, found.outcome.reward) == (verdict, reward)
    assert found.outcome.method == "agent"


async def test_a_text_is_judged_as_the_last_words_and_is_not_learnt_from(tmp_path: Path) -> None:
    def judge(problem: Problem, trajectory: Trajectory) -> Verdict:
        last = CODEC.decode(trajectory.turns[-1].completion.token_ids)
        return Verdict.RIGHT if "\\boxed{5}" in last else Verdict.WRONG

    text = f"async def agent(problem, client):\n{ASKS}    return '5'\n"
    found = await made(function(tmp_path, text), ["no box"], verifier=ScriptedVerifier(judge))
    assert found.outcome and found.outcome.verdict is Verdict.RIGHT
    assert len(found.turns) == 1 and "boxed" not in CODEC.decode(found.token_ids)


@pytest.mark.parametrize("gives", ["[5]", "float('nan')", "10**400", "'half \\ud800'"])
async def test_what_is_neither_is_a_failure_of_this_attempt_alone(tmp_path: Path, gives: str) -> None:
    text = f"async def agent(problem, client):\n{ASKS}    return {gives}\n"
    found = await made(function(tmp_path, text), [ANSWER])
    assert found.stop is Stop.AGENT_FAILED and found.fault
    assert found.fault.endswith("; let it give a text, a finite number or nothing")


async def test_a_text_that_takes_long_to_encode_is_a_failure(tmp_path: Path) -> None:
    text = f"async def agent(problem, client):\n{ASKS}    return 'x y' * 10**6\n"
    found = await made(function(tmp_path, text), [ANSWER])
    assert found.stop is Stop.AGENT_FAILED
    assert found.fault == "rollout.agent gave 3000000 characters; let it give 65536 at most"


@pytest.mark.parametrize("ends", ["raise SystemExit(3)", "import asyncio; raise asyncio.CancelledError"])
async def test_a_function_that_would_end_the_process_ends_its_attempt(tmp_path: Path, ends: str) -> None:
    found = await made(function(tmp_path, f"async def agent(problem, client):\n{ASKS}    {ends}\n"), [ANSWER])
    assert found.stop is Stop.AGENT_FAILED and len(found.turns) == 1


async def test_an_agent_that_swallows_its_cancellation_is_left_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "END_SECONDS", 0.1)
    text = f"""
import asyncio
async def agent(problem, client):
{ASKS}    for _ in range(100):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            pass
"""
    found = await made(function(tmp_path, text, seconds=1.5), [ANSWER])
    assert found.stop is Stop.AGENT_TIMEOUT
    told = "the agent did not end within rollout.agent_seconds = 1.5, nor 0.1 s after it was cancelled; "
    assert found.fault == f"{told}it is left to itself"


@pytest.mark.parametrize("seconds", [0.2, 60.0])
def test_an_agent_that_swallows_its_cancellations_does_not_keep_ctrl_c_from_ending_the_process(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "END_SECONDS", 0.1)
    text = """
import asyncio
ended = False
async def agent(problem, client):
    global ended
    for _ in range(100):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            pass
    ended = True
"""

    async def interrupted() -> None:
        making = asyncio.ensure_future(made(function(tmp_path, text, seconds=seconds), []))
        await asyncio.wait([making], timeout=0.5)  # the shorter attempt has ended by then, the other one is under way
        making.cancel()
        await asyncio.wait([making])

    asyncio.run(interrupted())
    assert not sys.modules["own_agent"].ended


async def test_a_thread_that_overstays_holds_up_nobody(tmp_path: Path) -> None:
    ends = "    time.sleep(60 if problem.id == 'slow' else 0)\n    raise KeyError\n"
    text = "import time\ndef agent(problem, client):\n" + ends
    agent = function(tmp_path, text, seconds=5.0, at_once=1)
    slow = await made(agent, [], replace(PROBLEM, id="slow"))
    assert slow.stop is Stop.AGENT_TIMEOUT and "KeyError" in str((await made(agent, [])).fault)
    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    assert left and all(thread.daemon for thread in left), "the interpreter would wait for it"


async def test_a_tool_call_that_the_end_breaks_off_is_no_fault(tmp_path: Path) -> None:
    class Slow(ScriptedTool):
        async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
            await asyncio.Event().wait()
            raise AssertionError

    text = f"""
import asyncio
async def agent(problem, client):
{ASKS}    asyncio.ensure_future(client.call("python", code="1")).add_done_callback(lambda done: done.exception())
    await asyncio.sleep(0.01)
    return 0.0
"""
    drawn = roller(Told([ANSWER]), conversation(Slow({})), agent=function(tmp_path, text))
    (group,) = await drawn.roll([PROBLEM], attempts=1, seed=1)
    (found,) = group.trajectories
    assert found.stop is Stop.ANSWERED and found.outcome and found.outcome.reward == 0.0


async def test_an_outage_that_the_end_brings_about_is_no_fault(tmp_path: Path) -> None:
    class Broken(Told):
        async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Any:
            if not self.given:
                return await super().generate(token_ids, sampling, **names)
            try:
                return await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise EngineUnavailable("the connection was broken off") from None

    text = f"""
import asyncio
async def agent(problem, client):
{ASKS}    more = client.chat([{{'role': 'user', 'content': 'more'}}])
    asyncio.ensure_future(more).add_done_callback(lambda done: done.exception())
    await asyncio.sleep(0.05)
    return 1.0
"""
    (group,) = await roller(Broken([ANSWER]), agent=function(tmp_path, text)).roll([PROBLEM], attempts=1, seed=1)
    (found,) = group.trajectories
    assert found.stop is Stop.ANSWERED and found.fault is None and found.outcome and found.outcome.reward == 1.0


async def test_a_mistake_in_an_engine_is_raised_and_no_reward(tmp_path: Path) -> None:
    class Broken(Told):
        async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Any:
            raise RuntimeError("no such kernel")

    text = f"async def agent(problem, client):\n    try:\n    {ASKS}    except Exception:\n        return 1.0\n"
    with pytest.raises(RuntimeError, match="no such kernel"):
        await roller(Broken([]), agent=function(tmp_path, text)).roll([PROBLEM], attempts=1, seed=1)


async def test_a_function_that_raises_has_failed_and_says_where(tmp_path: Path) -> None:
    text = f"async def agent(problem, client):\n{ASKS}    raise KeyError('mistake')\n"
    found = await made(function(tmp_path, text), [ANSWER])
    assert found.stop is Stop.AGENT_FAILED and found.fault == "KeyError: 'mistake' (own_agent.py, line 3)"
    assert found.outcome and len(found.turns) == 1


async def test_an_outage_is_ours_even_where_the_agent_catches_it(tmp_path: Path) -> None:
    text = f"""
async def agent(problem, client):
{ASKS}    try:
        await client.chat([{{'role': 'user', 'content': 'more'}}])
    except Exception:
        return 1.0
"""
    found = await made(function(tmp_path, text), [ANSWER])
    assert found.stop is Stop.ENVIRONMENT_FAILED and found.outcome is None and "script" in (found.fault or "")


async def test_an_agent_that_does_not_end_is_ended(tmp_path: Path) -> None:
    text = f"import asyncio\nasync def agent(problem, client):\n{ASKS}    await asyncio.Event().wait()\n"
    found = await made(function(tmp_path, text, seconds=0.3), [ANSWER])
    assert found.stop is Stop.AGENT_TIMEOUT
    assert found.fault == "the agent did not end within rollout.agent_seconds = 0.3"


@pytest.mark.parametrize("refused", [False, True])
async def test_an_agent_that_falls_over_after_a_cut_answer_says_why(tmp_path: Path, refused: bool) -> None:
    """The limit ended the attempt, and yet nobody would learn that the agent always fails. Our refusal is told by
    the stop."""
    text = f"async def agent(problem, client):\n{ASKS}"
    text += "    await client.chat([{'role': 'user', 'content': 'w' * 400}])\n" if refused else "    import nosuch\n"
    limits = AttemptLimits(max_turns=4, max_response_tokens=5, max_parallel_calls=1)
    found = await made(function(tmp_path, text), ["a long answer that goes on and on"], limits=limits)
    assert found.stop is Stop.MAX_TOKENS
    assert (found.fault is None) if refused else ("No module named 'nosuch'" in (found.fault or ""))


class Standing(Told):
    """An engine that stands still for a while in each request after the first."""

    def __init__(self, replies: list[str], seconds: float) -> None:
        super().__init__(replies)
        self.seconds = seconds

    async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Any:
        if self.given:
            await asyncio.sleep(self.seconds)
        return await super().generate(token_ids, sampling, **names)


@pytest.mark.parametrize(("replies", "stop"), [([ANSWER] * 2, Stop.ANSWERED), ([ANSWER], Stop.ENVIRONMENT_FAILED)])
async def test_what_an_agent_waits_for_the_engines_is_not_its_time(
    tmp_path: Path, replies: list[str], stop: Stop
) -> None:
    """The second request ends after the agent's seconds: with an answer, or because the engine is lost."""
    agent = function(tmp_path, f"async def agent(problem, client):\n{ASKS}{ASKS}    return 1.0\n", seconds=1.0)
    drawn = roller(Standing(replies, 1.5), agent=agent)
    (group,) = await drawn.roll([PROBLEM], attempts=1, seed=1)
    (found,) = group.trajectories
    assert (found.stop, found.outcome is None) == (stop, stop is Stop.ENVIRONMENT_FAILED)


class Queued(ScriptedTool):
    """A tool whose calls wait long; their programs run for `ran` seconds."""

    def __init__(self, ran: float) -> None:
        super().__init__({"1": ToolResult(call_id="", status=Status.OK, run_seconds=ran)})

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        await asyncio.sleep(0.5)
        return await super().run(call, seed=seed)


@pytest.mark.parametrize(("ran", "stop"), [(0.0, Stop.ANSWERED), (0.5, Stop.AGENT_TIMEOUT)])
async def test_of_a_call_its_programs_own_time_is_the_agents(tmp_path: Path, ran: float, stop: Stop) -> None:
    calls = "    for _ in range(3):\n        await client.call('python', code='1')\n"
    agent = function(tmp_path, f"async def agent(problem, client):\n{ASKS}{calls}    return 1.0\n", seconds=1.0)
    found = await made(agent, [ANSWER], conversation=conversation(Queued(ran)))
    assert found.stop is stop


async def test_a_program_gets_the_problem_and_gives_its_answer(tmp_path: Path) -> None:
    os.environ["SECRET_OF_OURS"] = "x"
    try:
        text = "assert 'SECRET_OF_OURS' not in os.environ\nprint('working')\nprint(json.dumps({'reward': 0.75}))\n"
        found = await made(program(tmp_path, text), [ANSWER])
    finally:
        del os.environ["SECRET_OF_OURS"]
    assert found.outcome and found.outcome.reward == 0.75, found.fault


@pytest.mark.parametrize("text", ["print(json.dumps({'answer': 42}))\n", "print(json.dumps({'answer': '42'}))\n"])
async def test_an_answer_is_judged_and_never_a_reward(tmp_path: Path, text: str) -> None:
    def judge(problem: Problem, trajectory: Trajectory) -> Verdict:
        return Verdict.RIGHT if "{5}" in CODEC.decode(trajectory.turns[-1].completion.token_ids) else Verdict.WRONG

    found = await made(program(tmp_path, text), ["no box"], verifier=ScriptedVerifier(judge))
    assert found.outcome and found.outcome.reward == 0.0


@pytest.mark.parametrize(
    "line",
    ['{"reward": "9"}', '{"answer": null}', '{"answer": [9]}', '{"answer": 9, "reward": 1}', '{"result": 9}'],
)
async def test_a_last_line_that_gives_neither_an_answer_nor_a_reward_is_refused(tmp_path: Path, line: str) -> None:
    found = await made(program(tmp_path, f"print({line!r})\n"), [ANSWER])
    assert found.stop is Stop.AGENT_FAILED and "let it give a text, a finite number or nothing" in str(found.fault)


@pytest.mark.parametrize("given", ["{", "5} or 6", "5}\\\\boxed{6", "5\\\\", "}{", "{5"])
async def test_no_brace_of_an_answer_has_another_one_judged(tmp_path: Path, given: str) -> None:
    def judge(problem: Problem, trajectory: Trajectory) -> Verdict:
        text = "".join(CODEC.decode(turn.completion.token_ids) for turn in trajectory.turns)
        return Verdict.RIGHT if strict_answer(text) == "5" else Verdict.WRONG

    text = f"async def agent(problem, client):\n{ASKS}    return '{given}'\n"
    found = await made(function(tmp_path, text), [ANSWER], verifier=ScriptedVerifier(judge))
    assert found.outcome and found.outcome.verdict is Verdict.WRONG


async def test_a_child_that_holds_the_output_does_not_hold_the_attempt(tmp_path: Path) -> None:
    text = "import subprocess\nsubprocess.Popen(['sleep', '31'], start_new_session=False)\nprint('x' * 3_000_000)\n"
    found = await made(program(tmp_path, text), [ANSWER])
    assert found.stop is Stop.ANSWERED


async def test_a_program_that_cannot_be_started_is_a_fault_and_no_reward(tmp_path: Path) -> None:
    file = tmp_path / "agent"
    file.write_text("#!/no/such/interpreter\n")
    file.chmod(0o755)
    found = await made(agent_named(str(file), seconds=5.0, at_once=1, right_above=0.5), [])
    assert found.stop is Stop.ENVIRONMENT_FAILED and "could not be started" in (found.fault or "")


async def test_a_program_that_fails_says_its_last_line(tmp_path: Path) -> None:
    found = await made(program(tmp_path, "raise ValueError('no luck')\n"), [ANSWER])
    assert found.stop is Stop.AGENT_FAILED and found.fault
    assert found.fault.endswith("ended with exit code 1: ValueError: no luck")


async def test_a_program_that_a_signal_ends_says_which(tmp_path: Path) -> None:
    found = await made(program(tmp_path, "os.kill(os.getpid(), 9)\n"), [ANSWER])
    assert found.stop is Stop.AGENT_FAILED and str(found.fault).endswith("ended with SIGKILL: it said nothing")


async def test_nothing_of_a_program_is_left_behind(tmp_path: Path) -> None:
    text = f"""
import subprocess, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "new")!r}, "w").write(str(child.pid))
os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "pid")!r})
time.sleep(600)
"""
    for seconds in (2.0, 4.0, 8.0, 60.0):
        found = await made(program(tmp_path, text, seconds=seconds), [ANSWER])
        assert found.stop is Stop.AGENT_TIMEOUT
        if (tmp_path / "pid").exists():  # else a busy machine gave it no CPU until it was over
            break
    child = int((tmp_path / "pid").read_text())
    assert await asyncio.to_thread(_ends, child)


def _ends(pid: int) -> bool:
    until = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_no_more_programs_run_at_once_than_allowed(tmp_path: Path) -> None:
    text = f"""
import time
place = {str(tmp_path)!r}
open(f"{{place}}/running-{{os.getpid()}}", "w").close()
print(len([name for name in os.listdir(place) if name.startswith("running-")]), file=sys.stderr)
assert len([name for name in os.listdir(place) if name.startswith("running-")]) <= 2
time.sleep(0.2)
os.remove(f"{{place}}/running-{{os.getpid()}}")
"""
    agent = program(tmp_path, text, at_once=2, seconds=60.0)
    drawn = roller(Told([ANSWER] * 6), agent=agent)
    (group,) = await drawn.roll([PROBLEM], attempts=6, seed=1)
    assert [one.stop for one in group.trajectories] == [Stop.ANSWERED] * 6, [one.fault for one in group.trajectories]


async def test_a_late_request_of_an_agent_that_was_ended_is_refused(tmp_path: Path) -> None:
    kept: list[Any] = []

    class Keeps:
        async def __call__(self, client: Any) -> None:
            kept.append(client)

    agent = GatewayAgent(Keeps(), seconds=5.0, at_once=None, right_above=0.5)
    await made(agent, [ANSWER])
    with pytest.raises(Exception, match="the attempt has ended"):
        await kept[0].chat([{"role": "user", "content": "late"}])
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient() as http:
            await http.get(f"{kept[0].base_url}/models")


async def test_what_an_agent_leaves_under_way_is_broken_off(tmp_path: Path) -> None:
    text = f"""
import asyncio
async def agent(problem, client):
{ASKS}    asyncio.get_running_loop().left = asyncio.ensure_future(client.chat([{{'role': 'user', 'content': 'more'}}]))
    await asyncio.sleep(0.05)
"""

    class Slow(Told):
        async def generate(self, token_ids: Any, sampling: Sampling, **names: Any) -> Any:
            if self.given:
                await asyncio.Event().wait()
            return await super().generate(token_ids, sampling, **names)

    engine = Slow([ANSWER])
    (group,) = await roller(engine, agent=function(tmp_path, text)).roll([PROBLEM], attempts=1, seed=1)
    (found,) = group.trajectories
    assert found.stop is Stop.ANSWERED and len(found.turns) == 1 and len(engine.closed) >= 2
    with pytest.raises(Exception, match="the attempt has ended"):
        await asyncio.get_running_loop().left  # type: ignore[attr-defined]


async def test_a_tool_that_is_down_when_it_is_closed_is_a_fault_and_not_the_end_of_the_run(tmp_path: Path) -> None:
    class Down(ScriptedTool):
        async def close(self) -> None:
            raise Unavailable("the shop is shut")

    talk = replace(conversation(), own_tools=lambda: (Down([]),))
    text = "async def agent(problem, client):\n" + ASKS
    found = await made(function(tmp_path, text), [ANSWER], conversation=talk)
    assert (found.stop, found.fault, found.outcome) == (Stop.ENVIRONMENT_FAILED, "the shop is shut", None)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("no_such_program --flag", "names no program that is here; write a command"),
        ("python no_such_file.py", "there is no file 'no_such_file.py' in /"),
        (
            __file__,
            r"no program that is here; write a command \('python a.py'\), package.module:name or a.py:name",
        ),
        ("'unclosed", "can't be read as a command: No closing quotation"),
        ("own_missing:agent", "there is no module own_missing"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_starts(reference: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        agent_named(reference, seconds=1.0, at_once=1, right_above=0.5)


async def test_an_attempt_of_several_conversations_is_kept_as_it_was(tmp_path: Path) -> None:
    text = f"async def agent(problem, client):\n{ASKS}    await client.chat([{{'role': 'user', 'content': 'anew'}}])\n"
    found = await made(function(tmp_path, text), ["one", ANSWER])
    assert len(found.conversations) == 2
    record = AttemptRecord(problem=PROBLEM, trajectory=found, policy_version=1)
    (row,) = attempts_table(1, [record], CODEC.decode).to_pylist()
    again = trajectory_of(decoded(row))
    assert [part.token_ids for part in again.conversations] == [part.token_ids for part in found.conversations]
    assert again.loss_mask == found.loss_mask and again.turns[1].prompt_ids == found.turns[1].prompt_ids
    said = [message["role"] for message in structured(decoded(row), lambda result: result.stdout)]
    assert said == ["user", "assistant", "agent", "assistant"]
    with pytest.raises(
        DataError, match=r"has several conversations \(rollout.agent\), which no list of messages holds"
    ):
        whole(decoded(row))
