"""Functions and programs of the user's own as agents: how they end, and what they give back."""

from __future__ import annotations

import asyncio
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocstar.agents import agent as own
from rocstar.agents.agent import GatewayAgent
from rocstar.answers.extract import strict_answer
from rocstar.errors import ConfigError, DataError, EngineUnavailable, Unavailable
from rocstar.record.formats import structured, whole
from rocstar.record.rollouts import AttemptRecord, attempts_table, decoded, trajectory_of
from rocstar.rollout.environment import AttemptLimits
from rocstar.sandbox import container
from rocstar.support.processes import words_of
from rocstar.types import Problem, Status, Stop, ToolCall, ToolResult, Trajectory, Verdict
from tests.agents.examples import ASKS, Told, asking, function, made, named, program
from tests.rollout.examples import ANSWER, CODEC, PROBLEM, conversation, roller
from tests.rollout.examples import program as call
from tests.sandbox.driver import eventually, runs
from tests.scripted import ScriptedTool, ScriptedVerifier


async def test_a_function_makes_the_attempt_and_sees_no_answer_unless_it_asks_for_the_row(tmp_path: Path) -> None:
    shown = "    assert problem.answer == '' and not problem.metadata\n"
    agent = asking(tmp_path, f"{shown}    assert client.row == {{'answer': '{PROBLEM.answer}', 'level': [5]}}\n"
                             "    client.row['level'].clear()  # a copy\n")  # fmt: skip
    problem = replace(PROBLEM, metadata={"level": [5]})
    assert (await made(agent, [ANSWER], problem)).stop is Stop.ANSWERED
    found = await made(agent, [ANSWER], problem)
    assert found.stop is Stop.ANSWERED and found.outcome and found.outcome.reward == 1.0
    assert CODEC.decode(found.turns[0].completion.token_ids).startswith(ANSWER)


EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
NEITHER = "; let it give a text, a number up to 1e+15 or nothing"


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("    return 1.0\n", "it gave back 1.0 without an answer of the model"),
        ("    pass\n", "it ended without an answer of the model"),
        *(
            (f"{ASKS}    return {given}\n", NEITHER)
            for given in ("[5]", "float('nan')", "-1e16", "10**400", "'half \\ud800'")
        ),
        (f"{ASKS}    return 'x y' * 10**6\n", "rollout.agent gave 3000000 characters; let it give 65536 at most"),
        (f"{ASKS}    raise KeyError('mistake')\n", "KeyError: 'mistake' (own_agent.py, line 3)"),
        (f"{ASKS}    raise SystemExit(3)\n", ""),
        (f"{ASKS}    import asyncio; raise asyncio.CancelledError\n", ""),
    ],
)
async def test_what_a_function_does_wrong_is_a_failure_of_its_attempt_alone(
    tmp_path: Path, body: str, fault: str
) -> None:
    """Without an answer of the model there are no tokens to learn from, and a reward would be theirs."""
    found = await made(function(tmp_path, f"async def agent(problem, client):\n{body}"), [ANSWER])
    assert found.stop is Stop.AGENT_FAILED and found.fault and found.fault.endswith(fault), found.fault
    assert len(found.turns) == (ASKS in body)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        *(
            (f"print({line!r})\n", NEITHER)
            for line in ('{"reward": "9"}', '{"answer": [9]}', '{"answer": 9, "reward": 1}', '{"result": 9}')
        ),
        ("raise ValueError('no luck')\n", "ended with exit code 1: ValueError: no luck"),
        ("os.kill(os.getpid(), 9)\n", "ended with SIGKILL: it printed nothing"),
    ],
)
async def test_what_a_program_does_wrong_is_its_attempts_failure(tmp_path: Path, text: str, fault: str) -> None:
    found = await made(program(tmp_path, text), [ANSWER])
    assert found.stop is Stop.AGENT_FAILED and found.fault and found.fault.endswith(fault), found.fault


