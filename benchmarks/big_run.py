"""A run folder of many attempts, made without a model: what the page of `rocstar view` is measured on.

    python benchmarks/big_run.py FOLDER --attempts 100000          # 196 steps, 1 attempt in 2,000 of 12,288 tokens
    python benchmarks/big_run.py FOLDER --attempts 1000000 --problems 512 --mean-tokens 60

Choices are made by RoC itself, files are written by the run folder's own writer. Words mean nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rocstar.config.recipe import load_recipe
from rocstar.learning.advantages import advantages
from rocstar.learning.resample import RocPaper
from rocstar.record.folder import RunFolder
from rocstar.record.journal import Journal
from rocstar.record.rollouts import attempts_schema, write_table
from rocstar.types import (
    Completion,
    Finish,
    FormatFacts,
    Group,
    Outcome,
    Problem,
    Status,
    Stop,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    problem_id,
    seed_for,
)

RECIPE = """\
[run]
name = "{name}"
[resample]
keep = {keep}
[[stage]]
name = "stage1"
kind = "rl"
steps = {steps}
"""
SIBLINGS, KEEP, LONG_TOKENS = 32, 16, 12_288
OPENING = ("<|im_start|>user\n", "<|im_end|>", "\n<|im_start|>assistant\n", "\n<|im_start|>tool\n<tool_response>\n")
CLOSING = ("\n</tool_response><|im_end|>\n<|im_start|>assistant\n", "<answer>\\boxed{", "}</answer>")
CALL = ('\n<tool_call>\n{"name": "python", "arguments": {"code": "', '"}}\n</tool_call>')
LINES = (
    *("import math", "\\n", "total = 0", "for n in range(1, 1000):", "    if n % 7 == 3:", "        total += n"),
    *("print(total)", "x = math.gcd(84, 36)", "print(x)", "print(undefined)", "values = [n * n for n in range(20)]"),
)
WORDS = (
    *(
        " so",
        " the",
        " number",
        " of",
        " pairs",
        " is",
        " at",
        " least",
        " one",
        " and",
        " we",
        " can",
        " check",
        " with",
    ),
    *(" code", " wait", ",", ".", " that", " is", " not", " right", " because", " each", " prime", " divides", " sum"),
    *(" modulo", " 7", " 12", " 204", " let", " me", " try", " again", "\n", " é", " 数", " 🙂", " <b>bold</b>", " Ω"),
)
DIGITS = tuple(str(digit) for digit in range(10))
VOCABULARY = (*OPENING, *CLOSING, *CALL, *LINES, *WORDS, *DIGITS)
ID = {word: number for number, word in enumerate(VOCABULARY)}
FIRST_WORD, LAST_WORD = ID[" so"], ID[" Ω"]
ERRORS = (
    (Status.CODE_ERROR, "NameError: name 'undefined' is not defined"),
    (Status.CODE_ERROR, "ZeroDivisionError: division by zero"),
    (Status.CODE_ERROR, "SyntaxError: '(' was never closed"),
    (Status.TIMEOUT, "the program ran longer than 5 s"),
)


@dataclass(slots=True)
class Made:
    """One attempt: the trajectory without tokens, and the tokens beside it."""

    trajectory: Trajectory
    prompt: list[int]
    tokens: list[int]
    mask: list[bool]
    texts: list[str]
    turns: str


def main() -> None:
    options = _options()
    began = time.monotonic()
    per_step = options.problems * SIBLINGS
    steps = -(-options.attempts // per_step)
    run = create(options.folder, steps)
    for step in range(1, steps + 1):
        add_step(run, step, options.problems, options.mean_tokens, options.seed)
    size = sum(file.stat().st_size for file in run.rollouts.iterdir())
    figures = {
        "attempts": steps * per_step,
        "steps": steps,
        "bytes": size,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(f"{run.path}: {figures['attempts']:,} attempts in {steps} steps, {size / 2**20:,.0f} MiB")
    print(json.dumps({"run": str(run.path), **figures}))


def create(base: Path, steps: int, name: str = "big") -> RunFolder:
    """A run folder of that many steps, none of them done, with a tokenizer."""
    base.mkdir(parents=True, exist_ok=True)
    text = RECIPE.format(name=name, steps=steps, keep=KEEP)
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        recipe = load_recipe(file.name, [])
    run = RunFolder.create(recipe, base, ["big_run"], recipe_text=text)
    with Journal(run.events) as events:
        events.append({"time": 0.0, "event": "stage", "name": "stage1", "kind": "rl", "steps": steps})
    model = run.checkpoint(0) / "model"
    model.mkdir(parents=True)
    (model / "tokenizer.json").write_text(_tokenizer())
    return run


def add_step(run: RunFolder, step: int, problems: int, mean_tokens: int, seed: int) -> None:
    """The attempts of a step, and its row of metrics."""
    draw = random.Random(seed_for(seed, step))
    numbers = np.random.default_rng(seed_for(seed, step))
    rows: list[dict[str, Any]] = []
    made: list[Made] = []
    for place in range(problems):
        problem = _problem((step * problems + place) % (problems * 20))
        group = [_attempt(problem, index, draw, numbers, mean_tokens) for index in range(SIBLINGS)]
        rows += _rows(step, problem, group)
        made += group
    write_table(run.rollout_file(step), _table(rows, made, numbers))
    _tell(run, step, rows)


def _problem(number: int) -> Problem:
    question = (
        f"Find the number of ordered pairs (a, b) of positive integers below {number + 10} with a^2 + b = {number}."
    )
    return Problem(id=problem_id(question), question=question, answer=str(number % 1000), source="made")


def _attempt(problem: Problem, index: int, draw: random.Random, numbers: np.random.Generator, mean_tokens: int) -> Made:
    length = (
        LONG_TOKENS
        if draw.random() < 0.0005
        else min(LONG_TOKENS, 8 + int(numbers.lognormal(0, 0.8) * mean_tokens * 0.72))
    )
    right, calls = (
        draw.random() < 0.3 + 0.5 * (int(problem.id[:6], 16) % 97 / 97),
        min(draw.choice((0, 1, 1, 2, 3)), length // 20),
    )
    prompt = [ID[OPENING[0]], *[ID[digit] for digit in "12"], ID[OPENING[1]], ID[OPENING[2]]]
    tokens, mask, turns, texts, told = [*prompt], [False] * len(prompt), [], [], []
    for number in range(calls + 1):
        ids = numbers.integers(FIRST_WORD, LAST_WORD + 1, max(1, length // (calls + 1))).tolist()
        last = number == calls
        code = [*draw.sample(LINES, 3)]
        ids += (
            [ID[CLOSING[1]], ID["7"], ID[CLOSING[2]]]
            if last
            else [ID[CALL[0]], *map(ID.__getitem__, code), ID[CALL[1]]]
        )
        reply = [] if last else [ID[OPENING[3]], ID["4"], ID["2"], ID[CLOSING[0]]]
        tokens += ids + reply
        mask += [True] * len(ids) + [False] * len(reply)
        texts.append("".join(map(VOCABULARY.__getitem__, ids)))
        result = None if last else _result(draw, number)
        turns.append(
            Turn(
                completion=Completion(token_ids=(), logprobs=(), finish=Finish.STOP),
                results=(result,) if result else (),
            )
        )
        told.append(_turn(len(ids), len(reply), result, "".join(code)))
    outcome = Outcome(
        verdict=Verdict.RIGHT if right else Verdict.WRONG,
        reward=float(right),
        extracted=problem.answer if right else "7",
        method="integer",
        format_facts=FormatFacts(answer_tags=draw.choice((1, 1, 1, 1, 2, 0)), reason_after_answer=False, boxed=True),
    )
    trajectory = Trajectory(
        problem_id=problem.id,
        index=index,
        prompt_ids=(),
        turns=tuple(turns),
        stop=Stop.MAX_TOKENS if length >= LONG_TOKENS else Stop.ANSWERED,
        outcome=outcome,
        seconds=length * 0.02 + calls * 0.1,
        tool_seconds=calls * 0.1,
    )
    return Made(trajectory, prompt, tokens, mask, texts, f"[{', '.join(told)}]")


def _result(draw: random.Random, number: int) -> ToolResult:
    if draw.random() < 0.8:
        return ToolResult(call_id=str(number), status=Status.OK, stdout="42\n", run_seconds=0.04, queue_seconds=0.003)
    status, told = draw.choice(ERRORS)
    trace = "" if status is Status.TIMEOUT else 'Traceback (most recent call last):\n  File "<cell>", line 3\n'
    return ToolResult(call_id=str(number), status=status, stderr=trace + told, run_seconds=0.05, queue_seconds=0.002)


def _turn(sampled: int, replied: int, result: ToolResult | None, code: str) -> str:
    calls: list[Any] = []
    results: list[Any] = []
    if result:
        raw = json.dumps({"name": "python", "arguments": {"code": code.replace("\\n", "\n")}})
        calls = [
            {
                "id": result.call_id,
                "tool": "python",
                "arguments": json.loads(raw)["arguments"],
                "raw": raw,
                "parse_error": None,
            }
        ]
        results = [{name: getattr(result, name) for name in ToolResult.__dataclass_fields__}]
    turn = {"finish": "stop", "sampled_tokens": sampled, "reply_tokens": replied, "version_spans": [[1, sampled]]}
    return json.dumps({**turn, "calls": calls, "results": results})


def _rows(step: int, problem: Problem, made: list[Made]) -> list[dict[str, Any]]:
    """As training records them: RoC's choice by the seed of the step."""
    group = Group(problem=problem, trajectories=tuple(one.trajectory for one in made))
    seed = seed_for(seed_for(0, "step", step), "resample", problem.id)
    chosen = RocPaper(KEEP)(group, random.Random(seed))
    kept = [choice.index for choice in chosen.choices if choice.kept]
    learnt = dict(zip(kept, advantages([group.rewards_G[i] for i in kept]), strict=True)) if len(kept) > 1 else {}
    return [
        {
            "step": step,
            "problem_id": problem.id,
            "question": problem.question,
            "gold": problem.answer,
            "source": problem.source,
            "index": choice.index,
            "verdict": str(group.trajectories[choice.index].outcome.verdict),  # type: ignore[union-attr]
            "reward": group.rewards_G[choice.index],
            "extracted": group.trajectories[choice.index].outcome.extracted,  # type: ignore[union-attr]
            "method": "integer",
            "format_facts": None,
            "penalty_errors": choice.penalty.errors,
            "penalty_format": choice.penalty.format,
            "penalty_total": choice.penalty.total,
            "kept": choice.kept,
            "reason": str(choice.reason),
            "weight": choice.weight,
            "advantage": learnt.get(choice.index),
            "stop": str(group.trajectories[choice.index].stop),
            "fault": None,
            "response_tokens": len(made[choice.index].tokens) - len(made[choice.index].prompt),
            "calls": group.trajectories[choice.index].num_calls,
            "failed_calls": group.trajectories[choice.index].num_failed_calls,
            "seconds": group.trajectories[choice.index].seconds,
            "tool_seconds": group.trajectories[choice.index].tool_seconds,
            "policy_version": step - 1,
            "turns": made[choice.index].turns,
            "text": made[choice.index].texts,
            "prompt_ids": made[choice.index].prompt,
        }
        for choice in chosen.choices
    ]


