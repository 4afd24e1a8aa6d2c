"""The address of the gateway, spoken to as the field's clients speak."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from rocstar.agents.agent import Gateway, app_of
from rocstar.agents.attempt import AgentAttempt, AttemptOver
from rocstar.errors import EngineUnavailable
from rocstar.types import Completion, EngineLoad, Finish, Status, Stop, ToolCall, ToolResult
from tests.agents.examples import Told, attempt, chat, made_by
from tests.rollout.examples import CODEC, program
from tests.scripted import ScriptedTool

SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
JSON = {"type": "json_schema"}
TOOL = {"type": "function", "function": {"name": "python", "description": "Runs it.", "parameters": SCHEMA}}


def client(one: AgentAttempt) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app_of({"key": one}.get))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers={"authorization": "Bearer key"})


async def ask(one: AgentAttempt, path: str = "/v1/chat/completions", **body: Any) -> Any:
    async with client(one) as http:
        return (await http.post(path, content=json.dumps(body))).json()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_chat_with_a_tool_of_the_agent_is_one_conversation() -> None:
    one = attempt(Told([program("print(2+3)"), "so 5"]))
    first = await ask(one, messages=[user("q")], tools=[TOOL])
    message = first["choices"][0]["message"]
    assert first["choices"][0]["finish_reason"] == "tool_calls"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"code": "print(2+3)"}
    answered = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
    second = await ask(one, messages=[user("q"), message, answered], tools=[TOOL])
    assert second["choices"][0]["message"]["content"] == "so 5"
    assert second["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    made = made_by(one)
    assert len(made.conversations) == 1 and made.num_sampled_tokens == sum(
        each["usage"]["completion_tokens"] for each in (first, second)
    )


async def test_responses_and_messages_say_the_same() -> None:
    function = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    one = attempt(Told([program("print(2+3)"), "so 5"]))
    first = await ask(one, "/v1/responses", input="q", instructions="be brief", tools=[function])
    (call,) = first["output"]
    assert (call["type"], call["name"], first["status"]) == ("function_call", "python", "completed")
    told = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    asked = [user("q"), call, told]
    second = await ask(one, "/v1/responses", input=asked, instructions="be brief", tools=[function])
    assert second["output"][0]["content"][0]["text"] == "so 5"

    other = attempt(Told([program("print(2+3)"), "so 5"]))
    offered = [{"type": "custom", "name": "python", "description": "Runs it.", "input_schema": SCHEMA}]
    head = {"max_tokens": 60, "system": "be brief", "tools": offered}
    head["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": False}
    first = await ask(other, "/v1/messages", messages=[user("q")], **head)
    (block,) = first["content"]
    assert (block["type"], block["input"], first["stop_reason"]) == ("tool_use", {"code": "print(2+3)"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "5"}]}
    turns = [user("q"), {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    second = await ask(other, "/v1/messages", messages=turns, **head)
    assert (second["content"], second["stop_reason"]) == ([{"type": "text", "text": "so 5"}], "end_turn")

    ours, theirs = made_by(one), made_by(other)
    assert len(ours.conversations) == 1 and ours.token_ids == theirs.token_ids


async def test_words_after_a_result_stand_with_it_and_parts_of_an_answer_are_one_message() -> None:
    one = attempt(Told([program("print(2+3)"), "so 5"]))
    message = (await ask(one, messages=[user("q")], tools=[TOOL]))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
    await ask(one, messages=[user("q"), message, result, user("be brief")], tools=[TOOL])
    assert len(made_by(one).conversations) == 1
    assert "<tool_response>\n5\nbe brief" in CODEC.decode(made_by(one).turns[0].reply_ids)

    function = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    other = attempt(Told(["I add.\n" + program("print(2+3)"), "so 5"]))
    said, call = (await ask(other, "/v1/responses", input="q", tools=[function]))["output"]
    told = {"type": "function_call_output", "call_id": call["call_id"], "output": [{"type": "input_text", "text": "5"}]}
    await ask(other, "/v1/responses", input=[user("q"), {"type": "reasoning"}, said, call, told], tools=[function])
    assert said["content"][0]["text"] == "I add." and len(made_by(other).conversations) == 1

    third = attempt(Told(["so 5", "yes"]))
    await ask(third, messages=[user("q")])
    parts = [{"role": "assistant", "content": part} for part in ("so", " 5")]
    await ask(third, messages=[user("q"), *parts, user("sure?")])
    assert len(made_by(third).conversations) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_stream_says_what_a_whole_answer_says(path: str) -> None:
    one = attempt(Told(["so 5"]))
    asked = {"input": "q"} if path.endswith("responses") else {"messages": [user("q")], "max_tokens": 60}
    async with client(one) as http:
        lines = (await http.post(path, json={**asked, "stream": True})).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "so 5" in json.dumps(events)
    assert made_by(one).num_sampled_tokens == len(CODEC.encode("so 5")) + 1


async def test_who_has_no_key_is_refused_and_nothing_is_made() -> None:
    one = attempt(Told(["so 5"]))
    async with client(one) as http:
        refused = await http.post(
            "/v1/chat/completions", json={"messages": [user("q")]}, headers={"authorization": "Bearer other"}
        )
    assert (refused.status_code, refused.json()["error"]["message"]) == (401, "no attempt under way has this key")
    assert made_by(one).turns == ()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "messages must be a list, got None"),
        ({"messages": [], "stop": ["x"] * 250_000}, "the body has more than 500000 strings, lists and objects"),
        ({"messages": [user("half \ud800")]}, "message 0 has half of a surrogate pair"),
        ({"messages": [user("q")], "stream_options": 5}, "stream_options must be an object, got 5"),
        ({"messages": [user("q")], "tools": [5]}, "expected tools with a name"),
        ({"messages": [user("q")], "n": 3}, "n 3 is not obeyed here; leave it out"),
        ({"messages": [user("q")], "max_tokens": 0}, "max_tokens must be a whole number of at least 1, got 0"),
        ({"messages": [user("q")], "max_completion_tokens": 0}, "max_completion_tokens must be a whole number of at"),
        ({"messages": [user("q")], "functions": [TOOL["function"]]}, "functions [{'name': 'python'"),
        ({"path": "/v1/responses", "input": "q", "text": {"format": JSON}}, "text.format {'type': 'json_schema'} is"),
        ({"path": "/v1/responses", "input": "q", "tools": [{"type": "custom", "name": "x"}]}, "tools holds {'type': "),
        ({"path": "/v1/messages", "messages": [user("q")], "output_config": {"format": JSON}}, "output_config.format"),
        ({"path": "/v1/messages", "messages": [user("q")], "tools": [{"type": "bash_1", "name": "b"}]}, "tools holds"),
        ({"messages": [user("q")], "stop": 7}, "stop must be a text or a list of texts, got 7"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "expected text content, got"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_in_a_sentence(body: dict[str, Any], said: str) -> None:
    found = await ask(attempt(Told([])), **body)
    assert said in found["error"]["message"] and found["error"]["type"] == "invalid_request_error"


async def test_an_outage_makes_the_attempt_a_fault_whatever_the_agent_does_then() -> None:
    one = attempt(Told(["so 5"]))
    await ask(one, messages=[user("q")])
    async with client(one) as http:
        failed = await http.post("/v1/chat/completions", json={"messages": [user("another")]})
    assert failed.status_code == 503
    made = made_by(one)
    assert made.stop is Stop.ENVIRONMENT_FAILED and made.fault and "the script of session" in made.fault


async def test_a_mistake_that_ends_the_run_is_answered_and_not_told_with_a_traceback() -> None:
    async def fails(number: int) -> None:
        raise OSError(28, "No space left on device")  # where finished calls are kept

    one = attempt(Told([], fails))
    async with client(one) as http:  # which raises what an application does not answer
        failed = await http.post("/v1/chat/completions", json={"messages": [user("q")]})
    assert failed.status_code == 500 and "No space left" in failed.text
    assert isinstance(one.broken, OSError)


async def test_an_aborted_completion_is_a_fault_and_no_turn() -> None:
    async def aborts(number: int) -> Completion:
        return Completion(token_ids=(), logprobs=(), finish=Finish.ABORTED)

    one = attempt(Told([], aborts))
    with pytest.raises(EngineUnavailable):
        await one.complete(chat("q"))
    assert made_by(one).stop is Stop.ENVIRONMENT_FAILED


async def test_limits_end_an_attempt_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    one = attempt(Told(["a"] * 5), max_turns=1)
    await ask(one, messages=[user("q")])
    refused = await ask(one, messages=[user("again")])
    assert "1 requests that rollout.max_turns allows" in refused["error"]["message"]
    assert made_by(one).stop is Stop.MAX_TURNS

    short = attempt(Told(["a long answer that goes on and on"]), max_response_tokens=5)
    cut = await ask(short, messages=[user("What is 2 + 3?")])
    assert cut["choices"][0]["finish_reason"] == "length" and made_by(short).stop is Stop.MAX_TOKENS
    more = await ask(short, messages=[user("w" * 400)])
    assert "rollout.max_response_tokens leaves room for" in more["error"]["message"]

    monkeypatch.setattr("rocstar.agents.attempt.MOST_CALLS", 2)  # the run keeps all results
    busy = attempt(Told(["a"]), ScriptedTool({"1": "5\n"}))
    told = [await ask(busy, "/v1/tools/python", code="1") for _ in range(3)]
    assert [*told[2]] == ["type", "error"] and "has made the 2 calls" in told[2]["error"]["message"]
    assert made_by(busy).stop is Stop.MAX_TURNS


async def test_an_attempt_has_one_unfinished_body_in_the_memory_of_the_run() -> None:
    """Sixty-four connections held two gigabytes."""
    gateway, one = Gateway(), attempt(Told([]))
    async with gateway.opened(one) as key:
        head = f"POST /v1/tools/x HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 2\r\n\r\n{{"
        links = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(2)]
        for _, end in links:
            end.write(head.encode())
            await asyncio.sleep(0.1)
        links[1][1].write(b"}")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(links[1][0].readline(), 0.2)
        links[0][1].close()
        assert await links[1][0].readline() == b"HTTP/1.1 400 Bad Request\r\n"
        links[1][1].close()


@pytest.mark.parametrize("answered", [0, 1])
async def test_a_text_that_has_more_tokens_than_there_is_room_for_is_refused_before_it_is_encoded(
    answered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run stands still while a text is encoded."""
    one = attempt(Told(["so 5"]))
    said = [user("q"), (await ask(one, messages=[user("q")]))["choices"][0]["message"]] if answered else []
    monkeypatch.setattr(type(CODEC), "encode_segments", None)
    refused = await ask(one, messages=[*said, user("9" * 100_000)])
    assert refused["error"]["message"].startswith("the request has at least ")
    assert made_by(one).stop is Stop.MAX_TOKENS


