"""What a run tells of its own evaluations, without asking a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from rocstar.record.atomic import write_json
from rocstar.record.journal import read_journal
from rocstar.record.tracker import RunTracker
from rocstar.run.evaluations import tell_unlike
from tests.record.examples import run


@pytest.mark.parametrize(("tokens", "told"), [(48, 0), (24, 1)])
def test_before_and_after_under_other_limits_are_told_apart(tmp_path: Path, tokens: int, told: int) -> None:
    folder, notes = run(tmp_path), list[str]()
    with RunTracker(folder) as tracker:
        parts = {"folder": folder, "tracker": tracker, "progress": SimpleNamespace(step=9)}
        going: Any = SimpleNamespace(**parts, screen=SimpleNamespace(note=notes.append))
        for name, step, most in (("before", 2, 48), ("after", 5, 48), ("after", 9, tokens)):
            tell_unlike(going)
            place = folder.evaluation(name, step)
            place.mkdir(parents=True)
            write_json(place / "result.json", {"setup": {"step": step, "max_response_tokens": most}})
        assert not notes
        tell_unlike(going)
    said = "the evaluations differ in max_response_tokens: 48 in before, 24 in after"
    assert [note.startswith(f"warning: {said}; ") for note in notes] == [True] * told
    warnings = [event for event in read_journal(folder.events) if event["event"] == "warning"]
    assert [(event["step"], event["evidence"]) for event in warnings] == [(9, said)] * told
