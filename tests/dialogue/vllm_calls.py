"""What vLLM's own parser finds in completions: run by vLLM's Python, texts as a JSON list on stdin, calls on stdout."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any


class NoTokens:
    def get_vocab(self) -> dict[str, int]:
        return {}


def main() -> None:
    from vllm.parser.qwen3 import Qwen3Parser

    request: Any = SimpleNamespace(tool_choice="auto", tools=[SimpleNamespace()], skip_special_tokens=False)
    found = []
    for text in json.load(sys.stdin):
        parser = Qwen3Parser(NoTokens(), None, chat_template_kwargs={"enable_thinking": False})
        calls = parser.extract_tool_calls_from_content(text, request).tool_calls
        found.append([[call.function.name, json.loads(call.function.arguments)] for call in calls])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
