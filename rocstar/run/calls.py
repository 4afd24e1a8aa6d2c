"""Records agents' finished calls of the model (`rollout.agent`) in steps that no checkpoint holds; a kill loses none.

    calls/step=000042.jsonl    one object a call: a hash of the request, the tokens written, which weights wrote them
    calls/weights.jsonl        the weights that the run has had: step, policy version, fingerprint

The request (token ids, and the sampling with its seed, which follows from the attempt and its place there) and the
weights determine the answer, so a resumed run that sends the same request to the same weights is answered from here.
Weights that came out differently have another fingerprint, and their calls are made again. Source: ours.
"""

from __future__ import annotations

import hashlib
import shutil
from array import array
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from rocstar.protocols import Engine, ForwardingEngine
from rocstar.record.folder import RunFolder, step_of
from rocstar.record.journal import Journal, read_journal
from rocstar.types import Completion, Finish, Sampling, Weights

NEEDS = {"asked": str, "token_ids": list, "logprobs": list, "finish": str, "spans": list, "weights": list}
"""Of a line of a step's file."""


class FinishedCalls:
    """Finished calls of a run, which starts or resumes after a step."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        self._folder = folder
        self._weights = Journal(folder.calls / "weights.jsonl")
        self.engines: dict[int, StepEngine] = {}
        """By step, for those that have begun and that no checkpoint holds."""
        folder.calls.mkdir(exist_ok=True)
        self._weights.truncate_after(step)
        known = read_journal(self._weights.path, {"version": int, "fingerprint": str})
        self._fingerprints = {row["version"]: row["fingerprint"] for row in known}
        self.forget(step)

    def written_by(self, weights: Weights, step: int) -> None:
        """From now on calls are written by the weights after `step`. Raises OSError."""
        self._fingerprints[weights.version] = weights.fingerprint
        self._weights.append({"step": step, "version": weights.version, "fingerprint": weights.fingerprint})

    def engine(self, step: int, engine: Engine) -> StepEngine:
        """The engine for the attempts of a step."""
        self.engines[step] = engine_of_step = StepEngine(engine, self._folder.calls_file(step), self._fingerprints)
        return engine_of_step

    def forget(self, step: int | None) -> None:
        """Forget the steps up to this one, which a checkpoint holds; None: forget all."""
        for file in self._folder.calls.glob("step=[0-9]*.jsonl"):
            if step is None or step_of(file) <= step:
                if engine := self.engines.pop(step_of(file), None):
                    engine.journal.close()
                file.unlink()

    def close(self) -> None:
        """Close all files."""
        self._weights.close()
        shutil.rmtree(self._folder.calls)


class StepEngine(ForwardingEngine):
    """Answers requests from the file of its step, each call once, and records those that it does not hold."""

    def __init__(self, engine: Engine, path: Path, fingerprints: Mapping[int, str]) -> None:
        """path: the file. fingerprints: of the weights that the run has had, by version; it grows."""
        super().__init__(engine)
        rows = read_journal(path, NEEDS)
        self.journal, self.there, self.taken = Journal(path), len(rows), 0
        """there: calls that the file held; taken: those answered from it."""
        self._left = {row["asked"]: row for row in rows}
        self._fingerprints = fingerprints

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        request = hashlib.sha256(repr(sampling).encode() + array("q", token_ids).tobytes()).hexdigest()
        if (row := self._left.get(request)) and self._is_of_known_weights(row):
            del self._left[request]
            self.taken += 1
            return msgspec.convert({**row, "version_spans": row["spans"]}, Completion)
        completion = await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)
        if completion.finish is not Finish.ABORTED and all(map(isfinite, completion.logprobs)):  # JSON has no others
            tokens = {"token_ids": completion.token_ids, "logprobs": completion.logprobs, "finish": completion.finish}
            spans = completion.version_spans
            self.journal.append({"asked": request, **tokens, "spans": spans, "weights": self._weights_of(spans)})
        return completion

    def _weights_of(self, spans: Sequence[Sequence[int]]) -> list[str | None]:
        return [self._fingerprints.get(version) for version, _ in spans]

    def _is_of_known_weights(self, row: Mapping[str, Any]) -> bool:
        weights = self._weights_of(row["spans"])
        return weights == row["weights"] and all(weights) and sum(n for _, n in row["spans"]) == len(row["token_ids"])
