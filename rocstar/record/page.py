"""Attempts as one HTML page that needs nothing else: no script, no network, no other file. What a model wrote stands in
it as text; characters that steer the reader's screen are spelled out."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import IO, Any

TEXT_CHARACTERS = 200_000  # of one message; a page must open
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
details { border: 1px solid #8886; border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem }
summary { cursor: pointer; overflow-wrap: anywhere }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; padding: .5rem; background: #8881 }
.right { color: #087443 } .wrong { color: #b42318 } .undecided { color: #888 }
.role { font-size: .8em; color: #888 } .call { border-left: 3px solid #36c } .tool { border-left: 3px solid #a60 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; font-size: .85em }
dd { margin: 0; overflow-wrap: anywhere }
@media (prefers-color-scheme: dark) { .right { color: #4cc38a } .wrong { color: #ff8b7f } }
"""
# The page forbids loading and running anything, in case a text ever breaks out of its place.
HEAD = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{STYLE}</style>
"""

Attempt = tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]
"""(what became of it, its messages)"""


def write_page(file: IO[str], title: str, attempts: Iterable[Attempt]) -> int:
    """Write the page; returns how many attempts it shows. Raises OSError."""
    file.write(f"{HEAD}<title>{text(title)}</title>\n<h1>{text(title)}</h1>\n")
    count = 0
    for facts, messages in attempts:
        file.write(_attempt(facts, messages))
        count += 1
    file.write(f"<p>{count} attempts</p></html>\n")
    return count


def text(value: Any) -> str:
    """Any text as text: nothing of it is markup."""
    return escape(visible(str(value)))


def visible(value: str) -> str:
    """Control and direction characters spelled out, so that none of them steers a screen."""
    return "".join(_shown(character) for character in value)


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs"):
        return character
    return f"\\u{ord(character):04x}"


def _attempt(facts: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    verdict = facts["verdict"] or "undecided"
    head = f"step {facts['step']}, attempt {facts['index']}, {facts['reason'] or ''}: {messages[0]['content'][:120]}"
    known = "".join(f"<dt>{text(key)}<dd>{text(value)}" for key, value in facts.items() if value is not None)
    said = "".join(_message(message) for message in messages)
    return (
        f'<details><summary><b class="{text(verdict)}">{text(verdict)}</b> {text(head)}</summary>\n'
        f"{said}<dl>{known}</dl></details>\n"
    )


def _message(message: Mapping[str, Any]) -> str:
    role = str(message["role"])
    parts = [_block(role, role, message["content"])] if message["content"] else []
    for call in message.get("tool_calls", ()):
        parts.append(_block("call", f"calls {call['function']['name']}", _program(call["function"]["arguments"])))
    return "".join(parts)


def _program(arguments: str) -> str:
    """The program where the call holds one, else the arguments."""
    found = json.loads(arguments)
    code = found.get("code") if isinstance(found, dict) else None
    return code if isinstance(code, str) else arguments


def _block(kind: str, label: str, content: str) -> str:
    left = len(content) - TEXT_CHARACTERS
    rest = f"\n... {left} characters more" if left > 0 else ""
    body = text(content[:TEXT_CHARACTERS] + rest)
    return f'<div class="role">{text(label)}</div><pre class="{text(kind)}">{body}</pre>\n'
