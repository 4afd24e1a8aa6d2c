"""Word problems as a task: what is trained on, what is held out, and that masked numbers really run."""

from __future__ import annotations

import asyncio
import gzip
import io
import random
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from rocstar.config.sections import DataSection
from rocstar.dialogue.calls import HERMES, render_call
from rocstar.errors import ConfigError
from rocstar.types import Completion, Demonstration, Finish, Problem
from tests.published import WORD_PROBLEMS, needs_word_problems
from tests.rollout.examples import CODEC, STOP, conversation, limits
from tests.scripted import ScriptedTool
from word_problems.environment import GivenEnvironment
from word_problems.expressions import parse_prefix
from word_problems.programs import unordered_program
from word_problems.rows import WordProblem
from word_problems.task import WordProblemTask
from word_problems.wording import things, with_decoy, with_story_shuffled, with_things_renamed

TRAIN = """Question,Numbers,Equation,Answer
tom has number0 pens . he gave number1 pens away . how many pens has he ?,18 4,- number0 number1,14
ann has number0 kites and number1 tops . how many kites has she ?,3 5,number0,3
bob has number0 rows of number1 chairs . he saw number2 cats . how many chairs has he ?,2 6 9,* number0 number1,12
eve had number0 figs . she ate number1 . she bought number2 . how many ?,9 2 4,+ - number0 number1 number2,11
"""
TEST = """Question,Numbers,Equation,Answer
tom has number0 pens . he gave number1 pens away . how many pens has he ?,7 5,- number0 number1,2
tom has number0 pens . he gave number1 pens away . how many pens has he ?,7 5,- number0 number1,2
zoe has number0 cups . she broke number1 cups . how many cups has she ?,8 3,- number0 number1,5
"""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Any]:
    for name, text in (("train", TRAIN), ("test", TEST)):
        with gzip.open(tmp_path / f"{name}.csv.gz", "wt") as file:
            file.write(text)
    return {"train_files": [str(tmp_path / "train.csv.gz")], "test_files": [str(tmp_path / "test.csv.gz")]}


def made(
    heldout: int = 10, train_files: Sequence[str] = (), test_files: Sequence[str] = (), **options: Any
) -> WordProblemTask:
    told: dict[str, Any] = {"train_files": list(train_files), "test_files": list(test_files), "options": options}
    data = DataSection(source="word_problems:WordProblemTask", **told)
    return WordProblemTask(data, tool_name="python", seed=1, heldout=heldout)


def printed(demo: Demonstration) -> str:
    """What the demonstrated program really prints."""
    (call,) = HERMES.parse(demo.turns[0].text, 0)
    with redirect_stdout(io.StringIO()) as out:
        exec(demo.problem.metadata.get("given", "") + call.arguments["code"], {})
    return out.getvalue()


@pytest.mark.parametrize("numbers", ["digits", "masked"])
@pytest.mark.parametrize("program", ["inline", "bound", "unordered"])
def test_every_demonstrated_program_prints_what_is_shown(files: dict[str, Any], numbers: str, program: str) -> None:
    shares = {"rename_share": 0.5, "decoy_share": 0.5, "swap_share": 0.5}
    variations: dict[str, Any] = {"wordings": 3, "ask_twice": True, **shares}
    task = made(**files, numbers=numbers, program=program, answer_share=1, **variations)
    for demo in task.demonstrations(60):
        assert printed(demo) == demo.turns[0].results[0].stdout
        assert float(printed(demo)) == pytest.approx(float(demo.problem.answer))


def test_held_out_are_the_test_rows_as_they_stand_marked_when_their_question_was_trained_on(
    files: dict[str, Any],
) -> None:
    problems = {problem.question: problem for problem in made(**files).heldout()}
    tom = problems["tom has 7 pens . he gave 5 pens away . how many pens has he ?"]
    zoe = problems["zoe has 8 cups . she broke 3 cups . how many cups has she ?"]
    assert len(problems) == 2
    assert (tom.metadata["duplicate"], tom.metadata["rows"], tom.answer) == (True, 2, "2")
    assert (zoe.metadata["duplicate"], zoe.metadata["rows"], zoe.answer) == (False, 1, "5")


def test_asked_twice_holds_for_held_out_problems_too_and_does_not_hide_a_duplicate(files: dict[str, Any]) -> None:
    problems = {problem.metadata["duplicate"]: problem for problem in made(**files, ask_twice=True).heldout()}
    assert problems[True].question.startswith("how many pens has he ? . tom has 7 pens .")


def test_without_test_files_the_development_questions_are_held_out_and_not_trained_on(files: dict[str, Any]) -> None:
    task = made(train_files=files["train_files"], holdout=1)
    (development,) = task.heldout()
    trained = {demo.problem.metadata["template"] for demo in task.demonstrations(30)}
    assert len(trained) == 3
    assert development.metadata["template"] not in trained


def test_training_problems_are_drawn_anew_and_never_one_of_the_held_out(files: dict[str, Any]) -> None:
    task = made(**files, redraws=50, pool=200)
    problems, held = task.problems(), {problem.id for problem in task.heldout()}
    assert len({problem.question for problem in problems}) > 100
    assert not held & {problem.id for problem in problems}
    assert [p.id for p in problems] == [p.id for p in made(**files, redraws=50, pool=200).problems()]


def test_rows_of_two_operators_and_answers_are_shown_as_often_as_asked(files: dict[str, Any]) -> None:
    task = made(**files, oversample=3, redraws=0)
    demos = task.demonstrations(6)
    assert sum(len(demo.turns) == 2 for demo in task.demonstrations(400)) / 400 == pytest.approx(0.25, abs=0.08)
    assert sorted(demo.problem.metadata["operators"] for demo in demos) == [0, 1, 1, 2, 2, 2]


