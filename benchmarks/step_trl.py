"""One whole RL step, rollout and update, beside TRL's GRPOTrainer: one thread, a Qwen3 shape of 3.7M parameters.

    python benchmarks/step_trl.py --trl-python PATH [--against CHECKOUT] [--rounds 5] [--only plain|conversation]
                                  [--size 135M]      # a Qwen3 with SmolLM2-135M's sizes
                                  [--dtype bfloat16] # of both passes; TRL's by autocast, its bf16=True

`plain`: 8 prompts x 8 attempts, 32 tokens and 128 new ones. `conversation`: three turns of 32 sampled tokens; the first
two end with the same call of a tool that takes 50 ms, appended to what the model wrote on every side, and go on with
its reply. Weights, tokenizer, prompts, template and call are the same; gradient checkpointing is off, no KL term, one
update a step; at 135M TRL learns in passes of 8 rows, because its pass over all 64 took more than 21 GB (rocstar
chooses its passes itself). TRL (1.16 or later) lives in an environment of its own: `pip install torch==2.13.0`, then
`pip install trl`; its tool loop runs the calls of different attempts one after another, rocstar's at once.

Every contestant is a process that stays; they take turns step by step after one step to warm up. `--against` adds
rocstar of another checkout. Prints medians and ranges of wall and CPU seconds and the ratio to TRL, round by round;
last one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from frame import ROOT, Worker, by_turns, parser, qwen3, report, spent, spread

PROMPT_TOKENS, NEW_TOKENS, TURN_TOKENS, PROMPTS, ATTEMPTS = 32, 128, 32, 8, 8
TOOL_SECONDS = 0.05
SIZES = {"3.7M": (2048, 256, 4, 4, 2, 768), "135M": (49152, 576, 30, 9, 3, 1536)}  # as frame.qwen3 takes them
TRL_ROWS = {"3.7M": PROMPTS * ATTEMPTS, "135M": 8}  # of one pass of its update
CALL = '<tool_call>\n{"name": "wait_and_add", "arguments": {"a": 1}}\n</tool_call>'
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    options = parsed()
    if options.worker:
        sys.path[0] = options.worker
        asyncio.run(rocstar_steps(Path(options.folder)))
        return
    figures: dict[str, Any] = {"rounds": options.rounds}
    for kind in [options.only] if options.only else ["plain", "conversation"]:
        with tempfile.TemporaryDirectory() as folder:
            write_case(Path(folder), 2 if kind == "conversation" else 0, options.size, options.dtype)
            figures[kind] = compared(contestants(options, folder), options.rounds)
        for name, columns in figures[kind].items():
            print(kind, name, *(f"{column} {value}" for column, value in columns.items()), sep="  ", flush=True)
    report(**figures)


def parsed() -> argparse.Namespace:
    arguments = parser(__doc__)
    arguments.add_argument("--trl-python", help="the interpreter of an environment with TRL")
    arguments.add_argument("--against", help="another checkout of rocstar")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--only", choices=["plain", "conversation"])
    arguments.add_argument("--size", choices=SIZES, default="3.7M")
    arguments.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments.add_argument("--worker", help=argparse.SUPPRESS)
    arguments.add_argument("--folder", help=argparse.SUPPRESS)
    return arguments.parse_args()


# -- taking turns


def contestants(options: argparse.Namespace, folder: str) -> dict[str, list[str]]:
    """Commands by name; the first is what the others are compared with."""
    checkouts = {"rocstar": str(ROOT), **({"against": options.against} if options.against else {})}
    ours = {n: [sys.executable, __file__, "--worker", c, "--folder", folder] for n, c in checkouts.items()}
    peer = [options.trl_python, str(ROOT / "benchmarks" / "step_trl_peer.py"), folder]
    return {"trl": peer, **ours} if options.trl_python else ours


def compared(commands: dict[str, list[str]], rounds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(Worker(command, env={**os.environ, **QUIET}))
            for name, command in commands.items()
        }
        steps = {name: one_step(worker) for name, worker in workers.items()}
        rows = by_turns(steps, range(rounds + 1))[1:]  # the first warms up
    first = next(iter(commands))
    return {
        name: {
            **{measure: spread([row[name][measure] for row in rows]) for measure in rows[0][name]},
            **{f"{m}_ratio": spread([row[name][m] / row[first][m] for row in rows]) for m in ("wall", "cpu")},
        }
        for name in commands
    }


def one_step(worker: Worker) -> Callable[[], dict[str, float]]:
    def step() -> dict[str, float]:
        line = worker.ask("step")
        while not line.startswith("STEP "):
            line = worker.line()
        found: dict[str, float] = json.loads(line.removeprefix("STEP "))
        return found

    return step


# -- the same case for all


START, STOP = "<|im_start|>", "<|im_end|>"


def opening(question: str) -> str:
    """Of rocstar's compact template and of the one in step_trl_peer.py."""
    return f"{START}user\n{question}{STOP}\n{START}assistant\n"


