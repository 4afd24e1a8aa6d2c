"""Environments that others wrote are trained on as they are: verifiers, OpenEnv, inspect_ai, reasoning-gym."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("openenv", reason="environments have an environment of their own: scripts/adapters_env")

from openenv.cli.commands.init import init

from rocstar.adapters import inspect_tasks, openenv, verifiers
from rocstar.adapters.environments import source_of
from rocstar.config.sections import DataSection
from rocstar.errors import ConfigError
from rocstar.record.folder import RunFolder
from rocstar.record.rollouts import read_rollouts
from rocstar.types import Problem, Stop, Trajectory
from tests.agents.examples import Told, named
from tests.forks import forked
from tests.rollout.examples import CODEC, roller
from tests.sandbox.driver import eventually
from tests.tiny_run import PYTHON, Command, begun, cold_run, workplace

EXAMPLES = Path(__file__).parents[2] / "examples" / "environments"
BRIEF = ("stage.stage1.steps=1", "stage.stage3.steps=0", "data.pool=6")
QUICK = {"agent": {"harness": {"id": "quick"}}}
WRONG_ENVIRONMENTS = """
import verifiers.v1 as vf
from inspect_ai import Task
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import Score, accuracy, match, model_graded_qa, scorer
from inspect_ai.solver import generate, multiple_choice, solver

class One(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def none(self, trace):
        return float("nan")

class Few(vf.Taskset[One, vf.TasksetConfig]):
    def load(self):
        for number in range(2, 8):
            yield One(vf.TaskData(prompt=f"Add {number} and 3"))

__all__ = ["Few"]

@scorer(metrics=[accuracy()])
def worded():
    async def score(state, target):
        return Score(value="very good")
    return score

SUMS = [Sample(input=f"Add {number} and 3", target="5") for number in range(2, 8)]
unscored = lambda: Task(dataset=SUMS, solver=generate())
walled = lambda: Task(dataset=SUMS, solver=generate(), scorer=match(), sandbox="local", turn_limit=3)
no_number = lambda: Task(dataset=SUMS, solver=generate(), scorer=worded())
no_task = lambda: 3

@scorer(metrics=[accuracy()])
def times():
    async def score(state, target):
        return Score(value=len(state.metadata["seen"]))
    return score

@solver
def sees():
    async def solve(state, generate):
        state.metadata["seen"].append(1)
        return await generate(state)
    return solve

ENDED = []

async def cleanup(state):
    ENDED.append(state.sample_id)

MARKED = [Sample(input="Add 2 and 3", target="5", id=name, metadata={"seen": []}) for name in ("one", "two")]
CONFIG = GenerateConfig(stop_seqs=["!"], system_message="Be brief.")
kept = lambda: Task(dataset=MARKED, solver=sees(), scorer=times(), config=CONFIG, cleanup=cleanup)
reacts = lambda: Task(dataset=MARKED, solver=react(prompt=None), scorer=match())
graded = lambda: Task(dataset=MARKED, solver=generate(), scorer=model_graded_qa())
def judged():
    said = ModelOutput.from_content("mockllm/model", "GRADE: I")
    said.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    grader = get_model("mockllm/model", custom_outputs=[said] * 9)
    return Task(dataset=MARKED, solver=generate(), scorer=model_graded_qa(), model_roles={"grader": grader})

PRIMES = [
    Sample(input="Which is prime?", choices=[str(number), str(number + 1)], target=target, id=name)
    for number, target, name in ((4, "B", None), (6, "B", None), (6, "A", None), (6, "A", "again"), (6, "A", "again"))
]
choices = lambda: Task(dataset=PRIMES, solver=multiple_choice(), scorer=match())
"""

ADDER = """
import verifiers.v1 as vf

class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, a: int, b: int) -> str:
        "Add two numbers."
        return str(a + b)

class Sum(vf.Task[vf.TaskData, vf.State]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace):
        assert [one.content for one in trace.tool_messages] == ["7"]
        return float(vf.extract_boxed_answer(trace.last_reply) == "7")

    @vf.metric
    async def answer(self, trace):
        return 7.0

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        yield Sum(vf.TaskData(prompt="Add 4 and 3"))
        yield Sum(vf.TaskData(prompt="Add 3 and 4"))

