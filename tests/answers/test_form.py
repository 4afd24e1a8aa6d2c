import pytest

from rocstar.answers.verifier import format_facts
from rocstar.types import FormatFacts


@pytest.mark.parametrize(
    ("turns", "tags", "reason_after", "boxed"),
    [
        ([], 0, False, False),
        ([r"<answer>\boxed{1}</answer>", "<answer>2</answer> <answer>3"], 2, False, True),
        (["<answer>", "5</answer>"], 0, False, False),  # a block does not span turns
        (["<answer>1</answer><reason>but"], 1, True, False),
        (["<answer>1</answer>", "<reason>but"], 1, True, False),
        (["<reason>so</reason><answer>1</answer>"], 1, False, False),
        (["</answer><reason>so</reason><answer>1</answer>"], 1, False, False),
        (["<reason>so</reason>"], 0, False, False),
    ],
)
def test_the_form_is_counted_over_all_turns(turns: list[str], tags: int, reason_after: bool, boxed: bool) -> None:
    assert format_facts(turns) == FormatFacts(answer_tags=tags, reason_after_answer=reason_after, boxed=boxed)