def test_a_program_that_path_lacks_is_found_beside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Debian without `python`, where nobody has activated the environment."""
    monkeypatch.setenv("PATH", "/nowhere")
    found = words_of("python a.py", said="", remedy="")
    assert found == (str(Path(sys.executable).with_name("python")), "a.py")


LATE = "    try:\n        await asyncio.sleep(60)\n    finally:\n        raise Unavailable('gone')\n"
CAUGHT = """
    try:
        await client.chat([{'role': 'user', 'content': 'more'}])
    except Exception:
        return 1.0
"""


@pytest.mark.parametrize(
    ("then", "seconds", "fault"),
    [
        ("    raise Unavailable('the game server is gone')\n", 20.0, "the game server is gone"),
        (LATE, 1.0, "gone"),
        (CAUGHT, 20.0, "the script of session"),
    ],
    ids=["told by the agent", "told after its time", "caught by the agent"],
)
async def test_an_outage_is_a_fault_and_no_reward(tmp_path: Path, then: str, seconds: float, fault: str) -> None:
    agent = asking(tmp_path, then, before="import asyncio\nfrom rocstar.errors import Unavailable\n", seconds=seconds)
    found = await made(agent, [ANSWER])
    assert found.stop is Stop.ENVIRONMENT_FAILED and found.outcome is None and fault in (found.fault or "")


@pytest.mark.parametrize("error", ["StopIteration", "GeneratorExit"])
async def test_what_no_coroutine_can_raise_is_an_agents_failure_in_a_thread(tmp_path: Path, error: str) -> None:
    found = await made(function(tmp_path, f"def agent(problem, client):\n    raise {error}\n"), [])
    assert found.stop is Stop.AGENT_FAILED and error in str(found.fault)


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
    [
        ("1", Verdict.RIGHT, 1.0),
        ("0.25", Verdict.WRONG, 0.25),
        ("True", Verdict.RIGHT, 1.0),
        ("{'reward': 0.25, 'form': True, 'why': 'x'}", Verdict.WRONG, 0.25),
    ],
)
async def test_a_number_is_the_reward(tmp_path: Path, gives: str, verdict: Verdict, reward: float) -> None:
    found = await made(asking(tmp_path, f"    return {gives}\n"), ["no box"])
    assert found.outcome and (found.outcome.verdict, found.outcome.reward) == (verdict, reward)
    assert found.outcome.method == "agent" and found.outcome.parts == ({"form": 1.0} if "form" in gives else {})


def right_if(said: str) -> ScriptedVerifier:
    """Judges by what stands in the attempt's last box."""

    def judge(problem: Problem, trajectory: Trajectory) -> Verdict:
        text = "".join(CODEC.decode(turn.completion.token_ids) for turn in trajectory.turns)
        return Verdict.RIGHT if strict_answer(text) == said else Verdict.WRONG

    return ScriptedVerifier(judge)


async def test_a_text_is_judged_in_the_place_of_the_last_text_and_is_not_learnt_from(tmp_path: Path) -> None:
    """A reward function that wants one box finds one, and a tool's output stays what it was."""
    read: list[tuple[list[str], list[int]]] = []

    def judge(problem: Problem, trajectory: Trajectory) -> Verdict:
        texts = [CODEC.decode(turn.completion.token_ids) for turn in trajectory.turns]
        read.append((texts, [len(turn.results) for turn in trajectory.turns]))
        return Verdict.RIGHT

    agent = asking(tmp_path, "    return '5'\n")
    found = await made(agent, ["I say \\\\boxed{6}"], verifier=ScriptedVerifier(judge))
    assert read == [(["<answer>\\boxed{5}</answer>"], [0])]
    assert len(found.turns) == 1 and "I say" in CODEC.decode(found.turns[0].completion.token_ids)
    assert "<answer>" not in CODEC.decode(found.token_ids)
    assert found.outcome and (found.outcome.verdict, found.outcome.extracted) == (Verdict.RIGHT, "5")


