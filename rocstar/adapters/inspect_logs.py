"""An inspect_ai log as a kept evaluation: what `rocstar view`, `runs rollouts`, `runs export` and `compare` read.

A log has messages and counts, not token ids, so its attempts are held as those of an endpoint (evaluation/endpoint.py):
"tokens" are code points. An epoch is a sibling. Not kept: events, attachments beyond messages, and user messages that
came after the first answer, which stand in the transcripts only.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from inspect_ai.log import EvalLog, EvalSample, read_eval_log, resolve_sample_attachments
from inspect_ai.model import ChatMessage, ChatMessageAssistant, ChatMessageTool

from rocstar.dialogue.calls import render_call
from rocstar.errors import ConfigError, DataError
from rocstar.evaluation.endpoint import CodePoints, chat_text, text_completion
from rocstar.evaluation.evaluate import Evaluation, kept_evaluation
from rocstar.record.folder import RUNS
from rocstar.record.messages import STATUS, mark_of
from rocstar.types import (
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
)

OUTAGE = "sandbox_unavailable"
LIMITS = {"message": Stop.MAX_TURNS, "turn": Stop.MAX_TURNS, "token": Stop.MAX_TOKENS, "context": Stop.MAX_TOKENS}
CUT = ("max_tokens", "model_length")
FEEDBACK = {"feedback_max_chars": 1 << 30, "feedback_truncate": "left", "feedback_errors": "full"}
"""The log has what the model read, so nothing is shortened when it is shown again."""
CODEC = CodePoints()
NAME_CHARACTERS = 100
MOST_TOKENS = MOST_EPOCHS = 2**31


def import_log(file: Path | str, runs: Path | str = RUNS, *, scorer: str | None = None) -> Path:
    """Write RUNS/evals/MODEL/LOG and return it. scorer: whose scores are the verdicts, the log's first by default.

    Raises DataError for a log that cannot be used, and ConfigError where the folder is there already."""
    path = Path(file)
    try:
        log = read_eval_log(str(path))
    except Exception as error:  # inspect_ai raises what its readers of zip, JSON and pydantic raise
        raise DataError(f"{path} is no log that inspect_ai can read ({str(error).splitlines()[0][:200]})") from error
    if not log.samples:
        raise DataError(f"{path} has no samples: the task ended before one was finished")
    folder = Path(runs) / "evals" / _folder_name(log.eval.model) / _folder_name(path.stem)
    if folder.exists():
        raise ConfigError(f"{folder} is there already; delete it, or import to another place with --runs")
    evaluation_of(log, scorer=scorer).write(folder, 0)
    return folder


def _folder_name(model: str) -> str:
    """A name that stays below the folder of evaluations, whatever the log calls its model."""
    return re.sub(r"[^\w.-]+", "_", model)[-NAME_CHARACTERS:].strip(".") or "model"


def evaluation_of(log: EvalLog, *, scorer: str | None = None) -> Evaluation:
    """Raises DataError."""
    samples = [resolve_sample_attachments(sample, "core") for sample in log.samples or ()]  # long texts lie apart
    problems = defaultdict[str, dict[int, EvalSample]](dict)
    for sample in samples:
        siblings = problems[str(sample.id)]
        if not 1 <= sample.epoch < MOST_EPOCHS:
            raise DataError(f"sample {sample.id} is of epoch {sample.epoch:.6g}; epochs count from 1")
        if sample.epoch in siblings:
            raise DataError(f"sample {sample.id} stands twice in epoch {sample.epoch}; leave one of them in the log")
        siblings[sample.epoch] = sample
    known = dict.fromkeys(name for sample in samples for name in sample.scores or ())
    if scorer is not None and scorer not in known:
        raise DataError(f"the log has no scorer {scorer}; it has {', '.join(known) or 'none'}")
    name = scorer or next(iter(known), None)
    groups = [group_of(siblings, log, name) for _, siblings in sorted(problems.items())]
    outcomes = [one.outcome for group in groups for one in group.trajectories]
    if not any(outcome and outcome.verdict is not Verdict.UNDECIDED for outcome in outcomes):
        raise DataError(f"none of the {len(outcomes)} samples has a score; score the log before it is imported")
    attempts = max(len(group.trajectories) for group in groups)
    return kept_evaluation({"samples": groups}, attempts, CODEC, setup_of(log, groups, name))


def setup_of(log: EvalLog, groups: Sequence[Group], scorer: str | None) -> dict[str, Any]:
    """What tells this evaluation from others; `rocstar compare` pairs those that agree."""
    asked = repr([(group.problem.id, group.problem.question, group.problem.answer) for group in groups])
    digest = hashlib.sha256(asked.encode()).hexdigest()
    config = log.eval.model_generate_config.model_dump(exclude_none=True)
    return {
        "model": log.eval.model,
        "step": 0,
        "data": {"task": log.eval.task, "problems": len(groups), "problems_sha256": digest},
        "verifier": scorer,
        "generate": config,
        **({} if log.status == "success" else {"status": log.status}),
        "feedback": FEEDBACK,
        "versions": {**log.eval.packages, "created": log.eval.created},
    }


def group_of(epochs: Mapping[int, EvalSample], log: EvalLog, scorer: str | None) -> Group:
    samples = [sample for _, sample in sorted(epochs.items())]
    first = samples[0]
    problem = Problem(
        id=str(first.id),
        question=text_of_input(first.input),
        answer=first.target if isinstance(first.target, str) else " | ".join(first.target),
        source=log.eval.task,
    )
    return Group(problem=problem, trajectories=tuple(trajectory_of(sample, scorer) for sample in samples))


def trajectory_of(sample: EvalSample, scorer: str | None) -> Trajectory:
    """One sample in one epoch. Raises DataError for a score that is no number or letter, and for impossible counts."""
    seconds, tokens = sample.total_time or 0.0, sum(usage.output_tokens for usage in sample.model_usage.values())
    if not 0 <= seconds < math.inf:
        raise DataError(f"sample {sample.id} is said to have taken {seconds} seconds; mend the log's total_time")
    if not 0 <= tokens < MOST_TOKENS:
        raise DataError(f"sample {sample.id} is said to have {tokens:.3g} output tokens; mend the log's model_usage")
    first = next((n for n, message in enumerate(sample.messages) if message.role == "assistant"), len(sample.messages))
    cut = any(choice.stop_reason in CUT for choice in sample.output.choices)  # one that broke may have none
    limit, fault = sample.limit.type if sample.limit else "token" if cut else None, fault_of(sample)
    stop = LIMITS.get(limit, Stop.MAX_TOKENS) if limit else Stop.ANSWERED
    asked = chat_text((message.role, message.text) for message in sample.messages[:first])
    return Trajectory(
        problem_id=str(sample.id),
        index=sample.epoch - 1,
        prompt_ids=tuple(CODEC.encode(asked)),
        turns=tuple(turns_of(sample.messages[first:], cut=cut)),
        stop=stop if fault is None else Stop.ENVIRONMENT_FAILED,
        outcome=None if fault is not None else outcome_of(sample, scorer),
        fault=fault,
        seconds=seconds,
        told_tokens=tokens,
    )


def fault_of(sample: EvalSample) -> str | None:
    """Whatever failed beside the model; such an attempt is in no figure."""
    if sample.error is not None:
        return str(sample.error.message)
    errors = [message.error for message in sample.messages if isinstance(message, ChatMessageTool) and message.error]
    return next((str(error.message) for error in errors if error.type == OUTAGE), None)


def outcome_of(sample: EvalSample, scorer: str | None) -> Outcome:
    """By inspect_ai's own reading of letters and numbers: full marks are RIGHT, less is WRONG, none UNDECIDED."""
    score = (sample.scores or {}).get(scorer or "")
    try:
        reward = number_of(score.value) if score else math.nan
    except ValueError as error:
        raise DataError(f"sample {sample.id}, scorer {scorer}: {error}; name another with --scorer") from None
    verdict = Verdict.UNDECIDED if math.isnan(reward) else Verdict.RIGHT if reward >= 1 else Verdict.WRONG
    return Outcome(
        verdict=verdict,
        reward=0.0 if math.isnan(reward) else reward,
        extracted=score.answer if score else None,
        method=scorer or "none",
        format_facts=FormatFacts(),
    )


