"""Requests become conversations: whatever an agent sends again, each sampled token is learnt from once, after exactly
what the engine was shown for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.data.sft.format import Chat, Message, Refused, Role
from rocstar.learning.advantages import rows_of
from rocstar.types import Choice, Completion, Group, Penalty, Reason, Resampled, Sampling, Trajectory
from tests.agents.examples import Told, attempt, chat, made_by, shown_and_learnt
from tests.rollout.examples import CODEC, PROBLEM


async def test_a_retry_a_branch_and_a_summary_are_conversations_of_their_own() -> None:
    engine = Told(["first", "second", "again", "side", "after"])
    one = attempt(engine, max_turns=5)
    await one.complete(chat("q"))
    await one.complete(chat("q", "first", "more"))
    await one.complete(chat("q"))
    await one.complete(chat("q", "first", "otherwise"))
    await one.complete(chat("a summary"))
    made = made_by(one)
    assert sorted(shown_and_learnt(made)) == sorted((ids, done.token_ids) for ids, done in engine.given)
    assert len(made.conversations) == 4
    assert CODEC.decode(made.turns[0].reply_ids) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    *_, branch, summary = made.conversations  # in the order of their last answers
    first_ids, first = engine.given[0]
    assert branch.prompt_ids[: len(first_ids) + len(first.token_ids)] == (*first_ids, *first.token_ids)
    assert CODEC.decode(summary.prompt_ids) == "<|im_start|>user\na summary<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        (("assistant",), "message 0 is of role assistant after none; send system or user"),
        (("user", "user"), "message 1 is of role user after user; send assistant"),
        (("user", "assistant"), "end with user or tool"),
        (("user", "tool"), "message 1 is of role tool after user; send assistant"),
    ],
)
async def test_messages_that_no_conversation_has_are_refused(roles: tuple[str, ...], said: str) -> None:
    messages = tuple(Message(role=Role(role), content="x") for role in roles)
    with pytest.raises(Refused, match=said):
        await attempt(Told([])).complete(Chat(messages=messages, tools=None))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 14))
def test_each_sampled_token_is_learnt_from_once_after_what_the_engine_saw(seed: int, requests: int) -> None:
    """An agent that goes on, goes back, forgets, changes answers and asks several times at once, at random."""
    draw = random.Random(seed)
    engine = Told([f"answer {n} {draw.choice(['yes', 'no'])}" for n in range(40)])
    one = attempt(engine, max_turns=40, max_response_tokens=100_000)
    known: list[tuple[str, ...]] = [()]

    async def ask() -> None:
        before = draw.choice(known)
        if before and draw.random() < 0.2:
            before = (*before[:-1], before[-1] + " changed")
        asked = (*before, f"question {draw.randrange(3)}")
        answer = await one.complete(chat(*asked))
        known.append((*asked, answer.message.content))

    async def all_of_them() -> None:
        left = requests
        while left:
            some = min(left, draw.choice([1, 1, 2, 3]))
            await asyncio.gather(*(ask() for _ in range(some)))
            left -= some

    asyncio.run(all_of_them())
    made = made_by(one)
    assert sorted(shown_and_learnt(made)) == sorted((ids, done.token_ids) for ids, done in engine.given)
    rows = rows_of([_kept(made)], lambda rewards: [1.0, -1.0])
    own = [row for row in rows if row.origin[:2] == (0, 0)]
    assert [row.origin for row in own] == [(0, 0, n) for n in range(len(own))]
    assert sum(sum(row.loss_mask) for row in own) == sum(len(done.token_ids) for _, done in engine.given)
    assert [token for row in own for token in row.token_ids] == list(made.token_ids)
    assert [value for row in own for value in row.sampled_logprobs] == list(made.sampled_logprobs)


def _kept(made: Trajectory) -> Resampled:
    group = Group(problem=PROBLEM, trajectories=(made, made))
    choices = tuple(
        Choice(index=n, kept=True, reason=Reason.KEPT_ALL, penalty=Penalty(errors=0.0, format=0.0)) for n in range(2)
    )
    return Resampled(group=group, choices=choices)


class Seeds(Told):
    """Remembers the seeds with which each prompt was continued."""

    def __init__(self) -> None:
        super().__init__(["a"] * 3)
        self.seeds: dict[tuple[int, ...], list[int]] = {}

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, **names: Any) -> Completion:
        self.seeds.setdefault(tuple(token_ids), []).append(sampling.seed)
        return await super().generate(token_ids, sampling, **names)


async def test_the_same_tokens_draw_the_same_whatever_else_is_asked() -> None:
    """Seeds follow from what is continued and how often it was, so neither order nor neighbours matter."""
    engines = [Seeds(), Seeds()]
    for engine, order in zip(engines, (("x", "y", "y"), ("y", "x", "y")), strict=True):
        one = attempt(engine)
        for word in order:
            await one.complete(chat(word))
    assert engines[0].seeds == engines[1].seeds
    assert all(len(set(each)) == len(each) for each in engines[0].seeds.values())


async def test_an_attempt_leaves_one_conversation_in_engines_at_most() -> None:
    """Else all attempts could wait for room while each holds some."""

    class Holds(Told):
        def __init__(self, replies: Sequence[str]) -> None:
            super().__init__(replies)
            self.held: set[str] = set()
            self.most_idle = 0
            self.busy: set[str] = set()

        async def generate(self, token_ids: Sequence[int], sampling: Sampling, **names: Any) -> Completion:
            session = names["session_id"]
            self.held.add(session)
            self.busy.add(session)
            self.most_idle = max(self.most_idle, len(self.held - self.busy))
            await asyncio.sleep(0.001)
            try:
                return await super().generate(token_ids, sampling, **names)
            finally:
                self.busy.discard(session)

        async def close_session(self, session_id: str) -> None:
            self.held.discard(session_id)

    engine = Holds(["a"] * 20)
    one = attempt(engine, max_turns=20)
    for word in ("x", "y", "z"):
        await one.complete(chat(word))
        assert len(engine.held) == 1
    await asyncio.gather(*(one.complete(chat(f"at once {n}")) for n in range(5)))
    assert engine.most_idle == 0 and len(engine.held) <= 1
    await one.close()
    assert not engine.held
