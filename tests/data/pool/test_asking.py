import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("httpx")

from rocstar.data.pool.build import build_pool
from rocstar.data.pool.config import PoolConfig

QUESTIONS = {"What is two plus two?": "4", "What is two plus three?": "6"}


class Model(BaseHTTPRequestHandler):
    """Answers both questions rightly, and cuts the answer of every third attempt."""

    asked: Counter[str]

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = request["messages"][0]["content"]
        self.asked[question.partition("\n")[0]] += 1
        text = "\\boxed{4}" if "two?" in question else "\\boxed{5}"
        finish = "length" if request["seed"] % 3 == 2 else "stop"
        body = json.dumps({"choices": [{"message": {"content": text}, "finish_reason": finish}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Model.asked = Counter()
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def test_a_model_is_asked_once_for_what_is_missing_and_wrong_labels_go(
    tmp_path: Path, server: ThreadingHTTPServer
) -> None:
    rows = "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in QUESTIONS.items())
    other = json.dumps({"question": "How many sides has a square?", "answer": "4"})
    (tmp_path / "other.jsonl").write_text(other)
    (tmp_path / "rows.jsonl").write_text(rows)
    endpoint = {"url": f"http://127.0.0.1:{server.server_port}/v1", "model": "m", "attempts": 4}
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
    assert Model.asked == dict.fromkeys(QUESTIONS, 4)
    said = [json.loads(line)["answers"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert said[0] == ["\\boxed{4}", "\\boxed{4}", "", "\\boxed{4}"]
