"""An environment of your own: what is said to a completion. This one asks again, once, when no tool was used."""

from dataclasses import replace

from rocstar.protocols import Reply
from rocstar.rollout.environment import AttemptLimits, Conversation, ToolEnvironment
from rocstar.types import Completion, Problem, Stop

HINT = "Look the unit up before you answer."


class HintEnvironment:
    """A conversation with tools that answers the first bare answer with a hint."""

    def __init__(self, problem: Problem, conversation: Conversation, limits: AttemptLimits, seed: int) -> None:
        self._inner = ToolEnvironment(problem, conversation, limits, seed)
        self._conversation = conversation
        self._may_hint = True
        self._spent = 0

    def opening(self) -> tuple[int, ...]:
        return self._inner.opening()

    def budget(self) -> int:
        return self._inner.budget() - self._spent

    async def reply(self, completion: Completion) -> Reply:
        reply = await self._inner.reply(completion)
        if reply.calls:
            self._may_hint = False
        if reply.stop is Stop.ANSWERED and self._may_hint:
            self._may_hint = False
            hint = self._conversation.template.reply([HINT])  # where the answer of a tool would stand
            reply = Reply(reply_ids=self._conversation.after(completion, hint))
            self._spent = len(reply.reply_ids)
        if reply.stop is None and self.budget() <= 0:  # the limits are this environment's to keep
            return replace(reply, reply_ids=(), stop=Stop.MAX_TOKENS)
        return reply

    async def close(self) -> None:
        await self._inner.close()
