"""An engine that computes as the real one and writes what demonstrations show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from rocstar.protocols import Engine, ForwardingEngine
from rocstar.types import Completion, Finish, Sampling, SftRow


def turns_of(row: SftRow) -> list[tuple[int, ...]]:
    """The token ids of each turn that the assistant writes, in order."""
    runs = groupby(zip(row.token_ids, row.loss_mask, strict=True), key=lambda pair: pair[1])
    return [tuple(token for token, _ in run) for mine, run in runs if mine]


@dataclass(slots=True)
class _GuidedSession:
    turns: Sequence[tuple[int, ...]]
    """What it writes."""
    sampled: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Where its completions begin, and what the engine had sampled there."""


class GuidedEngine(ForwardingEngine):
    """An engine that computes as `engine` does and writes the turns of demonstrations, which a model that has learned
    nothing would not write. So the attempts of a trial are as long, and call their tools, as those to come.

    `engine` samples as many tokens as the next turn has, and is given its own tokens as the conversation goes on, so
    its caches stay valid. Sessions take `rows` in the order in which they come."""

    def __init__(self, engine: Engine, rows: Iterator[Sequence[tuple[int, ...]]]) -> None:
        super().__init__(engine)
        self._rows = rows
        self._sessions: dict[str, _GuidedSession] = {}

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _GuidedSession(next(self._rows))
        number = len(session.sampled)
        planned = session.turns[number] if number < len(session.turns) else sampling.stop_token_ids[:1]
        ids = list(token_ids)
        for start, own in session.sampled:
            ids[start : start + len(own)] = own
        asked = replace(sampling, max_new_tokens=min(len(planned), sampling.max_new_tokens), stop_token_ids=())
        found = await super().generate(ids, asked, request_id=request_id, session_id=session_id)
        session.sampled.append((len(ids), found.token_ids))
        written = planned[: len(found.token_ids)]
        finish = Finish.STOP if len(written) == len(planned) else found.finish
        return replace(found, token_ids=written, finish=finish)

    async def close_session(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        await super().close_session(session_id)
