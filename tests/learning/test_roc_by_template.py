"""RoC prefers clean attempts under every template: what nobody asked for counts against nobody."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rocstar.answers.grade import Grader
from rocstar.answers.verifier import BoxedVerifier
from rocstar.config.sections import ResampleSection
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.template import Template
from rocstar.dialogue.templates import template_for
from rocstar.evaluation.endpoint import CodePoints
from rocstar.learning.resample import resampler_of
from rocstar.types import Choice, Group, Outcome, Status, Trajectory, Verdict
from tests.contracts.test_verifier import attempt, printed, problem, turn
from tests.dialogue.folders import LLAMA, PYTHON, THINKING, folder_of

BOX = "Put the answer into \\boxed{}.\n"
TAGS = "Put the answer into <answer> </answer>.\n"
TEMPLATES: dict[str, tuple[Callable[[Path], Template], bool]] = {
    "paper": (lambda folder: template_for("paper", None), True),
    "paper, own preamble": (lambda folder: template_for("paper", None, preamble=BOX), True),
    "compact": (lambda folder: template_for("compact", None), False),
    "compact, own preamble": (lambda folder: template_for("compact", None, preamble=TAGS), True),
    "model like qwen": (lambda folder: template_for("model", folder_of(folder, THINKING), [PYTHON]), False),
    "model like llama": (lambda folder: template_for("model", folder_of(folder, LLAMA), [PYTHON]), False),
    "model, own preamble": (
        lambda folder: template_for("model", folder_of(folder, THINKING), [PYTHON], preamble=TAGS),
        True,
    ),
}
"""By name: how it is made, and whether it asks for an answer block."""
CLEAN, MESSY, WRONG = 4, 12, 16


def solved(template: Template, index: int, asked: bool) -> Trajectory:
    """Four clean ones, twelve with a failed call of two, sixteen wrong; all written as the template asks."""
    box = f"\\boxed{{{5 if index < CLEAN + MESSY else 6}}}"
    status = Status.OK if index < CLEAN else Status.CODE_ERROR
    turns = (
        turn("c", printed("5", status)),
        turn("c", printed("5")),
        turn(f"<answer>{box}</answer>" if asked else box),
    )
    prompt = CodePoints().encode(text_of(template.opening("q", [PYTHON])))
    return replace(attempt(*turns), index=index, prompt_ids=tuple(prompt))


async def chosen(template: Template, asked: bool, settings: ResampleSection) -> tuple[Choice, ...]:
    attempts = [solved(template, index, asked) for index in range(CLEAN + MESSY + WRONG)]
    outcomes = await BoxedVerifier(CodePoints(), Grader()).verify_all([(problem("5"), one) for one in attempts])
    judged = tuple(
        replace(one, outcome=outcome if isinstance(outcome, Outcome) else None)
        for one, outcome in zip(attempts, outcomes, strict=True)
    )
    assert [one.outcome.verdict is Verdict.RIGHT for one in judged if one.outcome] == [True] * 16 + [False] * 16
    return resampler_of(settings)(Group(problem=problem("5"), trajectories=judged), random.Random(0)).choices


@pytest.mark.parametrize("name", TEMPLATES)
async def test_clean_attempts_are_kept_whatever_the_template_asks_for(name: str, tmp_path: Path) -> None:
    """Which of equal penalties are kept how often: test_resample.py."""
    make, asked = TEMPLATES[name]
    choices = await chosen(make(tmp_path), asked, ResampleSection())
    assert [choice.penalty.total for choice in choices[:16]] == [0.0] * CLEAN + [0.5] * MESSY
    assert [choice.kept for choice in choices[:CLEAN]] == [True] * CLEAN
    assert sum(choice.kept for choice in choices[:16]) == 8


async def test_a_block_that_was_asked_for_is_missed(tmp_path: Path) -> None:
    make, _ = TEMPLATES["compact, own preamble"]
    for weight in (1.0, 0.25):
        choices = await chosen(make(tmp_path), False, ResampleSection(format_weight=weight))
        assert {choice.penalty.format for choice in choices} == {weight}


async def test_a_recipe_may_count_blocks_that_nobody_asked_for(tmp_path: Path) -> None:
    make, _ = TEMPLATES["model like qwen"]
    choices = await chosen(make(tmp_path), False, ResampleSection(format_penalty="always"))
    assert {choice.penalty.format for choice in choices} == {1.0}
