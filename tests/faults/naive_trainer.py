"""A trainer that turns whatever goes wrong into a tool result or a reward of 0; see rocstar/faults/kit.py."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from typing import Any

from rocstar.faults.kit import ATTEMPTS
from rocstar.faults.stand_ins import PROGRAM, QUESTION, reward_of


def asked(seam: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(os.environ[seam] + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=2) as answer:
        return json.load(answer)


def said(messages: list[dict[str, str]]) -> str:
    try:
        answer = asked("FAULTS_ENGINE", "/v1/chat/completions", {"messages": messages})
        return str(answer["choices"][0]["message"]["content"])
    except Exception as error:
        return repr(error)


def attempt(number: int, reward: Callable[..., list[float]]) -> float:
    messages = [{"role": "user", "content": QUESTION.format(number)}]
    for _ in range(2):
        messages.append({"role": "assistant", "content": said(messages)})
        if "<tool_call>" in messages[-1]["content"]:
            try:
                printed = asked("FAULTS_TOOLS", "/run_code", {"code": PROGRAM})["run_result"]["stdout"]
            except Exception as error:
                printed = repr(error)
            messages.append({"role": "tool", "content": printed})
    try:
        return reward([messages[-1]["content"]])[0]
    except Exception:
        return 0.0


def main() -> None:
    reward = reward_of(os.environ["FAULTS_REWARD"])
    for number in range(ATTEMPTS):
        print(json.dumps({"reward": attempt(number, reward)}))


if __name__ == "__main__":
    main()
