"""Worked conversations to imitate, before and after they become tokens."""

from __future__ import annotations

from dataclasses import dataclass

from rocstar.types.problems import Problem
from rocstar.types.tools import ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoTurn:
    """One assistant turn of a demonstration."""

    text: str
    """What the assistant writes, tool-call tags included, end marker excluded."""
    results: tuple[ToolResult, ...] = ()
    """What the tools answered; empty on the last turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A worked conversation to imitate (SFT)."""

    problem: Problem
    turns: tuple[DemoTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SftRow:
    """A demonstration as tokens, laid out exactly as a rollout would lay it out."""

    token_ids: tuple[int, ...]
    """[T]."""
    loss_mask: tuple[bool, ...]
    """[T] true on tokens the assistant writes, end markers included."""
