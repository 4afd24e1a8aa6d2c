"""An environment of your own: what is said to a completion. This one asks again, once, when no tool was used."""

from rocstar.protocols import Reply
from rocstar.rollout.environment import Conversation, Limits, ToolEnvironment
from rocstar.types import Completion, Problem, Stop

HINT = "Look the unit up before you answer."


class HintEnvironment:
    """A conversation with tools that answers the first bare answer with a hint."""

    def __init__(self, problem: Problem, conversation: Conversation, limits: Limits, seed: int) -> None:
        self._inner = ToolEnvironment(problem, conversation, limits, seed)
        self._hint = tuple(conversation.codec.encode(conversation.template.reply([HINT])))
        self._may_hint = True
        self._spent = 0

    def opening(self) -> tuple[int, ...]:
        return self._inner.opening()

    def budget(self) -> int:
        return self._inner.budget() - self._spent

    async def reply(self, completion: Completion) -> Reply:
        reply = await self._inner.reply(completion)
        if reply.calls or reply.stop is not Stop.ANSWERED or not self._may_hint or self.budget() <= len(self._hint):
            self._may_hint = self._may_hint and not reply.calls
            return reply
        self._may_hint = False
        self._spent = len(self._hint)
        return Reply(reply_ids=self._hint)

    async def close(self) -> None:
        await self._inner.close()
