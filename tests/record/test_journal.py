"""Append-only JSONL that survives kills and full disks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rocstar.errors import DataError
from rocstar.record import journal as journal_module
from rocstar.record.journal import Journal, read_journal


def written(path: Path, *steps: int) -> Journal:
    journal = Journal(path)
    for step in steps:
        journal.append({"step": step})
    return journal


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_journal(path)]


def test_a_journal_that_was_never_written_is_empty(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "m.jsonl") == []


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2')
    assert steps(path) == [1]
    with written(path, 3):
        assert steps(path) == [1, 3]


@pytest.mark.parametrize("line", ['{"ste', "5"])
def test_a_line_in_the_middle_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"m\.jsonl line 2 is not a JSON object"):
        read_journal(path)


def test_truncating_drops_later_steps_keeps_rows_without_one_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with written(path, 1, 2, 3) as journal:
        journal.append({"event": "note"})
        journal.truncate_after(2)
        journal.append({"step": 3, "again": True})
    assert read_journal(path) == [{"step": 1}, {"step": 2}, {"event": "note"}, {"step": 3, "again": True}]


def test_a_full_disk_leaves_only_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with written(tmp_path / "m.jsonl", 1) as journal:

        def half_then_full(handle: int, line: bytes) -> int:
            if len(line) > 6:
                return real(handle, line[:6])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(journal_module.os, "write", half_then_full)
        with pytest.raises(OSError, match=r"No space left.*jsonl"):
            journal.append({"a": 1})
        monkeypatch.undo()
        journal.append({"step": 2})
    assert steps(tmp_path / "m.jsonl") == [1, 2]


def test_what_is_written_in_pieces_is_a_whole_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with written(tmp_path / "m.jsonl", 1) as journal:
        monkeypatch.setattr(os, "write", lambda handle, line: real(handle, line[:3]))
        journal.append({"step": 2})
        assert steps(tmp_path / "m.jsonl") == [1, 2]
