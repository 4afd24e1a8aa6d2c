"""A taskset of `verifiers`: sums, with a tool that adds, judged by the last box."""

from __future__ import annotations

import re
from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    total: int


class Adder(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def python(self, code: str) -> str:
        """Says what a sum is: print(2+3)."""
        terms = re.fullmatch(r"print\((\d{1,9})\+(\d{1,9})\)", code)
        return str(sum(map(int, terms.groups()))) if terms else "error"


class Sum(vf.Task[SumData, vf.State]):
    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(vf.extract_boxed_answer(trace.last_reply) == str(self.data.total))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        for number in range(2, 8):
            yield Sum(SumData(prompt=f"Add {number} and 3", total=number + 3))


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