def number_of(value: Any) -> float:
    """A score as inspect_ai reads it; NaN is none. Raises ValueError for what is no number to it, and for infinity."""
    if (number := mark_of(value)) is None:
        raise ValueError(f"the score {value!r:.60} is no number or letter")
    return number


def turns_of(messages: Sequence[ChatMessage], *, cut: bool) -> list[Turn]:
    """One turn an assistant message, with the tool messages that answer it. cut: the last one ended at a limit."""
    places = [n for n, message in enumerate(messages) if isinstance(message, ChatMessageAssistant)]
    spans = [messages[begin:end] for begin, end in zip(places, [*places[1:], len(messages)], strict=False)]
    return [turn_of(span, cut=cut and span is spans[-1]) for span in spans]


def turn_of(span: Sequence[ChatMessage], *, cut: bool) -> Turn:
    said, *following = span
    calls = tuple(
        ToolCall(
            id=call.id,
            tool=call.function,
            arguments=call.arguments,
            raw=render_call(call.function, call.arguments),
            parse_error=call.parse_error,
        )
        for call in said.tool_calls or ()
    )
    text = "\n".join(filter(None, [text_of(said), *(call.raw for call in calls)]))
    return Turn(
        completion=text_completion(CODEC, text, cut=cut),
        calls=calls,
        results=tuple(result_of(message) for message in following if isinstance(message, ChatMessageTool)),
        reply_ids=tuple(CODEC.encode("".join(f"\n{message.text}" for message in following))),
    )


def result_of(message: ChatMessageTool) -> ToolResult:
    error = message.error
    return ToolResult(
        call_id=message.tool_call_id or "",
        status=STATUS.get(error.type, Status.CODE_ERROR) if error else Status.OK,
        stdout=message.text,
        stderr=error.message if error else "",
    )


def text_of_input(asked: str | list[ChatMessage]) -> str:
    return asked if isinstance(asked, str) else "\n\n".join(message.text for message in asked)


def text_of(message: ChatMessageAssistant) -> str:
    """What the model wrote, its reasoning between tags."""
    if isinstance(message.content, str):
        return message.content
    pieces = [
        f"<think>{part.reasoning}</think>" if part.type == "reasoning" else part.text
        for part in message.content
        if part.type in ("reasoning", "text")
    ]
    return "\n".join(pieces)