SWALLOWS = """
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


async def test_an_agent_that_swallows_its_cancellation_is_left_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "END_SECONDS", 0.1)
    found = await made(function(tmp_path, SWALLOWS, seconds=0.5), [])
    assert found.stop is Stop.AGENT_TIMEOUT
    told = "the agent did not end within rollout.agent_seconds = 0.5, nor 0.1 s after it was cancelled; "
    assert found.fault == f"{told}it is left to itself"


@pytest.mark.parametrize("seconds", [0.2, 60.0])
def test_an_agent_that_swallows_its_cancellations_does_not_keep_ctrl_c_from_ending_the_process(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "END_SECONDS", 0.1)

    async def interrupted() -> None:
        making = asyncio.ensure_future(made(function(tmp_path, SWALLOWS, seconds=seconds), []))
        await asyncio.wait([making], timeout=0.5)  # the shorter attempt has ended by then, the other one is under way
        making.cancel()
        await asyncio.wait([making])

    asyncio.run(interrupted())
    assert not sys.modules["own_agent"].ended


async def test_an_agent_is_not_late_because_the_run_was_stopped(tmp_path: Path) -> None:
    stopped = "    asyncio.get_running_loop().call_soon(time.sleep, 1.0)\n"
    then = f"{stopped}    for _ in range(3):\n        await asyncio.to_thread(int)\n    return 1.0\n"
    found = await made(asking(tmp_path, then, before="import asyncio, time\n", seconds=0.8), [ANSWER])
    assert found.stop is Stop.ANSWERED


async def test_a_thread_that_overstays_holds_up_nobody(tmp_path: Path) -> None:
    ends = "    time.sleep(60 if problem.id == 'slow' else 0)\n    raise KeyError\n"
    text = "import time\ndef agent(problem, client):\n" + ends
    agent = function(tmp_path, text, seconds=5.0, at_once=1)
    slow = await made(agent, [], replace(PROBLEM, id="slow"))
    assert slow.stop is Stop.AGENT_TIMEOUT and "KeyError" in str((await made(agent, [])).fault)
    left = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    assert left and all(thread.daemon for thread in left), "the interpreter would wait for it"


async def test_a_tool_call_that_ends_after_its_agent_is_no_fault(tmp_path: Path) -> None:
    class Slow(ScriptedTool):
        async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
            await asyncio.sleep(0.1)
            return replace(await super().run(call, seed=seed), run_seconds=0.1)

    then = """
    asyncio.ensure_future(client.call("python", code="1")).add_done_callback(lambda done: done.exception())
    await asyncio.sleep(0.01)
    return 0.0
"""
    agent = asking(tmp_path, then, before="import asyncio\n")
    found = await made(agent, [ANSWER], conversation=conversation(Slow({})))
    assert found.stop is Stop.ANSWERED and found.outcome and found.outcome.reward == 0.0


async def test_a_mistake_in_an_engine_is_raised_and_no_reward(tmp_path: Path) -> None:
    async def breaks(number: int) -> None:
        raise RuntimeError("no such kernel")

    text = f"async def agent(problem, client):\n    try:\n    {ASKS}    except Exception:\n        return 1.0\n"
    with pytest.raises(RuntimeError, match="no such kernel"):
        await made(function(tmp_path, text), Told([], breaks))


@pytest.mark.parametrize("refused", [False, True])
async def test_an_agent_that_falls_over_after_a_cut_answer_says_why(tmp_path: Path, refused: bool) -> None:
    """The limit ended the attempt, and yet nobody would learn that the agent always fails. Our refusal is told by
    the stop."""
    then = "    await client.chat([{'role': 'user', 'content': 'w' * 400}])\n" if refused else "    import nosuch\n"
    limits = AttemptLimits(max_turns=4, max_response_tokens=5, max_parallel_calls=1)
    found = await made(asking(tmp_path, then), ["a long answer that goes on and on"], limits=limits)
    assert found.stop is Stop.MAX_TOKENS
    assert (found.fault is None) if refused else ("No module named 'nosuch'" in (found.fault or ""))


@pytest.mark.parametrize(
    ("ends", "count", "fault"),
    [
        ("os.kill(os.getpid(), 9)\n", "kills", "because memory ran out; lower rollout.agents_at_once"),
        ("raise BlockingIOError\n", "refused_processes", "(pids.max) was reached"),
        ("raise OSError\n", "is_full", "is full; free it"),
    ],
)
async def test_a_program_for_which_the_machine_had_no_room_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, count: str, fault: str
) -> None:
    """Which of the programs took it nobody can tell."""
    counts = iter((3, 4))
    monkeypatch.setattr(container, count, lambda *folder: next(counts))
    found = await made(program(tmp_path, ends), [ANSWER])
    assert found.stop is Stop.ENVIRONMENT_FAILED and fault in (found.fault or "")


async def test_a_function_that_fails_because_this_process_has_no_more_files_is_an_outage(tmp_path: Path) -> None:
    then = "    try:\n        raise OSError(24, 'Too many')\n    except OSError:\n        raise KeyError('a')\n"
    assert (await made(asking(tmp_path, then), [ANSWER])).stop is Stop.ENVIRONMENT_FAILED


@pytest.mark.parametrize(("replies", "stop"), [([ANSWER] * 2, Stop.ANSWERED), ([ANSWER], Stop.ENVIRONMENT_FAILED)])
async def test_what_an_agent_waits_for_the_engines_is_not_its_time(
    tmp_path: Path, replies: list[str], stop: Stop
) -> None:
    """The second request ends after the agent's seconds: with an answer, or because the engine is lost."""

    async def stands_still(number: int) -> None:
        await asyncio.sleep(1.5 * number)

    agent = asking(tmp_path, f"{ASKS}    return 1.0\n", seconds=1.0)
    found = await made(agent, Told(replies, stands_still))
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
    agent = asking(tmp_path, f"{calls}    return 1.0\n", seconds=0.9)
    found = await made(agent, [ANSWER], conversation=conversation(Queued(ran)))
    assert found.stop is stop


