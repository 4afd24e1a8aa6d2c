"""The Python tool: takes a model's program and returns its result. `rocstar.sandbox` runs it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rocstar.errors import SandboxUnavailable
from rocstar.protocols import ToolSpec
from rocstar.sandbox.call import OF_LIMITS, Call, Limits, ProgramOutcome, Response, SandboxDown, ServiceOutcome
from rocstar.tools.arguments import bad_call, text_arguments
from rocstar.types import Status, ToolCall, ToolResult

if TYPE_CHECKING:
    from rocstar.sandbox.client import SandboxClient

DESCRIPTION = "Runs a Python program and returns what it printed and the value of its last expression."
PARAMETERS = {
    "type": "object",
    "properties": {
        "code": {"type": "string", "description": "The program."},
        "input": {"type": "string", "description": "Its standard input; empty when left out."},
    },
    "required": ["code"],
}
# Names the paper (Fig. 2, 3, 10, 11), its published weights and its released configuration use for this tool.
NAMES = (
    "python",
    "execute_python_code_with_standard_io",
    "execute_python_code",
    "python_code_with_standard_io",
    "jupyter_code",
)
STATUS = {
    ProgramOutcome.OK: Status.OK,
    ProgramOutcome.EXCEPTION: Status.CODE_ERROR,
    ProgramOutcome.EXIT_NONZERO: Status.CODE_ERROR,
    ProgramOutcome.SIGNAL: Status.CODE_ERROR,
    ProgramOutcome.WALL_TIMEOUT: Status.TIMEOUT,
    ProgramOutcome.CPU_TIMEOUT: Status.TIMEOUT,
    ProgramOutcome.MEMORY: Status.MEMORY_LIMIT,
    ProgramOutcome.OUTPUT_LIMIT: Status.OUTPUT_LIMIT,
    ProgramOutcome.REJECTED: Status.BAD_CALL,
}


class PythonTool:
    """The paper's Python interpreter with standard input and output. Implements `Tool`; each call is a fresh program.

    Source: paper §2.1 for the arguments; limits, statuses and the separate value are ours."""

    def __init__(self, client: SandboxClient, limits: Limits, name: str = "python") -> None:
        self._client = client
        self._limits = limits
        self._ids = itertools.count()
        self.spec = spec_of(name, DESCRIPTION, PARAMETERS)

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        """Raises SandboxUnavailable when the sandbox failed, independent of the program."""
        complaint = text_arguments(call, PARAMETERS)
        if complaint is not None:
            return bad_call(call, complaint)
        program = Call(
            id=f"{call.id}-{next(self._ids)}",
            code=call.arguments["code"],
            stdin=call.arguments.get("input") or "",
            limits=self._limits,
            seed=seed,
        )
        try:
            response = await self._client.run(program)
        except SandboxDown as error:
            raise SandboxUnavailable(str(error)) from error
        return result_of(call, response)


def spec_of(name: str, description: str, parameters: Mapping[str, Any]) -> ToolSpec:
    """The spec of a tool that runs Python; it can be called by all of NAMES."""
    aliases = tuple(other for other in NAMES if other != name)
    return ToolSpec(name=name, description=description, parameters=parameters, aliases=aliases)


def result_of(call: ToolCall, response: Response) -> ToolResult:
    """A sandbox response as a tool result. Raises SandboxUnavailable for service outcomes, and for limits that the
    sandbox refuses, since the run has set them, not the model."""
    if isinstance(response.outcome, ServiceOutcome):
        raise SandboxUnavailable(f"the sandbox could not run a program ({response.outcome}: {response.message})")
    if response.outcome is ProgramOutcome.REJECTED and response.message.startswith(OF_LIMITS):
        raise SandboxUnavailable(f"the sandbox does not take what [sandbox] sets: {response.message}")
    return ToolResult(
        call_id=call.id,
        status=STATUS[response.outcome],
        stdout=response.stdout,
        stderr=explained(response),
        value=response.value,
        run_seconds=response.run_seconds,
        queue_seconds=response.queue_seconds,
        truncated_bytes=response.truncated_bytes,
        isolation=response.isolation,
    )


def explained(response: Response) -> str:
    """Standard error, plus a last line of ours if the program could not report why it ended."""
    if response.outcome is ProgramOutcome.SIGNAL:
        reason = f"the program was killed by {response.signal}"
    elif response.outcome is ProgramOutcome.EXIT_NONZERO:
        reason = f"the program exited with status {response.exit_code}"
    elif response.outcome is ProgramOutcome.REJECTED:
        reason = response.message
    else:
        return response.stderr
    return with_last_line(response.stderr, f"{reason}\n")


def with_last_line(text: str, line: str) -> str:
    """`line` on a line of its own, whether or not the text ends one."""
    gap = "\n" if text and not text.endswith("\n") else ""
    return f"{text}{gap}{line}"
