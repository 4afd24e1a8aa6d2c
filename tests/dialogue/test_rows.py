import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocstar.dialogue.bpe import train_bpe
from rocstar.dialogue.templates import template_named
from rocstar.types import (
    Completion,
    Demonstration,
    DemoTurn,
    Finish,
    Problem,
    Status,
    Stop,
    ToolResult,
    Trajectory,
    Turn,
)
from tests.dialogue.naive_rows import encode_demonstration

WORDS = ["print(1)", " 12", "<tool_call>", "\n", "hello", "<answer>", "é"]
CODEC = train_bpe(WORDS * 9, vocab_size=180, markers=template_named("paper").markers, word_merges=False)

texts = st.lists(st.sampled_from([word for word in WORDS if word != "<tool_call>"])).map("".join)
results = texts.map(lambda text: ToolResult(call_id="call_0", status=Status.OK, stdout=text))
call_turns = st.builds(
    lambda text, got: DemoTurn(text=text, results=tuple(got)), texts, st.lists(results, min_size=1, max_size=2)
)
demonstrations = st.builds(
    lambda question, turns, last: Demonstration(
        problem=Problem(id="p", question=question, answer="1"), turns=(*turns, DemoTurn(text=last))
    ),
    texts,
    st.lists(call_turns, max_size=3),
    texts,
)


def shown(result: ToolResult) -> str:
    return result.stdout


@pytest.mark.parametrize("name", ["paper", "compact"])
@settings(deadline=None)
@given(demo=demonstrations)
def test_a_row_is_laid_out_as_the_trajectory_a_rollout_would_record(name: str, demo: Demonstration) -> None:
    template = template_named(name)
    stop_id = CODEC.token_id(template.stop)
    turns = []
    for turn in demo.turns:
        ids = (*CODEC.encode(turn.text), stop_id)
        reply = CODEC.encode_segments(template.reply([shown(r) for r in turn.results]), ()) if turn.results else []
        completion = Completion(token_ids=ids, logprobs=(0.0,) * len(ids), finish=Finish.STOP)
        turns.append(Turn(completion=completion, reply_ids=tuple(reply)))
    trajectory = Trajectory(
        problem_id="p",
        index=0,
        prompt_ids=tuple(CODEC.encode_segments(template.opening(demo.problem.question, ()), ())),
        turns=tuple(turns),
        stop=Stop.ANSWERED,
    )
    row = encode_demonstration(demo, codec=CODEC, template=template, tools=(), feedback=shown)
    assert row.token_ids == trajectory.token_ids
    assert row.loss_mask == trajectory.loss_mask
