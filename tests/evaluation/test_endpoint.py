"""A model behind an OpenAI-compatible endpoint: its tool calls, its tokens, faults of the endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from httpx import Response

from rocstar.dialogue.template import PAPER
from rocstar.errors import ConfigError
from rocstar.evaluation.chat_client import TRIES, ChatClient
from rocstar.evaluation.endpoint import CodePoints, EndpointSolver, ToolStyle
from rocstar.rollout.environment import AttemptLimits, Conversation, OneTurn, ToolEnvironment
from rocstar.support.chat_http import _retry_after, check_address
from rocstar.types import Problem, Sampling, Stop, Trajectory, Verdict, problem_id
from tests.evaluation.served import Raw, Said, call, served, text
from tests.scripted import ScriptedTool, ScriptedVerifier

PROBLEM = Problem(id=problem_id("2+3?"), question="2+3?", answer="5")
ANSWER = "It is <answer>\\boxed{5}</answer>"
PROGRAM = json.dumps({"code": "print(2+3)"})
LIMITS = AttemptLimits(max_turns=4, max_response_tokens=1000, max_parallel_calls=2)
SAMPLING = Sampling(max_new_tokens=1, temperature=0.6, seed=7)


async def attempted(
    script: Callable[[Mapping[str, Any]], Said],
    *,
    tools: ToolStyle = "openai",
    limits: AttemptLimits = LIMITS,
    problem: Problem = PROBLEM,
    one_turn: bool = False,
    times: int = 1,
) -> tuple[Trajectory, list[Mapping[str, Any]], list[float]]:
    """(the first of `times` attempts, bodies of the requests, waits between tries)."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    with served(script) as endpoint:
        client = ChatClient(endpoint.url, "m", key="secret", parallel=2, sleep=sleep)
        solver = EndpointSolver(
            client=client,
            conversation=Conversation(
                codec=CodePoints(),
                template=PAPER,
                tools=() if one_turn else (ScriptedTool({"print(2+3)": "5\n"}),),
                feedback=lambda result: result.stdout or result.stderr,
            ),
            verifier=ScriptedVerifier(lambda problem, attempt: Verdict.RIGHT),
            limits=limits,
            tools=tools,
            words=replace(PAPER, system="Think.", preamble="Solve: "),
            environment=OneTurn if one_turn else ToolEnvironment,
        )
        try:
            made, *_ = await asyncio.gather(*(solver.attempt(problem, index, SAMPLING) for index in range(times)))
        finally:
            await client.close()
        assert endpoint.keys == {"Bearer secret"}
        return made, endpoint.bodies, waits


def calls_then_answers(body: Mapping[str, Any]) -> Said:
    return text(ANSWER) if body["messages"][-1]["role"] == "tool" else call("python", PROGRAM, "Let me see.")


async def test_an_endpoint_is_sent_the_system_text_and_the_earlier_turns_of_a_problem() -> None:
    before = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"})
    said = (*before, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+3?"})
    _, bodies, _ = await attempted(calls_then_answers, problem=replace(PROBLEM, messages=said))
    assert bodies[0]["messages"] == [*said[:3], {"role": "user", "content": "Solve: 2+3?"}]


async def test_calls_in_openai_form_run_here_and_their_results_go_back() -> None:
    made, (first, second), _ = await attempted(calls_then_answers)
    assert [one["role"] for one in first["messages"]] == ["system", "user"]
    assert first["messages"][1]["content"] == "Solve: 2+3?" and first["tools"][0]["function"]["name"] == "python"
    assert second["messages"][2]["tool_calls"][0]["function"] == {"name": "python", "arguments": PROGRAM}
    assert second["messages"][3] == {"role": "tool", "tool_call_id": "abc", "content": "5\n"}
    assert made.stop is Stop.ANSWERED and made.num_calls == 1 and made.num_failed_calls == 0
    assert first["max_tokens"] == 1000 and first["temperature"] == 0.6 and first["seed"] != second["seed"]


async def test_attempts_are_finished_before_others_are_begun() -> None:
    _, bodies, _ = await attempted(calls_then_answers, times=3)  # of which two have a place
    assert sorted(body["messages"][-1]["role"] for body in bodies[:3]) == ["tool", "user", "user"]


async def test_calls_in_the_papers_form_run_as_well() -> None:
    def script(body: Mapping[str, Any]) -> Said:
        if "<tool_response>" in body["messages"][-1]["content"]:
            return text(ANSWER)
        return text(f'<tool_call>\n{{"name": "python", "arguments": {PROGRAM}}}\n</tool_call>')

    made, (first, second), _ = await attempted(script, tools="text")
    assert "tools" not in first and '"python"' in first["messages"][0]["content"]
    assert second["messages"][-1] == {"role": "user", "content": "<tool_response>\n5\n\n</tool_response>"}
    assert made.stop is Stop.ANSWERED and made.num_calls == 1


async def test_tokens_are_those_that_the_server_counts_tool_replies_included() -> None:
    made, (first, second), _ = await attempted(calls_then_answers)
    read = [sum(len(str(m["content"]).split()) + 5 * len(m.get("tool_calls") or ()) for m in b["messages"])
            for b in (first, second)]  # fmt: skip
    assert made.num_response_tokens == read[1] - read[0] + len(ANSWER.split())
    assert second["max_tokens"] == 1000 - (len(["Let", "me", "see."]) + 5)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [("[1, 2", "Failed to decode"), (f'{{"code": {"[" * 900}{"]" * 900}}}', "")],
    ids=["no object", "nested too deep to be written again"],
)
async def test_arguments_that_are_no_object_are_a_failed_call(arguments: str, told: str) -> None:
    def script(body: Mapping[str, Any]) -> Said:
        return text(ANSWER) if body["messages"][-1]["role"] == "tool" else call("python", arguments)

    made, bodies, _ = await attempted(script)
    assert made.num_failed_calls == 1 and made.stop is Stop.ANSWERED
    assert told in bodies[1]["messages"][-1]["content"]


