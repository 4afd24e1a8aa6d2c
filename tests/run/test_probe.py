"""Programs and answers whose result is known, through a real sandbox and a real grader, and through false ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rocstar.answers.grade import Grade, Grader
from rocstar.errors import RunHalted, SandboxUnavailable
from rocstar.run import probe as module
from rocstar.run.probe import probe, prober
from rocstar.sandbox.call import Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.tools.python import PythonTool
from rocstar.types import ToolCall, ToolResult, Verdict
from tests.scripted import Clock


class Lying(PythonTool):
    """A sandbox that forgets what programs print."""

    async def run(self, call: ToolCall, *, seed: int = 0) -> ToolResult:
        return replace(await super().run(call, seed=seed), stdout="")


class Generous(Grader):
    """Takes every answer."""

    async def grade(self, gold: str, predicted: str | None) -> Grade:
        return replace(await super().grade(gold, predicted), verdict=Verdict.RIGHT)


async def test_a_sandbox_or_grader_that_answers_wrongly_halts_the_run_and_real_ones_do_not() -> None:
    grader, generous = Grader(), Generous()
    try:
        with SandboxClient.start(slots=1, preload=()) as sandbox:
            await probe(PythonTool(sandbox, Limits()), grader)
            with pytest.raises(RunHalted, match=r"the sandbox ran 'print\(6 \* 7\).* instead of .*42"):
                await probe(Lying(sandbox, Limits()), grader)
            with pytest.raises(RunHalted, match="the grader compared '41' with '42' and gave right instead of wrong"):
                await probe(PythonTool(sandbox, Limits()), generous)
    finally:
        await grader.close()
        await generous.close()


async def test_no_answer_is_a_fault_of_ours_and_no_wrong_answer() -> None:
    sandbox = SandboxClient.start(slots=1, preload=())
    sandbox.close()
    with pytest.raises(SandboxUnavailable):
        await probe(PythonTool(sandbox, Limits()), Grader())


async def test_probes_come_before_the_first_step_and_then_every_so_many_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That a run makes them: tests/test_train.py."""
    clock, probed, nobody = Clock(), list[float](), SimpleNamespace()

    async def noted(*_: Any) -> None:
        probed.append(clock.now)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(module, "probe", noted)
    probe_when_due = prober(nobody, nobody, 100.0)  # type: ignore[arg-type]
    for seconds in (0, 99, 1, 60, 60):
        clock.now += seconds
        await probe_when_due()
    assert probed == [0, 100, 220]
