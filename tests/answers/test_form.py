from rocstar.answers.verifier import format_facts
from rocstar.types import FormatFacts


def test_blocks_are_counted_over_all_turns() -> None:
    facts = format_facts([r"<answer>\boxed{1}</answer>", "<answer>2</answer> <answer>3"])
    assert facts == FormatFacts(answer_tags=2, reason_after_answer=False, boxed=True)


def test_a_block_does_not_span_turns() -> None:
    assert format_facts(["<answer>", "5</answer>"]).answer_tags == 0


def test_reason_after_the_first_answer_is_seen_in_the_same_turn_and_in_later_ones() -> None:
    assert format_facts(["<answer>1</answer><reason>but"]).reason_after_answer
    assert format_facts(["<answer>1</answer>", "<reason>but"]).reason_after_answer


def test_reason_before_the_answer_is_in_order() -> None:
    assert not format_facts(["<reason>so</reason><answer>1</answer>"]).reason_after_answer
    assert not format_facts(["</answer><reason>so</reason><answer>1</answer>"]).reason_after_answer
    assert not format_facts(["<reason>so</reason>"]).reason_after_answer


def test_nothing_written_has_no_form() -> None:
    assert format_facts([]) == FormatFacts(answer_tags=0, reason_after_answer=False, boxed=False)