def _table(rows: list[dict[str, Any]], made: list[Made], numbers: np.random.Generator) -> pa.Table:
    lengths = [len(one.tokens) for one in made]
    offsets = pa.array([0, *accumulate(lengths)], pa.int32())
    mask = np.concatenate([np.array(one.mask) for one in made])
    logprobs = (-numbers.exponential(0.4, len(mask)) * mask).astype(np.float32)
    flat = {
        "token_ids": np.concatenate([np.array(one.tokens, np.int32) for one in made]),
        "loss_mask": mask,
        "sampled_logprobs": logprobs,
        "entropies": (numbers.exponential(0.5, len(mask)) * mask).astype(np.float32),
        "old_logprobs": (logprobs + numbers.normal(0, 0.01, len(mask)) * mask).astype(np.float32),
    }
    schema = attempts_schema()
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(flat[field.name]).cast(field.type.value_type))
        if field.name in flat
        else pa.array([row[field.name] for row in rows], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _tell(run: RunFolder, step: int, rows: list[dict[str, Any]]) -> None:
    calls, kept = sum(row["calls"] for row in rows), sum(row["kept"] for row in rows)
    metrics = {
        "reward/mean": sum(row["reward"] for row in rows) / len(rows),
        "tool/calls": calls / len(rows),
        "tool/error_rate": sum(row["failed_calls"] for row in rows) / max(1, calls),
        "len/tokens": sum(row["response_tokens"] for row in rows) / len(rows),
        "roc/attempts": len(rows),
        "roc/kept": kept,
        "step/tokens": sum(row["response_tokens"] for row in rows),
        "step/seconds": 60.0 + step % 7,
    }
    with Journal(run.metrics) as journal:
        journal.append({"step": step, "stage": "stage1", "stage_step": step, **metrics})
    if step % 50 == 0:
        with Journal(run.events) as events:
            told = {
                "name": "truncated",
                "evidence": f"{step % 9 + 20}% of attempts were cut",
                "action": "raise the limit",
            }
            events.append({"time": step * 60.0, "event": "warning", "step": step, **told})


def _tokenizer() -> str:
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.WordLevel({word: number for word, number in ID.items()}, unk_token="."))
    made.decoder = decoders.Fuse()
    return str(made.to_str())


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attempts", type=int, default=100_000)
    parser.add_argument("--problems", type=int, default=16, help="of a step, each with 32 attempts")
    parser.add_argument("--mean-tokens", type=int, default=600, help="of an attempt")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
