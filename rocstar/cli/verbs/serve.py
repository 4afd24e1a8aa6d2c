"""`rocstar serve` and `rocstar chat`: talking to a model that may use its tools."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated

import typer

from rocstar.cli.verbs.common import AsJson, Runs, Settings, quiet, stoppable
from rocstar.errors import ConfigError
from rocstar.support.exits import need

READ_BYTES = 65536
Model = Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="A model folder, a hub id, a run's name or `last`.")]
Context = Annotated[
    int | None, typer.Option(min=1, metavar="TOKENS", help="Of the longest conversation.", show_default=False)
]


def chat(
    model: Model,
    settings: Settings = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Ask once and stop; `-` reads stdin.", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of one answer, tool output included.", show_default=False)
    ] = None,
    context: Context = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Each question begins a new conversation.")] = False,
    as_json: AsJson = False,
    runs: Runs = Path("runs"),
) -> None:
    """Talk to a model that may use its tools; each answer is shown as it is written, and remembered."""
    from rocstar.parts.modelfolder import model_named

    need("train")
    model_named(model, runs)
    if prompt == "-":
        prompt = sys.stdin.buffer.read().decode("utf-8", "replace")
    if prompt is not None and not prompt.strip():
        raise ConfigError("the question is empty; give one with -p, or with -p - on the standard input")
    quiet()
    typed = Typed()
    if prompt is None:
        typed.ask("; the model is loaded meanwhile")
    with stoppable("stopped; nothing of the conversation is kept"):
        from rocstar.serving.chat import chat as carry_out

        carry_out(
            model=model,
            prompt=prompt,
            settings=settings or [],
            system=system,
            max_tokens=max_tokens,
            context=context,
            temperature=temperature,
            fresh=fresh,
            as_json=as_json,
            runs=runs,
            question=typed.question,
        )


class Typed:
    """Questions that a person types, a line of standard input each, read while other things are done: a model is loaded
    meanwhile, and Ctrl-C ends the wait."""

    def __init__(self) -> None:
        self._rest = b""
        self._asked: Future[str] | None = None

    def ask(self, remark: str = "") -> None:
        """Begin to read a question; `remark` is shown beside the request for it."""
        if sys.stdin.isatty():
            print(f"question (empty line ends{remark})> ", end="", file=sys.stderr, flush=True)
        self._asked = Future()
        threading.Thread(target=self._wait, args=(self._asked,), name="typed", daemon=True).start()

    async def question(self) -> str:
        """The question that was begun, or a new one; empty at the end of the input. Bytes that are no text are shown
        as question marks."""
        import asyncio  # heavy, and help pages need none of it

        if self._asked is None:
            self.ask()
        asked, self._asked = self._asked, None
        assert asked is not None
        return (await asyncio.wrap_future(asked)).strip()

    def _wait(self, asked: Future[str]) -> None:
        """Read the descriptor: a thread that waits in `sys.stdin` holds a lock that keeps the process from ending."""
        asked.set_running_or_notify_cancel()
        try:
            while b"\n" not in self._rest and (more := os.read(sys.stdin.fileno(), READ_BYTES)):
                self._rest += more
        except (OSError, ValueError) as error:  # it was closed
            asked.set_exception(error)
            return
        line, _, self._rest = self._rest.partition(b"\n")
        asked.set_result(line.decode("utf-8", "replace"))


def serve(
    model: Model,
    settings: Settings = None,
    host: Annotated[str, typer.Option(help="Another than loopback needs ROCSTAR_SERVE_TOKEN.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8701,
    rows: Annotated[int, typer.Option(min=1, help="Answers written at once; more wait.")] = 8,
    context: Context = None,
    runs: Runs = Path("runs"),
) -> None:
    """An OpenAI-compatible server: chat completions whose tool calls run in the sandbox here.

    Example: rocstar serve last --port 8701"""
    need("train")
    need("sandbox")
    from rocstar.parts.modelfolder import model_named

    model_named(model, runs)  # before anything that takes seconds is loaded
    quiet()
    from rocstar.serving.app import serve as carry_out

    with stoppable("stopped"):
        carry_out(
            model=model,
            settings=settings or [],
            host=host,
            port=port,
            rows=rows,
            context=context,
            runs=runs,
            say=lambda sentence: print(sentence, file=sys.stderr, flush=True),
        )
