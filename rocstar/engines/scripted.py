"""An engine that replays given replies, for tests and demonstrations of everything around an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rocstar.errors import EngineUnavailable
from rocstar.protocols import TextCodec
from rocstar.types import Completion, EngineLoad, Finish, Sampling, Weights, seed_for, spans_of


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

    async def abort(self, request_id: str) -> None:
        """Nothing runs long enough to be aborted."""

    async def close_session(self, session_id: str) -> None:
        self._taken.pop(session_id, None)
        self._held.pop(session_id, None)
