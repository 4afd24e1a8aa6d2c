"""Finished calls of a step: taken once, of known weights only, and whole."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any

import pytest

from rocstar.errors import DataError
from rocstar.record.journal import read_journal
from rocstar.run.calls import NEEDS, FinishedCalls, StepEngine
from rocstar.types import Completion, Finish, Sampling, VersionSpan, Weights
from tests.record.examples import run

SAMPLING = Sampling(max_new_tokens=2)


class Counted:
    """An engine that writes the number of the request."""

    def __init__(self, logprob: float = -1.0) -> None:
        self.asked, self.logprob = 0, logprob

    async def generate(self, *_: Any, **__: Any) -> Completion:
        self.asked += 1
        spans = (VersionSpan(3, 1),)
        return Completion(token_ids=(self.asked,), logprobs=(self.logprob,), finish=Finish.LENGTH, version_spans=spans)


async def asked_twice(path: Path, engine: Any, known: dict[int, str]) -> list[int]:
    step = StepEngine(engine, path, known)
    made = [await step.generate((1, 2), SAMPLING, request_id="r", session_id="s") for _ in range(2)]
    return [one.token_ids[0] for one in made]


async def test_a_call_is_taken_once_and_made_anew_by_other_weights_or_unknown_ones(tmp_path: Path) -> None:
    path, engine = tmp_path / "step=000001.jsonl", Counted()
    first = StepEngine(engine, path, {3: "these"})  # type: ignore[arg-type]
    await first.generate((1, 2), SAMPLING, request_id="r", session_id="s")
    before = path.read_text()
    for known, found in (({3: "these"}, [1, 2]), ({3: "others"}, [3, 4]), ({}, [5, 6])):
        path.write_text(before)
        assert await asked_twice(path, engine, known) == found
    path.write_text(before.replace("these", "").replace('[""]', "[null]"))
    assert await asked_twice(path, engine, {}) == [7, 8]


async def test_a_resumed_run_has_the_calls_of_steps_that_are_not_saved_and_knows_no_weights_after_its_own(
    tmp_path: Path,
) -> None:
    folder, engine = run(tmp_path), Counted()
    first = FinishedCalls(folder, 0)
    first.written_by(Weights(version=3, fingerprint="these"), 2)
    for step in (2, 3):
        await first.engine(step, engine).generate((1, 2), SAMPLING, request_id="r", session_id="s")  # type: ignore[arg-type]
    for saved, found in ((2, 2), (1, 3)):
        later = FinishedCalls(folder, saved)
        assert [file.name for file in folder.calls.glob("step=*")] == ["step=000003.jsonl"]
        again = later.engine(3, engine)  # type: ignore[arg-type]
        made = await again.generate((1, 2), SAMPLING, request_id="r", session_id="s")
        assert (made.token_ids, again.there) == ((found,), 1)


async def test_a_call_without_log_probabilities_that_are_numbers_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "step=000001.jsonl"
    assert await asked_twice(path, Counted(nan), {3: "these"}) == [1, 2]
    assert not path.exists()


def test_a_line_that_lacks_something_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step=000001.jsonl"
    path.write_text('{"token_ids": []}\n')
    with pytest.raises(DataError, match='line 1 has no "asked" that fits'):
        read_journal(path, NEEDS)
