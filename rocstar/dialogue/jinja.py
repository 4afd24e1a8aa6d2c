"""The templates once more as Jinja chat templates, for `apply_chat_template` of a saved tokenizer. Never used to make
the ids of a rollout; a test holds both forms equal."""

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


def _literal(text: str) -> str:
    """A Jinja string literal."""
    return json.dumps(text)


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
