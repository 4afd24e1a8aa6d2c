"""IFBench: IFEval's figures over 58 harder kinds of instructions, checked by the benchmark's own published package.

Its checks lean on taggers, syllable and emoji tables, so they are not written again: the package `ifbench` of
github.com/allenai/IFBench is asked. Source: Pyatkin et al. 2025, arXiv 2507.02833."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from rocstar.errors import ConfigError
from rocstar.evaluation.scorers.ifeval import IfevalScorer
from rocstar.evaluation.scoring import Parts

HINT = "pip install git+https://github.com/allenai/IFBench"


def check() -> None:
    """Raises ConfigError where the package is not there."""
    if find_spec("ifbench") is None:
        raise ConfigError(f"IFBench is scored by its own package, which is not installed; {HINT}")


def scorer(parts: Parts) -> IfevalScorer:
    return IfevalScorer(parts, published)


def published(instruction: str, arguments: Mapping[str, Any], prompt: str, answer: str) -> bool:
    """What the package says. Raises KeyError for an instruction that it does not know."""
    from ifbench import instructions_registry

    one = instructions_registry.INSTRUCTION_DICT[instruction](instruction)
    one.build_description(**{name: value for name, value in arguments.items() if value is not None})
    if "prompt" in (one.get_instruction_args() or {}):
        one.build_description(prompt=prompt)
    return bool(answer.strip()) and bool(one.check_following(answer))
