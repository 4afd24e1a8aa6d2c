"""The real code of clients, from checkouts that environment variables name, against a running service.

ROCSTAR_RSTAR           github.com/microsoft/rStar
ROCSTAR_CODE_JUDGE      github.com/0xWJ/code-judge
ROCSTAR_VERL            github.com/volcengine/verl
ROCSTAR_SANDBOX_FUSION  github.com/bytedance/SandboxFusion
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from tests.sandbox_service.clients import TestClient, load, stand_in
from tests.sandbox_service.support import Http, checkout

# rStar2-Agent


async def test_the_tool_client_of_rstar_runs_its_calls_and_its_replayed_notebook(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = checkout("ROCSTAR_RSTAR", "microsoft/rStar") / "rstar2_agent" / "tools"
    aiohttp = pytest.importorskip("aiohttp")
    utils = load(monkeypatch, "code_judge_utils", tools / "code_judge_utils.py")
    host, port = http.url.removeprefix("http://").split(":")
    history = [{"name": "jupyter_code", "arguments": {"code": "x = 20\nprint('muted')"}}]
    calls: list[dict[str, Any]] = [
        {"name": "jupyter_code", "arguments": {"code": "print('seen')\nx + 1"}, "history_tool_calls": history},
        {"name": "jupyter_code", "arguments": {"code": "y = 1\n1 / 0"}},
        {"name": "python_code_with_standard_io", "arguments": {"code": "print(input()[::-1])", "input": "abc"}},
    ]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        answers = await utils.run_tool_calls_on_server_async(
            calls * 10,
            session,
            generate_tool_call_code=utils.generate_tool_call_code,
            generate_tool_call_input=utils.generate_tool_call_input,
            host_addr=host,
            host_port=port,
        )
    assert len(answers) == 30
    for notebook, failed, piped in zip(answers[::3], answers[1::3], answers[2::3], strict=True):
        assert notebook.startswith("Tool call success\nstdout: seen\n21\n\nexecution time: ")
        assert failed.startswith("Tool call failure\nreason: \nstderr: ZeroDivisionError: division by zero")
        assert piped.startswith("Tool call success\nstdout: cba\n")


async def test_the_batching_processor_of_rstar_gets_each_caller_its_own_answer(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = checkout("ROCSTAR_RSTAR", "microsoft/rStar") / "rstar2_agent" / "tools"
    aiohttp = pytest.importorskip("aiohttp")
    utils = load(monkeypatch, "code_judge_utils", tools / "code_judge_utils.py")
    processing = load(monkeypatch, "request_processor", tools / "request_processor.py")
    host, port = http.url.removeprefix("http://").split(":")

    async def submit(calls: list[Any], session: Any) -> Any:
        return await utils.run_tool_calls_on_server_async(
            calls,
            session,
            generate_tool_call_code=utils.generate_tool_call_code,
            generate_tool_call_input=utils.generate_tool_call_input,
            host_addr=host,
            host_port=port,
        )

    async with aiohttp.ClientSession() as session:
        processor = processing.RequestProcessor(
            batch_size=32, batch_timeout_seconds=0.05, session=session, concurrency=8, batch_submit_func=submit
        )
        await processor.start()
        calls = [
            {"name": "python_code_with_standard_io", "arguments": {"code": f"print({n} ** 2)", "input": ""}}
            for n in range(100)
        ]
        answers = await asyncio.gather(*(processor.send_request(call) for call in calls))
        await processor.stop()
    assert [answer.splitlines()[1] for answer in answers] == [f"stdout: {n * n}" for n in range(100)]


# code-judge


def submissions(client: Any) -> list[Any]:
    made = [client.Submission(str(n), "python", f"print(input(), {n})", "in", f"in {n}") for n in range(10)]
    return [*made, client.Submission("bad", "python", "1/0"), client.Submission("late", "python", "while 1: pass")]


def check(results: list[Any]) -> None:
    *good, bad, late = results
    assert [(each.sub_id, each.success, each.reason) for each in good] == [(str(n), True, "") for n in range(10)]
    assert (bad.run_success, "ZeroDivisionError" in bad.stderr, bad.reason) == (False, True, "")
    assert (late.run_success, late.reason) == (False, "worker_timeout")


def test_the_clients_of_code_judge_get_their_results_and_its_status(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    client = load(monkeypatch, "judge_client", checkout("ROCSTAR_CODE_JUDGE", "0xWJ/code-judge") / "judge_client.py")
    for url in (http.url, f"{http.url}/code-judge"):
        with client.BufferedJudgeClient(url, max_workers=1) as buffered:
            check(buffered.judge(submissions(client)))
    status = client.JudgeClient(f"{http.url}/code-judge").get_status()
    assert (status.queue, status.num_workers) == (0, 4)


async def test_the_async_client_of_code_judge_gets_its_results(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    client = load(monkeypatch, "judge_client", checkout("ROCSTAR_CODE_JUDGE", "0xWJ/code-judge") / "judge_client.py")
    async with client.BufferedAsyncJudgeClient(http.url, max_workers=2) as buffered:
        check(await buffered.judge(submissions(client)))


def test_code_judges_own_tests_of_python_pass(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but those of C++, and those that expect the line code-judge prints into a program's output at a timeout."""
    tests = load(
        monkeypatch, "code_judge_tests", checkout("ROCSTAR_CODE_JUDGE", "0xWJ/code-judge") / "tests" / "test_main.py"
    )
    service = TestClient(http, "/code-judge")
    tests.test_status(service)
    for kind in ("judge", "run"):
        for name in ("python", "python_fail", "python_missing_input", "io_valid", "io_invalid", "multi_process"):
            getattr(tests, f"test_{name}")(service, kind)
        for batch in ("batch", "long-batch"):
            tests.test_batch_fail(service, kind, batch)
    tests.test_python_timeout(service, "judge")