__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
"""

UNSCORED = WRONG_ENVIRONMENTS.replace("    @vf.reward\n", "")


ACTIONS = {"properties": {"text": {"type": "string"}}, "required": ["text"]}


class Session:
    """Of a server whose steps give these rewards."""

    def __init__(self, rewards: Sequence[Any]) -> None:
        self._left = list(rewards)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: Any) -> None: ...

    async def reset(self, seed: int) -> SimpleNamespace:
        return SimpleNamespace(observation={"text": "hello"}, reward=None, done=False)

    async def step(self, action: Any) -> SimpleNamespace:
        reward = self._left.pop(0)
        if isinstance(reward, Exception):
            raise reward
        return SimpleNamespace(observation={"text": "and?"}, reward=reward, done=not self._left)


@pytest.fixture(autouse=True)
def examples_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wrong_v1.py").write_text(WRONG_ENVIRONMENTS)
    monkeypatch.delitem(sys.modules, "wrong_v1", raising=False)
    for folder in (tmp_path, EXAMPLES):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # of the servers that verifiers starts


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the environment that `openenv init` makes: it echoes, and pays a tenth for each character."""
    folder = tmp_path_factory.mktemp("openenv")
    init("echo", output_dir=str(folder))
    application = folder / "echo" / "server" / "app.py"
    application.write_text(application.read_text().replace("max_concurrent_envs=1", "max_concurrent_envs=4"))
    (said := folder / "said").touch()  # a pipe that nobody reads on would hold the server up once it is full
    command = ("-m", "uvicorn", "server.app:app", "--port", "0", "--no-access-log")
    process = forked(PYTHON, *command, folder=folder / "echo", files=[os.devnull, os.devnull, str(said)])
    try:
        assert eventually(lambda: "running on" in said.read_text())
        yield said.read_text().partition("running on ")[2].split()[0]
    finally:
        process.kill()


Train = Callable[..., list[dict[str, Any]]]
"""Settings -> the attempts of one RL step."""


