"""The server as an OpenAI client sees it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from rocstar.dialogue.codec import Codec
from rocstar.errors import ConfigError
from rocstar.serving import app
from rocstar.serving.agent import Ran
from rocstar.serving.app import Agent, app_of
from rocstar.serving.spec import ServeSpec
from rocstar.types import Status, ToolCall, ToolResult
from tests.rollout.examples import ANSWER, CODEC, QUESTION, TEMPLATE, program, roller
from tests.serving.examples import Piecewise, agent_over

RUN = program("print(2+3)")
ASKED = {"model": "small", "messages": [{"role": "user", "content": QUESTION}]}


def client_of(agent: Agent, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app_of(agent))
    return httpx.AsyncClient(transport=transport, base_url="http://here", headers=headers)


async def ask(agent: Agent, body: Any, **headers: str) -> httpx.Response:
    async with client_of(agent, **headers) as client:
        return await client.post("/v1/chat/completions", json=body)


async def test_an_answer_comes_with_what_the_tool_did() -> None:
    answer = (await ask(agent_over(Piecewise([f"I add. {RUN}", ANSWER])), ASKED)).json()
    message = answer["choices"][0]["message"]
    assert message["content"].replace("\n", "") == f"I add. {ANSWER}"
    assert message["reasoning_content"] == "```python\nprint(2+3)\n```\n```output\n5\n```\n"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["rocstar"]["calls"][0]["status"] == "ok"
    assert answer["rocstar"]["response_tokens"] > answer["usage"]["completion_tokens"]
    assert answer["usage"]["total_tokens"] > answer["usage"]["completion_tokens"] > 10


async def test_a_client_that_goes_amid_its_request_is_no_error_of_the_server() -> None:
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    await app_of(agent_over(Piecewise([ANSWER])))(scope, receive, send)


def test_a_call_that_is_no_program_is_not_shown_as_python() -> None:
    call = ToolCall(id="call_0", tool="grams_in", arguments={"unit": "blem"}, raw='\n{"name": "grams_in"}\n')
    ran = Ran(call=call, result=ToolResult(call_id="call_0", status=Status.OK), told="7")
    assert ran.shown() == '```\n{"name": "grams_in"}\n```\n```output\n7\n```\n'


async def test_a_stream_says_the_same_piece_by_piece() -> None:
    body = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
    response = await ask(agent_over(Piecewise([f"I add. {RUN}", ANSWER])), body)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    pieces = [json.loads(line) for line in lines[:-1]]
    deltas = [piece["choices"][0]["delta"] for piece in pieces if piece["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas).replace("\n", "") == f"I add. {ANSWER}"
    assert [delta["content"] for delta in deltas if "content" in delta][:2] == ["", "I add. "]
    assert any("print(2+3)" in delta.get("reasoning_content", "") for delta in deltas)
    assert pieces[-2]["choices"][0]["finish_reason"] == "stop"
    assert pieces[-1]["usage"]["completion_tokens"] > 10


async def test_the_conversation_so_far_is_laid_out_as_the_template_does() -> None:
    engine = Piecewise([ANSWER])
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": [{"type": "text", "text": "2+3?<|im_end|>"}]},
    ]
    assert (await ask(agent_over(engine), {"messages": messages})).status_code == 200
    text = CODEC.decode(engine.asked[0])
    assert text.count(TEMPLATE.stop) == 4 or text.count("im_end") == 4
    assert ANSWER in text and text.index(QUESTION) < text.index(ANSWER) < text.index("2+3?<")
    stops = [token for token in engine.asked[0] if CODEC.decode([token]) == TEMPLATE.stop]
    assert len(stops) == 3  # what a user wrote is no marker


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools is not obeyed here; leave it out, because this server runs"),
        ({"tool_choice": "none"}, "tool_choice is not obeyed here; leave it out, because this server runs"),
        ({"presence_penalty": 0.5}, "presence_penalty is not obeyed here; leave it out"),
        ({"n": 2}, "n is not obeyed here; leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format is not obeyed here; leave it out"),
        ({"temperature": "hot"}, "temperature: Input should be a valid number"),
        ({"temperature": 11}, "temperature: Input should be less than or equal to 10"),
        ({"temperature": True}, "temperature: Input should be a valid number"),
        ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
        ({"max_completion_tokens": True}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 5000}, "5000 more were asked for, which is more than the context length of 1000"),
        ({"messages": []}, "messages must be a list with at least one message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the last of messages is of role assistant; end them"),
        ({"messages": [{"role": "system", "content": "x"}]}, "the last of messages is of role system; end them"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "expected a message of role user"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text content"),
        ({"messages": [{"role": "user", "content": "x"}] * 2}, "expected a message of role assistant"),
        ({"surprise": 1}, "surprise is not obeyed here"),
        ({"temperature": 5e-324}, "too small to draw by; 0 takes the likeliest token"),
        ({"seed": 1.5}, "seed: Input should be a valid integer"),
        ({"stream": "yes"}, "stream: Input should be a valid boolean"),
        ({"stop": ["x"]}, "stop is not obeyed here; leave it out"),
        ({"messages": [{"role": [], "content": "x"}]}, "another form than chat completions have"),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_in_a_sentence(change: dict[str, Any], said: str) -> None:
    response = await ask(agent_over(Piecewise([ANSWER])), {**ASKED, **change})
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


async def test_a_path_that_is_not_there_is_refused_with_those_that_are() -> None:
    async with client_of(agent_over(Piecewise([]))) as client:
        response = await client.post("/v1/completions", json={"prompt": "1"})
    said = "there is no /v1/completions here; this server has /v1/models and /v1/chat/completions and /health"
    assert (response.status_code, response.json()["error"]["message"]) == (404, said)


async def test_a_conversation_that_the_template_cannot_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ConfigError("no question can follow")

    monkeypatch.setattr(type(TEMPLATE), "next_question", refused)
    turns = [*ASKED["messages"], {"role": "assistant", "content": "7"}, *ASKED["messages"]]
    response = await ask(agent_over(Piecewise([ANSWER])), {**ASKED, "messages": turns})
    assert response.status_code == 400 and "no question can follow" in response.text


async def test_a_text_without_room_is_refused_before_it_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Codec, "encode_segments", None)  # keeps all others waiting, minutes for some megabytes
    call = {"function": {"name": "python", "arguments": {"code": "x" * 10**6}}}
    called = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "1"}]
    for messages in ([{"role": "user", "content": "x" * 10**6}], [*ASKED["messages"], *called]):
        response = await ask(agent_over(Piecewise([ANSWER])), {**ASKED, "messages": messages})
        assert response.status_code == 400
        assert "tokens, which is more than the context length of 1000; shorten it" in response.text


async def test_what_clients_send_without_asking_for_anything_is_taken() -> None:
    more = {"n": 1, "stop": None, "tools": [], "user": "me", "frequency_penalty": 0, "top_p": 1.0, "seed": 4}
    more |= {"presence_penalty": 0.0, "tool_choice": "auto", "metadata": {"ticket": "7"}}
    assert (await ask(agent_over(Piecewise([ANSWER])), {**ASKED, **more})).status_code == 200


async def test_strange_bodies_and_characters_are_no_fault_of_ours() -> None:
    async with client_of(agent_over(Piecewise([ANSWER]))) as client:
        for body in (b"", b"[]", b"{", b"\xff", b"[" * 100_000):
            assert (await client.post("/v1/chat/completions", content=body)).status_code == 400
        deep = b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": '
        call = b'[{"function": {"name": "\\ud800", "arguments": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}}]}]}"
        assert (await client.post("/v1/chat/completions", content=deep + call)).status_code == 400
        assert (await client.post("/v1/chat/completions", content=b'{"\\ud800": 1}')).status_code == 400
        for odd in (b'"temperature": NaN', b'"top_p": Infinity'):
            body = b'{"messages": [{"role": "user", "content": "x"}], %b}' % odd
            assert "finite number" in (await client.post("/v1/chat/completions", content=body)).text
        odd = b'{"messages": [{"role": "user", "content": "\\ud800 \\u0000"}]}'
        assert (await client.post("/v1/chat/completions", content=odd)).status_code == 200


async def test_an_outage_is_a_503_and_never_an_answer() -> None:
    response = await ask(agent_over(Piecewise([RUN])), ASKED)
    assert response.status_code == 503
    assert "the script is over" in response.json()["error"]["message"]
    streamed = await ask(agent_over(Piecewise([RUN])), {**ASKED, "stream": True})
    assert '"error"' in streamed.text and '"finish_reason": "stop"' not in streamed.text


async def test_the_token_is_needed_where_there_is_one_and_web_pages_are_refused() -> None:
    agent = agent_over(Piecewise([ANSWER]), token="secret")
    assert (await ask(agent, ASKED)).status_code == 401
    assert (await ask(agent, ASKED, authorization="Bearer wrong")).status_code == 401
    assert (await ask(agent, ASKED, authorization="Bearer secret", origin="http://evil")).status_code == 403
    assert (await ask(agent, ASKED, authorization="Bearer secret")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_what_two_turns_say_is_kept_apart(stream: bool) -> None:
    call = RUN.lstrip()
    engine = Piecewise([call, f"So.{call}", f"Then:\n{call}", ANSWER])
    response = await ask(agent_over(engine), {**ASKED, "stream": stream})
    lines = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line[:7] == "data: {"]
    parts = [each["choices"][0]["delta"].get("content") or "" for each in lines if stream]
    content = "".join(parts) if stream else response.json()["choices"][0]["message"]["content"]
    assert content == f"So.\nThen:\n{ANSWER}"


class Endless(Piecewise):
    """Is asked for an answer when SIGTERM comes, and never has it."""

    async def generate(self, *_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()


def test_a_server_that_is_ended_in_the_middle_of_an_answer_ends_quietly(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Uvicorn printed a traceback of "Exception in ASGI application"."""
    subject = SimpleNamespace(run=None, model=Path("small"), holds=1000, specs=[])

    @asynccontextmanager
    async def opened(*_: Any, **__: Any) -> Any:
        yield roller(Endless([]), verifier=None)

    monkeypatch.setattr(app, "find_agent", lambda *_: subject)
    monkeypatch.setattr(app, "opened_agent", opened)
    clients: list[threading.Thread] = []

    def say(told: str) -> None:
        url = f"{told.split()[2]}/chat/completions"
        clients.append(threading.Thread(target=lambda: httpx.post(url, json=ASKED, timeout=60)))
        clients[0].start()

    app.serve(ServeSpec(model="small", port=0, rows=1), say)
    clients[0].join()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_half_of_a_surrogate_pair_in_a_call_is_shown_as_a_question_mark(stream: bool) -> None:
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "\\ud800", "\\ud801": 1}}\n</tool_call>'
    response = await ask(agent_over(Piecewise([call, ANSWER])), {**ASKED, "stream": stream})
    assert response.status_code == 200 and '{"code":"?","?":1}' in response.text.replace(" ", "")
    assert "\\ud8" not in response.text.replace("\\\\ud8", "")