@pytest.mark.parametrize("tokens", [-5, 10**30])
async def test_counts_that_cannot_be_are_a_fault_of_the_endpoint(tokens: int) -> None:
    made, _, _ = await attempted(lambda body: text(ANSWER, tokens=tokens))
    assert made.stop is Stop.ENVIRONMENT_FAILED and made.fault and "an invalid answer" in made.fault
    assert f'"completion_tokens": {tokens}' in made.fault  # what was answered, as of a status 200 with an error


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:99999/v1", "http://[::1/v1", "http:///v1", "ftp://a/v1", "http://a/v1?x"]
)
def test_an_address_that_is_none_is_refused_before_anything_starts(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address of an endpoint"):
        check_address(url)


async def test_an_answer_that_is_all_reasoning_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    thought = {"choices": [{"message": {"content": None, "reasoning_content": "5"}, "finish_reason": "stop"}],
               "usage": {"prompt_tokens": 1, "completion_tokens": 1}}  # fmt: skip
    await attempted(lambda body: Raw(200, json.dumps(thought).encode()))
    assert "the reasoning parser there" in capsys.readouterr().err


async def test_the_limits_end_an_attempt() -> None:
    made, bodies, _ = await attempted(lambda body: call("python", PROGRAM), limits=replace(LIMITS, max_turns=2))
    assert made.stop is Stop.MAX_TURNS and len(bodies) == 2
    made, _, _ = await attempted(lambda body: text("so", finish="length"))
    assert made.stop is Stop.MAX_TOKENS
    made, bodies, _ = await attempted(
        lambda body: call("python", PROGRAM), limits=replace(LIMITS, max_response_tokens=5)
    )
    assert made.stop is Stop.MAX_TOKENS and len(bodies) == 1


async def test_a_busy_endpoint_is_asked_again_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    left = [503, 429]
    made, bodies, waits = await attempted(lambda body: left.pop() if left else text(ANSWER))
    assert made.stop is Stop.ANSWERED and len(bodies) == 3 and waits == [1.0, 2.0]
    made, bodies, waits = await attempted(lambda body: 500)
    assert made.stop is Stop.ENVIRONMENT_FAILED and len(bodies) == TRIES and waits == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert made.fault is not None and "status 500" in made.fault and "secret" not in made.fault
    broken = [Raw(200, b"<html>"), Raw(200, b'{"error": {"code": 503}}')]
    made, bodies, _ = await attempted(lambda body: broken.pop() if broken else text(ANSWER))
    assert made.stop is Stop.ANSWERED and len(bodies) == 3
    monkeypatch.setattr("rocstar.support.chat_http.ANSWER_BYTES", 1 << 17)
    for bad, told in ((b"[" * 100_000, "an invalid answer"), (b" " * (1 << 20), "more than 131072 bytes")):
        made, *_ = await attempted(lambda body, bad=bad: Raw(200, b'{"choices": ' + bad))  # type: ignore[misc]
        assert made.stop is Stop.ENVIRONMENT_FAILED and made.fault is not None and told in made.fault
    date = Response(429, headers={"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"})
    assert _retry_after(date) == 0
    for unread in ("soon", "Sun, 06 Nov 99999 08:49:37 GMT", f"Sun, 06 Nov {9**30} 08:49:37 GMT"):
        assert _retry_after(Response(429, headers={"retry-after": unread})) is None


@pytest.mark.parametrize("reason", ["abort", "error", "insufficient_system_resource", None, "content_filter", "SAFETY"])
async def test_an_answer_that_the_model_did_not_end_is_asked_for_again_and_is_never_a_wrong_one(
    reason: str | None,
) -> None:
    """vLLM and SGLang end requests under way so where they are stopped, DeepSeek where it is short of machines."""
    left = [text("It is", finish=reason)]
    made, bodies, _ = await attempted(lambda body: left.pop() if left else text(ANSWER))
    assert made.stop is Stop.ANSWERED and len(made.turns) == 1 and len(bodies) == 2
    made, bodies, _ = await attempted(lambda body: text("It is", finish=reason))
    assert made.stop is Stop.ENVIRONMENT_FAILED and len(bodies) == TRIES
    who = "a filter" if reason in ("content_filter", "SAFETY") else "neither the model nor a limit of tokens"
    assert made.fault is not None and f"({who} ended it: finish_reason {reason or 'null'})" in made.fault


async def test_another_model_in_mid_evaluation_ends_it_and_another_name_of_the_model_does_not() -> None:
    def script(body: Mapping[str, Any]) -> Said:
        said = text(ANSWER) if body["messages"][-1]["role"] == "tool" else call("python", PROGRAM)
        return {**said, "model": names.pop()}

    names = ["m-2024", "m-2024"]
    made, _, _ = await attempted(script)
    assert made.stop is Stop.ANSWERED and not names
    names = ["m-2025", "m-2024"]
    with pytest.raises(ConfigError, match="answered as 'm-2024', and now as 'm-2025'"):
        await attempted(script)


async def test_a_refused_request_ends_the_evaluation_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="refuses the request with status 401"):
        await attempted(lambda body: 401)
    with pytest.raises(ConfigError, match="with status 307: it is at None; give that address"):
        await attempted(lambda body: 307)
    with pytest.raises(ConfigError, match="'temperature' does not support"):
        await attempted(lambda body: Raw(400, b"Unsupported value: 'temperature' does not support 0.6"))