@pytest.fixture
def train(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    def trained(*settings: str) -> list[dict[str, Any]]:
        place, cold = workplace(tmp_path / "place"), begun(tmp_path_factory.getbasetemp(), run=cold_run)
        ended = Command.start(place, "train", "tiny.toml", *cold, *BRIEF, *settings).wait()
        assert ended.code == 0, ended.told
        rows = read_rollouts(RunFolder(place / "runs" / "tiny"), 3)
        assert len(rows) == 8 and not any(row["fault"] for row in rows)
        return rows

    return trained


async def attempted(agent: str, problem: Problem, *replies: str) -> Trajectory:
    made = named(f"rocstar.adapters.{agent}", seconds=200)
    (group,) = await roller(Told(replies), agent=made).roll([problem], attempts=1, seed=1)
    return group.trajectories[0]


async def played(url: str, *replies: str) -> Trajectory:
    """One attempt at a seed of an OpenEnv server."""
    source = source_of("openenv", {"url": url, "seeds": 4, "sessions": 1, "steps": 3})
    return await attempted("openenv:play", Problem(id=f"{3:016x}", question="", answer="", source=source), *replies)


def heldout(adapter: Any, **options: Any) -> Problem:
    """The held-out problem."""
    made = adapter(DataSection(source="its:Problems", options=options), tool_name="python", seed=0, heldout=1)
    (problem,) = made.heldout()
    assert isinstance(problem, Problem)
    return problem


def taskset_problem(file: Path, text: str, options: Mapping[str, Any] = QUICK) -> Problem:
    """The held-out problem of a taskset that a file defines."""
    file.write_text(text)
    return heldout(verifiers.TasksetProblems, taskset={"id": file.stem}, **options)


@pytest.mark.slow
def test_an_episode_of_verifiers_is_an_attempt_with_its_reward(train: Train) -> None:
    rows = train(
        "data.source=rocstar.adapters.verifiers:TasksetProblems",
        "data.options.taskset.id=sums_v1",
        "data.options.agent.harness.id=quick",
        "rollout.agent=rocstar.adapters.verifiers:solve",
    )
    for row in rows:
        total = int(row["question"].split()[1]) + 3
        assert row["reward"] == float(f"\\boxed{{{total}}}</answer>" in row["text"][-1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [QUICK, {}], ids=["quick", "null"])
async def test_tools_of_a_verifiers_environment_answer_the_model(options: dict[str, Any], tmp_path: Path) -> None:
    if not options and shutil.which("uv") is None:
        pytest.skip("verifiers' own harness starts its program with uv, which is not here")
    problem = taskset_problem(tmp_path / "adder_v1.py", ADDER, options)
    call = '<tool_call>{"name": "add", "arguments": {"a": 4, "b": 3}}</tool_call>'
    made = await attempted("verifiers:solve", problem, call, "It is \\boxed{7}.")
    assert made.fault is None and [call.tool for call in made.turns[0].calls] == ["add"]
    assert len(made.turns) == 2 and made.outcome and made.outcome.reward == 1.0
    assert {"rewards_right": 1.0, "metrics_answer": 7.0}.items() <= made.outcome.parts.items()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("agent", "options", "told"),
    [
        ("verifiers:solve", {"taskset": {"id": "unscored_v1"}, **QUICK}, "it left a trace unscored"),
        ("verifiers:solve", {"taskset": {"id": "wrong_v1"}, **QUICK}, "its rewards come to nan"),
        ("inspect_tasks:solve", {"task": "wrong_v1:no_number"}, "the score 'very good' is no number or letter"),
    ],
)
async def test_an_episode_that_nobody_scored_or_whose_reward_is_no_number_is_a_fault_of_the_environment(
    agent: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "unscored_v1.py").write_text(UNSCORED)
    adapter = verifiers.TasksetProblems if agent == "verifiers:solve" else inspect_tasks.Samples
    made = await attempted(agent, heldout(adapter, **options), "It is \\boxed{7}.")
    assert made.stop is Stop.ENVIRONMENT_FAILED and not made.outcome
    assert made.fault == f"the environment failed: ValueError: {told}"


async def test_a_solver_of_inspect_ai_makes_attempts_that_its_scorer_judges() -> None:
    problem = heldout(inspect_tasks.Samples, task="sums:sums")
    number = int(problem.question.split()[1])
    call = f'<tool_call>{{"name": "python", "arguments": {{"code": "print({number}+3)"}}}}</tool_call>'
    for total, reward in ((number + 3, 1.0), (number + 4, 0.0)):
        made = await attempted("inspect_tasks:solve", problem, call, f"It is \\boxed{{{total}}}")
        assert made.fault is None and made.outcome and made.outcome.reward == reward
        first, _ = made.turns
        assert [call.tool for call in first.calls] == ["python"] and str(number + 3) in CODEC.decode(first.reply_ids)


async def test_attempts_share_nothing_of_a_sample_and_settings_of_its_task_are_obeyed() -> None:
    problem = heldout(inspect_tasks.Samples, task="wrong_v1:kept")
    made = [await attempted("inspect_tasks:solve", problem, "It is 5! And more") for _ in range(2)]
    assert [one.outcome and one.outcome.reward for one in made] == [1.0, 1.0]
    assert {CODEC.decode(one.turns[0].completion.token_ids) for one in made} == {"It is 5!"}
    assert "Be brief." in CODEC.decode(made[0].prompt_ids)
    assert len(sys.modules["wrong_v1"].ENDED) == 2


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("reacts", 1.0),
        ("judged", 0.0),
        ("graded", "the environment failed: PrerequisiteError: No model specified"),
    ],
)
async def test_agents_of_inspect_ai_play_and_a_policy_is_not_its_own_judge(task: str, told: float | str) -> None:
    submits = '<tool_call>{"name": "submit", "arguments": {"answer": "5"}}</tool_call>'
    said = submits if task == "reacts" else "GRADE: C"
    made = await attempted("inspect_tasks:solve", heldout(inspect_tasks.Samples, task=f"wrong_v1:{task}"), said)
    assert len(made.turns) == 1
    if isinstance(told, float):
        assert made.outcome and made.outcome.reward == told, made.fault
    else:
        assert made.fault and made.fault.startswith(told) and not made.outcome


async def test_an_openenv_server_pays_for_each_step_of_a_session(server: str) -> None:
    """A tenth for each character, up to data.options.steps answers."""
    problem = heldout(openenv.Seeds, url=server, seeds=4, sessions=2, steps=3)
    made = await asyncio.gather(*(attempted("openenv:play", problem, "left", "right", up) for up in ("up", "down")))
    assert [len(one.turns) for one in made] == [3, 3]
    assert [one.outcome and one.outcome.reward for one in made] == [pytest.approx(1.1), pytest.approx(1.3)]


@pytest.mark.slow
def test_a_generator_of_reasoning_gym_is_trained_on(train: Train) -> None:
    rows = train(
        "data.source=rocstar.adapters.reasoning_gym:Generator",
        "data.options.name=letter_counting",
        "data.options.config.max_words=5",
        "evaluate.verifier=rocstar.adapters.reasoning_gym:score",
        "rollout.max_response_tokens=64",
    )
    assert {row["verdict"] for row in rows} <= {"right", "wrong"} and {row["reward"] for row in rows} <= {0.0, 1.0}