async def test_a_program_gets_the_problem_and_what_stands_before_it_but_no_secret_and_gives_its_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_OURS", "x")
    said = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": PROBLEM.question})
    text = """
assert problem['messages'][0]['content'] == 'Be brief.' and 'SECRET_OF_OURS' not in os.environ
print('working')
print(json.dumps({'reward': 0.75}))
"""
    found = await made(program(tmp_path, text), [ANSWER], problem=replace(PROBLEM, messages=said))
    assert found.outcome and found.outcome.reward == 0.75, found.fault


async def test_an_answer_is_judged_and_never_a_reward(tmp_path: Path) -> None:
    agent = program(tmp_path, "print(json.dumps({'answer': 42}))\n")
    found = await made(agent, ["no box"], verifier=right_if("5"))
    assert found.outcome and found.outcome.reward == 0.0


@pytest.mark.parametrize("given", ["{", "5} or 6", "5}\\\\boxed{6", "5\\\\", "}{", "{5"])
async def test_no_brace_of_an_answer_has_another_one_judged(tmp_path: Path, given: str) -> None:
    found = await made(asking(tmp_path, f"    return '{given}'\n"), [ANSWER], verifier=right_if("5"))
    assert found.outcome and found.outcome.verdict is Verdict.WRONG


@pytest.mark.parametrize("reference", [f"{EXAMPLES}/with_tools.py:solve", f"python {EXAMPLES}/client_script.py"])
async def test_the_examples_call_a_tool_and_answer(reference: str) -> None:
    agent = named(reference, seconds=60.0)
    found = await made(agent, [call("print(2+3)"), ANSWER])
    assert (found.stop, found.num_calls, len(found.conversations)) == (Stop.ANSWERED, 1, 1), found.fault
    assert found.outcome and found.outcome.reward == 1.0


async def test_a_child_that_holds_the_output_does_not_hold_the_attempt(tmp_path: Path) -> None:
    text = "import subprocess\nsubprocess.Popen(['sleep', '31'], start_new_session=False)\nprint('x' * 3_000_000)\n"
    found = await made(program(tmp_path, text), [ANSWER])
    assert found.stop is Stop.ANSWERED


async def test_a_program_that_cannot_be_started_is_a_fault_and_no_reward(tmp_path: Path) -> None:
    file = tmp_path / "agent"
    file.write_text("#!/no/such/interpreter\n")
    file.chmod(0o755)
    found = await made(named(str(file), seconds=5.0), [])
    assert found.stop is Stop.ENVIRONMENT_FAILED and "could not be started" in (found.fault or "")


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
        assert found.fault == f"the agent did not end within rollout.agent_seconds = {seconds:g}"
        if (tmp_path / "pid").exists():  # else a busy machine gave it no CPU until it was over
            break
    child = int((tmp_path / "pid").read_text())
    assert await asyncio.to_thread(eventually, lambda: not runs(child))


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


