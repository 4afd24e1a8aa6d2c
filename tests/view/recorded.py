"""Run folders for the page, written by the run folder's own writers, and the application over them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from rocstar.config.recipe import load_recipe
from rocstar.config.sections import ResampleSection
from rocstar.learning.advantages import advantages, kept_advantages
from rocstar.learning.resample import resampler_of, seed_of_choice
from rocstar.record.folder import RunFolder
from rocstar.record.journal import Journal
from rocstar.record.rollouts import AttemptRecord, write_attempts
from rocstar.types import (
    Completion,
    Finish,
    FormatFacts,
    Group,
    Outcome,
    Problem,
    Resampled,
    Status,
    Stop,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    problem_id,
)
from rocstar.view.app import application
from rocstar.view.sources import Library

SEED = 5
RECIPE = """\
[run]
name = "{name}"
seed = {seed}
[[stage]]
name = "first"
kind = "rl"
steps = 3
resample.method = "{method}"
{more}
"""
STATUSES = (Status.OK, Status.OK, Status.OK, Status.CODE_ERROR, Status.TIMEOUT, Status.BAD_CALL)


def trajectory(problem: Problem, index: int, draw: random.Random) -> Trajectory:
    """An attempt like any other: up to four calls that may fail, any number of answer tags, now and then a fault."""
    calls = draw.choice((0, 1, 2, 3, 4))
    turns = [_turn(draw, number) for number in range(calls)] + [Turn(completion=_completion(draw))]
    failed, verdict = draw.random() < 0.04, draw.choice((Verdict.RIGHT, Verdict.WRONG, Verdict.WRONG))
    verdict = Verdict.UNDECIDED if draw.random() < 0.04 else verdict
    return Trajectory(
        problem_id=problem.id,
        index=index,
        prompt_ids=(1, 2),
        turns=tuple(turns),
        stop=Stop.ENVIRONMENT_FAILED if failed else draw.choice((Stop.ANSWERED, Stop.ANSWERED, Stop.MAX_TOKENS)),
        outcome=None if failed else _outcome(verdict, draw),
        fault="the sandbox is gone" if failed else None,
        seconds=2.0,
        tool_seconds=0.5,
    )


def _outcome(verdict: Verdict, draw: random.Random) -> Outcome:
    facts = FormatFacts(answer_tags=draw.choice((0, 1, 1, 1, 2, 3, 9)), reason_after_answer=False, boxed=True)
    reward = float(verdict is Verdict.RIGHT)
    return Outcome(verdict=verdict, reward=reward, extracted="7", method="integer", format_facts=facts)


def _completion(draw: random.Random) -> Completion:
    ids = tuple(draw.choices(range(97, 100), k=draw.randrange(1, 60)))
    return Completion(token_ids=ids, logprobs=tuple(-draw.random() for _ in ids), finish=Finish.STOP)


def _turn(draw: random.Random, number: int) -> Turn:
    status = draw.choice(STATUSES)
    stderr = "" if status is Status.OK else "ZeroDivisionError: division by zero"
    call = ToolCall(id=f"call_{number}", tool="python", arguments={"code": "print(1)"}, raw='{"code": "print(1)"}')
    result = ToolResult(call_id=call.id, status=status, stdout="needle 42", stderr=stderr, run_seconds=0.1)
    return Turn(completion=_completion(draw), calls=(call,), results=(result,), reply_ids=(7, 8))


def problem(number: int) -> Problem:
    question = f"What is {number} + {number}?"
    return Problem(id=problem_id(question), question=question, answer=str(2 * number), source="made")


def chosen(step: int, problems: Sequence[Problem], attempts: int, settings: ResampleSection) -> list[Resampled]:
    """Groups of a step, chosen among as `rocstar.train.learn_from` does."""
    draw = random.Random(step)
    groups = [Group(problem=p, trajectories=tuple(trajectory(p, i, draw) for i in range(attempts))) for p in problems]
    resample = resampler_of(settings)
    return [resample(group, random.Random(seed_of_choice(SEED, step, group.problem.id))) for group in groups]


def records(groups: Sequence[Resampled]) -> list[AttemptRecord]:
    return [
        AttemptRecord(
            problem=one.group.problem,
            trajectory=one.group.trajectories[choice.index],
            choice=choice,
            advantage=kept_advantages(one, advantages).get(choice.index),
            policy_version=3,
            entropies=[0.5] * len(one.group.trajectories[choice.index].token_ids),
        )
        for one in groups
        for choice in one.choices
    ]


def create(base: Path, name: str = "made", *, method: str = "roc", keep: int = 8, repetition: float = 0.0) -> RunFolder:
    base.mkdir(parents=True, exist_ok=True)
    recipe = base / f"{name}.toml"
    more = f"resample.repetition_weight = {repetition}" if repetition else ""
    keeps = "" if method == "all" else f"resample.keep = {keep}\n"
    recipe.write_text(RECIPE.format(name=name, seed=SEED, method=method, more=keeps + more))
    return RunFolder.create(load_recipe(str(recipe), []), base, ["test"])


def add_step(run: RunFolder, step: int, *, problems: int = 3, attempts: int = 16) -> list[Resampled]:
    stage = load_recipe(str(run.path.parent / f"{run.name}.toml"), []).stage[0]
    groups = chosen(step, [problem(n) for n in range(problems)], attempts, stage.resample)  # type: ignore[union-attr]
    write_attempts(run.rollout_file(step), step, records(groups), decode)
    with Journal(run.metrics) as metrics:
        metrics.append(
            {"step": step, "stage": "first", "reward/mean": step / 10, "step/tokens": 100, "step/seconds": 1}
        )
    return groups


def add_evaluation(run: RunFolder, name: str, step: int, seed: int) -> None:
    from rocstar.record.atomic import write_json

    folder, draw = run.evaluation(name, step), random.Random(seed)
    folder.mkdir(parents=True)
    made = [
        AttemptRecord(problem=problem(n), trajectory=trajectory(problem(n), 0, draw), policy_version=1)
        for n in range(40)
    ]
    write_attempts(folder / "samples.parquet", step, made, decode)
    accuracy = {"value": 0.5, "interval": [0.3, 0.7], "n": 40}
    write_json(folder / "result.json", {"accuracy": accuracy, "setup": {"model": "m", "attempts": 1}})


def add_tokenizer(run: RunFolder) -> None:
    """One that spells each id as `decode` does, as far as attempts here use them."""
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.WordLevel({chr(number): number for number in range(128)}, unk_token=" "))
    made.decoder = decoders.Fuse()
    model = run.checkpoint(0) / "model"
    model.mkdir(parents=True)
    (model / "tokenizer.json").write_text(made.to_str())


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def attempt(
    text: str, *, stdout: str = "", code: str = "print(1)", question: str = "Q?", index: int = 0
) -> AttemptRecord:
    """One attempt that wrote this text, with a call whose program and output are these."""
    call = ToolCall(id="call_0", tool="python", arguments={"code": code}, raw=code)
    result = ToolResult(call_id="call_0", status=Status.CODE_ERROR, stdout=stdout, stderr=stdout)
    ids = tuple(map(ord, text))
    turns = (
        Turn(
            completion=Completion(token_ids=ids, logprobs=(-0.5,) * len(ids), finish=Finish.STOP),
            calls=(call,),
            results=(result,),
        ),
    )
    asked = Problem(id=problem_id(ascii(question)), question=question, answer=text[:50], source="made")
    outcome = Outcome(
        verdict=Verdict.WRONG,
        reward=0.0,
        extracted=text[:50],
        method="integer",
        format_facts=FormatFacts(answer_tags=1, reason_after_answer=False, boxed=True),
    )
    made = trajectory(asked, index, random.Random(1))
    made = replace(made, turns=turns, stop=Stop.ANSWERED, outcome=outcome, fault=None, seconds=1.0)
    return AttemptRecord(problem=asked, trajectory=made, policy_version=1)


Ask = Callable[..., Any]


@contextmanager
def page(base: Path, cache: Path) -> Iterator[TestClient]:
    with TestClient(application(Library.open(None, base), cache=cache), base_url="http://127.0.0.1:8710") as client:
        yield client


def settled(client: TestClient, path: str, **query: Any) -> Any:
    """The answer once every file is in the table and every text was looked for."""
    while True:
        found = client.get(path, params=query)
        value = found.json()
        if found.status_code != 200 or not (value.get("indexing") or value.get("searched", 0) < value.get("of", 0)):
            return value
        time.sleep(0.005)  # what is waited for computes in this process
