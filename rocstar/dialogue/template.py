"""Conversation text: what stands before, between and after the words the model writes. Text only, no token ids.

Two templates share one ChatML shape. `paper` is the conversation of rStar2-Agent (system text, tools block, preamble,
pre-opened `<reason>`); `compact` is the bare minimum for models of a few hundred thousand parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

from rocstar.errors import ConfigError
from rocstar.protocols import ToolSpec

START, STOP = "<|im_start|>", "<|im_end|>"

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


class Template(Protocol):
    """Text around completions. Promise: opening + completion + reply + completion ... is the whole conversation."""

    @property
    def stop(self) -> str:
        """The marker that ends an assistant turn; a single token in every tokenizer used."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """Strings a tokenizer trained for this template keeps whole as special tokens; `stop` is one of them."""
        ...

    def opening(self, question: str, tools: Sequence[ToolSpec], system: str | None = None) -> str:
        """Everything before the first completion; `system` replaces the default system text."""
        ...

    def reply(self, tool_texts: Sequence[str]) -> str:
        """Everything between a completion that ended with `stop` and the next one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMl:
    """A ChatML template. Source: paper Fig. 3 for the shape; wording ours."""

    system: str | None
    """System text when the caller gives none; None for no system message."""
    preamble: str
    """Stands before the question in the user message."""
    opened: str
    """Tag already open when the assistant starts to write, on every assistant turn; may be empty."""
    lists_tools: bool
    """Whether the system message shows the schemas of the tools."""
    markers: tuple[str, ...]
    """See `Template.markers`."""

    @property
    def stop(self) -> str:
        return STOP

    @property
    def assistant_header(self) -> str:
        """Text right before each completion."""
        return f"{START}assistant\n{self.opened}"

    def opening(self, question: str, tools: Sequence[ToolSpec], system: str | None = None) -> str:
        user = f"{START}user\n{self.preamble}{question}{STOP}\n"
        return self._system_message(tools, system) + user + self.assistant_header

    def reply(self, tool_texts: Sequence[str]) -> str:
        responses = "".join(f"\n<tool_response>\n{text}\n</tool_response>" for text in tool_texts)
        return f"\n{START}user{responses}{STOP}\n{self.assistant_header}"

    def _system_message(self, tools: Sequence[ToolSpec], system: str | None) -> str:
        text = self.system if system is None else system
        if text is None:
            return ""
        block = tools_block(tools) if self.lists_tools and tools else ""
        return f"{START}system\n{text}{block}{STOP}\n"


def tool_schema(spec: ToolSpec) -> dict[str, Any]:
    """A tool as OpenAI-style function schema, the form `apply_chat_template(tools=...)` takes."""
    function = {"name": spec.name, "description": spec.description, "parameters": _plain(spec.parameters)}
    return {"type": "function", "function": function}


def tools_block(tools: Sequence[ToolSpec]) -> str:
    """The `# Tools` section of a system message: one JSON schema a line. Source: paper Fig. 3; wording ours."""
    lines = "".join("\n" + json.dumps(tool_schema(spec), ensure_ascii=False) for spec in tools)
    return TOOLS_HEAD + lines + TOOLS_TAIL


def _plain(value: Any) -> Any:
    """Mappings and sequences as dict and list, which is all that JSON writers take."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


PAPER = ChatMl(
    system=SYSTEM,
    preamble=PREAMBLE,
    opened="<reason>",
    lists_tools=True,
    markers=(START, STOP, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)

# Only the stop marker must be one token. The other tags are ordinary text here, which lets a BPE without word
# boundaries learn each run of fixed text (tags, roles, line ends) as one token.
COMPACT = ChatMl(system=None, preamble="", opened="", lists_tools=False, markers=(STOP,))

TEMPLATES: Mapping[str, ChatMl] = {"paper": PAPER, "compact": COMPACT}


def template_named(name: str) -> ChatMl:
    """The template of that name. Raises ConfigError for any other name than `paper` and `compact`."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    nearest = get_close_matches(name, TEMPLATES, n=1, cutoff=0.0)[0]
    raise ConfigError(f"rollout.template {name!r} is unknown; the nearest is {nearest!r}, of {', '.join(TEMPLATES)}.")