@pytest.mark.parametrize(
    ("adapter", "options", "told"),
    [
        (verifiers.TasksetProblems, {"taskset": {"id": "nowhere"}}, "no verifiers environment: taskset 'nowhere' not"),
        (verifiers.TasksetProblems, {"taskset": {"id": "sums_v1", "speed": 3}}, "verifiers environment"),
        (verifiers.TasksetProblems, {"tasks": 3}, "verifiers environment"),
        (
            verifiers.TasksetProblems,
            {"taskset": {"id": "sums_v1"}, "agent": {"harness": {"id": "bash"}}},
            "bash would run the model's programs on this machine; name a agent.runtime for it",
        ),
        (
            verifiers.TasksetProblems,
            {"id": "agentic-judge", "taskset": {"id": "sums_v1"}},
            "have no client of their own; leave one so",
        ),
        (inspect_tasks.Samples, {"task": "nowhere:sums"}, "there is no module nowhere"),
        (inspect_tasks.Samples, {"task": "wrong_v1:unscored"}, "has no scorer"),
        (
            inspect_tasks.Samples,
            {"task": "wrong_v1:walled"},
            "sets turn_limit, sandbox, which rollout.agent can't keep",
        ),
        (inspect_tasks.Samples, {"task": "wrong_v1:no_task"}, "gave a int"),
        (inspect_tasks.Samples, {"task": "sums:sums", "arguments": {"size": 3}}, "unexpected keyword argument 'size'"),
        (inspect_tasks.Samples, {"tusk": "sums:sums"}, "did you mean task?"),
        (openenv.Seeds, {"url": "http://127.0.0.1:1"}, "is no OpenEnv server"),
        (openenv.Seeds, {"url": "echo"}, "is no OpenEnv server"),
    ],
)
def test_what_is_no_environment_is_refused(adapter: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        adapter(DataSection(source="its:Problems", options=options), tool_name="python", seed=0, heldout=2)
    assert told in str(caught.value)


def test_a_taskset_without_a_harness_is_played_by_one_that_runs_no_programs() -> None:
    config = verifiers._config('verifiers {"taskset": {"id": "sums_v1"}}')
    assert config.agent.harness.id == "null" and config.agent.runtime.type == "subprocess"


def test_samples_that_share_a_question_are_told_apart_by_choices_target_and_id() -> None:
    data = DataSection(source="its:Problems", options={"task": "wrong_v1:choices"})
    problems = inspect_tasks.Samples(data, tool_name="python", seed=0, heldout=0).problems()
    assert len(problems) == 4 and {problem.question.partition("\n\n")[0] for problem in problems} == {"Which is prime?"}


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([0.25, None, 0.5], 0.75),
        ([None, None], "ValueError: its rewards come to None"),
        ([float("nan")], "ValueError: its rewards come to nan"),
        ([1e400, 1.0], "ValueError: its rewards come to inf"),
        ([1e20], "ValueError: its rewards come to 1e+20"),
        ([RuntimeError(f"Invalid message {openenv.INVALID}")], f"RuntimeError: Invalid message {openenv.INVALID}"),
        (["good"], "ValueError: could not convert string to float: 'good'"),
    ],
)
async def test_rewards_of_an_openenv_server_that_come_to_no_number_are_a_fault(
    rewards: Sequence[Any], told: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv, "actions_of", lambda url: (ACTIONS, "text"))
    monkeypatch.setattr(openenv, "GenericEnvClient", lambda base_url: Session(rewards))
    made = await played("http://here", "left", "right", "up")
    if isinstance(told, float):
        assert made.outcome and made.outcome.reward == told
    else:
        assert made.fault == f"the environment failed: {told}" and not made.outcome


async def test_a_server_that_is_gone_is_a_fault() -> None:
    made = await played("http://127.0.0.1:1", "left")
    assert made.stop is Stop.ENVIRONMENT_FAILED and made.fault and "ConnectError" in made.fault


def test_each_server_keeps_its_places() -> None:
    places = [openenv.places(url, 2) for url in ("http://a", "http://b", "http://a")]
    assert places[0] is places[2] and places[0] is not places[1]


def test_answers_become_actions_and_observations_messages() -> None:
    assert openenv.action_of("left", "move") == {"move": "left"}
    assert openenv.action_of('{"x": 3}', None) == {"x": 3}
    assert openenv.action_of("[3]", None) == openenv.action_of("[3", None) | {"": "[3]"}
    assert openenv.shown({"text": "hello", "done": False, "reward": 0.0, "metadata": {}}) == "hello"
    assert openenv.shown({"text": "hello", "length": 5}) == '{"text": "hello", "length": 5}'
