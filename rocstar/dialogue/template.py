"""Conversation text: everything before, between and after the model's completions. Text only, no token ids.

Our two templates share one ChatML shape. `paper` is the conversation of rStar2-Agent (system text, tools block,
preamble, pre-opened `<reason>`); `compact` is the bare minimum for models of a few hundred thousand parameters. A
model's own chat template is in `model_template.py`; `templates.py` picks one by name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from rocstar.dialogue.calls import CLOSE, HERMES, OPEN, CallSyntax
from rocstar.dialogue.segments import Segment, foreign, ours
from rocstar.errors import ConfigError, DataError
from rocstar.protocols import Marked, ToolSpec, tool_schema
from rocstar.types import Problem

START, STOP = "<|im_start|>", "<|im_end|>"
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


Turns = Sequence[tuple[str, str]]
"""(what the user said, what the assistant answered), in order."""


class Template(Marked, Protocol):
    """Text around completions. Promise: opening + completion + reply + completion ... is the whole conversation, and
    only segments authored by the template hold its markers."""

    @property
    def reserved(self) -> tuple[str, ...]:
        """Strings that mark turns, tool responses and calls; no other author's text is read as one of them."""
        ...

    @property
    def calls(self) -> CallSyntax:
        """How calls are written under this template."""
        ...

    def opening(
        self, question: str, tools: Sequence[ToolSpec], system: str | None = None, earlier: Turns = ()
    ) -> tuple[Segment, ...]:
        """Everything before the first completion; `system` replaces the default system text. earlier: what a user
        said and the assistant answered before; a preamble stands before the question alone."""
        ...

    def reply(self, tool_texts: Sequence[str]) -> tuple[Segment, ...]:
        """Everything between a completion that ended with `stop` and the next one, answering calls."""
        ...

    def next_question(self, question: str) -> tuple[Segment, ...]:
        """The same, with another question."""
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
    """Text before the question in the user message."""
    opened: str
    """Tag opened before the assistant's text, on every assistant turn; may be empty."""
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

    def opening(
        self, question: str, tools: Sequence[ToolSpec], system: str | None = None, earlier: Turns = ()
    ) -> tuple[Segment, ...]:
        user = ours(f"{START}user\n{self.preamble}"), foreign(question), ours(f"{STOP}\n{self.assistant_header}")
        end = ours(f"{STOP}\n")
        before = (
            (ours(f"{START}user\n"), foreign(asked), end, ours(self.assistant_header), foreign(said), end)
            for asked, said in earlier
        )
        return *self._system_message(tools, system), *chain.from_iterable(before), *user

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


def prompt_of(template: Template, problem: Problem, tools: Sequence[ToolSpec]) -> tuple[Segment, ...]:
    """What the model reads first of a problem. Raises DataError for one that the template refuses."""
    try:
        return template.opening(problem.question, tools, problem.system, problem.earlier)
    except ConfigError as refusal:
        raise DataError(f"{problem.place}: {refusal}") from None


def tools_block(tools: Sequence[ToolSpec]) -> tuple[Segment, ...]:
    """The `# Tools` section of a system message: one JSON schema a line. Source: paper Fig. 3; wording ours."""
    schemas = "".join("\n" + json.dumps(tool_schema(spec), ensure_ascii=False) for spec in tools)
    return ours(TOOLS_HEAD), foreign(schemas), ours(TOOLS_TAIL)


PAPER = ChatMl(system=SYSTEM, preamble=PREAMBLE, opened="<reason>", lists_tools=True, markers=RESERVED)

# Only the stop marker must be one token. The other tags are ordinary text here, so that a BPE without word boundaries
# can learn each run of fixed text (tags, roles, line ends) as one token.
COMPACT = ChatMl(system=None, preamble="", opened="", lists_tools=False, markers=(STOP,))

CHAT = replace(PAPER, system="You are a helpful assistant.", preamble="", opened="")
"""The format of rows that bring their own tools: the paper's tools block and call syntax without its reasoning format.
A chat answer right after an open `<reason>`, or under a request for a `\\boxed{}`, would teach the model to ignore
both. Source: ours; the paper does not say how its non-reasoning rows were laid out."""


# The templates as Jinja chat templates, for `apply_chat_template` of a saved tokenizer; never used for the ids of a
# rollout; a test keeps both forms equal. Also the prefix that adds tools to a chat template without them.


def chat_template(*, system: str | None, preamble: str, header: str, lists_tools: bool) -> str:
    """Jinja source that renders messages (roles system, user, assistant, tool) as `ChatMl` of these fields does.

    The content of an assistant message is the model's text after the header (after the opened tag, in `paper`).
    """
    source = _CHATML.replace("LISTED", _TOOLS if lists_tools else "")
    words = {"HEAD": TOOLS_HEAD, "TAIL": TOOLS_TAIL, "END": f"{STOP}\n", "HEADER": header}
    words |= {"SYSTEM": f"{START}system\n", "USER": f"{START}user\n{preamble}", "REPLIED": f"{START}user"}
    return _filled(source, {"DEFAULT": "none" if system is None else json.dumps(system), **_literals(words)})


