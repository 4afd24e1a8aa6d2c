"""What vLLM's own parsers find in completions. vLLM's Python runs this file, once for all tests of a process, since to
import a parser takes fifteen seconds of CPU: a line of stdin is a JSON list of a syntax's name (none: Qwen3.5's) and
texts, and a line of stdout their calls."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

REQUEST: Any = SimpleNamespace(tool_choice="auto", tools=[SimpleNamespace()], skip_special_tokens=False)


class Tokens:
    """A tokenizer that has these tokens, as far as a parser looks."""

    def __init__(self, *known: str) -> None:
        self.known = {text: number for number, text in enumerate(known)}

    def get_vocab(self) -> dict[str, int]:
        return self.known


def reader_of(name: str) -> Callable[[str], Any]:
    if name in ("mistral", "list"):
        from vllm.parser.mistral import MistralParser

        tokens: Any = Tokens("[TOOL_CALLS]", *(["[ARGS]"] if name == "mistral" else []))
        return lambda text: MistralParser(tokens, None).extract_tool_calls_from_content(text, REQUEST)
    if name == "glm":
        from vllm.parser.glm47_moe import Glm47MoeParser

        plain: Any = {"enable_thinking": False}
        return lambda text: Glm47MoeParser(Tokens(), None, chat_template_kwargs=plain).extract_tool_calls_from_content(
            text, SimpleNamespace(tool_choice="auto", tools=[], skip_special_tokens=False)
        )
    if name == "harmony":
        from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
        from vllm.parser.harmony import HarmonyParser

        class Harmony(HarmonyParser):
            reasoning_parser = tool_parser = property(lambda _: True)  # type: ignore[assignment]

        def found(text: str) -> Any:
            parser = Harmony.__new__(Harmony)
            parser._parser, parser._current_message_tokens = None, []
            parser._next_tool_call_index = parser._num_processed_messages = 0
            parser._num_counted_tokens = parser._num_reasoning_tokens = 0
            parser.model_tokenizer = get_encoding()
            ids = get_encoding().encode(text, allowed_special="all")
            calls = parser.parse("", REQUEST, model_output_token_ids=ids)[2]
            return SimpleNamespace(tool_calls=[SimpleNamespace(function=call) for call in calls or ()])

        return found
    if name.startswith("deepseek"):
        from vllm.tool_parsers.deepseekv3_tool_parser import DeepSeekV3ToolParser
        from vllm.tool_parsers.deepseekv31_tool_parser import DeepSeekV31ToolParser

        marks: Any = Tokens(*(f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "calls▁end", "call▁begin", "call▁end")))
        parser: Any = DeepSeekV3ToolParser if name.endswith("v3") else DeepSeekV31ToolParser
        return lambda text: parser(marks).extract_tool_calls(text, REQUEST)
    from vllm.parser.qwen3 import Qwen3Parser

    thinking: Any = {"enable_thinking": False}
    return lambda text: Qwen3Parser(Tokens(), None, chat_template_kwargs=thinking).extract_tool_calls_from_content(
        text, REQUEST
    )


def arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_by_vllm(name: str, texts: Sequence[str]) -> list[list[list[Any]]]:
    """For each text the names and arguments of its calls. Skips the test where there is no vLLM."""
    from tests.engines.vllm_server import vllm_python

    reading = _started(str(vllm_python()))
    assert reading.stdin is not None and reading.stdout is not None
    reading.stdin.write(json.dumps([name, texts]) + "\n")
    reading.stdin.flush()
    found: list[list[list[Any]]] = json.loads(reading.stdout.readline())
    return found


@cache
def _started(python: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM writes there as well
    for line in sys.stdin:
        name, texts = json.loads(line)
        reader = reader_of(name)
        calls = (reader(text).tool_calls for text in texts)
        found = [[[call.function.name, arguments(call.function.arguments)] for call in each] for each in calls]
        print(json.dumps(found), file=answers)


if __name__ == "__main__":
    main()