def reply(tool_text: str) -> str:
    return f"\n{START}user\n<tool_response>\n{tool_text}\n</tool_response>{STOP}\n{START}assistant\n"


def write_case(folder: Path, calls: int, size: str, dtype: str) -> None:
    """Model, tokenizer, questions of exactly PROMPT_TOKENS tokens with their template, and the call."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = write_tokenizer(folder)
    stop = tokenizer.token_to_id(STOP)
    qwen3(*SIZES[size], max_position_embeddings=1024, eos_token_id=stop).save_pretrained(folder)
    questions = []
    for number in range(PROMPTS):
        question = str(number)
        while len(tokenizer.encode(opening(question)).ids) < PROMPT_TOKENS:
            question += str(number)  # a digit is one token
        questions.append(question)
    call_ids = tokenizer.encode(CALL + STOP).ids
    room = (calls + 1) * TURN_TOKENS + calls * (len(call_ids) + len(tokenizer.encode(reply("2")).ids)) + 8
    case = {
        "questions": questions,
        "attempts": ATTEMPTS,
        "trl_rows": TRL_ROWS[size],
        "dtype": dtype,
        "calls": calls,
        "call_ids": call_ids,
        "stop": stop,
        "turn_tokens": TURN_TOKENS,
        "response_tokens": room if calls else NEW_TOKENS,
    }
    (folder / "case.json").write_text(json.dumps(case))


def write_tokenizer(folder: Path) -> Any:
    """Byte-level BPE over the words of the conversation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CALL, "user assistant tool <tool_response>"] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP, "pad_token": "<|pad|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


# -- rocstar's side


class Conversing:
    """An engine whose first turns of each session are of the same length and end with the call."""

    def __init__(self, engine: Any, case: dict[str, Any]) -> None:
        self._engine, self._case = engine, case

    async def generate(self, token_ids: Sequence[int], sampling: Any, *, request_id: str, session_id: str) -> Any:
        from rocstar.types import Finish

        calls = sum(token == self._case["stop"] for token in token_ids) // 2  # one ends the question, two each turn
        asked = replace(sampling, max_new_tokens=self._case["turn_tokens"], stop_token_ids=())
        written = await self._engine.generate(token_ids, asked, request_id=request_id, session_id=session_id)
        if calls >= self._case["calls"]:
            return written
        more = tuple(self._case["call_ids"])
        clean = tuple(token if token != self._case["stop"] else token - 1 for token in written.token_ids)
        return replace(
            written, token_ids=clean + more, logprobs=written.logprobs + (-1.0,) * len(more), finish=Finish.STOP
        )

    async def close_session(self, session_id: str) -> None:
        await self._engine.close_session(session_id)


class WaitAndAdd:
    """The tool, as step_trl_peer.py has it."""

    def __init__(self) -> None:
        from rocstar.protocols import ToolSpec

        self.spec = ToolSpec(name="wait_and_add", description="Adds one.", parameters={"type": "object"})

    async def run(self, call: Any, *, seed: int = 0) -> Any:
        from rocstar.types import Status, ToolResult

        await asyncio.sleep(TOOL_SECONDS)
        return ToolResult(call_id=call.id, status=Status.OK, stdout=str(call.arguments["a"] + 1))