def test_missing_files_and_a_holdout_that_leaves_nothing_are_refused(files: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"data\.train_files is empty"):
        made().problems()
    with pytest.raises(ConfigError, match=r"lower data\.options\.holdout"):
        made(train_files=files["train_files"], holdout=4).heldout()


def test_a_masked_program_runs_with_the_given_numbers_and_is_recorded_as_written(files: dict[str, Any]) -> None:
    (problem,) = made(heldout=1, **files, numbers="masked").heldout()
    given = problem.metadata["given"] + "print(n0-n1)"
    assert asyncio.run(one_call(problem, "print(n0-n1)")) == (given, "print(n0-n1)")
    assert asyncio.run(one_call(made(**files).heldout()[0], "print(1)")) == ("print(1)", "print(1)")


async def one_call(problem: Problem, code: str) -> tuple[str, str]:
    """The code that reached the tool, and the code in the record."""
    tool = ScriptedTool(["1\n"])
    ids = (*CODEC.encode(render_call("python", {"code": code})), STOP)
    completion = Completion(token_ids=ids, logprobs=(0.0,) * len(ids), finish=Finish.STOP)
    reply = await GivenEnvironment(problem, conversation(tool), limits(), seed=0).reply(completion)
    return tool.calls[0].arguments["code"], reply.calls[0].arguments["code"]


# Wordings


def row_of(template: str, numbers: tuple[int, ...] = (18, 4)) -> WordProblem:
    return WordProblem(template=template, numbers=numbers, tree=parse_prefix("- number0 number1"), answer=14)


PENS = row_of("tom has number0 pens . he gave number1 away . how many pens has he ?")


def test_a_thing_is_renamed_wherever_it_stands_its_singular_too() -> None:
    row = row_of("tom has number0 pens . each pen costs number1 dollars . how many pens ?")
    renamed = with_things_renamed(row, ["kites", "pens"], 1.0, random.Random(0))
    assert renamed.template == "tom has number0 kites . each kite costs number1 dollars . how many kites ?"


def test_money_and_time_are_no_things() -> None:
    assert things([row_of("she paid number0 dollars for number1 red pens")]) == ("pens",)


def test_a_decoy_counts_something_else_and_leaves_the_value() -> None:
    seen = set()
    for seed in range(8):
        row = with_decoy(PENS, ["kites", "pens"], random.Random(seed))
        assert (row.value, row.unused_numbers, row.is_consistent) == (14, 1, True)
        assert len(set(row.numbers)) == 3
        seen.add(row.template)
    assert seen == {
        "tom has number0 pens . tom has number1 kites . he gave number2 away . how many pens has he ?",
        "tom has number0 kites . tom has number1 pens . he gave number2 away . how many pens has he ?",
    }
    unnamed = row_of("tom has number0 pens . he gave number1 away . how many has he ?")  # by its question
    assert with_decoy(unnamed, ["kites", "pens"], random.Random(0)) is unnamed


def test_a_shuffled_story_keeps_its_question_last_and_its_value() -> None:
    told = {with_story_shuffled(PENS, random.Random(seed)) for seed in range(8)}
    assert {(row.template, row.value) for row in told} == {
        (PENS.template, 14),
        ("he gave number0 away . tom has number1 pens . how many pens has he ?", 14),
    }


# Programs that leave the order to Python


@pytest.mark.parametrize(
    ("equation", "numbers", "program"),
    [
        ("- number1 number0", (4, 18, 2), "print(abs(4-18))"),
        ("- number0 number1", (4, 18, 2), "print(4-18)"),
        ("/ number1 number0", (4, 20, 2), "print(max(4,20)/min(4,20))"),
        ("/ number1 number0", (4, 18, 2), "print(18/4)"),
        ("* number1 number0", (4, 18, 2), "print(4*18)"),
        ("- * number2 number0 number1", (4, 18, 9), "print(4*9-18)"),
        ("* number2 - number1 number0", (4, 18, 2), "print(2*abs(4-18))"),
        ("+ number0 12", (4, 18, 2), "print(4+12)"),
    ],
)
def test_a_program_leaves_the_order_of_two_numbers_to_python_where_that_is_safe(
    equation: str, numbers: tuple[int, ...], program: str
) -> None:
    row = WordProblem(template="number0 number1 number2 ?", numbers=numbers, tree=parse_prefix(equation), answer=1)
    assert unordered_program(row, "digits") == program


# The real files


@needs_word_problems
def test_no_question_of_svamp_is_trained_on() -> None:
    task = made(
        heldout=1000,
        train_files=[str(WORD_PROBLEMS / "mawps_asdiv_a_train.csv.gz")],
        test_files=[str(WORD_PROBLEMS / "svamp_test.csv.gz")],
    )
    assert [problem.metadata["duplicate"] for problem in task.heldout()] == [False] * 1000


@needs_word_problems
def test_a_published_mawps_fold_repeats_questions_and_these_are_marked() -> None:
    files = [str(WORD_PROBLEMS / f"cv_mawps_fold0_{part}.csv.gz") for part in ("train", "dev")]
    problems = made(heldout=1000, train_files=files[:1], test_files=files[1:]).heldout()
    assert sum(problem.metadata["rows"] for problem in problems) == 384
    assert sum(problem.metadata["rows"] for problem in problems if problem.metadata["duplicate"]) == 127
