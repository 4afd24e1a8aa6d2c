"""The tools a recipe names: Python ones built in, functions and classes of the user's own, those of MCP servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocstar.errors import ConfigError
from rocstar.protocols import AttemptTool, Tool, ToolSpec
from rocstar.sandbox.call import Limits
from rocstar.support.exits import need
from rocstar.support.plugins import check_call, is_reference, load
from rocstar.tools.function import FunctionTool
from rocstar.tools.notebook import NotebookTool
from rocstar.tools.python import PythonTool

if TYPE_CHECKING:
    from rocstar.sandbox.client import SandboxClient


BUILT_IN: Mapping[str, Callable[..., Tool]] = {"python": PythonTool, "notebook": partial(NotebookTool, waits=True)}
"""By their names in a recipe: built from (sandbox, limits, name=...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The model's tools, in the recipe's order."""

    shared: tuple[Tool, ...]
    """Stateless tools: one instance of each serves all attempts."""
    makers: tuple[Callable[[], Sequence[AttemptTool]], ...]
    """Makers of the tools that each attempt owns and closes."""
    specs: tuple[ToolSpec, ...]

    def own(self) -> tuple[AttemptTool, ...]:
        """Fresh instances for one attempt."""
        return tuple(tool for make in self.makers for tool in make())


NO_TOOLS = Tools(shared=(), makers=(), specs=())


def make_tools(
    names: Sequence[str],
    sandbox: SandboxClient,
    limits: Limits,
    *,
    tool_name: str,
    folders: Sequence[Path | str] = (),
) -> Tools:
    """The tools of `sandbox.tools`.

    Those of BUILT_IN are called `tool_name`. `package.module:name` is a typed function with a docstring, or a class
    that implements `Tool`; it is created without arguments, and one with `close` is created for each attempt (creation
    must be cheap: one is created to read its spec). `mcp:` and `mcp-shared:` name the tools of a server
    (`rocstar.tools.mcp`). limits: of each program, and of each call of a function or a server. Raises ConfigError: no
    such name, not a tool, or two tools with a common name; Unavailable: a server that can't be reached."""
    tools: list[tuple[str, Tool]] = []
    makers: dict[str, Callable[[], Sequence[AttemptTool]]] = {}
    for name in names:
        maker = _maker(name, sandbox, limits, tool_name, folders)
        for tool in maker():
            for other, taken in tools:
                theirs, ours = taken.spec, tool.spec
                if ours.name in (theirs.name, *theirs.aliases) or theirs.name in ours.aliases:
                    raise ConfigError(
                        f"sandbox.tools: {other!r} and {name!r} both answer to the name {ours.name!r}; rename or leave "
                        "out one"
                    )
            tools.append((name, tool))
            if hasattr(tool, "close"):
                makers[name] = maker
    return Tools(
        shared=tuple(tool for name, tool in tools if name not in makers),
        makers=tuple(makers.values()),
        specs=tuple(tool.spec for _, tool in tools),
    )


def _maker(
    name: str, sandbox: SandboxClient, limits: Limits, tool_name: str, folders: Sequence[Path | str]
) -> Callable[[], Any]:
    if name in BUILT_IN:
        return lambda: [BUILT_IN[name](sandbox, limits, name=tool_name)]
    if name.startswith(("mcp:", "mcp-shared:")):
        need("mcp")
        from rocstar.tools.mcp import mcp_tools

        return mcp_tools(name, limits)
    if is_reference(name):
        return _own(name, load(name, folders=folders, setting="sandbox.tools"), limits)
    close = [f"; did you mean {near!r}?" for near in get_close_matches(name, BUILT_IN, n=1)] or ["."]
    raise ConfigError(
        f"sandbox.tools names {name!r}, which is none of {', '.join(BUILT_IN)}{close[0]} A tool of your own is written "
        "package.module:name or file.py:name, an MCP server mcp:COMMAND or mcp:URL"
    )


def _own(name: str, found: Any, limits: Limits) -> Callable[[], Any]:
    setting = f"sandbox.tools = {name!r}"
    if not inspect.isclass(found):
        seconds, most = limits.wall_seconds, limits.output_bytes
        return lambda: [FunctionTool(found, timeout_seconds=seconds, output_bytes=most, said=setting)]
    check_call(found, (), said=setting)
    missing = [part for part in ("spec", "run") if not hasattr(found, part)]
    if missing:
        raise ConfigError(f"{setting} has no {missing[0]}; give it `spec` and `run` (rocstar.protocols.Tool)")
    return lambda: [found()]
