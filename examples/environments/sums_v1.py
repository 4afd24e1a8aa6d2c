"""A taskset of `verifiers`: sums, judged by the last box."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    total: int


class Sum(vf.Task[SumData, vf.State]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(vf.extract_boxed_answer(trace.last_reply) == str(self.data.total))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        for number in range(2, 8):
            yield Sum(SumData(prompt=f"Add {number} and 3", total=number + 3))


__all__ = ["Sums"]
