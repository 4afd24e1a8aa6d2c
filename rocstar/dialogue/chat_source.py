"""A model's own Jinja chat template: found in its folder and rendered as `apply_chat_template` of transformers does,
in a sandbox, without loading transformers (which would load torch).

One thing differs: `strftime_now` always gives DAY, so that a prompt is the same on every day of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template as Compiled
from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rocstar.dialogue.jinja import with_tools
from rocstar.dialogue.tokenizer_files import ModelFiles
from rocstar.errors import ConfigError

DAY = datetime(2024, 7, 26)  # the day that Llama 3's own templates fall back to
SEEN = "What is this?"
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatSource:
    """A chat template, compiled."""

    def __init__(self, source: str, files: ModelFiles, place: str) -> None:
        """`place` names the template in messages. Raises ConfigError."""
        self._place, self._files = place, files
        self.text = source
        self._tokens = {name: text for name in SPECIAL if (text := files.token(name))}
        self.mentions_thinking = "</think>" in source
        try:
            self._compiled = _compiled(source)
        except TemplateError as error:
            raise ConfigError(f"{place} is no valid Jinja template: {error}.") from None

    def taught_tools(self) -> ChatSource:
        """The same for conversations with tools, where it knows none. Raises ConfigError."""
        asked = [{"role": "system", "content": SEEN}, {"role": "user", "content": "Q"}]
        try:
            in_system = SEEN in self.render(asked, (), header=True)
        except ConfigError:
            in_system = False
        return ChatSource(with_tools(self.text, in_system=in_system), self._files, self._place)

    def render(self, messages: Sequence[Any], tools: Sequence[Any], *, header: bool) -> str:
        """The conversation as text; `header` adds what stands before the next completion. Raises ConfigError."""
        try:
            return self._compiled.render(
                messages=messages, tools=list(tools) or None, add_generation_prompt=header, **self._tokens
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{self._place} can't render such a conversation: {error}.") from None


def find_chat_source(files: ModelFiles, folder: Path, *, with_tools: bool) -> ChatSource:
    """The template of chat_template.jinja, else that of tokenizer_config.json; of several named ones `tool_use` where
    there are tools, else `default`, as transformers chooses. Raises ConfigError."""
    source: Any = files.chat_template if files.chat_template is not None else files.tokenizer.get("chat_template")
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, Mapping)}
        source = named.get("tool_use") if with_tools and "tool_use" in named else named.get("default")
    if not isinstance(source, str) or not source:
        raise ConfigError(f"{folder} has no chat template; use rollout.template 'paper' or 'compact'.")
    return ChatSource(source, files, f"the chat template of {folder}")


def _compiled(source: str) -> Compiled:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = DAY.strftime
    return environment.from_string(source)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter, no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for loss masks; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the form Jinja asks for

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