@pytest.mark.parametrize(
    ("breaks", "told"),
    [(False, "the attempt has ended"), (True, "the connection was broken off")],
    ids=["quietly", "with an outage of the engine"],
)
async def test_what_an_agent_leaves_under_way_is_broken_off_and_an_outage_that_this_brings_about_is_no_fault(
    tmp_path: Path, breaks: bool, told: str
) -> None:
    async def never_answers(number: int) -> None:
        try:
            await asyncio.sleep(600 * number)
        except asyncio.CancelledError:
            if breaks:
                raise EngineUnavailable("the connection was broken off") from None
            raise

    then = """
    asyncio.get_running_loop().left = asyncio.ensure_future(client.chat([{'role': 'user', 'content': 'more'}]))
    await asyncio.sleep(0.05)
    return 1.0
"""
    engine = Told([ANSWER], never_answers)
    found = await made(asking(tmp_path, then, before="import asyncio\n"), engine)
    assert found.stop is Stop.ANSWERED and found.fault is None and found.outcome and found.outcome.reward == 1.0
    assert len(found.turns) == 1 and len(engine.closed) >= 2
    with pytest.raises(Exception, match=told):
        await asyncio.get_running_loop().left  # type: ignore[attr-defined]


async def test_a_tool_that_is_down_when_it_is_closed_is_a_fault_and_not_the_end_of_the_run(tmp_path: Path) -> None:
    class Down(ScriptedTool):
        async def close(self) -> None:
            raise Unavailable("the shop is shut")

    talk = replace(conversation(), own_tools=lambda: (Down([]),))
    found = await made(asking(tmp_path, ""), [ANSWER], conversation=talk)
    assert (found.stop, found.fault, found.outcome) == (Stop.ENVIRONMENT_FAILED, "the shop is shut", None)


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("no_such_program --flag", "names no program that exists here; write a command"),
        ("python no_such_file.py", "there is no file 'no_such_file.py' in /"),
        (__file__, r"no program that exists here; write a command \('python a.py'\), package.module:name or a.py:name"),
        ("'unclosed", "can't be read as a command: No closing quotation"),
        ("own_missing:agent", "there is no module own_missing"),
    ],
)
def test_what_does_not_exist_is_refused_before_anything_starts(reference: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        named(reference)


async def test_an_attempt_of_several_conversations_is_kept_as_it_was(tmp_path: Path) -> None:
    agent = asking(tmp_path, "    await client.chat([{'role': 'user', 'content': 'anew'}])\n")
    found = await made(agent, ["one", ANSWER])
    assert len(found.conversations) == 2
    record = AttemptRecord(problem=PROBLEM, trajectory=found, policy_version=1)
    (row,) = attempts_table(1, [record], CODEC.decode).to_pylist()
    again = trajectory_of(decoded(row))
    assert [part.token_ids for part in again.conversations] == [part.token_ids for part in found.conversations]
    assert again.loss_mask == found.loss_mask and again.turns[1].prompt_ids == found.turns[1].prompt_ids
    said = [message["role"] for message in structured(decoded(row), lambda result: result.stdout)]
    assert said == ["user", "assistant", "agent", "assistant"]
    with pytest.raises(
        DataError, match=r"has several conversations \(rollout.agent\), which do not form one list of messages"
    ):
        whole(decoded(row))


async def test_an_agent_that_changes_its_problem_changes_nothing_for_the_next_attempt(tmp_path: Path) -> None:
    asked = replace(PROBLEM, messages=({"role": "user", "content": PROBLEM.question},))
    agent = function(
        tmp_path,
        "async def agent(problem, client):\n    problem.messages[0]['content'] += '!'\n"
        "    await client.chat(list(problem.messages))\n",
    )
    assert (await made(agent, [ANSWER], asked)).stop is Stop.ANSWERED
    assert asked.messages[0]["content"] == PROBLEM.question
