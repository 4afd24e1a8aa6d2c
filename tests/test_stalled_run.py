"""A whole run in which attempts hang: it says so, ends, and is resumed as if nothing had been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_run import COLD_STEPS, Command, begun, metrics, workplace

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

ENVIRONMENT = """\
import asyncio
from pathlib import Path
from rocstar.rollout.environment import ToolEnvironment

class Hanging(ToolEnvironment):
    async def reply(self, completion):
        if Path("hang").exists():
            await asyncio.Event().wait()
        return await super().reply(completion)
"""
SETTINGS = (
    "rollout.environment=hanging:Hanging",
    "sandbox.timeout_seconds=0.3",
    "run.stall_seconds=3",
    "run.stall_policy=halt",
    "stage.stage1.steps=2",
    "stage.stage3.steps=0",
    "evaluate.problems=0",
)


def test_a_run_whose_attempts_hang_halts_with_a_report_and_is_resumed(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = workplace(tmp_path / "w")
    (folder / "hanging.py").write_text(ENVIRONMENT)
    command = Command.start(folder, "train", "tiny.toml", *begun(tmp_path_factory.getbasetemp()), *SETTINGS)
    ended = command.after_step(COLD_STEPS + 1, (folder / "hang").touch)
    assert ended.code == 1 and "Traceback" not in ended.told, ended.told
    sentence = ended.told.splitlines()[-1]
    assert "wait for a tool" in sentence and sentence.endswith("rocstar train --resume tiny"), ended.told
    run = folder / "runs" / "tiny"
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (stall,) = [row for row in rows if row["event"] == "stall"]
    assert stall["phase"] == "rollout" and stall["waiting"]["a tool"] > 0
    assert "Hanging.reply" in (run / "logs" / stall["log"]).read_text()
    (folder / "hang").unlink()
    assert Command.start(folder, "train", "--resume", "tiny", "run.stall_policy=warn").wait().code == 0
    assert len(metrics(folder)) == COLD_STEPS + 2
