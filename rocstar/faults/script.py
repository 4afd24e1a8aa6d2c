"""The conversation that is had under every fault, and what each part says where nothing fails.

The model asks for a program and answers with what it printed; every attempt then earns 1. So a reward of anything else
was given to a fault, and a prompt that holds the call and not its output shows the model a fault as a tool result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

QUESTION = "What is 6 times 7063? ({})"
PROGRAM = "print(6 * 7063)"
CELLS = ("n = 6", "print(n * 7063)")
"""The same in a notebook, whose second cell needs the first."""
PRINTED = "42378"
RIGHT = f"<answer>\\boxed{{{PRINTED}}}</answer>"
WRONG = "<answer>\\boxed{0}</answer>"
"""What the model says to anything but PRINTED, and what every spoilt answer of an engine says."""
OTHERS = "777"
"""The output of another call."""


def call_of(code: str) -> str:
    """As a model that calls tools in Hermes' syntax writes it."""
    quoted = code.replace('"', '\\"')
    return f'<tool_call>\n{{"name": "python", "arguments": {{"code": "{quoted}"}}}}\n</tool_call>'


def reply_to(prompt: str, programs: tuple[str, ...]) -> str:
    """The model's next words."""
    left = [code for code in programs if code not in prompt]
    if left:
        return call_of(left[0])
    return RIGHT if was_told(prompt, programs) else WRONG


def was_told(prompt: str, programs: tuple[str, ...]) -> bool:
    """Whether what stands behind the last call is its output."""
    return not programs or PRINTED in prompt.rpartition(programs[-1])[2]


def reward_of(misdeed: str) -> Callable[..., list[float]]:
    """A reward function in TRL's signature that earns 1 for the right answer. misdeed: it raises,
    hangs or gives nan, once."""
    left = [1]

    def reward(completions: list[str], **columns: Any) -> list[float]:
        strikes, left[0] = left[0] and misdeed, 0
        if strikes == "raises":
            raise ConnectionError("the judge cannot be reached")
        if strikes == "hangs":
            threading.Event().wait()
        found = [float(RIGHT in text) for text in completions]
        return [float("nan"), *found[1:]] if strikes == "nan" else found

    return reward


def always(completions: list[str], **columns: Any) -> list[float]:
    """The reward of a model that has learnt nothing."""
    return [1.0] * len(completions)
