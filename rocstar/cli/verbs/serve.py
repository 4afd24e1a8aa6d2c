"""`rocstar serve` and `rocstar chat`: talking to a model that may use its tools."""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from dataclasses import replace

from rocstar.cli.verbs.common import options_of, stoppable
from rocstar.errors import ConfigError
from rocstar.serving.spec import ChatSpec, ServeSpec
from rocstar.support.exits import need

READ_BYTES = 65536


@options_of(ChatSpec)
def chat(spec: ChatSpec) -> None:
    """Talk to a model that may use its tools; each answer is shown as it is written, and remembered."""
    from rocstar.parts.modelfolder import model_named

    need("train")
    model_named(spec.model, spec.runs)
    if spec.prompt == "-":
        spec = replace(spec, prompt=sys.stdin.buffer.read().decode("utf-8", "replace"))
    spec = replace(spec, prompt=_decoded(spec.prompt), system=_decoded(spec.system))
    if spec.prompt is not None and not spec.prompt.strip():
        raise ConfigError("the question is empty; give one with -p, or with -p - on the standard input")
    typed = Typed()
    if spec.prompt is None:
        typed.ask("; the model is loaded meanwhile")
    with stoppable("stopped; nothing of the conversation is kept"):
        from rocstar.serving.chat import chat as carry_out

        carry_out(spec, typed.question)


def _decoded(typed: str | None) -> str | None:
    """A text of the command line, with question marks for bytes that are no text, as in questions that are read."""
    return typed and typed.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


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
        from rocstar.support.plugins import run_in_daemon_thread

        self._asked = run_in_daemon_thread(self._line, "typed")

    async def question(self) -> str:
        """The question that was begun, or a new one; empty at the end of the input. Bytes that are no text are shown
        as question marks."""
        import asyncio  # heavy, and help pages need none of it

        if self._asked is None:
            self.ask()
        asked, self._asked = self._asked, None
        assert asked is not None
        return (await asyncio.wrap_future(asked)).strip()

    def _line(self) -> str:
        """Read the descriptor: a thread that waits in `sys.stdin` holds a lock that keeps the process from ending.
        Raises OSError, ValueError where it was closed."""
        while b"\n" not in self._rest and (more := os.read(sys.stdin.fileno(), READ_BYTES)):
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace")


@options_of(ServeSpec)
def serve(spec: ServeSpec) -> None:
    """An OpenAI-compatible server: chat completions whose tool calls run in the sandbox here.

    Example: rocstar serve last --port 8701"""
    need("train")
    from rocstar.parts.modelfolder import model_named

    model_named(spec.model, spec.runs)  # before anything that takes seconds is loaded
    from rocstar.serving.app import serve as carry_out

    with stoppable("stopped"):
        carry_out(spec, lambda sentence: print(sentence, file=sys.stderr, flush=True))
