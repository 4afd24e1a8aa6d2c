import json
from pathlib import Path

import pytest

from rocstar.cli import run

ROWS = [{"question": "How many legs do two cats have?", "answer": "8"}, {"question": "How much is it?", "answer": "x"}]
RECIPE = '[[source]]\nname = "s"\npath = "rows.jsonl"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "pool.toml").write_text(RECIPE)
    return tmp_path


def test_data_build_prints_the_funnel_and_writes_the_pool(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["data", "build", f"{folder / 'pool.toml'}", f"data={folder}", f"out={folder / 'out'}"])
    printed = capsys.readouterr().out
    assert code == 0
    assert [line.split()[:2] for line in printed.splitlines()[1:4]] == [
        ["read", "2"],
        ["not_integer", "1"],
        ["kept", "1"],
    ]
    assert json.loads((folder / "out" / "problems.jsonl").read_text())["answer"] == "8"


def test_data_check_prints_a_prompt_and_ends_with_2_for_bad_rows(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "rows.jsonl"
    assert run(["data", "check", str(file), "--template", "compact"]) == 0
    assert "«<|im_end|>»" in capsys.readouterr().out
    file.write_text(file.read_text() + "{broken\n")
    assert run(["data", "check", str(file), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["rows"], told["bad"]["rows"]) == (2, 1)
    assert run(["data", "check", str(file), "--layout", "verll"]) == 2
