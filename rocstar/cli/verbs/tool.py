"""`rocstar tool try`: a tool alone, called as the model calls it. Nothing here loads torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocstar.cli.verbs.common import STYLE, AsJson, print_json, write
from rocstar.support.exits import FAILED, OK

if TYPE_CHECKING:
    from rocstar.parts.build import AttemptParts
    from rocstar.protocols import Tool
    from rocstar.types import ToolCall

READ = ("sandbox.", "rollout.tool_name", "rollout.feedback", "run.modules")
"""The beginnings of the keys that a tool alone obeys."""

app = typer.Typer(**STYLE, help="Tools of the model.")


@app.command(name="try")
def try_out(
    name: Annotated[
        str, typer.Argument(metavar="TOOL", help="As in sandbox.tools: python, notebook, MODULE:NAME, mcp:COMMAND.")
    ],
    calls: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JSON]...", help="Arguments of a call, or a file of them, one a line; then settings."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the tool's spec for the model, and the model's text of each call; the calls are those of one attempt.

    A server of several tools is called with {"name": ..., "arguments": ...}.

    Example: rocstar tool try tools.py:grams_in '{"unit": "blem"}'"""
    import asyncio
    import json

    from rocstar.config.recipe import changed, refuse_others
    from rocstar.config.sections import Recipe
    from rocstar.parts.build import AttemptParts

    given = calls or []
    settings = [text for text in given if not text.lstrip().startswith("{") and "=" in text]
    asked = [line for text in given if text not in settings for line in _calls_in(text)]
    refuse_others(settings, READ, """a tool alone takes arguments as JSON, such as '{"a": 12}', and""")
    parts = AttemptParts(changed(Recipe(), [f"sandbox.tools={[name]!r}", *settings], {}))
    specs, answers = asyncio.run(_tried(parts, name, asked))
    if as_json:
        print_json({"tools": specs, "calls": answers})
    else:
        for spec in specs:
            write(sys.stdout, f"spec for the model: {json.dumps(spec, ensure_ascii=False)}\n")
        for one in answers:
            write(sys.stdout, f"\n> {one['call']}\n{one['reply']}\n[{one['status']}, {one['seconds']:.3f} s]\n")
    raise typer.Exit(FAILED if any(one["status"] != "ok" for one in answers) else OK)


def _calls_in(text: str) -> list[str]:
    """The calls themselves, or those of a file. Raises ConfigError."""
    from pathlib import Path

    from rocstar.errors import ConfigError

    if text.lstrip().startswith("{"):
        return [text]
    if not Path(text).is_file():
        raise ConfigError(f'{text!r} is neither the arguments of a call, as in \'{{"code": "1"}}\', nor a file of such')
    return [line for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip()]


async def _tried(parts: AttemptParts, name: str, asked: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The tools' schemas, and what came of each call. Raises ConfigError, Unavailable."""
    from contextlib import nullcontext

    from rocstar.cluster import started_sandbox
    from rocstar.protocols import tool_schema
    from rocstar.tools.choose import BUILT_IN

    runs_programs = name in BUILT_IN and asked
    with started_sandbox(parts.recipe.sandbox) if runs_programs else nullcontext() as sandbox:
        tools = parts.tools(sandbox)
        own, answers = tools.own(), []
        named: dict[str, Tool] = {tool.spec.name: tool for tool in (*own, *tools.shared)}
        for number, text in enumerate(asked):
            tool, call = _call(named, text, number)
            result = await tool.run(call)
            fields = {"status": str(result.status), "seconds": result.run_seconds, "reply": parts.feedback(result)}
            answers.append({"call": text, **fields})
        for one in own:
            await one.close()
    return [tool_schema(spec) for spec in tools.specs], answers


def _call(named: dict[str, Tool], text: str, number: int) -> tuple[Tool, ToolCall]:
    """As the model would write it, whether it is JSON or not. Raises ConfigError for a tool that is not there."""
    from rocstar.dialogue.calls import CLOSE, HERMES, OPEN
    from rocstar.errors import ConfigError

    name = next(iter(named))
    whole = text if len(named) > 1 else f'{{"name": "{name}", "arguments": {text}}}'
    call = HERMES.parse(f"{OPEN}\n{whole}\n{CLOSE}", number)[0]
    if call.parse_error is None and call.tool not in named:
        raise ConfigError(f"{text} calls {call.tool!r}; the server's tools are {', '.join(named)}")
    return named.get(call.tool, named[name]), call