def with_tools(source: str, *, in_system: bool) -> str:
    """Extend a chat template with only the roles system, user and assistant to tools: their schemas go to the end of
    the system message (else the beginning of the first question), calls into the assistant's text, and replies into a
    user turn. Source: ours."""
    words = {"HEAD": TOOLS_HEAD.lstrip(), "TAIL": TOOLS_TAIL, "ROLE": "system" if in_system else "user"}
    return _filled(_PLAIN, _literals(words)) + "{{- '' }}" + source


def _literals(words: Mapping[str, str]) -> dict[str, str]:
    """Texts as string literals of Jinja."""
    return {name: json.dumps(text) for name, text in words.items()}


def _filled(source: str, words: Mapping[str, str]) -> str:
    """Jinja source in one line, with each word in capitals replaced."""
    line = "".join(part.strip() for part in source.splitlines())
    return re.sub(rf"\b(?:{'|'.join(words)})\b", lambda found: words[found[0]], line)


_TOOLS = r"""
    {%- if tools -%}
        {{- HEAD -}}
        {%- for tool in tools -%}{{- "\n" -}}{{- tool | tojson -}}{%- endfor -%}
        {{- TAIL -}}
    {%- endif -%}"""
_CHATML = r"""
{%- if messages and messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set system = DEFAULT -%}{%- set turns = messages -%}
{%- endif -%}
{%- if system is not none -%}
    {{- SYSTEM -}}{{- system -}}LISTED{{- END -}}
{%- endif -%}
{%- for message in turns -%}
    {%- if message.role == 'user' -%}
        {{- USER -}}{{- message.content -}}{{- END -}}
    {%- elif message.role == 'assistant' -%}
        {{- HEADER -}}{{- message.content or '' -}}
        {%- for call in message.tool_calls or [] -%}{%- set call = call.function or call -%}
            {%- if not loop.first or message.content -%}{{- "\n" -}}{%- endif -%}
            {{- "<tool_call>\n{\"name\": " -}}{{- call.name | tojson -}}{{- ", \"arguments\": " -}}
            {{- call.arguments if call.arguments is string else call.arguments | tojson -}}
            {{- "}\n</tool_call>" -}}
        {%- endfor -%}
        {{- END -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- REPLIED -}}{%- endif -%}
        {{- "\n<tool_response>\n" -}}{{- message.content -}}{{- "\n</tool_response>" -}}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- END -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- HEADER -}}{%- endif -%}
"""
_PLAIN = r"""
{%- set plain = namespace(turns=[], tools='', said='') -%}
{%- for tool in tools or [] -%}{%- set plain.tools = plain.tools + '\n' + (tool | tojson) -%}{%- endfor -%}
{%- if plain.tools -%}{%- set plain.tools = HEAD + plain.tools + TAIL -%}{%- endif -%}
{%- if plain.tools and ROLE == 'system' and messages[0].role != 'system' -%}
    {%- set plain.turns = [{'role': 'system', 'content': plain.tools}] -%}{%- set plain.tools = '' -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {%- set plain.said = plain.said + ('\n' if plain.said else '') + '<tool_response>\n' -%}
        {%- set plain.said = plain.said + message.content + '\n</tool_response>' -%}
        {%- if loop.last or loop.nextitem.role != 'tool' -%}
            {%- set plain.turns = plain.turns + [{'role': 'user', 'content': plain.said}] -%}
            {%- set plain.said = '' -%}
        {%- endif -%}
    {%- elif message.role == 'assistant' -%}
        {%- set plain.said = message.content or '' -%}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function or call -%}
            {%- set plain.said = plain.said + ('\n' if plain.said and plain.said[-1] != '\n' else '') -%}
            {%- set plain.said = plain.said + '<tool_call>\n{"name": ' + (call.name | tojson) + ', "arguments": ' -%}
            {%- set given = call.arguments if call.arguments is string else call.arguments | tojson -%}
            {%- set plain.said = plain.said + given + '}\n</tool_call>' -%}
        {%- endfor -%}
        {%- set plain.turns = plain.turns + [{'role': 'assistant', 'content': plain.said}] -%}
        {%- set plain.said = '' -%}
    {%- elif message.role == ROLE and plain.tools -%}
        {%- set parts = [message.content, plain.tools] if ROLE == 'system' else [plain.tools, message.content] -%}
        {%- set plain.turns = plain.turns + [{'role': ROLE, 'content': parts | join('\n\n')}] -%}
        {%- set plain.tools = '' -%}
    {%- else -%}
        {%- set plain.turns = plain.turns + [message] -%}
    {%- endif -%}
{%- endfor -%}
{%- set messages = plain.turns -%}
"""
