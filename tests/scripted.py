"""A tool and a verifier that answer from a script, for tests of everything around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rocstar.answers.verifier import settled
from rocstar.errors import SandboxUnavailable, VerifierUnavailable
from rocstar.protocols import ToolSpec
from rocstar.tools.arguments import bad_call, text_arguments
from rocstar.types import FormatFacts, Outcome, Problem, Status, ToolCall, ToolResult, Trajectory, Verdict

PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string"}, "input": {"type": "string"}},
    "required": ["code"],
}
Scripted = str | ToolResult | SandboxUnavailable
"""Standard output of a program that went well, a whole result, or the fault to raise."""


class ScriptedTool:
    """Implements `Tool`. A mapping answers by the call's `code`, a sequence one entry per well-formed call in order.

    A program that is not in the mapping is a CODE_ERROR; a sequence that has run out raises SandboxUnavailable, so a
    test that makes more calls than it scripted fails by name. Calls it was given are kept in `calls`."""

    def __init__(
        self, script: Mapping[str, Scripted] | Sequence[Scripted], name: str = "python", aliases: tuple[str, ...] = ()
    ) -> None:
        self._by_code = dict(script) if isinstance(script, Mapping) else None
        self._in_order = [] if isinstance(script, Mapping) else list(script)
        description = "Answers from a script."
        self._spec = ToolSpec(name=name, description=description, parameters=PARAMETERS, aliases=aliases)
        self.calls: list[ToolCall] = []

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        """Raises SandboxUnavailable where the script says so or has run out."""
        self.calls.append(call)
        complaint = text_arguments(call, PARAMETERS)
        if complaint is not None:
            return bad_call(call, complaint)
        entry = self._next(call.arguments["code"])
        if isinstance(entry, SandboxUnavailable):
            raise entry
        if isinstance(entry, str):
            return ToolResult(call_id=call.id, status=Status.OK, stdout=entry)
        return replace(entry, call_id=call.id)

    def _next(self, code: str) -> Scripted:
        if self._by_code is not None:
            unknown = ToolResult(call_id="", status=Status.CODE_ERROR, stderr=f"no script for this program: {code}\n")
            return self._by_code.get(code, unknown)
        if not self._in_order:
            return SandboxUnavailable(f"the script has run out of answers; the next call was {code!r}")
        return self._in_order.pop(0)


@dataclass
class ScriptedVerifier:
    """Implements `Verifier` with the verdicts that `decide` returns; it may raise VerifierUnavailable."""

    decide: Callable[[Problem, Trajectory], Verdict]

    async def verify_all(self, attempts: Sequence[tuple[Problem, Trajectory]]) -> list[Outcome | VerifierUnavailable]:
        """VerifierUnavailable stands where `decide` raised it; ContractBroken for an ENVIRONMENT_FAILED trajectory."""
        return [self._verify(problem, trajectory) for problem, trajectory in attempts]

    def _verify(self, problem: Problem, trajectory: Trajectory) -> Outcome | VerifierUnavailable:
        settled(trajectory, "graded")
        try:
            verdict = self.decide(problem, trajectory)
        except VerifierUnavailable as error:
            return error
        facts = FormatFacts(answer_tags=1, reason_after_answer=False, boxed=True)
        reward = float(verdict is Verdict.RIGHT)
        return Outcome(verdict=verdict, reward=reward, extracted=None, method="scripted", format_facts=facts)
