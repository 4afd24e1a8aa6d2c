"""A run whose attempts an agent makes: it goes on, goes back and begins anew, and is replayed to the bit. Killed and
resumed: test_killed_run.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rocstar.record.folder import RunFolder
from rocstar.record.rollouts import read_rollouts, trajectory_of
from tests.tiny_run import Command, begun, metrics, workplace

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
WANDERER = '''
import json
PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOL = {"type": "function", "function": {"name": "python", "description": "", "parameters": PARAMETERS}}

async def solve(problem, client):
    """Asks once and again from the start, goes on from both, and begins anew at the end. Gives nothing, an answer that
    stands in no conversation, or a reward, by the problem."""
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


def settings(base: Path, *more: str) -> tuple[str, ...]:
    limits = ("rollout.max_turns=12", "rollout.max_response_tokens=96")
    return (*begun(base), "stage.stage3.steps=0", "stage.stage1.steps=3", *limits, *more)


@pytest.fixture(scope="module")
def wandered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = workplace(tmp_path_factory.mktemp("wandered") / "place")
    (place / "wanderer.py").write_text(WANDERER)
    given = settings(tmp_path_factory.getbasetemp(), "rollout.agent=wanderer:solve")
    ended = Command.start(place, "train", "tiny.toml", *given).wait()
    assert ended.code == 0, ended.told
    return place


def test_every_sampled_token_is_learnt_from_once_and_replayed_to_the_bit(wandered: Path) -> None:
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
    place = workplace(tmp_path / "place")
    (place / "broken.py").write_text("def solve(problem, client):\n    raise RuntimeError('no such luck')\n")
    given = settings(tmp_path_factory.getbasetemp(), "rollout.agent=broken:solve")
    ended = Command.start(place, "train", "tiny.toml", *given).wait()
    said = "rollout.agent failed in every attempt; the first says: RuntimeError: no such luck (broken.py, line 2)"
    assert ended.code != 0 and said in ended.told
