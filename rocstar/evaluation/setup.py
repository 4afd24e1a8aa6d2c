"""What defines an evaluation, in full: who looks up a figure later can see what it is a figure of, and evaluations that
differ in anything never share a place."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rocstar.config.sections import Recipe, StageRolloutSection
from rocstar.dialogue.segments import text_of
from rocstar.evaluation.evaluate import Protocol
from rocstar.record.atomic import plain
from rocstar.record.identity import git_state, versions
from rocstar.rollout.environment import Conversation
from rocstar.support.plugins import is_reference
from rocstar.types import Problem

CIRCUMSTANCES = ("versions", "git")
"""What says how an evaluation was made, not what it is: the same one made later has the same name."""
PROBE = "QUESTION"  # stands for the question where a template's own text is recorded


def as_evaluated(recipe: Recipe) -> Recipe:
    """With the limits of the last RL stage as the base, under which training evaluates at its end."""
    limits = recipe.rollouts[-1].model_dump()
    return recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update=limits)})


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
    """The `setup` of a result. rollout: the limits in force. data: where the problems came from, as the caller knows
    it. engine: `device` and `dtype` it computes with. model, step: whose weights, and after how many steps of its run
    (0 for a plain model)."""
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
        **({"right_above": recipe.evaluate.right_above} if is_reference(recipe.evaluate.verifier) else {}),
        "sandbox": recipe.sandbox.model_dump(exclude={"urls"}),  # where programs ran is a circumstance
        "engine": dict(engine),
        "versions": versions(),
        "git": git_state(),
    }


def name_of(setup: Mapping[str, Any], readable: str, *, known: Sequence[str] = ()) -> str:
    """`readable` with eight hexadecimal digits of what the evaluation is, for a folder name. `known` are the keys that
    the place of the folder says already, such as the step of a run's checkpoint."""
    said = {key: value for key, value in setup.items() if key not in (*CIRCUMSTANCES, *known)}
    return f"{readable}-{_sha256(said)[:8]}"


def _words_of(conversation: Conversation) -> list[str]:
    """What the template puts around a question and around the reply of a tool."""
    specs = [tool.spec for tool in (*conversation.tools, *conversation.own_tools())]
    template = conversation.template
    return [text_of(template.opening(PROBE, specs)), text_of(template.reply([PROBE]))]


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()
