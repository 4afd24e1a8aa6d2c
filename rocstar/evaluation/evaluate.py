"""One evaluation of one policy: its setup, its attempts, figures with intervals, and its files.

The result is one JSON-able object; `samples.parquet` beside it has every attempt, so every number can be traced. A
Solver makes the attempts: a Roller over engines of ours, or an EndpointSolver (`endpoint.py`)."""

from __future__ import annotations

import hashlib
import json
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocstar.dialogue.segments import text_of
from rocstar.errors import ConfigError, RunHalted
from rocstar.evaluation.intervals import figure
from rocstar.evaluation.metrics import EvalSummary, is_judged, is_right, maj_at_k, means_of_parts, summarise, votes_PR
from rocstar.evaluation.recall import Recall
from rocstar.protocols import TextCodec, Verifier
from rocstar.record.atomic import plain, write_json
from rocstar.record.identity import git_state, versions
from rocstar.record.rollouts import AttemptRecord, write_attempts
from rocstar.rollout.collect import verified_groups
from rocstar.rollout.environment import Conversation
from rocstar.rollout.episode import Note
from rocstar.support.plugins import code_of, is_reference
from rocstar.types import Group, Problem, Sampling, Stop, Trajectory, seed_for

if TYPE_CHECKING:
    from rocstar.config.sections import Recipe, StageRolloutSection

Progress = Callable[[str, int, int, float], None]
"""(which attempts, problems done, of so many, right share of their judged attempts, nan without one);
`Screen.attempted` is one."""
TRANSCRIPTS = 8  # attempts kept as text in the result; all of them are in samples.parquet
CIRCUMSTANCES = ("versions", "git")
"""Keys of the setup left out of an evaluation's name, so that a later repetition has the same name."""
UNUSUAL = {"agent", "agent_seconds", "agent_walls", "agent_reads", "tool_name", "truncated"}
"""Settings of rollouts recorded in a setup only if not the default: older results lack them."""
AGAIN = "evaluate again (in a run: rocstar train --resume RUN)"
PROBE = "QUESTION"  # placeholder for the question in the recorded text of a template


