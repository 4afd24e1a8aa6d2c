"""The templates once more as Jinja chat templates, for `apply_chat_template` of a saved tokenizer; never used to make
the ids of a rollout, a test holds both forms equal. And what a chat template that knows no tools is begun with."""

from __future__ import annotations

import json

from rocstar.dialogue.markup import START, STOP, TOOLS_HEAD, TOOLS_TAIL


def chat_template(*, system: str | None, preamble: str, header: str, lists_tools: bool) -> str:
    """Jinja source that renders messages (roles system, user, assistant, tool) as `ChatMl` of these fields does.

    The content of an assistant message is what the model wrote after the header (after the opened tag, in `paper`).
    """
    return (
        _system(system, lists_tools)
        + "{%- for message in turns -%}"
        + _user(preamble)
        + _assistant(_literal(header))
        + _tool()
        + "{%- endif -%}{%- endfor -%}"
        + f"{{%- if add_generation_prompt -%}}{{{{- {_literal(header)} -}}}}{{%- endif -%}}"
    )


def with_tools(source: str, *, in_system: bool) -> str:
    """A chat template that knows roles system, user and assistant alone, for conversations with tools: their schemas
    stand at the end of the system message (else at the beginning of the first question), calls in the assistant's own
    text, and replies in a turn of the user. Source: ours."""
    literals = {"HEAD": TOOLS_HEAD.lstrip(), "TAIL": TOOLS_TAIL, "ROLE": "system" if in_system else "user"}
    prelude = "".join(line.strip() for line in _PLAIN.splitlines())
    for name, text in literals.items():
        prelude = prelude.replace(name, _literal(text))
    return prelude + "{{- '' }}" + source


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


_literal = json.dumps
"""A text as a string literal of Jinja."""


def _emit(*texts: str) -> str:
    """Write literal text."""
    return "{{- " + _literal("".join(texts)) + " -}}"


def _system(system: str | None, lists_tools: bool) -> str:
    default = "none" if system is None else _literal(system)
    return (
        "{%- if messages and messages[0].role == 'system' -%}"
        "{%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}"
        f"{{%- else -%}}{{%- set system = {default} -%}}{{%- set turns = messages -%}}{{%- endif -%}}"
        "{%- if system is not none -%}"
        + _emit(START, "system\n")
        + "{{- system -}}"
        + (_tools() if lists_tools else "")
        + _emit(STOP, "\n")
        + "{%- endif -%}"
    )


def _tools() -> str:
    return (
        "{%- if tools -%}"
        + _emit(TOOLS_HEAD)
        + "{%- for tool in tools -%}"
        + _emit("\n")
        + "{{- tool | tojson -}}{%- endfor -%}"
        + _emit(TOOLS_TAIL)
        + "{%- endif -%}"
    )


def _user(preamble: str) -> str:
    return (
        "{%- if message.role == 'user' -%}"
        + _emit(START, "user\n", preamble)
        + "{{- message.content -}}"
        + _emit(STOP, "\n")
    )


def _assistant(header: str) -> str:
    return (
        "{%- elif message.role == 'assistant' -%}{{- "
        + header
        + " -}}{{- message.content or '' -}}"
        + "{%- for call in message.tool_calls or [] -%}{%- set call = call.function or call -%}"
        + "{%- if not loop.first or message.content -%}"
        + _emit("\n")
        + "{%- endif -%}"
        + _emit('<tool_call>\n{"name": ')
        + "{{- call.name | tojson -}}"
        + _emit(', "arguments": ')
        + "{{- call.arguments if call.arguments is string else call.arguments | tojson -}}"
        + _emit("}\n</tool_call>")
        + "{%- endfor -%}"
        + _emit(STOP, "\n")
    )


def _tool() -> str:
    return (
        "{%- elif message.role == 'tool' -%}"
        "{%- if loop.first or loop.previtem.role != 'tool' -%}"
        + _emit(START, "user")
        + "{%- endif -%}"
        + _emit("\n<tool_response>\n")
        + "{{- message.content -}}"
        + _emit("\n</tool_response>")
        + "{%- if loop.last or loop.nextitem.role != 'tool' -%}"
        + _emit(STOP, "\n")
        + "{%- endif -%}"
    )
