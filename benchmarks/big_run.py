"""A run folder of many attempts, made without a model: what the page of `rocstar view` is measured on.

    python benchmarks/big_run.py FOLDER --attempts 100000          # 196 steps, 1 attempt in 2,000 of 12,288 tokens
    python benchmarks/big_run.py FOLDER --attempts 1000000 --problems 512 --mean-tokens 60

Choices are made by RoC itself, files are written by the run folder's own writer. Words mean nothing.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from frame import parser, report, spent

from rocstar.config.recipe import load_recipe
from rocstar.config.sections import ResampleSection
from rocstar.learning.advantages import advantages
from rocstar.learning.resample import resample
from rocstar.record.folder import RunFolder
from rocstar.record.journal import Journal
from rocstar.record.rollouts import AttemptRecord, write_rollouts
from rocstar.types import (
    Completion,
    Finish,
    FormatFacts,
    Group,
    Outcome,
    Problem,
    Status,
    Stop,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
    problem_id,
    seed_for,
)

RECIPE = """\
[run]
name = "big"
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
PLAIN = "so the number of pairs is at least one and we can check with code wait that is not right because each prime"
WORDS = (
    *(f" {word}" for word in f"{PLAIN} divides sum modulo 7 12 204 let me try again".split()),
    *(",", ".", "\n", " é", " 数", " 🙂", " <b>bold</b>", " Ω"),
)
VOCABULARY = (*OPENING, *CLOSING, *CALL, *LINES, *WORDS, *"0123456789")
ID = {word: number for number, word in enumerate(VOCABULARY)}
FIRST_WORD, LAST_WORD = ID[WORDS[0]], ID[WORDS[-1]]
ERRORS = (
    (Status.CODE_ERROR, "NameError: name 'undefined' is not defined"),
    (Status.CODE_ERROR, "ZeroDivisionError: division by zero"),
    (Status.CODE_ERROR, "SyntaxError: '(' was never closed"),
    (Status.TIMEOUT, "TimeoutError: the program ran too long"),
)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--attempts", type=int, default=100_000)
    arguments.add_argument("--problems", type=int, default=16, help="of a step, each with 32 attempts")
    arguments.add_argument("--mean-tokens", type=int, default=600, help="of an attempt")
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    per_step = options.problems * SIBLINGS
    steps = -(-options.attempts // per_step)
    with spent() as seconds:
        run = create(options.folder, steps)
        for step in range(1, steps + 1):
            add_step(run, step, options.problems, options.mean_tokens, options.seed)
    size = sum(file.stat().st_size for file in run.rollouts.iterdir())
    print(f"{run.path}: {steps * per_step:,} attempts in {steps} steps, {size / 2**20:,.0f} MiB")
    report(run=str(run.path), attempts=steps * per_step, steps=steps, bytes=size, seconds=round(seconds.wall, 1))


def create(base: Path, steps: int) -> RunFolder:
    """A run folder of that many steps, none of them done, with a tokenizer."""
    base.mkdir(parents=True, exist_ok=True)
    text = RECIPE.format(steps=steps, keep=KEEP)
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
    attempts: list[AttemptRecord] = []
    for place in range(problems):
        problem = _problem((step * problems + place) % (problems * 20))
        made = (_attempt(problem, index, draw, numbers, mean_tokens) for index in range(SIBLINGS))
        attempts += _chosen(step, Group(problem=problem, trajectories=tuple(made)), numbers)
    write_rollouts(run, step, attempts, _decode)
    _tell(run, step, attempts)


def _decode(ids: Sequence[int]) -> str:
    return "".join(map(VOCABULARY.__getitem__, ids))


def _problem(number: int) -> Problem:
    pairs = f"ordered pairs (a, b) of positive integers below {number + 10}"
    question = f"Find the number of {pairs} with a^2 + b = {number}."
    return Problem(id=problem_id(question), question=question, answer=str(number % 1000), source="made")


def _attempt(
    problem: Problem, index: int, draw: random.Random, numbers: np.random.Generator, mean_tokens: int
) -> Trajectory:
    is_long = draw.random() < 0.0005
    length = LONG_TOKENS if is_long else min(LONG_TOKENS, 8 + int(numbers.lognormal(0, 0.8) * mean_tokens * 0.72))
    right = draw.random() < 0.3 + 0.5 * (int(problem.id[:6], 16) % 97 / 97)
    calls = min(draw.choice((0, 1, 1, 2, 3)), length // 20)
    facts = FormatFacts(answer_tags=draw.choice((1, 1, 1, 1, 2, 0)), reason_after_answer=False, boxed=True)
    return Trajectory(
        problem_id=problem.id,
        index=index,
        prompt_ids=tuple(ID[word] for word in (OPENING[0], "1", "2", *OPENING[1:3])),
        turns=tuple(
            _turn(number, number == calls, length // (calls + 1), draw, numbers) for number in range(calls + 1)
        ),
        stop=Stop.MAX_TOKENS if length >= LONG_TOKENS else Stop.ANSWERED,
        outcome=Outcome(
            verdict=Verdict.RIGHT if right else Verdict.WRONG,
            reward=float(right),
            extracted=problem.answer if right else "7",
            method="integer",
            format_facts=facts,
        ),
        seconds=length * 0.02 + calls * 0.1,
        tool_seconds=calls * 0.1,
    )


def _turn(number: int, is_last: bool, length: int, draw: random.Random, numbers: np.random.Generator) -> Turn:
    lines = draw.sample(LINES, 3)
    after = (CLOSING[1], "7", CLOSING[2]) if is_last else (CALL[0], *lines, CALL[1])
    words = numbers.integers(FIRST_WORD, LAST_WORD + 1, max(1, length)).tolist()
    ids = (*words, *map(ID.__getitem__, after))
    completion = Completion(
        token_ids=ids,
        logprobs=tuple((-numbers.exponential(0.4, len(ids))).tolist()),
        finish=Finish.STOP,
        version_spans=(VersionSpan(1, len(ids)),),
    )
    if is_last:
        return Turn(completion=completion)
    arguments = {"code": "".join(lines).replace("\\n", "\n")}
    raw = json.dumps({"name": "python", "arguments": arguments})
    return Turn(
        completion=completion,
        calls=(ToolCall(id=str(number), tool="python", arguments=arguments, raw=raw),),
        results=(_result(draw, number),),
        reply_ids=tuple(ID[word] for word in (OPENING[3], "4", "2", CLOSING[0])),
    )


def _result(draw: random.Random, number: int) -> ToolResult:
    if draw.random() < 0.8:
        return ToolResult(call_id=str(number), status=Status.OK, stdout="42\n", run_seconds=0.04, queue_seconds=0.003)
    status, told = draw.choice(ERRORS)
    trace = "" if status is Status.TIMEOUT else 'Traceback (most recent call last):\n  File "<cell>", line 3\n'
    return ToolResult(call_id=str(number), status=status, stderr=trace + told, run_seconds=0.05, queue_seconds=0.002)


def _chosen(step: int, group: Group, numbers: np.random.Generator) -> Iterator[AttemptRecord]:
    """As training records them: RoC's choice by the seed of the step."""
    seed = seed_for(seed_for(0, "step", step), "resample", group.problem.id)
    choices = resample(group, random.Random(seed), ResampleSection(keep=KEEP)).choices
    kept = [choice.index for choice in choices if choice.kept]
    learnt = dict(zip(kept, advantages([group.rewards_G[i] for i in kept]), strict=True)) if len(kept) > 1 else {}
    for choice in choices:
        trajectory = group.trajectories[choice.index]
        mask = np.array(trajectory.loss_mask)
        noise = numbers.normal(0, 0.01, len(mask)) * mask
        yield AttemptRecord(
            problem=group.problem,
            trajectory=trajectory,
            choice=choice,
            advantage=learnt.get(choice.index),
            policy_version=step - 1,
            entropies=numbers.exponential(0.5, len(mask)) * mask,  # type: ignore[arg-type]
            old_logprobs=np.array(trajectory.sampled_logprobs) + noise,  # type: ignore[arg-type]
        )


def _tell(run: RunFolder, step: int, attempts: Sequence[AttemptRecord]) -> None:
    made = [attempt.trajectory for attempt in attempts]
    calls, tokens = sum(one.num_calls for one in made), sum(one.num_response_tokens for one in made)
    metrics = {
        "reward/mean": sum(one.outcome.reward for one in made if one.outcome) / len(made),
        "tool/calls": calls / len(made),
        "tool/error_rate": sum(one.num_failed_calls for one in made) / max(1, calls),
        "len/tokens": tokens / len(made),
        "roc/attempts": len(made),
        "roc/kept": sum(attempt.choice is not None and attempt.choice.kept for attempt in attempts),
        "step/tokens": tokens,
        "step/seconds": 60.0 + step % 7,
    }
    with Journal(run.metrics) as journal:
        journal.append({"step": step, "stage": "stage1", "stage_step": step, **metrics})
    if step % 50 == 0:
        told = {"evidence": f"{step % 9 + 20}% of attempts were cut", "action": "raise the limit"}
        with Journal(run.events) as events:
            events.append({"time": step * 60.0, "event": "warning", "step": step, "name": "truncated", **told})


def _tokenizer() -> str:
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.WordLevel(ID, unk_token="."))
    made.decoder = decoders.Fuse()
    return str(made.to_str())


if __name__ == "__main__":
    main()
