"""One completion under a plain chat template, without our tools, for the paper's one-turn benchmarks. Shows the
functions of a problem (`metadata["functions"]`), if any, and runs none."""

from __future__ import annotations

from dataclasses import dataclass

from rocstar.dialogue.template import prompt_of
from rocstar.errors import EngineUnavailable
from rocstar.protocols import Reply, ToolSpec
from rocstar.rollout.environment import AttemptLimits, Conversation
from rocstar.types import Completion, Finish, Problem, Stop


@dataclass
class OneTurn:
    """Environment of one completion; an EnvironmentFactory."""

    problem: Problem
    conversation: Conversation
    limits: AttemptLimits
    seed: int

    def opening(self) -> tuple[int, ...]:
        return self.conversation.ids(prompt_of(self.conversation.template, self.problem, specs_of(self.problem)))

    def budget(self) -> int:
        return self.limits.max_response_tokens

    async def reply(self, completion: Completion) -> Reply:
        """Parse its calls, without answering them. Raises EngineUnavailable when the completion was aborted."""
        if completion.finish is Finish.ABORTED:
            raise EngineUnavailable("the completion was aborted before the model had ended it")
        stop = Stop.ANSWERED if completion.finish is Finish.STOP else Stop.MAX_TOKENS
        return Reply(calls=tuple(self.conversation.calls(completion, 0, specs_of(self.problem))), stop=stop)

    async def close(self) -> None:
        pass


def specs_of(problem: Problem) -> list[ToolSpec]:
    """The functions that the model may call."""
    return [
        ToolSpec(name=one["name"], description=one.get("description", ""), parameters=one["parameters"])
        for one in problem.metadata.get("functions", ())
    ]
