import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from rocstar.data.pool.build import build_pool
from rocstar.data.pool.config import PoolConfig
from tests.evaluation.served import served, text

QUESTIONS = {"What is two plus two?": "4", "What is two plus three?": "6"}


def answers(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Both questions rightly; the answer of every third attempt is cut."""
    said = "\\boxed{4}" if "two?" in body["messages"][0]["content"] else "\\boxed{5}"
    return text(said, finish="length" if body["seed"] % 3 == 2 else "stop")


def test_a_model_is_asked_once_for_what_is_missing_and_wrong_labels_go(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in QUESTIONS.items())
    other = json.dumps({"question": "How many sides has a square?", "answer": "4"})
    (tmp_path / "other.jsonl").write_text(other)
    (tmp_path / "rows.jsonl").write_text(rows)
    with served(answers) as model:
        endpoint = {"url": model.url, "model": "m", "attempts": 4}
        config = PoolConfig.model_validate(
            {
                "data": str(tmp_path),
                "out": str(tmp_path / "out"),
                "source": [{"name": "s", "path": "rows.jsonl"}, {"name": "unchecked", "path": "other.jsonl"}],
                "agreement": {"sources": ["s"], "answers": str(tmp_path / "answers.jsonl"), "endpoint": endpoint},
            }
        )
        for _ in range(2):
            sheet = build_pool(config, lambda gold, said: (said == f"\\boxed{{{gold}}}", "scripted"), lambda text: None)
            assert (sheet.total("kept"), sheet.total("disagreement"), sheet.unasked) == (2, 1, 0)
    assert Counter(prompt.partition("\n")[0] for prompt in model.prompts) == dict.fromkeys(QUESTIONS, 4)
    said = [json.loads(line)["answers"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert said[0] == ["\\boxed{4}", "\\boxed{4}", "", "\\boxed{4}"]
