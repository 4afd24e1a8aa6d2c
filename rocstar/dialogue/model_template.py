"""A model's own Jinja chat template as a Template: found in its folder, and rendered as `apply_chat_template` of
transformers does, in a sandbox, without loading transformers (which would load torch). It is rendered with marks around
text that is not the template's, then split at the marks. Text between two completions is taken from a rendered example
conversation. One thing differs from transformers: `strftime_now` always gives DAY, so that a prompt is the same on
every day of a run.

Checked when loaded: tools are shown, calls have a supported syntax, and earlier turns do not change when the
conversation continues."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Block, CallBlock, EnvironmentAttribute, ExprStmt, For, Macro, Node, Or
from jinja2.nodes import Template as Parsed
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rocstar.dialogue.calls import HERMES, LLAMA, XML, CallSyntax
from rocstar.dialogue.marked_calls import ID, MARKED, turn_of
from rocstar.dialogue.segments import Author, Segment, is_harmless, ours, text_of
from rocstar.dialogue.template import MODEL_PREAMBLE, Turns, with_tools
from rocstar.dialogue.tokenizer_files import ModelFiles, read_model_files
from rocstar.errors import ConfigError, first_line
from rocstar.protocols import ToolSpec, tool_schema

DAY = datetime(2024, 7, 26)  # the day that Llama 3's own templates fall back to
INSTEAD = (
    "use a template of your own (rollout.template = 'package.module:name', docs/plugins.md), or 'paper', whose markers "
    "`rocstar model add-tokens` gives the model"
)
SEEN = "What is this?"
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
OURS = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")
"""Variables of a template that nobody else may set."""
EMPTY: Mapping[str, Any] = MappingProxyType({})
RENDERING = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
             MemoryError, SyntaxError)  # fmt: skip
"""What a template may raise: Jinja limits no lengths, its own limits are OverflowError, and Python nests 20 loops."""
MOST_TURNS = 1_000_000  # of all loops, macros and blocks of one rendering: some seconds of CPU
MOST_CHARACTERS = 10**8  # of one rendering


class ChatSource:
    """A chat template, compiled."""

    def __init__(self, source: str, files: ModelFiles, place: str, options: Mapping[str, Any]) -> None:
        """`place` names the template in messages; options: variables of its own, such as enable_thinking. Raises
        ConfigError."""
        self._place, self._files, self._options = place, files, options
        self.text = source
        self._tokens = {name: text for name in SPECIAL if (text := files.token(name))}
        self.mentions_thinking = "</think>" in source
        try:
            self._environment = _environment()
            self._compiled = self._environment.from_string(source)
        except RENDERING as error:
            raise ConfigError(f"{place} is no valid Jinja template: {str(error).rstrip('.')}.") from None
        free = find_undeclared_variables(self._environment.parse(source)) - {*OURS, *self._tokens} if options else set()
        if unknown := next((name for name in options if name not in free), None):
            told = f"it has {', '.join(sorted(free))}" if free else "it has none"
            raise ConfigError(f"rollout.template_options.{unknown}: no such variable of {place}; {told}.")

    def taught_tools(self) -> ChatSource:
        """The template extended to tools, which it does not support. Raises ConfigError."""
        example = [{"role": "system", "content": SEEN}, {"role": "user", "content": "Q"}]
        try:
            in_system = SEEN in self.render(example, (), header=True)
        except ConfigError:
            in_system = False
        return ChatSource(with_tools(self.text, in_system=in_system), self._files, self._place, self._options)

    def render(self, messages: Sequence[Any], tools: Sequence[Any], *, header: bool) -> str:
        """The conversation as text; `header` adds the text before the next completion. Arguments of calls are objects,
        or JSON for a template that takes only that (DeepSeek's). Raises ConfigError."""
        shown = {"tools": list(tools) or None, "add_generation_prompt": header, **self._tokens, **self._options}
        try:
            return self._text(messages, shown)
        except RENDERING as error:
            with suppress(*RENDERING):
                return self._text(_with_json(messages), shown)
            raise ConfigError(
                f"{self._place} can't render such a conversation: {first_line(error).rstrip('.')}."
            ) from None

    def _text(self, messages: Sequence[Any], shown: Mapping[str, Any]) -> str:
        """Raises one of RENDERING, also for a template that goes on and on: it may come from anybody."""
        parts, size = [], 0
        self._environment.turns = MOST_TURNS
        for part in self._compiled.generate(messages=messages, **shown):
            parts.append(part)
            if (size := size + len(part)) > MOST_CHARACTERS:
                raise TemplateError(f"it writes more than {MOST_CHARACTERS} characters")
        return "".join(parts)


def _with_json(messages: Sequence[Any]) -> list[Any]:
    """The same messages, with the arguments of calls as JSON."""
    found: list[Any] = json.loads(json.dumps(messages))
    for call in (call for message in found for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return found


def find_chat_source(
    files: ModelFiles, folder: Path, *, with_tools: bool, options: Mapping[str, Any] = EMPTY
) -> ChatSource:
    """The template of chat_template.jinja, else that of tokenizer_config.json; of several named ones `tool_use` with
    tools, else `default`, as in transformers. Raises ConfigError."""
    source: Any = files.chat_template if files.chat_template is not None else files.tokenizer.get("chat_template")
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source if isinstance(one, Mapping)}
        source = named.get("tool_use") if with_tools and "tool_use" in named else named.get("default")
    if not isinstance(source, str) or not source:
        raise ConfigError(f"{folder} has no chat template; use rollout.template 'paper' or 'compact'.")
    return ChatSource(source, files, f"the chat template of {folder}", options)


class _Bounded(ImmutableSandboxedEnvironment):
    """Counts the turns of loops, macros and blocks, and multiplies nothing to a great length. Not covered: texts that
    grow by joining or filling up, and filters that go through a long list in each turn."""

    intercepted_binops = frozenset(("*", "**"))
    turns = 0
    """That are left."""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        first, second = (len(one) if hasattr(one, "__len__") else abs(one) for one in (left, right))
        if first * second > MOST_CHARACTERS:
            raise TemplateError(f"it computes something too large with {operator}")
        return super().call_binop(context, operator, left, right)

    @property
    def turn(self) -> None:
        """Evaluated in each turn."""
        self.turns -= 1
        if self.turns < 0:
            raise TemplateError(f"its loops go round more than {MOST_TURNS} times")

    def _parse(self, *source: Any) -> Parsed:
        tree = super()._parse(*source)
        looping: Any = tree.find_all((For, Macro, CallBlock, Block))
        for node in looping:
            turn = EnvironmentAttribute("turn", lineno=node.lineno)
            node.body.insert(0, ExprStmt(turn, lineno=node.lineno))
            if getattr(node, "test", None):  # of `for ... if`: what it leaves out is a turn, too
                node.test = Or(turn, node.test, lineno=node.lineno)
        return tree


def _environment() -> _Bounded:
    environment = _Bounded(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = DAY.strftime
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own filter, no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for loss masks; here its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the form Jinja asks for

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# Noncharacters, which exchanged text never contains. Marks surround foreign text, PROBE replaces a completion.
LEFT, RIGHT, PROBE = "\ufdd0", "\ufdd1", "\ufdd2"
_CONTROL = re.compile(f"[{LEFT}{RIGHT}{PROBE}]")
_TAG = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|</?\w+>|\[/?[A-Z_]+\]")
_MARKED = re.compile(f"{LEFT}((?:(?:{_TAG.pattern})\\s*{LEFT})*[^{LEFT}{RIGHT}]*){RIGHT}")
_STOP = re.compile(r"<[^<>\s]+>|\S+")
_USER = {"role": "user", "content": "Q"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTemplate:
    """See `load_model_template`."""

    source: ChatSource
    schemas: tuple[Mapping[str, Any], ...]
    """Of the recipe's tools, shown in the example conversations that replies are cut from."""
    stop: str
    answer_stop: str
    reserved: tuple[str, ...]
    calls: CallSyntax
    preamble: str
    """Text before each question in the user message."""

    taught: bool = False
    """Whether the model's template does not support tools and `source` is our extension of it."""

    @property
    def jinja(self) -> str | None:
        """The tokenizer keeps its template, unless it does not support tools."""
        return self.source.text if self.taught else None

    def opening(
        self, question: str, tools: Sequence[ToolSpec], system: str | None = None, earlier: Turns = ()
    ) -> tuple[Segment, ...]:
        messages = [] if system is None else [{"role": "system", "content": _marked(system)}]
        for asked, said in earlier:
            messages.append({"role": "user", "content": _marked(asked)})
            messages.append({"role": "assistant", "content": _marked_turn(said)})
        schemas = [_marked_strings(tool_schema(spec)) for spec in tools]
        return _segments(self.source.render([*messages, self._user(question)], schemas, header=True))

    def reply(self, tool_texts: Sequence[str]) -> tuple[Segment, ...]:
        name = self.schemas[0]["function"]["name"] if self.schemas else "python"
        answers = [{"role": "tool", "name": name, "tool_call_id": ID, "content": _marked(text)} for text in tool_texts]
        try:
            return self._after(self.stop, [_USER, _calling(len(answers), name), *answers])
        except ConfigError:  # Llama's allows a single call a turn, however many answers follow
            return self._after(self.stop, [_USER, _calling(1, name), *answers])

    def next_question(self, question: str) -> tuple[Segment, ...]:
        return self._after(self.answer_stop, [_USER, {"role": "assistant", "content": PROBE}, self._user(question)])

    def chat(self) -> ModelTemplate:
        return replace(self, preamble="")

    def _user(self, question: str) -> dict[str, str]:
        return {"role": "user", "content": self.preamble + _marked(question)}

    def _after(self, stop: str, messages: Sequence[Any]) -> tuple[Segment, ...]:
        """The rendered text after the stop marker of the completion with the last PROBE."""
        text = self.source.render(messages, self.schemas, header=True)
        end = text.find(stop, text.rfind(PROBE))
        if PROBE not in text or end < 0:
            raise ConfigError(
                f"the model's chat template does not end what the assistant wrote with {stop}, so "
                "no question can follow; ask it in a conversation of its own."
            )
        return _segments(text[end + len(stop) :])


def load_model_template(
    folder: Path,
    tools: Sequence[ToolSpec],
    *,
    preamble: str | None = None,
    options: Mapping[str, Any] = EMPTY,
    syntaxes: Sequence[CallSyntax] = (),
) -> ModelTemplate:
    """The chat template of the model in `folder`, for conversations with `tools`. `preamble` None asks for the answer
    in a `\\boxed{}`, which is where it is read. options: variables of the template. syntaxes: of calls, beside ours. A
    template without support for tools is extended (`with_tools`). Raises ConfigError if it writes calls in an
    unsupported syntax, or rewrites text before a reply."""
    source = find_chat_source(read_model_files(folder), folder, with_tools=bool(tools), options=options)
    stop = _answer_stop(source, folder)
    template = ModelTemplate(
        source=source,
        schemas=tuple(tool_schema(spec) for spec in tools),
        stop=stop,
        answer_stop=stop,
        reserved=(stop,),
        calls=HERMES,
        preamble=MODEL_PREAMBLE if preamble is None else preamble,
    )
    if tools and not _shows(template, tools):
        template = replace(template, source=source.taught_tools(), taught=True)
    if tools:
        if not _shows(template, tools):
            raise ConfigError(
                f"the chat template of {folder} does not show tools; {INSTEAD}, or no tools at all "
                "(rollout.max_turns = 1)."
            )
        calls, stop = _call_syntax(template.source, folder, syntaxes)
        template = replace(template, calls=calls, stop=stop)
        if len(tools) > 1 and tools[0].name in text_of(template.reply(["1"])):
            raise ConfigError(
                f"the chat template of {folder} names each result's tool, so give only one, or {INSTEAD}."
            )
        _check_history(template, tools, folder)
    return replace(template, reserved=_reserved(template))


def _shows(template: ModelTemplate, tools: Sequence[ToolSpec]) -> bool:
    return text_of(template.opening("Q", tools)) != text_of(template.opening("Q", ()))


def _answer_stop(source: ChatSource, folder: Path) -> str:
    """What follows an answer; if nothing does (GLM), what begins the next question."""
    answer = {"role": "assistant", "content": PROBE}
    texts = (source.render([_USER, answer, *more], (), header=False) for more in ([], [_USER]))
    found = next(filter(None, (_STOP.search(text, text.rfind(PROBE) + 1) for text in texts if PROBE in text)), None)
    if not found:
        raise ConfigError(f"the chat template of {folder} writes nothing after an assistant turn that would end it.")
    return found[0]


def _call_syntax(source: ChatSource, folder: Path, own: Sequence[CallSyntax]) -> tuple[CallSyntax, str]:
    """The syntax of calls, and what follows a turn with one; if nothing does (GLM), what begins the results."""
    text = source.render([_USER, _calling(1, "probe", "1"), *_answers(1)], (), header=False)
    for syntax in (*own, HERMES, LLAMA, XML, *MARKED):
        if stop := _STOP.search(text.partition(text_of(syntax.render("probe", {"code": "1"})))[2]):
            return syntax, stop[0]
    raise ConfigError(
        f"the chat template of {folder} writes a tool call as {text[-100:]!r}, which is in no syntax that is "
        f"read here (docs/dialogue.md); {INSTEAD}."
    )


def _check_history(template: ModelTemplate, tools: Sequence[ToolSpec], folder: Path) -> None:
    """Two rounds of calls, some of them parallel, with and without thoughts: opening, completions and replies joined
    must equal the template's rendering of the whole conversation."""
    opening = text_of(template.opening("Q", tools))
    for thought in _thoughts(template, tools):
        for width in (1, 2):
            if template.stop in text_of(turn_of(template.calls, (), [("python", {"code": "1"})] * width)):
                continue  # a call ends the turn
            reply = template.stop + text_of(template.reply(["1"] * width))
            call = text_of(template.calls.render("python", {"code": "1"}))
            tried = [
                thought + between * bool(thought and not thought.endswith("\n")) + between.join([call] * width)
                for between in ("\n", "")
            ]
            tried += _written(template, opening, thought, width)
            for completion in tried:
                texts = _rendered(template, thought, completion, width)
                # Older templates of Mistral's have no place for text before calls: it stays as it was sampled.
                lacks_text = thought == "So." and len(texts) == 1 and thought not in texts[0]
                if lacks_text or opening + (completion + reply) * 2 in texts:
                    break
            else:
                raise ConfigError(
                    f"the chat template of {folder} rewrites earlier turns when a conversation goes on (after "
                    f"{completion[:40]!r}), so tokens already sampled would change; {INSTEAD}."
                )


def _written(template: ModelTemplate, opening: str, thought: str, width: int) -> list[str]:
    """The completion with this thought and so many calls as the template itself writes it, if only blanks and an empty
    `<think>` differ."""
    text = next(iter(_rendered(template, thought, "", width)), "")
    completion = text[len(opening) : text.find(template.stop, len(opening))]
    said = template.calls.strip(completion).replace("<think></think>", "").split()
    same = text.startswith(opening) and "".join(said) == "".join(thought.split())
    return [completion] if same and len(template.calls.parse(completion)) == width else []


def _thoughts(template: ModelTemplate, tools: Sequence[ToolSpec]) -> list[str]:
    """Possible beginnings of a completion: no thoughts if the opening holds empty ones, their end if it opens them."""
    opening = text_of(template.opening("Q", tools)).rstrip()
    if opening.endswith("<think>"):
        return ["So.\n</think>\n\n"]
    thinks = template.source.mentions_thinking and not opening.endswith("</think>")
    return ["", "So.", *(["<think>\nSo.\n</think>\n\n"] if thinks else [])]


def _rendered(template: ModelTemplate, thought: str, completion: str, width: int) -> list[str]:
    """The conversation as the template renders it, with calls as objects and with calls as text; only the latter if it
    refuses so many at once."""
    as_objects = _calling(width, code="1") | {"content": thought}
    answers = _answers(width)
    texts = []
    for assistant in (as_objects, {"role": "assistant", "content": completion}):
        question = {"role": "user", "content": f"{template.preamble}Q"}
        messages = [question, assistant, *answers, assistant, *answers]
        try:
            texts.append(template.source.render(messages, template.schemas, header=True))
        except ConfigError:
            continue
    return texts


def _reserved(template: ModelTemplate) -> tuple[str, ...]:
    """Tags that the template writes around questions, replies and calls; not those that open the next completion."""
    plain = [{"role": "assistant", "content": "A"}, _USER]
    conversation = [_USER, *([_calling(1), *_answers(1)] if template.schemas else plain)]
    own = template.source.render(conversation, (), header=False)
    return tuple(dict.fromkeys((template.stop, template.answer_stop, *template.calls.reserved, *_TAG.findall(own))))


def _calling(count: int, name: str = "python", code: str = PROBE) -> dict[str, Any]:
    function = {"name": name, "arguments": {"code": code}}
    call = {"id": ID, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call] * count}


def _answers(count: int) -> list[dict[str, Any]]:
    return [{"role": "tool", "name": "python", "tool_call_id": ID, "content": "1"}] * count


def _marked(text: str) -> str:
    """Foreign text between marks; blanks at its ends stay outside, so that a template that trims them still does."""
    clean = _CONTROL.sub("\ufffd", text)
    inner = clean.strip()
    return clean.replace(inner, f"{LEFT}{inner}{RIGHT}", 1) if inner else clean


def _marked_turn(text: str) -> str:
    """Foreign text of an earlier turn, likewise, and each part of it between tags: what a template leaves of it that
    drops all up to `</think>` keeps its marks."""
    parts = re.split(f"({_TAG.pattern})", _CONTROL.sub("\ufffd", text))
    marked = "".join(LEFT + part if place % 2 else _marked(part) for place, part in enumerate(parts))
    return re.sub(f"{LEFT}(?:{_TAG.pattern})(?=\\s*\\Z)", f"\\g<0>{RIGHT}", marked)


def _marked_strings(value: Any) -> Any:
    if isinstance(value, str):
        return value if is_harmless(value) else _marked(value)
    if isinstance(value, dict):
        return {_marked_strings(key): _marked_strings(inner) for key, inner in value.items()}
    return [_marked_strings(inner) for inner in value] if isinstance(value, list) else value


def _segments(text: str) -> tuple[Segment, ...]:
    parts = [_CONTROL.sub("", part) for part in _MARKED.split(text)]
    return tuple(Segment(part, Author.OTHERS) if place % 2 else ours(part) for place, part in enumerate(parts) if part)
