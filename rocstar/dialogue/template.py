"""Conversation text: what stands before, between and after the words the model writes. Text only, no token ids.

Our two templates share one ChatML shape. `paper` is the conversation of rStar2-Agent (system text, tools block,
preamble, pre-opened `<reason>`); `compact` is the bare minimum for models of a few hundred thousand parameters. A
model's own chat template is in `model_template.py`; `templates.py` picks one by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rocstar.dialogue.calls import HERMES, CallSyntax
from rocstar.dialogue.jinja import chat_template
from rocstar.dialogue.markup import PREAMBLE, RESERVED, START, STOP, SYSTEM, TOOLS_HEAD, TOOLS_TAIL
from rocstar.dialogue.segments import Segment, foreign, ours
from rocstar.protocols import ToolSpec


class Template(Protocol):
    """Text around completions. Promise: opening + completion + reply + completion ... is the whole conversation, and
    only segments whose author is the template hold its markers."""

    @property
    def stop(self) -> str:
        """The marker that ends an assistant turn; a single token in every tokenizer used."""
        ...

    @property
    def reserved(self) -> tuple[str, ...]:
        """Strings that mark turns, tool responses and calls; nobody else's text is read as one of them."""
        ...

    @property
    def calls(self) -> CallSyntax:
        """How calls are written under this template."""
        ...

    @property
    def jinja(self) -> str | None:
        """Jinja source for the `chat_template` of a saved tokenizer; None to keep what the tokenizer came with."""
        ...

    def opening(self, question: str, tools: Sequence[ToolSpec], system: str | None = None) -> tuple[Segment, ...]:
        """Everything before the first completion; `system` replaces the default system text."""
        ...

    def reply(self, tool_texts: Sequence[str]) -> tuple[Segment, ...]:
        """Everything between a completion that ended with `stop` and the next one, answering calls."""
        ...

    def next_question(self, question: str) -> tuple[Segment, ...]:
        """The same, asking something else."""
        ...

    def chat(self) -> Template:
        """The form for rows that bring their own tools or none: no preamble, nothing about problems and boxes."""
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
    """Strings a tokenizer trained for this template keeps whole as special tokens; `stop` is one of them."""

    stop = STOP
    reserved = RESERVED
    calls = HERMES

    @property
    def jinja(self) -> str:
        return chat_template(
            system=self.system, preamble=self.preamble, header=self.assistant_header, lists_tools=self.lists_tools
        )

    @property
    def assistant_header(self) -> str:
        """Text right before each completion."""
        return f"{START}assistant\n{self.opened}"

    def opening(self, question: str, tools: Sequence[ToolSpec], system: str | None = None) -> tuple[Segment, ...]:
        user = ours(f"{START}user\n{self.preamble}"), foreign(question), ours(f"{STOP}\n{self.assistant_header}")
        return *self._system_message(tools, system), *user

    def reply(self, tool_texts: Sequence[str]) -> tuple[Segment, ...]:
        responses = ((ours("\n<tool_response>\n"), foreign(text), ours("\n</tool_response>")) for text in tool_texts)
        inner = (segment for response in responses for segment in response)
        return ours(f"\n{START}user"), *inner, ours(f"{STOP}\n{self.assistant_header}")

    def next_question(self, question: str) -> tuple[Segment, ...]:
        tail = ours(f"{STOP}\n{self.assistant_header}")
        return ours(f"\n{START}user\n{self.preamble}"), foreign(question), tail

    def chat(self) -> ChatMl:
        return CHAT

    def _system_message(self, tools: Sequence[ToolSpec], system: str | None) -> tuple[Segment, ...]:
        if self.system is None and system is None:
            return ()
        text = ours(self.system or "") if system is None else foreign(system)
        block = tools_block(tools) if self.lists_tools and tools else ()
        return ours(f"{START}system\n"), text, *block, ours(f"{STOP}\n")


def tool_schema(spec: ToolSpec) -> dict[str, Any]:
    """A tool as OpenAI-style function schema, the form `apply_chat_template(tools=...)` takes."""
    function = {"name": spec.name, "description": spec.description, "parameters": _plain(spec.parameters)}
    return {"type": "function", "function": function}


def tools_block(tools: Sequence[ToolSpec]) -> tuple[Segment, ...]:
    """The `# Tools` section of a system message: one JSON schema a line. Source: paper Fig. 3; wording ours."""
    schemas = "".join("\n" + json.dumps(tool_schema(spec), ensure_ascii=False) for spec in tools)
    return ours(TOOLS_HEAD), foreign(schemas), ours(TOOLS_TAIL)


def _plain(value: Any) -> Any:
    """Mappings and sequences as dict and list, which is all that JSON writers take."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value


PAPER = ChatMl(system=SYSTEM, preamble=PREAMBLE, opened="<reason>", lists_tools=True, markers=RESERVED)

# Only the stop marker must be one token. The other tags are ordinary text here, which lets a BPE without word
# boundaries learn each run of fixed text (tags, roles, line ends) as one token.
COMPACT = ChatMl(system=None, preamble="", opened="", lists_tools=False, markers=(STOP,))

CHAT = replace(PAPER, system="You are a helpful assistant.", preamble="", opened="")
"""How rows that bring their own tools are written: the paper's tools block and call syntax without its reasoning
clothes. A chat answer right after an open `<reason>`, or under a request for a `\\boxed{}`, would teach the model to
ignore both. Source: ours; the paper does not say how its non-reasoning rows were laid out."""