class Solver(typing.Protocol):
    """Makes single attempts at problems, and provides their verifier."""

    @property
    def codec(self) -> TextCodec:
        """Turns the token ids of its attempts into text."""
        ...

    @property
    def verifier(self) -> Verifier:
        """Judges attempts; one with `figures` adds those to the result (`Scorer`)."""
        ...

    @property
    def note(self) -> Note:
        """Called with what each attempt waits for."""
        ...

    async def attempt(self, problem: Problem, index: int, sampling: Sampling) -> Trajectory:
        """Make one attempt, not yet verified; its randomness follows from `sampling.seed`. A service failure ends it as
        ENVIRONMENT_FAILED."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How an evaluation samples."""

    attempts: int
    """k."""
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    greedy: bool = False
    """Whether each problem also gets one greedy attempt."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A finished evaluation: all attempts, and the result."""

    groups: Mapping[str, Sequence[Group]]
    """Name of the file -> its groups: `samples`, and `greedy` if requested."""
    result: Mapping[str, Any]
    """The contents of `result.json`; docs/evaluation.md explains each key."""
    codec: TextCodec

    def write(self, folder: Path, step: int, version: int) -> None:
        """Save it in `folder`; result.json is written last, because it marks the evaluation as finished. version: of
        the weights. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, some in self.groups.items():
            records = [
                AttemptRecord(problem=group.problem, trajectory=attempt, policy_version=version)
                for group in some
                for attempt in group.trajectories
            ]
            write_attempts(folder / f"{name}.parquet", step, records, self.codec.decode)
        write_json(folder / "result.json", self.result)


def setup_of(
    recipe: Recipe,
    rollout: StageRolloutSection,
    conversation: Conversation,
    problems: Sequence[Problem],
    protocol: Protocol,
    *,
    model: str,
    step: int,
    data: Mapping[str, Any],
    engine: Mapping[str, str],
) -> dict[str, Any]:
    """The `setup` of a result: everything that defines it, so that a figure's meaning can be looked up later, and
    evaluations that differ in anything never share a folder.

    rollout: the limits in force. model, step: whose weights, and after how many steps of its run (0 for a plain model).
    data: the source of the problems. engine: such as `device` and `dtype`."""
    in_force = recipe.rollout.model_copy(update=rollout.model_dump())
    named = (recipe.evaluate.verifier, in_force.environment, in_force.agent, recipe.sandbox.tools)
    code = code_of(named, recipe.run.modules)
    return {
        "model": model,
        "step": step,
        "data": {**data, "problems": len(problems), "problems_sha256": _sha256([[p.id, p.answer] for p in problems])},
        **asdict(protocol),
        "max_turns": rollout.max_turns,
        "max_response_tokens": rollout.max_response_tokens,
        "max_parallel_calls": rollout.max_parallel_calls,
        "template": {"name": recipe.rollout.template, "sha256": _sha256(_words_of(conversation))},
        "environment": recipe.rollout.environment,
        "feedback": recipe.rollout.model_dump(include={"feedback_max_chars", "feedback_truncate", "feedback_errors"}),
        "verifier": recipe.evaluate.verifier,
        **in_force.model_dump(include=UNUSUAL, exclude_defaults=True),
        **({"right_above": recipe.evaluate.right_above} if is_reference(recipe.evaluate.verifier) else {}),
        **({"code": code} if code else {}),
        "sandbox": recipe.sandbox.model_dump(exclude={"urls"}),  # the place where programs ran does not define it
        "engine": dict(engine),
        "versions": versions(),
        "git": git_state(),
    }


def name_of(setup: Mapping[str, Any], readable: str, *, known: Sequence[str] = ()) -> str:
    """`readable` with eight hexadecimal digits of a hash of the setup, for a folder name. known: keys already implied
    by the folder's path, such as the step of a run's checkpoint."""
    hashed = {key: value for key, value in setup.items() if key not in (*CIRCUMSTANCES, *known)}
    return f"{readable}-{_sha256(hashed)[:8]}"


def _words_of(conversation: Conversation) -> list[str]:
    """The template's text around a question and around the reply of a tool."""
    specs = [tool.spec for tool in (*conversation.tools, *conversation.own_tools())]
    template = conversation.template
    try:
        replies = [text_of(template.reply([PROBE]))]
    except ConfigError:
        if specs:
            raise
        replies = []  # without tools a template need not know how their replies are written
    return [text_of(template.opening(PROBE, specs)), *replies]


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()


async def evaluate_policy(
    solver: Solver,
    problems: Sequence[Problem],
    protocol: Protocol,
    *,
    fault_budget: float,
    setup: Mapping[str, Any],
    progress: Progress = lambda name, done, total, right: None,
    recall: Recall | None = None,
) -> Evaluation:
    """Attempts of `solver`, and their figures, including those of a benchmark's own scorer.

    fault_budget: share of the sampled and of the greedy attempts that may end by service failures; one more ends the
    evaluation. setup: of `setup_of`, stored in the result. progress: called after each problem. recall: stores attempts
    as they come; stored ones are not repeated. Raises RunHalted past the budget: such failures remove the attempts that
    use the failed service, so figures of the others would answer another question."""
    journal = recall or Recall()

    async def roll(name: str, identity: str, attempts: int, sampling: Sampling) -> list[Group]:
        seed = seed_for(protocol.seed, identity)

        async def one(problem: Problem, index: int, who: tuple[int | str, ...]) -> Trajectory:
            request = replace(sampling, seed=seed_for(*who))
            question_key = f"attempt/{'/'.join(map(str, who))}/{sampling.temperature:g}"
            return await journal.attempt(question_key, lambda: solver.attempt(problem, index, request))

        return await verified_groups(
            problems,
            one,
            solver.verifier,
            attempts=attempts,
            seed=seed,
            note=solver.note,
            done=_tally(name, len(problems), attempts, fault_budget, progress),
        )

    drawn = Sampling(max_new_tokens=1, temperature=protocol.temperature, top_p=protocol.top_p, top_k=protocol.top_k)
    groups = {"samples": await roll("sampled", "evaluate", protocol.attempts, drawn)}
    if protocol.greedy:
        groups["greedy"] = await roll("greedy", "greedy", 1, Sampling(max_new_tokens=1, temperature=0.0))
    sampled, greedy = groups["samples"], groups.get("greedy", [])
    shown = (greedy or sampled)[:TRANSCRIPTS]
    result = {
        **_figures(sampled, greedy, protocol.attempts),
        **getattr(solver.verifier, "figures", lambda groups: {})(sampled),
        "setup": setup,
        "transcripts": [transcript(group, group.trajectories[0], solver.codec) for group in shown],
    }
    return Evaluation(groups=groups, result=result, codec=solver.codec)