class ByFirstToken:
    """The verifier: about half of the attempts are right, as step_trl_peer.py rewards them."""

    async def verify_all(self, attempts: Sequence[Any]) -> list[Any]:
        from rocstar.types import FormatFacts, Outcome, Verdict

        facts = FormatFacts(answer_tags=1, reason_after_answer=False, boxed=True)
        right = [trajectory.turns[0].completion.token_ids[0] % 2 for _, trajectory in attempts]
        return [
            Outcome(
                verdict=Verdict.RIGHT if one else Verdict.WRONG,
                reward=float(one),
                extracted=None,
                method="scripted",
                format_facts=facts,
            )
            for one in right
        ]


async def rocstar_steps(folder: Path) -> None:
    """A step for each line on stdin."""
    from rocstar.support.threads import quiet_torch

    quiet_torch(threads=1)
    import torch

    torch.set_num_threads(1)
    case = json.loads((folder / "case.json").read_text())
    step = rocstar_step(folder, case)
    while await asyncio.to_thread(sys.stdin.readline):
        with spent() as taken:
            rollout_cpu = await step()
        figures = {"wall": taken.wall, "cpu": taken.cpu, "rollout_cpu": rollout_cpu}
        print("STEP " + json.dumps(figures), flush=True)


def rocstar_step(folder: Path, case: dict[str, Any]) -> Any:
    """A function that makes one step: roll, update, publish. Returns the CPU seconds of the first."""
    import random

    from rocstar.config.sections import ResampleSection
    from rocstar.dialogue.codec import Codec
    from rocstar.dialogue.template import COMPACT
    from rocstar.engines.torch_engine import TorchEngine
    from rocstar.learning.advantages import advantages, rows_of
    from rocstar.learning.resample import resample
    from rocstar.rollout.collect import Roller
    from rocstar.rollout.environment import AttemptLimits, Conversation
    from rocstar.types import Problem

    codec, template = Codec.load(folder), COMPACT
    rows = len(case["questions"]) * case["attempts"]
    model, learn = model_and_learner(folder, codec, template, case["dtype"])
    engine = TorchEngine(model, rows=rows, positions=512)
    problems = [Problem(id=str(n), question=q, answer="") for n, q in enumerate(case["questions"])]
    tools = (WaitAndAdd(),) if case["calls"] else ()
    roller = Roller(
        engine=Conversing(engine, case) if case["calls"] else engine,  # type: ignore[arg-type]
        conversation=Conversation(codec=codec, template=template, tools=tools, feedback=lambda result: result.stdout),
        verifier=ByFirstToken(),
        limits=AttemptLimits(max_turns=4, max_response_tokens=case["response_tokens"], max_parallel_calls=1),
        stop_token_ids=(case["stop"],),
    )
    seeds, every = iter(range(10**6)), ResampleSection(method="all")

    async def step() -> float:
        with spent() as rolled:
            groups = await roller.roll(problems, attempts=case["attempts"], seed=next(seeds))
        kept = [resample(group, random.Random(0), every) for group in groups]
        weights = learn(rows_of(kept, advantages))
        await engine.load_weights(weights)
        return rolled.cpu

    return step


def model_and_learner(folder: Path, codec: Any, template: Any, dtype: str) -> tuple[Any, Any]:
    """A model for the engine, and a function that makes one update from rows and publishes the weights."""
    import copy

    import torch

    from rocstar.config.sections import LearningSection, ModelSection
    from rocstar.engines.torch_forward import lowered
    from rocstar.learning.learner import GrpoLearner
    from rocstar.learning.models import load_model
    from rocstar.learning.policy import Policy

    model = load_model(folder)
    policy = Policy(copy.deepcopy(model), codec, template, ModelSection(dtype=dtype))  # type: ignore[arg-type]
    learner = GrpoLearner(policy, LearningSection())
    model = lowered(model, getattr(torch, dtype))
    return model, lambda rows: (learner.update(rows), policy.publish())[1]


if __name__ == "__main__":
    main()