async def test_an_answer_ends_before_the_first_stop_text_and_its_tokens_with_it() -> None:
    one = attempt(Told(["Thought: add\nObservation: 5 and more", "then"]))
    first = await ask(one, messages=[user("q")], stop=["Observation:", "never"])
    assert first["choices"][0]["message"]["content"] == "Thought: add\n"
    kept = made_by(one).turns[0].completion
    assert CODEC.decode(kept.token_ids).startswith("Thought: add\nObservation:")
    assert "more" not in CODEC.decode(kept.token_ids) and kept.finish is Finish.STOP
    assert len(kept.logprobs) == len(kept.token_ids) == sum(span.tokens for span in kept.version_spans)
    await ask(one, messages=[user("q"), first["choices"][0]["message"], user("go on")])
    assert len(made_by(one).conversations) == 1


async def test_a_stop_text_is_not_found_in_the_mark_that_ends_a_turn() -> None:
    one = attempt(Told(["so 5"]))
    assert (await ask(one, messages=[user("q")], stop="end"))["choices"][0]["message"]["content"] == "so 5"


async def test_a_call_that_json_cannot_hold_is_given_back_as_text() -> None:
    one = attempt(Told(['<tool_call>\n{"name": "python", "arguments": {"code": NaN}}\n</tool_call>']))
    found = (await ask(one, messages=[user("q")], tools=[TOOL]))["choices"][0]
    assert found["finish_reason"] == "stop" and "NaN" in found["message"]["content"]


