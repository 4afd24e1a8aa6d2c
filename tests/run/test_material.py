"""What a run works on is read and checked before a run folder exists."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rocstar.config.recipe import recipe_of
from rocstar.errors import ConfigError, DataError
from rocstar.run.material import (
    Material,
    _codec_at_first,
    _unasked,
    fingerprint,
    first_prompt,
    read_material,
    unwritten,
)
from rocstar.run.tasks import ArithmeticTask
from rocstar.support.exits import NOT_READY, failure, install_command

MESSAGES = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "\\boxed{2}"}]
COLD = {"name": "cold", "kind": "sft", "steps": 1}
RL = {"name": "rl", "kind": "rl", "steps": 1, "rollout": {"max_response_tokens": 64}}
SMALL = {**RL, "data": {"pool": 8}}
"""Of few problems, which are drawn."""
FEW = {"problems": 4}
"""Held out."""


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems(count: int) -> list[dict[str, Any]]:
    return [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(count)]


def files(train: str, test: str | None = None, **data: Any) -> dict[str, Any]:
    """The section `data` of problems from a file, and of those that are held out."""
    return {"source": "files", "train_files": [train], **({"test_files": [test]} if test else {}), **data}


def imitating(tmp_path: Path) -> dict[str, Any]:
    return {**COLD, "sft": {"rows_file": write(tmp_path / "rows.jsonl", {"messages": MESSAGES})}}


def material(*stages: dict[str, Any], **base: Any) -> Material:
    return read_material(recipe_of({"rollout": {"max_response_tokens": 64}, **base}, list(stages)))


def test_the_memory_of_all_engines_together_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One alone fits; each process has a cache of its own."""
    monkeypatch.setattr("rocstar.run.material.host_bytes", lambda: 30_000_000)
    rollout = {"max_response_tokens": 64, "engine_rows": 200}
    base = {"model": {"device": "cpu"}, "rollout": rollout, "evaluate": FEW}
    material(COLD, SMALL, **base)
    with pytest.raises(ConfigError, match=r"of \d+ tokens .* lower rollout.kv_tokens"):
        material(COLD, SMALL, **base, engine=[{"name": "e", "kind": "torch", "count": 3}])


def test_a_missing_vllm_is_told_before_there_is_a_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROCSTAR_VLLM_PYTHON", raising=False)
    with pytest.raises(ConfigError, match=r"engine\.v needs a Python that has vLLM and was given none; make one with"):
        material(COLD, SMALL, engine=[{"name": "v", "kind": "vllm"}], evaluate=FEW)
    material(COLD, SMALL, engine=[{"name": "v", "kind": "vllm", "url": "http://127.0.0.1:8000"}], evaluate=FEW)