# verl


def verl_utils(monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = checkout("ROCSTAR_VERL", "volcengine/verl") / "verl" / "utils" / "reward_score" / "sandbox_fusion"
    stand_in(monkeypatch, "verl.utils.reward_score")
    package = load(monkeypatch, "verl.utils.reward_score.sandbox_fusion.utils", folder / "utils.py")
    logging.getLogger(package.__name__).setLevel(logging.CRITICAL)
    return package


def test_the_reward_of_verl_tells_right_wrong_crash_and_timeout_apart(
    http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = verl_utils(monkeypatch)
    code = "n = int(input())\nif n == 3: 1/0\nwhile n == 4: pass\nprint(n * 2)"
    cases = {"inputs": ["1", "2", "3", "4"], "outputs": ["2\n", "5", "6", "8"]}
    results, told = utils.check_correctness(f"{http.url}/run_code", cases, code, timeout=2)
    assert results == [True, False, -2, -3]
    assert [each["status"] for each in told] == ["success", "wrong_answer", "runtime_error", "timeout"]
    assert (told[2]["exit_code"], "ZeroDivisionError" in told[2]["stderr"]) == (1, True)


def test_the_function_calls_of_verl_run(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    utils = verl_utils(monkeypatch)
    cases = {"inputs": ["1\n2", "[1]\n[2, 3]"], "outputs": ["3", "[1, 2, 3]"], "fn_name": "add"}
    solution = "class Solution:\n    def add(self, a, b):\n        return a + b"
    semaphore = threading.Semaphore(4)
    results, _ = utils.check_correctness(f"{http.url}/run_code", cases, solution, concurrent_semaphore=semaphore)
    assert results == [True, True]


def test_the_score_of_verl_is_the_share_of_cases_passed(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    verl_utils(monkeypatch)
    folder = checkout("ROCSTAR_VERL", "volcengine/verl") / "verl" / "utils" / "reward_score" / "sandbox_fusion"
    scoring = load(monkeypatch, "verl.utils.reward_score.sandbox_fusion", folder / "__init__.py")
    completion = "so:\n```python\nprint(max(map(int, input().split())))\n```"
    cases = {"inputs": ["1 2", "9 3", "5 5", "7 8"], "outputs": ["2", "9", "5", "7"]}
    score, _ = scoring.compute_score(f"{http.url}/run_code", None, 1024, completion, cases)
    assert score == 0.75


def test_the_tool_of_verl_returns_what_the_program_printed(http: Http, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its network code is its own; Ray and the base class, which only carry it, are stand-ins."""
    root = checkout("ROCSTAR_VERL", "volcengine/verl") / "verl"
    verl_utils(monkeypatch)
    unchanged: Any = lambda *arguments, **options: arguments[0] if arguments else unchanged  # noqa: E731
    stand_in(monkeypatch, "ray", remote=unchanged, method=unchanged)
    stand_in(monkeypatch, "verl.tools.base_tool", BaseTool=object)
    stand_in(monkeypatch, "verl.utils.rollout_trace", rollout_trace_op=unchanged)
    stand_in(monkeypatch, "verl.tools.schemas", OpenAIFunctionToolSchema=dict, ToolResponse=dict)
    tools = load(monkeypatch, "verl.tools.sandbox_fusion_tools", root / "tools" / "sandbox_fusion_tools.py")
    tool = object.__new__(tools.SandboxFusionTool)
    tool.sandbox_fusion_url, tool.memory_limit_mb = f"{http.url}/run_code", 1024
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)"
    assert tool.execute_code("1", code) == {"text": "out\nerr\n"}


# SandboxFusion


def fusion_tests(monkeypatch: pytest.MonkeyPatch, http: Http, name: str) -> Any:
    """Its own test module on its own request and response models; only its server is ours."""
    pytest.importorskip("pydantic")
    root = checkout("ROCSTAR_SANDBOX_FUSION", "bytedance/SandboxFusion") / "sandbox"

    class Router:
        def post(self, *arguments: Any, **options: Any) -> Any:
            return lambda function: function

    class Logger:
        def get_logger(self) -> None:
            return None

    stand_in(monkeypatch, "structlog", stdlib=Logger())
    stand_in(monkeypatch, "fastapi", APIRouter=Router)
    stand_in(monkeypatch, "fastapi.testclient", TestClient=lambda app: TestClient(http))
    stand_in(monkeypatch, "sandbox.server.server", app=None)
    types = load(monkeypatch, "sandbox.runners.types", root / "runners" / "types.py")
    stand_in(monkeypatch, "sandbox.runners", CODE_RUNNERS={}, run_jupyter=None, **vars(types))
    load(monkeypatch, "sandbox.server.sandbox_api", root / "server" / "sandbox_api.py")
    return load(monkeypatch, f"fusion_{name}", root / "tests" / "runners" / f"{name}.py")


@pytest.mark.parametrize("name", ["print", "timeout", "assertion_error", "syntax_error", "file_read", "stdin"])
def test_sandbox_fusions_own_tests_of_python_pass(http: Http, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All but the one that fetches a file from outside the working directory."""
    getattr(fusion_tests(monkeypatch, http, "test_python"), f"test_python_{name}")()


@pytest.mark.parametrize("name", ["print", "multi_cell", "multi_cell_raise"])
def test_sandbox_fusions_own_tests_of_notebooks_pass(http: Http, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All but the one that draws a picture."""
    getattr(fusion_tests(monkeypatch, http, "test_jupyter"), f"test_jupyter_{name}")()