async def test_the_runs_tools_are_called_by_name_and_counted() -> None:
    tool = ScriptedTool({"print(2+3)": "5\n", "print(x)": ToolResult(call_id="", status=Status.CODE_ERROR)})
    one = attempt(Told([program("print(2+3)"), "so 5"]), tool)
    first = await ask(one, messages=[user("q")], tools=[TOOL])
    assert (await ask(one, "/v1/tools/python", code="print(2+3)"))["content"] == "5"
    await ask(one, "/v1/tools/python", code="print(x)")
    assert "no tool named 'bash'" in (await ask(one, "/v1/tools/bash", code="ls"))["error"]["message"]
    (turn,) = made_by(one).turns
    assert [call.id for call in turn.calls] == [result.call_id for result in turn.results]
    assert turn.calls[0].id == first["choices"][0]["message"]["tool_calls"][0]["id"]
    assert made_by(one).num_failed_calls == 1 and made_by(one).num_calls == 2


async def test_a_tool_call_that_waits_for_another_does_not_begin_once_the_attempt_has_ended() -> None:
    begun, first = list[ToolCall](), asyncio.Event()

    class Endless(ScriptedTool):
        async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
            begun.append(call)
            first.set()
            await asyncio.Event().wait()
            raise AssertionError

    one = attempt(Told([]), Endless({}))
    calls = [asyncio.ensure_future(one.call("python", {"code": "1"})) for _ in range(2)]
    await first.wait()
    await asyncio.wait_for(one.close(), 5.0)
    done, _ = await asyncio.wait(calls, timeout=1.0)
    assert [type(call.exception()) for call in done] == [AttemptOver, AttemptOver] and len(begun) == 1


