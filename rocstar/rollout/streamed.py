"""An attempt that a person watches: the text is reported in small pieces, and each tool call with its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rocstar.protocols import Engine, Environment, ForwardingEngine, Reply
from rocstar.types import Completion, Finish, Sampling, seed_for, spans_of


class StreamedEngine(ForwardingEngine):
    """An engine that is asked for a few tokens at a time; its session keeps what it has computed in between.

    Greedy completions are those of the engine itself. Sampled ones are others than it would give in one go, because a
    token's randomness follows from where its request began; they are the same for the same `piece` and seed."""

    def __init__(self, engine: Engine, *, piece: int, told: Callable[[Sequence[int]], None]) -> None:
        """piece: tokens asked for at a time. told: gets all tokens of the completion so far, after each piece."""
        super().__init__(engine)
        self._piece, self._told = piece, told

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        parts: list[Completion] = []
        written: list[int] = []
        while True:
            asked = replace(
                sampling,
                max_new_tokens=min(self._piece, sampling.max_new_tokens - len(written)),
                seed=seed_for(sampling.seed, len(written)),
            )
            name = f"{request_id}/{len(written)}"
            part = await super().generate([*token_ids, *written], asked, request_id=name, session_id=session_id)
            parts.append(part)
            written += part.token_ids
            self._told(written)
            if part.finish is not Finish.LENGTH or not part.token_ids or len(written) >= sampling.max_new_tokens:
                return _joined(parts)

    async def abort(self, request_id: str) -> None:
        """Not by name: cancel the task that waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedEnvironment:
    """An environment whose replies are told, in a conversation that may have begun before."""

    environment: Environment
    opened: tuple[int, ...] | None
    """The conversation so far, as tokens; None for the environment's own opening."""
    told: Callable[[Reply], None]

    def opening(self) -> tuple[int, ...]:
        return self.environment.opening() if self.opened is None else self.opened

    def budget(self) -> int:
        return self.environment.budget()

    async def reply(self, completion: Completion) -> Reply:
        reply = await self.environment.reply(completion)
        self.told(reply)
        return reply

    async def close(self) -> None:
        await self.environment.close()


def _joined(parts: Sequence[Completion]) -> Completion:
    versions = (span.version for part in parts for span in part.version_spans for _ in range(span.tokens))
    return Completion(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(logprob for part in parts for logprob in part.logprobs),
        finish=parts[-1].finish,
        version_spans=spans_of(versions),
    )
