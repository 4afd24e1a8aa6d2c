"""The templates once more as Jinja chat templates, for `apply_chat_template` of a saved tokenizer; never used to make
the ids of a rollout, a test holds both forms equal. And what a chat template that knows no tools is begun with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from rocstar.dialogue.markup import START, STOP, TOOLS_HEAD, TOOLS_TAIL


def chat_template(*, system: str | None, preamble: str, header: str, lists_tools: bool) -> str:
    """Jinja source that renders messages (roles system, user, assistant, tool) as `ChatMl` of these fields does.

    The content of an assistant message is what the model wrote after the header (after the opened tag, in `paper`).
    """
    source = _CHATML.replace("LISTED", _TOOLS if lists_tools else "")
    words = {"HEAD": TOOLS_HEAD, "TAIL": TOOLS_TAIL, "END": f"{STOP}\n", "HEADER": header}
    words |= {"SYSTEM": f"{START}system\n", "USER": f"{START}user\n{preamble}", "REPLIED": f"{START}user"}
    return _filled(source, {"DEFAULT": "none" if system is None else json.dumps(system), **_literals(words)})


def with_tools(source: str, *, in_system: bool) -> str:
    """A chat template that knows roles system, user and assistant alone, for conversations with tools: their schemas
    stand at the end of the system message (else at the beginning of the first question), calls in the assistant's own
    text, and replies in a turn of the user. Source: ours."""
    words = {"HEAD": TOOLS_HEAD.lstrip(), "TAIL": TOOLS_TAIL, "ROLE": "system" if in_system else "user"}
    return _filled(_PLAIN, _literals(words)) + "{{- '' }}" + source


def _literals(words: Mapping[str, str]) -> dict[str, str]:
    """Texts as string literals of Jinja."""
    return {name: json.dumps(text) for name, text in words.items()}


def _filled(source: str, words: Mapping[str, str]) -> str:
    """Jinja source in one line, with what stands for each word in capitals."""
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
