"""Wiring: from a resolved recipe to the parts that carry it out. Decisions live in the parts; here they only meet."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rocstar.answers.grade import Grader
from rocstar.answers.verifier import BoxedVerifier, ToolOutputVerifier
from rocstar.config import EvaluateSection, LearningSection, ModelSection, RolloutSection, SandboxSection, SftSection
from rocstar.dialogue.codec import Codec
from rocstar.dialogue.feedback import feedback_text
from rocstar.dialogue.templates import template_named
from rocstar.engines.torch_engine import TorchEngine
from rocstar.learning.learner import LearnerSettings
from rocstar.learning.policy import Policy, Shape
from rocstar.learning.sft import SftSettings
from rocstar.protocols import ToolSpec, Verifier
from rocstar.rollout.collect import Roller
from rocstar.rollout.environment import Conversation, Limits
from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.wire import Limits as ProgramLimits
from rocstar.tools.notebook import NotebookTool
from rocstar.tools.python import PythonTool
from rocstar.types import ToolResult


@dataclass(slots=True, kw_only=True)
class Workshop:
    """What lives as long as a run and is shared by its stages."""

    policy: Policy
    engine: TorchEngine
    sandbox: SandboxClient
    grader: Grader

    async def close(self) -> None:
        await self.engine.close()
        await self.grader.close()


def make_engine(policy: Policy, rollout: RolloutSection, positions: int) -> TorchEngine:
    """An engine over its own copy of the policy's model."""
    return TorchEngine(copy.deepcopy(policy.model), rows=rollout.engine_rows, positions=positions)


def make_tool(sandbox: SandboxClient, limits: SandboxSection, name: str) -> PythonTool:
    """For programs that stand alone, whatever `sandbox.tool` says."""
    return PythonTool(sandbox, program_limits(limits), name=name)


def make_notebook(sandbox: SandboxClient, limits: SandboxSection, name: str) -> NotebookTool:
    """For one attempt, and closed with it."""
    return NotebookTool(sandbox, program_limits(limits), name=name)


def tool_spec(sandbox: SandboxClient, limits: SandboxSection, name: str) -> ToolSpec:
    """Of the tool that the model is told about."""
    made = make_notebook if limits.tool == "notebook" else make_tool
    return made(sandbox, limits, name).spec


def program_limits(limits: SandboxSection) -> ProgramLimits:
    return ProgramLimits(
        wall_seconds=limits.timeout_seconds,
        cpu_seconds=limits.cpu_seconds,
        memory_bytes=limits.memory_bytes,
        output_bytes=limits.output_bytes,
        processes=limits.processes,
    )


def make_feedback(rollout: RolloutSection) -> Callable[[ToolResult], str]:
    """How tool results are worded for the model."""
    return partial(
        feedback_text,
        max_chars=rollout.feedback_max_chars,
        truncate=rollout.feedback_truncate,
        errors=rollout.feedback_errors,
    )


def make_conversation(
    codec: Codec, sandbox: SandboxClient, rollout: RolloutSection, limits: SandboxSection
) -> Conversation:
    without_tools = Conversation(
        codec=codec, template=template_named(rollout.template), tools=(), feedback=make_feedback(rollout)
    )
    if rollout.max_turns == 1:
        return without_tools
    if limits.tool == "notebook":
        return replace(without_tools, own_tools=lambda: (make_notebook(sandbox, limits, rollout.tool_name),))
    return replace(without_tools, tools=(make_tool(sandbox, limits, rollout.tool_name),))


def make_verifier(codec: Codec, grader: Grader, settings: EvaluateSection) -> Verifier:
    if settings.verifier == "tool_output":
        return ToolOutputVerifier(codec)
    return BoxedVerifier(codec, grader, strict=settings.verifier == "boxed_strict")


def make_roller(
    workshop: Workshop, rollout: RolloutSection, limits: SandboxSection, evaluate: EvaluateSection
) -> Roller:
    codec = workshop.policy.codec
    conversation = make_conversation(codec, workshop.sandbox, rollout, limits)
    return Roller(
        engine=workshop.engine,
        conversation=conversation,
        verifier=make_verifier(codec, workshop.grader, evaluate),
        limits=Limits(
            max_turns=rollout.max_turns,
            max_response_tokens=rollout.max_response_tokens,
            max_parallel_calls=rollout.max_parallel_calls,
        ),
        stop_token_ids=codec.stop_ids(conversation.template),
    )


def shape_of(model: ModelSection, vocab_size: int) -> Shape:
    return Shape(
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        intermediate_size=model.intermediate_size,
        rope_theta=model.rope_theta,
        max_positions=model.max_positions,
    )


def sft_settings(section: SftSection, steps: int) -> SftSettings:
    return SftSettings(steps=steps, **section.model_dump(exclude={"batch_rows", "rows_file"}))


def learner_settings(section: LearningSection, temperature: float) -> LearnerSettings:
    names = LearnerSettings.__dataclass_fields__.keys() - {"temperature"}
    return LearnerSettings(temperature=temperature, **section.model_dump(include=set(names)))


def weights_folder(run: Path) -> Path:
    """Where the learner publishes weights for the engine."""
    return run / "weights"