async def test_contents_that_are_nothing_are_empty_texts() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "python", "arguments": "{}"}}]}
    one = attempt(Told(["a", "b"]))
    for messages in (
        [user("q"), called, {"role": "tool", "content": None}],
        [user("q"), {"role": "assistant", "content": None, "tool_calls": None}, user("p")],
    ):
        assert (await ask(one, messages=messages, tools=[TOOL]))["choices"]


async def test_blocks_of_a_message_stay_in_its_role_and_none_vanishes() -> None:
    one = attempt(Told(["a", "b"]))
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}
    assert (await ask(one, "/v1/messages", messages=[user("q"), thought, user("p")]))["content"]
    uses = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "python", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "5"}
    words = {"role": "user", "content": [{"type": "text", "text": "so?"}, result]}
    assert (await ask(one, "/v1/messages", messages=[user("q"), uses, words]))["content"]
    for wrong in ({"role": "system", "content": "evil"}, uses["content"][0]):
        told = await ask(one, "/v1/messages", messages=[{"role": "user", "content": [wrong]}])
        assert "which is not obeyed here" in told["error"]["message"]


async def test_what_is_nested_too_deeply_is_refused() -> None:
    deep = "[" * 2000 + "]" * 2000
    body = json.dumps({"messages": [user("q")], "tools": [TOOL]}).replace('"required": ["code"]', f'"default": {deep}')
    async with client(attempt(Told([]))) as http:
        assert (await http.post("/v1/chat/completions", content=body)).status_code == 400


async def test_a_connection_that_an_agent_lets_rest_is_there_when_it_goes_on() -> None:
    """uvicorn's own rule closes it after five seconds, and a request that is under way then is lost."""
    gateway, one = Gateway(), attempt(Told(["so 5", "so 6"]))
    async with gateway.opened(one) as key:
        connection = HTTPConnection(gateway.origin.removeprefix("http://"))

        def asked(question: str) -> int:
            body = json.dumps({"messages": [user(question)]})
            connection.request("POST", "/v1/chat/completions", body, {"authorization": f"Bearer {key}"})
            with connection.getresponse() as answer:
                answer.read()
                return answer.status

        assert await asyncio.to_thread(asked, "q") == 200
        await asyncio.sleep(5.5)
        assert await asyncio.to_thread(asked, "p") == 200
        connection.close()


