"""Markers and wording of our own templates."""

from __future__ import annotations

START, STOP = "<|im_start|>", "<|im_end|>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"

RESERVED = (START, STOP, OPEN, CLOSE, "<tool_response>", "</tool_response>")
"""Strings that mark turns, tool responses and calls."""

SYSTEM = (
    "The User brings a problem and the Assistant solves it. The Assistant first thinks the problem through and then "
    "gives the User the answer. The thinking stands inside <reason> </reason> and the answer inside "
    "<answer> </answer>, like this: <reason> thinking goes here </reason> <answer> answer goes here </answer>."
)
TOOLS_HEAD = (
    "\n\n# Tools\n\nFunctions are available to help with the problem. Each line inside <tools></tools> is the JSON "
    "schema of one of them:\n<tools>"
)
TOOLS_TAIL = (
    "\n</tools>\n\nEvery call is a JSON object with the function's name and its arguments, inside "
    '<tool_call></tool_call>:\n<tool_call>\n{"name": <function name>, "arguments": <object of arguments>}\n</tool_call>'
)
PREAMBLE = (
    "Solve the problem below and give the answer inside <answer> </answer>. The final answer is read automatically "
    "from \\boxed{}, so put it there.\n\nThe problem is:\n"
)
MODEL_PREAMBLE = (
    "Solve the problem below. The final answer is read automatically from \\boxed{}, so put it there.\n\n"
    "The problem is:\n"
)
