"""The nouns of rocstar: what passes between rooms. Data only; no behaviour beyond derived facts.

They are imported from here; the files below, each building on those before it, are

    problems  tools  completions  demonstrations  trajectories  groups  batches

Dimension letters used as suffixes: P problems, R attempts drawn per problem, G attempts kept,
N sequences in a batch, T tokens, V vocabulary.
"""

from rocstar.types.batches import Batch, BatchRow, Update
from rocstar.types.completions import (
    Canary,
    Completion,
    EngineLoad,
    Finish,
    Sampling,
    VersionSpan,
    Weights,
    spans_of,
    without_tokens,
)
from rocstar.types.demonstrations import Demonstration, DemoTurn, SftRow
from rocstar.types.groups import Choice, Group, Penalty, Reason, Resampled
from rocstar.types.problems import Problem, problem_id, seed_for
from rocstar.types.tools import Status, ToolCall, ToolResult
from rocstar.types.trajectories import RIGHT_ABOVE, FormatFacts, Outcome, Stop, Trajectory, Turn, Verdict

__all__ = [
    "RIGHT_ABOVE",
    "Batch",
    "BatchRow",
    "Canary",
    "Choice",
    "Completion",
    "DemoTurn",
    "Demonstration",
    "EngineLoad",
    "Finish",
    "FormatFacts",
    "Group",
    "Outcome",
    "Penalty",
    "Problem",
    "Reason",
    "Resampled",
    "Sampling",
    "SftRow",
    "Status",
    "Stop",
    "ToolCall",
    "ToolResult",
    "Trajectory",
    "Turn",
    "Update",
    "Verdict",
    "VersionSpan",
    "Weights",
    "problem_id",
    "seed_for",
    "spans_of",
    "without_tokens",
]
