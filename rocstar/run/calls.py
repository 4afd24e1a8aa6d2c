"""Finished calls of the model by agents (`rollout.agent`) in steps that no checkpoint holds yet; a kill loses none.

    calls/step=000042.jsonl    one object a call: a hash of what was asked, what was written, which weights wrote it
    calls/weights.jsonl        the weights that the run has had: step, policy version, fingerprint

What is asked (token ids, and the sampling with its seed, which follows from the attempt and its place there) and the
weights decide what is written, so a resumed run that asks the same of the same weights is answered from here. Weights
that came out otherwise have another fingerprint, and calls of them are made again. Source: ours.
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
    """Those of a run that is at its beginning, or goes on after a step."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        self._folder = folder
        self._weights = Journal(folder.calls / "weights.jsonl")
        self.engines: dict[int, StepEngine] = {}
        """Of the steps that have begun and that no checkpoint holds."""
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
        self.engines[step] = made = StepEngine(engine, self._folder.calls_file(step), self._fingerprints)
        return made

    def forget(self, step: int | None) -> None:
        """A checkpoint holds the steps up to this one; None: none under way goes on."""
        for file in self._folder.calls.glob("step=[0-9]*.jsonl"):
            if step is None or step_of(file) <= step:
                if engine := self.engines.pop(step_of(file), None):
                    engine.journal.close()
                file.unlink()

    def close(self) -> None:
        """The run is over."""
        self._weights.close()
        shutil.rmtree(self._folder.calls)


class StepEngine(ForwardingEngine):
    """Answers what was asked before from the file of its step, each call once, and writes down what was not."""

    def __init__(self, engine: Engine, path: Path, fingerprints: Mapping[int, str]) -> None:
        """path: the file. fingerprints: of the weights that the run has had, by version; it grows."""
        super().__init__(engine)
        rows = read_journal(path, NEEDS)
        self.journal, self.there, self.taken = Journal(path), len(rows), 0
        """there: calls that stood in the file; taken: those that were answered from it."""
        self._left = {row["asked"]: row for row in rows}
        self._fingerprints = fingerprints

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        asked = hashlib.sha256(repr(sampling).encode() + array("q", token_ids).tobytes()).hexdigest()
        if (row := self._left.get(asked)) and self._is_of_known_weights(row):
            del self._left[asked]
            self.taken += 1
            return msgspec.convert({**row, "version_spans": row["spans"]}, Completion)
        made = await super().generate(token_ids, sampling, request_id=request_id, session_id=session_id)
        if made.finish is not Finish.ABORTED and all(map(isfinite, made.logprobs)):  # JSON has no others
            told = {"asked": asked, "token_ids": made.token_ids, "logprobs": made.logprobs, "finish": made.finish}
            spans = made.version_spans
            self.journal.append({**told, "spans": spans, "weights": self._weights_of(spans)})
        return made

    def _weights_of(self, spans: Sequence[Sequence[int]]) -> list[str | None]:
        return [self._fingerprints.get(version) for version, _ in spans]

    def _is_of_known_weights(self, row: Mapping[str, Any]) -> bool:
        weights = self._weights_of(row["spans"])
        return weights == row["weights"] and all(weights) and sum(n for _, n in row["spans"]) == len(row["token_ids"])
