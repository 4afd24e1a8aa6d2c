"""What vLLM's own parser finds in completions: run by vLLM's Python, with the name of a syntax (none: Qwen3.5's), texts
as a JSON list on stdin, calls on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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


def main() -> None:
    reader = reader_of(sys.argv[1] if len(sys.argv) > 1 else "")
    found = [
        [[call.function.name, arguments(call.function.arguments)] for call in reader(text).tool_calls]
        for text in json.load(sys.stdin)
    ]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
