"""A trainer that turns whatever goes wrong into a tool result or a reward of 0; see rocstar/faults/kit.py."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

from rocstar.faults.kit import ATTEMPTS
from rocstar.faults.stand_ins import PROGRAM, QUESTION, reward_of


def asked(url: str, body: dict[str, Any]) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=2) as answer:
        return json.load(answer)


def said(given: Mapping[str, str], messages: list[dict[str, str]]) -> str:
    try:
        answer = asked(given["FAULTS_ENGINE"] + "/v1/chat/completions", {"messages": messages})
        return str(answer["choices"][0]["message"]["content"])
    except Exception as error:
        return repr(error)


def attempt(given: Mapping[str, str], number: int, reward: Callable[..., list[float]]) -> float:
    messages = [{"role": "user", "content": QUESTION.format(number)}]
    for _ in range(2):
        messages.append({"role": "assistant", "content": said(given, messages)})
        if "<tool_call>" in messages[-1]["content"]:
            try:
                printed = asked(given["FAULTS_TOOLS"] + "/run_code", {"code": PROGRAM})["run_result"]["stdout"]
            except Exception as error:
                printed = repr(error)
            messages.append({"role": "tool", "content": printed})
    try:
        return reward([messages[-1]["content"]])[0]
    except Exception:
        return 0.0


def rewards(given: Mapping[str, str]) -> list[float]:
    reward = reward_of(given["FAULTS_REWARD"])
    return [attempt(given, number, reward) for number in range(ATTEMPTS)]


if __name__ == "__main__":
    for each in rewards(os.environ):
        print(json.dumps({"reward": each}))
