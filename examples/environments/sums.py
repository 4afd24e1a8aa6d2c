"""A task of inspect_ai: sums, with a tool that adds, judged by the last box."""

from __future__ import annotations

import re

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool


@tool
def python() -> Tool:
    async def execute(code: str) -> str:
        """Says what a sum is.

        Args:
            code: Such as print(2+3).
        """
        terms = re.fullmatch(r"print\((\d{1,9})\+(\d{1,9})\)", code)
        return str(sum(map(int, terms.groups()))) if terms else "error"

    return execute


@task
def sums() -> Task:
    samples = [Sample(input=f"Add {number} and 3", target=f"\\boxed{{{number + 3}}}") for number in range(2, 8)]
    return Task(dataset=samples, solver=[use_tools(python()), generate()], scorer=includes())
