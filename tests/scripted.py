"""An engine, a tool and a verifier that answer from a script, for tests of everything around them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rocstar.answers.extract import counts_as_cut
from rocstar.errors import EngineUnavailable, SandboxUnavailable, VerifierUnavailable
from rocstar.protocols import TextCodec, ToolSpec
from rocstar.tools.arguments import bad_call, text_arguments
from rocstar.types import (
    Completion,
    EngineLoad,
    Finish,
    FormatFacts,
    Outcome,
    Problem,
    Sampling,
    Status,
    ToolCall,
    ToolResult,
    Trajectory,
    Verdict,
    Weights,
    seed_for,
    spans_of,
)

PARAMETERS = {
    "type": "object",
    "properties": {"code": {"type": "string"}, "input": {"type": "string"}},
    "required": ["code"],
}
Scripted = str | ToolResult | SandboxUnavailable
"""Standard output of a program that went well, a whole result, or the fault to raise."""


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class ScriptedTool:
    """Implements `Tool`. A mapping answers by the call's `code`, a sequence one entry per well-formed call in order.

    A program that is not in the mapping is a CODE_ERROR; a sequence that has run out raises SandboxUnavailable, so a
    test that makes more calls than it scripted fails by name. Calls it was given are kept in `calls`, their seeds in
    `seeds`."""

    def __init__(
        self, script: Mapping[str, Scripted] | Sequence[Scripted], name: str = "python", aliases: tuple[str, ...] = ()
    ) -> None:
        self._by_code = dict(script) if isinstance(script, Mapping) else None
        self._in_order = [] if isinstance(script, Mapping) else list(script)
        description = "Answers from a script."
        self._spec = ToolSpec(name=name, description=description, parameters=PARAMETERS, aliases=aliases)
        self.calls: list[ToolCall] = []
        self.seeds: list[int] = []

    @property
    def spec(self) -> ToolSpec:
        return self._spec

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        """Raises SandboxUnavailable where the script says so or has run out."""
        self.calls.append(call)
        self.seeds.append(seed)
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
        counts_as_cut(trajectory, "graded")
        try:
            verdict = self.decide(problem, trajectory)
        except VerifierUnavailable as error:
            return error
        facts = FormatFacts(answer_tags=1, reason_after_answer=False, boxed=True)
        reward = float(verdict is Verdict.RIGHT)
        parts = {"half share": reward / 2}
        return Outcome(
            verdict=verdict, reward=reward, parts=parts, extracted=None, method="scripted", format_facts=facts
        )


class ScriptedEngine:
    """Continues every session with the next of its replies.

    `replies` are texts; a session reads one list, chosen by its seed-independent name: `scripts(session_id)` or the
    same list for all. Each reply is encoded, ends at its first stop token (one is put after a reply that has none) and
    is cut at max_new_tokens. Logprobs are small negative numbers that follow from the seed, so that they are
    recognisable. A session that asks for more than its script holds gets EngineUnavailable."""

    def __init__(self, codec: TextCodec, replies: Sequence[str] | Callable[[str], Sequence[str]]) -> None:
        self._codec = codec
        self._scripts = replies if callable(replies) else lambda session_id: replies
        self._taken: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._produced = 0
        self._version = 0
        self.seen: dict[str, list[tuple[int, ...]]] = {}
        """Token ids each session was asked to continue, call by call."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        await asyncio.sleep(0)
        script, turn = self._scripts(session_id), self._taken.get(session_id, 0)
        if turn >= len(script):
            raise EngineUnavailable(f"the script of session {session_id} ends after {len(script)} replies")
        self._taken[session_id] = turn + 1
        self.seen.setdefault(session_id, []).append(tuple(token_ids))
        stops = sampling.stop_token_ids
        ids = [*self._codec.encode(script[turn]), *stops[:1]]
        end = next((place for place, token in enumerate(ids) if token in stops), len(ids)) + 1
        kept = ids[: min(end, sampling.max_new_tokens)]
        finish = Finish.STOP if kept and kept[-1] in stops else Finish.LENGTH
        base = seed_for(sampling.seed, request_id) % 1000 / 1e6
        self._held[session_id] = len(token_ids) + len(kept)
        self._produced += len(kept)
        return Completion(
            token_ids=tuple(kept),
            logprobs=tuple(-0.001 - base for _ in kept),
            finish=finish,
            version_spans=spans_of([self._version] * len(kept)),
        )

    def load(self) -> EngineLoad:
        return EngineLoad(
            capacity_tokens=2**20,
            used_tokens=sum(self._held.values()),
            running=0,
            waiting=0,
            policy_version=self._version,
            produced_tokens=self._produced,
        )

    async def load_weights(self, weights: Weights) -> None:
        self._version = weights.version

    async def close_session(self, session_id: str) -> None:
        self._taken.pop(session_id, None)
        self._held.pop(session_id, None)