def test_problems_that_are_held_out_are_not_learned_from(tmp_path: Path) -> None:
    rows = problems(4)
    data = files(write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", *rows[2:]))
    made = material(imitating(tmp_path), RL, data=data)
    assert [p.question for p in made.problems["rl"]] == ["0+1?", "1+1?"]
    assert len(made.heldout) == 2 and len(made.layouts["cold"]) == 1
    few = material(imitating(tmp_path), RL, data={**data, "max_problems": 1})
    assert (len(few.problems["rl"]), len(few.heldout)) == (1, 1), "of each file"
    assert made.notes == ["stage rl: 2 of the 4 problems in data.train_files are held out, and so not learnt from"]


def test_a_held_out_question_under_another_system_text_is_told_and_learnt_from(tmp_path: Path) -> None:
    """It may be a part of the question, as a story is."""

    def said(system: str, *turns: str) -> dict[str, Any]:
        roles = ("user", "assistant", "user")
        talk = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
        return {"prompt": [{"role": "system", "content": system}, *talk], "answer": "2"}

    train = [said("Be brief.", "1+1?"), said("Be kind.", "1+1?"), said("Be kind.", "0+0?", "0", "1+1?")]
    data = files(write(tmp_path / "a.jsonl", *train), write(tmp_path / "b.jsonl", said("Be brief.", "1+1?")))
    made = material(imitating(tmp_path), RL, data=data)
    assert [problem.system for problem in made.problems["rl"]] == ["Be kind.", "Be kind."]
    assert made.notes == [
        "stage rl: 1 of the 3 problems in data.train_files is held out, and so not learnt from",
        "stage rl: 1 of the 2 problems to learn from asks a held-out question under another system text; leave such "
        "rows out, unless that text is a part of the question",
    ]


def test_rows_of_one_question_with_several_answers_are_told(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": answer} for answer in ("3", "2", "2")]
    train = write(tmp_path / "a.jsonl", *rows, {"question": "2+2?", "answer": "4"})
    made = material(imitating(tmp_path), RL, data=files(train), evaluate={"problems": 0})
    assert [problem.answer for problem in made.problems["rl"]] == ["2", "4"]
    why = "because a later one has", "another answer to the same question", "the same question and answer"
    left = "stage rl: 1 of the 4 rows in data.train_files is left out,"
    assert sorted(made.notes) == [f"{left} {why[0]} {why[1]}", f"{left} {why[0]} {why[2]}"]


def test_test_questions_that_are_not_drawn_are_counted_where_they_are_learnt_from(tmp_path: Path) -> None:
    rows = problems(5)
    other = {"question": "9+1?", "answer": "10"}
    data = files(write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", *rows[1:4], other))
    made = material(imitating(tmp_path), RL, data=data, evaluate={"problems": 1})
    drawn = {problem.question for problem in made.heldout}
    learnt = [problem.question for problem in made.problems["rl"] if problem.question in ("1+1?", "2+1?", "3+1?")]
    assert not drawn & set(learnt) and len(learnt) in (2, 3)
    are = "are in data.test_files, too, and not among the evaluate.problems = 1 that are held out; raise that number"
    assert made.notes[-1].startswith(
        f"stage rl: {len(learnt)} of the {len(made.problems['rl'])} problems to learn from {are}"
    )


def test_demonstrations_that_are_not_written_as_attempts_are_told(tmp_path: Path) -> None:
    """As in rows for TRL, whose trainer wants `tools` in each."""

    def notes(*rows: dict[str, Any]) -> Any:
        cold = {**COLD, "sft": {"rows_file": write(tmp_path / "rows.jsonl", *rows)}}
        train = write(tmp_path / "a.jsonl", {"question": "1+1?", "answer": "2"})
        return material(cold, RL, data=files(train), evaluate={"problems": 0}, model={"max_positions": 1024}).notes

    assert notes({"messages": MESSAGES}, {"messages": MESSAGES, "tools": []}) == []
    (told,) = notes({"messages": MESSAGES, "tools": []})
    assert told.startswith(
        "stage cold: its demonstrations have `tools` of their own, so they are written as plain chats"
    )


def test_a_reward_function_that_fails_on_the_right_answer_is_told_before_anything_starts(tmp_path: Path) -> None:
    """At 058688ea one that took a list of messages for a text was told after the cold start and an evaluation."""
    (tmp_path / "own_reward.py").write_text(
        "def right(completions, answer, **_):\n    return [float(completions[0][-1].strip() == answer)]\n"
        "def bare(completions, **_):\n    return 1.0\n"
    )
    own = {"run": {"modules": [str(tmp_path)]}, "evaluate": {"problems": 0, "verifier": "own_reward.py:right"}}

    def notes(prompt: Any) -> Any:
        rows = write(tmp_path / "a.jsonl", {"prompt": prompt, "answer": "2"})
        return material(imitating(tmp_path), RL, data=files(rows), **own).notes

    assert notes("1+1?") == []
    (told,) = notes(MESSAGES[:1])
    raised = "raised AttributeError: 'dict' object has no attribute 'strip' (own_reward.py, line 2)."
    assert told.startswith(
        f"warning: for the first problem's own answer, in a box, your reward function own_reward.py:right {raised}"
    )
    own["evaluate"]["verifier"] = "own_reward.py:bare"
    assert "one number for each completion. Attempts without" in notes("1+1?")[0]


def test_a_missing_ray_is_told_before_there_is_a_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocstar.support.exits.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError) as caught:
        material(COLD, cluster={"launcher": "ray", "learners": 2})
    code, sentence = failure(caught.value) or (0, "")
    assert code == NOT_READY and sentence.startswith("ray is not installed; install what is missing with: ")
    assert sentence.endswith(install_command("cluster"))


def test_another_number_of_learners_than_torchrun_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"cluster\.learners is 8 but torchrun started 4 processes"):
        material(COLD, cluster={"learners": 8})


def test_other_answers_and_other_columns_are_other_problems(tmp_path: Path) -> None:
    """A reward may read the columns; runs begun before that was known noted the first hash alone."""
    data = files(str(tmp_path / "a.jsonl"))
    found = []
    for answer, level in (("2", 1), ("2", 1), ("999", 1), ("2", 3)):
        write(tmp_path / "a.jsonl", {"question": "1+1?", "answer": answer, "level": level})
        found.append(fingerprint(material(imitating(tmp_path), RL, data=data))["rl"])
    assert found[0] == found[1] and len(set(found)) == 3
    assert found[3].startswith(found[0][:64]) and not found[2].startswith(found[0][:64])


OWN_TASK = """
import uuid

from rocstar.protocols import Task
from rocstar.types import Problem, problem_id

class Own(Task):
    def __init__(self, data, *, tool_name, seed, heldout):
        self.answer = data.options["answer"]
    def problems(self, exclude=frozenset()):
        return [Problem(id=problem_id("a"), question="a", answer=self.answer, metadata={"folder": str(uuid.uuid4())})]
    def heldout(self):
        return []
"""


def test_what_a_task_of_ones_own_makes_anew_each_time_is_no_other_problem(tmp_path: Path) -> None:
    """The names of folders, or the order of a set: refused, its runs could never go on."""
    (tmp_path / "own_fresh_task.py").write_text(OWN_TASK)
    found = []
    for answer in ("1", "1", "2"):
        data = {"source": "own_fresh_task:Own", "options": {"answer": answer}}
        model = {"data": data, "run": {"modules": [str(tmp_path)]}, "evaluate": {"problems": 0}}
        found.append(fingerprint(material(imitating(tmp_path), RL, **model)))
    assert found[0] == found[1] and found[0]["rl"] != found[2]["rl"]


def test_a_model_that_main_memory_cannot_hold_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values alone would fit."""
    for place in ("run.material", "parts.memory"):
        monkeypatch.setattr(f"rocstar.{place}.host_bytes", lambda: 10_000_000_000)
    shape = {"hidden_size": 4096, "num_layers": 8, "num_heads": 32, "num_kv_heads": 4, "intermediate_size": 11008}
    rollout = {"max_response_tokens": 64, "engine_rows": 4}
    base = {"model": {"device": "cpu", **shape}, "rollout": rollout, "evaluate": FEW}
    told = r"up to \d\d\.\d GB \(.*weights \d\.\d GB, optimizer 1\d\.\d GB.*and 10\.0 GB of memory are avail"
    with pytest.raises(ConfigError, match=told):
        material(COLD, SMALL, **base)


def test_a_task_that_shows_all_it_has_at_once_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one made from published solutions does, however many are asked for."""
    whole = ArithmeticTask.demonstrations
    base = {"model": {"device": "cpu"}, "sft": {"batch_rows": 8, "warmup_steps": 0}, "evaluate": FEW}

    def taken(steps: int) -> float:
        memory = material({**COLD, "steps": steps}, SMALL, **base).memory
        assert memory is not None
        return memory.always["demonstrations"]

    by_count = taken(20) / taken(2)
    monkeypatch.setattr(ArithmeticTask, "demonstrations", lambda self, count: whole(self, 40))
    assert by_count == 10 and taken(20) == taken(10) > 0


@pytest.mark.parametrize("engine", [[], [{"name": "v", "kind": "vllm"}], [{"name": "t", "kind": "torch"}]])
def test_a_cache_without_room_for_the_longest_attempt_is_refused_on_gpus_too(
    engine: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cap alone would fit. How long prompts are shows only once there is a tokenizer."""
    monkeypatch.setenv("ROCSTAR_VLLM_PYTHON", sys.executable)
    monkeypatch.setattr("rocstar.parts.placement._gpus_here", lambda device: (("0", "1"), 80e9))
    base = {"rollout": {"max_response_tokens": 64, "kv_tokens": 76}, "evaluate": FEW, "engine": engine}
    with pytest.raises(ConfigError, match=r"^rollout.kv_tokens 76 is less than the \d+ tokens of the longest attempt"):
        material(COLD, SMALL, **base)


def asked(tmp_path: Path, *words: int, name: str = "a.jsonl") -> str:
    """A file of problems of so many words each."""
    return write(
        tmp_path / name, *({"question": f"{n} " + "word " * count, "answer": "2"} for n, count in enumerate(words))
    )


def test_a_prompt_that_is_too_long_is_named_by_file_and_line(tmp_path: Path) -> None:
    data = files(asked(tmp_path, 1, 400, 2, 900))
    told = (
        r"the longest prompt of \d+ tokens \(a\.jsonl line 4, and 1 more are too long\) need \d+ positions, .*; leave "
        r"such problems out with data\.max_prompt_tokens=448, or"
    )
    with pytest.raises(ConfigError, match=told):
        material(imitating(tmp_path), RL, data=data)
    every = files(asked(tmp_path, 900, 901, name="b.jsonl"))  # nothing would be left
    with pytest.raises(ConfigError, match=r"a rollout\.template that writes less around each question, leave such pro"):
        material(imitating(tmp_path), RL, data=every)


def test_a_row_without_a_column_that_the_reward_requires_is_refused(tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text("def right(completions, width, **_): return [float(w) for w in width]\n")
    judged = {"verifier": f"{tmp_path / 'needs.py'}:right", "problems": 0}
    rows = [{"question": f"{n}?", "answer": "1", "width": n} for n in range(3)]
    data = files(write(tmp_path / "a.jsonl", *rows))
    material(imitating(tmp_path), RL, data=data, evaluate=judged)
    sums = 'title = "Sums"\nsource = "made here"\nkind = "math"\nfiles = ["b.jsonl"]\n'
    (tmp_path / "sums.toml").write_text(f"{sums}[protocol]\nattempts = 1\ntemperature = 1.0\n")
    write(tmp_path / "b.jsonl", {"question": "?", "answer": "1"})
    asked = [{"name": str(tmp_path / "sums.toml"), "folder": str(tmp_path)}]
    with pytest.raises(DataError, match="b line 1 has no column width"):
        material(imitating(tmp_path), RL, data=data, evaluate=judged | {"benchmark": asked})
    write(tmp_path / "a.jsonl", *rows, {"question": "?", "answer": "1"})
    with pytest.raises(DataError, match=r"a\.jsonl line 4 has no column width beside .*needs\.py:right requires; add"):
        material(imitating(tmp_path), RL, data=data, evaluate=judged)


def test_arguments_of_a_row_for_a_tool_are_refused_where_nothing_reads_them(tmp_path: Path) -> None:
    def of(tool: str, given: Any) -> dict[str, Any]:
        return {"question": f"{tool}?", "answer": "1", "extra_info": {"tools_kwargs": {tool: given}}}

    row = of("python", {"create_kwargs": {"ground_truth": "1"}})
    others = [of("python", {"create_kwargs": {"ground_truth": None}}), of("search", {"create_kwargs": {"top": 3}})]
    data = files(write(tmp_path / "a.jsonl", *others))
    material(imitating(tmp_path), RL, data=data, evaluate={"problems": 0})
    write(tmp_path / "a.jsonl", *others, row)
    with pytest.raises(DataError, match=r"a\.jsonl line 3 has extra_info\.tools_kwargs for python, which no tool"):
        material(imitating(tmp_path), RL, data=data, evaluate={"problems": 0})
    (tmp_path / "reads_rows.py").write_text("async def solve(problem, client): ...\n")
    agent = {"max_response_tokens": 64, "agent": f"{tmp_path / 'reads_rows.py'}:solve"}
    material(imitating(tmp_path), RL, data=data, evaluate={"problems": 0}, rollout=agent)


def test_problems_with_longer_prompts_are_left_out_counted_and_named(tmp_path: Path) -> None:
    test = asked(tmp_path, 3, 700, name="b.jsonl")
    data = files(asked(tmp_path, 1, 400, 2, 900), test, max_prompt_tokens=448)
    made = material(imitating(tmp_path), RL, data=data)
    of_stage, held_out = made.notes
    assert re.fullmatch(
        r"stage rl: data\.max_prompt_tokens leaves out 2 of 4 problems, whose prompts have more than 448 tokens: "
        r"a\.jsonl line 2 \(\d+\), a\.jsonl line 4 \(\d+\)",
        of_stage,
    )
    assert held_out.startswith("held out: data.max_prompt_tokens leaves out 1 of 2 problems")
    assert "b.jsonl line 2" in held_out
    with pytest.raises(ConfigError, match=r"leaves out 4 of 4 problems, .* so nothing is left; raise it"):
        material(imitating(tmp_path), RL, data={**data, "max_prompt_tokens": 1})


def test_characters_that_the_tokenizer_loses_are_told(tmp_path: Path) -> None:
    rows = [{"question": question, "answer": "2"} for question in ("1+1?", "小明有几个?", "小?\u200f\u00a0")]
    made = material(imitating(tmp_path), RL, data=files(write(tmp_path / "a.jsonl", *rows)))
    (told,) = unwritten(made, _codec_at_first(made))
    assert told.startswith(
        "warning: the tokenizer has no token for 5 characters of the problems ('个', '几', '小', '明', '有'), "
        "which 2 of 3 hold; "
    )


def test_a_stage_may_leave_out_more_than_another(tmp_path: Path) -> None:
    data = files(asked(tmp_path, 1, 900))
    strict = {**RL, "name": "strict", "data": {"max_prompt_tokens": 448}}
    made = material(imitating(tmp_path), RL, strict, data=data, model={"max_positions": 4096})
    assert [told.split(":")[0] for told in made.notes] == ["stage strict"]


def epochs_of(tmp_path: Path, rows: int, **stage: Any) -> Material:
    shown = {"rows_file": write(tmp_path / "rows.jsonl", *[{"messages": MESSAGES}] * rows), "batch_rows": 8}
    sft = {**shown, "warmup_steps": 0, **stage.pop("sft", {})}
    return material({"name": "cold", "kind": "sft", "sft": sft, **stage}, model={"max_positions": 256})


@pytest.mark.parametrize(("rows", "epochs", "steps"), [(33, 3, 13), (8, 1, 1), (5, 2, 2), (32, 0.5, 2)])
def test_epochs_become_steps_once_the_rows_are_known(tmp_path: Path, rows: int, epochs: float, steps: int) -> None:
    """The recorded recipe has the steps; no row is seen less often than asked for."""
    made = epochs_of(tmp_path, rows, epochs=epochs)
    (stage,) = made.recipe.stage
    assert (stage.steps, stage.model_dump()["epochs"]) == (steps, 0)
    assert steps * min(8, rows) >= epochs * rows
    told = f"stage cold: epochs {epochs:g} of {rows} rows, 8 a step, are {steps} step" + "s" * (steps > 1)
    assert made.notes == [told]


@pytest.mark.parametrize(
    ("stage", "told"),
    [
        ({"epochs": 3, "steps": 5}, "steps 5 and epochs 3 are given; give steps or epochs"),
        ({"epochs": 3, "steps": 0}, "steps 0 and epochs 3 are given; give steps or epochs"),
        ({}, "steps is missing; give steps or epochs"),
        ({"epochs": 3, "sft": {"rows_file": None}}, "epochs 3 need sft.rows_file, .* give steps instead, or a file"),
        (
            {"epochs": 1, "sft": {"warmup_steps": 9}},
            "are 4 steps, fewer than its sft.warmup_steps 9; lower that or raise",
        ),
    ],
)
def test_epochs_that_cannot_be_obeyed_are_refused(tmp_path: Path, stage: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, ValidationError), match=told):
        epochs_of(tmp_path, 32, **stage)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A model of its own and a problem, to be read only."""
    pytest.importorskip("torch")
    from rocstar.config.sections import ModelSection
    from rocstar.dialogue.templates import template_named
    from rocstar.learning.models import random_model
    from rocstar.learning.policy import Policy
    from tests.learning.examples import SHAPE, codec

    place = tmp_path_factory.mktemp("pretrained")
    made = random_model(SHAPE.model_copy(update={"max_positions": 256}), 0)
    Policy(made, codec(), template_named("compact"), ModelSection()).save(place / "model")
    data = files(write(place / "a.jsonl", {"question": "1+1?", "answer": "2"}))
    return {"model": {"path": str(place / "model")}, "data": data}


def test_a_model_that_nobody_asks_for_a_box_is_told_before_the_first_step(
    tmp_path: Path, pretrained: dict[str, Any]
) -> None:
    compact = {"rollout": {"template": "compact", "max_turns": 1}}
    (told,) = material(RL, **pretrained, **compact).notes
    assert told.startswith(
        r"warning: no sft stage comes before rl and the prompt does not ask for \boxed{}, where eval"
    )
    made = material(RL, **pretrained, **compact)
    evaluate = made.recipe.evaluate.model_copy(update={"verifier": "rocstar.adapters.reasoning_gym:score"})
    assert list(_unasked(replace(made, recipe=made.recipe.model_copy(update={"evaluate": evaluate}))))
    asking = {"rollout": {**compact["rollout"], "preamble": r"Answer in \boxed{}. "}}
    assert material(RL, **pretrained, **asking).notes == []
    agent = {"rollout": {**compact["rollout"], "agent": "own_agent.py:play"}}
    (tmp_path / "own_agent.py").write_text("def play(problem, client): ...")
    told = material(RL, **pretrained, **agent, run={"modules": [str(tmp_path)]})
    assert told.notes == [] and first_prompt(told) is None, "its prompts are the agent's"
    assert material(imitating(tmp_path), RL, **pretrained, **compact).notes == []
    own = {"verifier": "rocstar.adapters.rewards:compute_score"}
    assert material(RL, **pretrained, **compact, evaluate=own).notes == []


def test_a_cap_under_what_an_answer_takes_is_refused_and_one_without_room_for_a_call_is_told(
    tmp_path: Path, pretrained: dict[str, Any]
) -> None:
    def capped(tokens: int, **rollout: Any) -> Material:
        stage = {**RL, "rollout": {"max_response_tokens": tokens, **rollout}}
        return material(imitating(tmp_path), stage, **pretrained, rollout={"template": "compact"})

    with pytest.raises(
        ConfigError, match=r"stage rl: rollout.max_response_tokens is 9, and \\boxed\{0\} takes 10 with"
    ):
        capped(9)
    assert capped(10, max_turns=1).notes == capped(9, max_turns=1, truncated="graded").notes == []
    (told,) = capped(30).notes
    least = int(told.split()[-3].rstrip(";"))
    assert "a tool call, its reply and" in told and capped(least).notes == [] != capped(least - 1).notes
    with pytest.raises(ConfigError, match="takes 2 with its end"):  # nobody knows its tokens yet
        material(imitating(tmp_path), {**RL, "rollout": {"max_response_tokens": 1}}, data=pretrained["data"])


def test_demonstrations_that_the_run_would_cut_or_whose_calls_would_fail_are_told(
    tmp_path: Path, pretrained: dict[str, Any]
) -> None:
    def shown(*calls: tuple[str, dict[str, str]]) -> list[str]:
        rows = []
        for name, arguments in calls:
            call = {"function": {"name": name, "arguments": arguments}}
            asked = {"role": "assistant", "content": "", "tool_calls": [call]}
            rows.append({"messages": [MESSAGES[0], asked, {"role": "tool", "content": "2"}, MESSAGES[1]]})
        cold = {**COLD, "sft": {"rows_file": write(tmp_path / "calls.jsonl", *rows)}}
        stage = {**RL, "rollout": {"max_response_tokens": 180}}
        return list(material(cold, stage, **pretrained, rollout={"template": "compact"}).notes)

    fine = ("python", {"code": "1+1"})
    assert shown(fine, fine) == []
    assert shown(fine, ("pyhton", {"code": "1+1"})) == [
        "stage cold: 1 of 2 demonstrations call what the run's tools do not take, first conversation 2: no tool is "
        "called 'pyhton'; there is python"
    ]
    (told,) = shown(("python", {"source": "1+1"}))
    assert "required argument 'code' is missing" in told
    (told,) = shown(fine, ("python", {"code": "1+1" * 12}))
    assert told.startswith("stage cold: 1 of 2 demonstrations take more than the 180 tokens of stage rl")


def test_a_model_that_cannot_learn_is_refused_before_anything_starts_whatever_engine_writes(
    tmp_path: Path, pretrained: dict[str, Any]
) -> None:
    """What other configs are refused for is in tests/clumsy/training.py."""
    folder = tmp_path / "model"
    shutil.copytree(pretrained["model"]["path"], folder)
    plain = json.loads((folder / "config.json").read_text())
    rollout = {"rollout": {"template": "compact", "max_turns": 1}}
    server = {"engine": [{"name": "v", "kind": "vllm", "url": "http://127.0.0.1:8000"}]}

    def read(**changes: Any) -> None:
        (folder / "config.json").write_text(json.dumps({**plain, **changes}))
        own = {**pretrained, "model": {"path": str(folder)}}
        material(imitating(tmp_path), RL, **own, **rollout, **server)

    read(logits_scaling=1.0, layer_types=["sliding_attention", "linear_attention"], sliding_window=16)
    with pytest.raises(ConfigError, match=r"logits_scaling 8\.0"):  # Granite
        read(logits_scaling=8.0)


def test_how_stale_tokens_are_weighed_and_what_cannot_end_a_stage_is_told(
    tmp_path: Path, pretrained: dict[str, Any]
) -> None:
    def ahead(**sections: Any) -> list[str]:
        stage = {**RL, "rollout": {"max_response_tokens": 60, "max_staleness_steps": 1}, **sections}
        plain = {"rollout": {"template": "compact", "max_turns": 1}}
        return list(material(imitating(tmp_path), stage, **pretrained, **plain).notes)

    (told,) = ahead()
    assert told.startswith("stage rl: tokens may be 1 step older") and told.endswith("2 (learning.importance_cap)")
    own = {"importance_cap": 0}
    (told,) = ahead(learning=own, end={"reward_gain": 0.1})
    assert "end.reward_gain is first looked at after 40 (end.window is 20), so it does not end the stage" in told
    assert ahead(learning=own, end={"reward_gain": -1}) == []