class Lost(Told):
    """Once its second request is under way, which waits for `on`, so much has changed in the engines' load."""

    def __init__(self, **changes: int) -> None:
        super().__init__(["so 5", "so 6"])
        self.on, self._changes, self._is_lost = asyncio.Event(), changes, False

    async def generate(self, *given: Any, **names: Any) -> Completion:
        if self.given:
            self._is_lost = True
            await self.on.wait()
        return await super().generate(*given, **names)

    def load(self) -> EngineLoad:
        return replace(super().load(), **self._changes if self._is_lost else {})


@pytest.mark.parametrize(
    ("changes", "stop", "answers"),
    [
        ({}, Stop.ANSWERED, False),
        ({"lost": 1}, Stop.ENVIRONMENT_FAILED, False),
        ({"lost": 1}, Stop.ENVIRONMENT_FAILED, True),
        ({"capacity_tokens": 0}, Stop.ENVIRONMENT_FAILED, False),
    ],
)
async def test_who_gives_a_request_up_while_engines_are_lost_is_not_to_blame(
    changes: dict[str, int], stop: Stop, answers: bool
) -> None:
    """Whether or not it is answered after all before the attempt has ended."""
    engine = Lost(**changes)
    gateway, one = Gateway(), attempt(engine)
    async with gateway.opened(one) as key:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=20) as http:
            url = f"{gateway.origin}/v1/chat/completions"
            assert (await http.post(url, json={"messages": [user("q")]})).status_code == 200
            with pytest.raises(httpx.ReadTimeout):
                await http.post(url, json={"messages": [user("p")]}, timeout=0.5)
        if answers:
            engine.on.set()
            await asyncio.wait({*one.asking})
            await asyncio.sleep(0.1)
        await one.close()
    assert made_by(one).stop is stop


async def test_the_address_is_there_while_attempts_are() -> None:
    gateway, one, other = Gateway(), attempt(Told(["so 5"])), attempt(Told(["so 6"]))
    async with gateway.opened(one) as key, gateway.opened(other) as another, httpx.AsyncClient() as http:
        for name, text in ((key, "so 5"), (another, "so 6")):
            sent = {"authorization": f"Bearer {name}"}
            url = f"{gateway.origin}/v1/chat/completions"
            found = await http.post(url, json={"messages": [user("q")]}, headers=sent)
            assert found.json()["choices"][0]["message"]["content"] == text
        assert (await http.get(f"{gateway.origin}/v1/models")).json()["data"][0]["id"] == "policy"
        lost = await http.post(f"{gateway.origin}/v1/messages/count_tokens", json={})
        assert lost.status_code == 404 and "no /v1/messages/count_tokens here" in lost.json()["error"]["message"]
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient() as http:
            await http.get(f"{gateway.origin}/v1/models")
    async with gateway.opened(one) as again:
        assert again != key
    await asyncio.sleep(0)


async def test_an_attempt_that_is_cancelled_as_it_ends_leaves_no_address_behind() -> None:
    gateway, entered, ends = Gateway(), asyncio.Event(), asyncio.Event()

    async def use() -> None:
        async with gateway.opened(attempt(Told([]))), httpx.AsyncClient() as http:
            await http.get(f"{gateway.origin}/v1/models")
            entered.set()
            await ends.wait()

    using = asyncio.create_task(use())
    await entered.wait()
    ends.set()
    for _ in range(20):  # somewhere among these it waits for the address to close
        await asyncio.sleep(0)
        using.cancel()
    await asyncio.wait([using])
    if left := asyncio.all_tasks() - {asyncio.current_task()}:  # of these one closes the address
        await asyncio.wait(left, timeout=60)
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{gateway.origin}/v1/models")


async def test_a_refusal_of_half_of_a_surrogate_pair_can_be_sent() -> None:
    one = attempt(Told([]), ScriptedTool({}))
    assert "unknown argument '?'" in (await ask(one, "/v1/tools/python", code="1", **{"\ud800": 1}))["content"]
