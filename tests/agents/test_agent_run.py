"""A run whose attempts an agent makes: it goes on, goes back and begins anew, and is replayed to the bit. Killed and
resumed: test_killed_run.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocstar.record.folder import RunFolder
from rocstar.record.rollouts import read_rollouts, trajectory_of
from tests.tiny_run import Command, begun, metrics, run_once, workplace

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
WANDERER = '''
import asyncio, json
PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOL = {"type": "function", "function": {"name": "python", "description": "", "parameters": PARAMETERS}}

async def solve(problem, client):
    """Asks once and again from the start, goes on from both, and begins anew at the end. Gives nothing, an answer that
    stands in no conversation, or a reward, by the problem."""
    await asyncio.sleep(0.1)  # so that a kill comes amid a step
    question = {"role": "user", "content": problem.question}
    for messages in ([question], [question]):
        message = (await client.chat(messages, tools=[TOOL]))["choices"][0]["message"]
        if calls := message.get("tool_calls"):
            said = await client.call("python", **json.loads(calls[0]["function"]["arguments"]))
            replies = [{"role": "tool", "tool_call_id": call["id"], "content": said} for call in calls]
            for _ in range(2):  # one goes on, the other is a branch
                await client.chat([*messages, message, *replies], tools=[TOOL])
    last = (await client.chat([{"role": "user", "content": "Add 2 and 3"}]))["choices"][0]["message"]
    number = int(problem.question.split()[1])
    return (None, str(number + len(str(last))), len(str(last)) % 2)[number % 3]
'''


def begin(place: Path, base: Path, *more: str, agent: str = WANDERER) -> Command:
    """place: its workplace."""
    (place / "own.py").write_text(agent)
    limits = ("rollout.max_turns=12", "rollout.max_response_tokens=96")
    steps = ("stage.stage3.steps=0", "stage.stage1.steps=3", "evaluate.problems=0")
    return Command.start(place, "train", "tiny.toml", *begun(base), *steps, *limits, "rollout.agent=own:solve", *more)


def unkilled(base: Path, name: str, *more: str) -> Path:
    """Such a run with these settings, to be read only; it has the name for all tests of a session."""
    folder, ended = run_once(base, name, lambda place: begin(place, base, *more).wait())
    assert ended.code == 0, ended.told
    return folder


def test_every_sampled_token_is_learnt_from_once_and_replayed_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    wandered = unkilled(tmp_path_factory.getbasetemp(), "wandered", "rollout.refill=2")
    run = RunFolder(wandered / "runs" / "tiny")
    rows = [row for row in metrics(wandered) if "agent/conversations" in row]
    assert len(rows) == 3 and all(row["agent/conversations"] > 2 and row["agent/failed"] == 0.0 for row in rows)
    assert any(row["agent/branches"] > 0 for row in rows)
    for row in rows:
        attempts = [(one, trajectory_of(one)) for one in read_rollouts(run, row["step"])]
        assert row["step/tokens"] == sum(made.num_sampled_tokens for _, made in attempts)
        learnt = [(one, made) for one, made in attempts if one["old_logprobs"]]
        for one, made in learnt:
            assert len(one["old_logprobs"]) == len(made.token_ids) == len(one["token_ids"])
            gaps = [
                abs(ours - theirs)
                for ours, theirs, mine in zip(
                    one["old_logprobs"], one["sampled_logprobs"], one["loss_mask"], strict=True
                )
                if mine
            ]
            assert max(gaps) < 1e-4  # each conversation was learnt from after its own prompt alone
    ended = Command.start(wandered, "replay", "tiny", "--json").wait()
    steps = json.loads(ended.out)["steps"]
    assert ended.code == 0 and [one["differs"] for one in steps] == [{}] * 3, ended.told


def test_where_every_agent_fails_the_run_halts_and_says_why(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    fails = "def solve(problem, client):\n    raise RuntimeError('no such luck')\n"
    ended = begin(workplace(tmp_path / "place"), tmp_path_factory.getbasetemp(), agent=fails).wait()
    said = "rollout.agent failed in every attempt; the first says: RuntimeError: no such luck (own.py, line 2)"
    assert ended.code != 0 and said in ended.told