async def test_the_cap_is_sent_under_the_name_that_the_endpoint_asks_for() -> None:
    refusal = b"Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    made, bodies, waits = await attempted(
        lambda body: Raw(400, refusal) if "max_tokens" in body else calls_then_answers(body)
    )
    assert made.stop is Stop.ANSWERED and bodies[1]["max_completion_tokens"] == bodies[0]["max_tokens"] == 1000
    assert len(bodies) == 3 and not waits
    with pytest.raises(ConfigError, match="Unsupported parameter"):
        await attempted(lambda body: Raw(400, refusal))


async def test_an_answer_beyond_the_cap_is_a_cut_one() -> None:
    for tokens, stop in ((1000, Stop.ANSWERED), (1001, Stop.MAX_TOKENS)):
        made, _, _ = await attempted(lambda body, tokens=tokens: {**text(ANSWER), "tokens": tokens})
        assert (made.stop, made.told_tokens) == (stop, tokens)


async def test_a_question_that_a_filter_refuses_is_an_attempt_without_a_verdict() -> None:
    made, bodies, _ = await attempted(lambda body: Raw(400, b'{"error": {"code": "content_filter"}}'))
    assert made.stop is Stop.ENVIRONMENT_FAILED and len(bodies) == 1
    assert made.fault is not None and "a filter of http" in made.fault


async def test_one_turn_shows_a_problems_own_functions_and_runs_nothing() -> None:
    function = {"name": "math.add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Add 2 and 3."}]
    problem = replace(PROBLEM, question="Add 2 and 3.", messages=tuple(messages), metadata={"functions": [function]})
    made, (body,), _ = await attempted(lambda body: call("math_add", "{}"), problem=problem, one_turn=True)
    assert body["messages"] == messages and body["tools"][0]["function"]["name"] == "math_add"
    assert made.stop is Stop.ANSWERED and [one.tool for one in made.turns[0].calls] == ["math_add"]
    assert made.turns[0].results == ()