def _tally(name: str, total: int, attempts: int, budget: float, progress: Progress) -> Callable[[Group], None]:
    done = right = judged = 0
    faults: list[str | None] = []
    unasked: list[str | None] = []  # of agents that failed before the model had said anything: no evidence about it

    def count(group: Group) -> None:
        nonlocal done, right, judged
        done += 1
        judged += sum(map(is_judged, group.trajectories))
        right += sum(map(is_right, filter(is_judged, group.trajectories)))
        faults.extend(one.fault for one in group.trajectories if one.stop is Stop.ENVIRONMENT_FAILED)
        silent = (one for one in group.trajectories if not one.turns)
        unasked.extend(one.fault for one in silent if one.stop in (Stop.AGENT_FAILED, Stop.AGENT_TIMEOUT))
        progress(name, done, total, right / judged if judged else math.nan)
        if len(unasked) == total * attempts:
            why = "rollout.agent failed in every attempt of this evaluation before the model said anything"
            raise RunHalted(f"{why}, so it has no result; mend the agent and {AGAIN}: {unasked[0]}")
        if len(faults) > budget * total * attempts:
            raise RunHalted(
                f"{len(faults)} of the {total * attempts} attempts of this evaluation ended by failures outside the "
                f"model, which is more than run.fault_budget {budget:.0%} allows, so it has no result; "
                f"repair what the first of them says and {AGAIN}: {faults[0]}"
            )

    return count


def transcript(group: Group, attempt: Trajectory, codec: TextCodec) -> dict[str, Any]:
    """One attempt as text for people."""
    pieces = [ids for turn in attempt.turns for ids in (turn.completion.token_ids, turn.reply_ids)]
    return {
        "problem_id": group.problem.id,
        "question": group.problem.question,
        "gold": group.problem.answer,
        "text": "".join(map(codec.decode, pieces)).strip(),
        "verdict": str(attempt.outcome.verdict) if attempt.outcome else None,
    }


COUNTS = [one.name for one in fields(EvalSummary) if one.type in ("int", "float | None")]
"""Numbers of a summary copied unchanged to a result."""


def _figures(sampled: Sequence[Group], greedy: Sequence[Group], attempts: int) -> dict[str, Any]:
    by_greedy = summarise(greedy, 1)
    summary, majority = summarise(sampled, attempts), maj_at_k(votes_PR(sampled))
    notes = _notes(summary)
    return {
        "accuracy": figure(summary.avg_at_k, *notes),
        "greedy": figure(by_greedy.avg_at_k, *_notes(by_greedy)) if greedy else None,
        f"avg@{attempts}": figure(summary.avg_at_k, *notes),
        f"pass@{attempts}": figure(summary.pass_at_k, *notes),
        f"maj@{attempts}": majority and figure(majority, *notes),
        **{name: getattr(summary, name) for name in COUNTS},
        "longest_prompt_tokens": _longest_prompt(sampled),
        **means_of_parts([[a.outcome.parts for a in g.trajectories if a.outcome] for g in sampled]),
        "accuracy_by_source": {name: figure(value) for name, value in summary.accuracy_by_source.items()},
    }


def _longest_prompt(groups: Sequence[Group]) -> int | None:
    """None for an endpoint, whose prompt tokens are unknown."""
    first = [group.trajectories[0] for group in groups]
    is_told = any(attempt.told_tokens is not None for attempt in first)
    return None if is_told else max((len(attempt.prompt_ids) for attempt in first), default=0)


def _notes(summary: EvalSummary) -> tuple[int, float]:
    """`missing` and `undecided` of its figures."""
    return summary.environment_failed, summary.undecided / max(1, summary.attempts - summary.environment_failed)
