"""Facts about the form of an attempt, for RoC's format penalty. No judgement and no reward here."""

from __future__ import annotations

from collections.abc import Sequence

from rocstar.answers.extract import answer_blocks, boxed_answer
from rocstar.types import FormatFacts


def format_facts(texts_of_turns: Sequence[str], prompt: str = "<answer>") -> FormatFacts:
    """Look at what the assistant wrote, one text per turn; tool replies and template text must not be in it. The prompt
    says whether an answer block was asked for: that of our template `paper` does, those of `compact` and of most
    published models do not, whatever stands in the question or in an environment's own words counts too.

    Blocks do not span turns. The release counts over the whole response and reads tags in tool output as the
    model's own; ours cannot. Source: paper §2.2.2 (extra `<reason>` after `<answer>`) and eq. 5."""
    tags = [len(answer_blocks(text)) for text in texts_of_turns]
    return FormatFacts(
        answer_tags=sum(tags),
        reason_after_answer=_reason_after_answer(texts_of_turns, tags),
        boxed=any(boxed_answer(text) is not None for text in texts_of_turns),
        answer_asked="<answer>" in prompt,
    )


def _reason_after_answer(texts: Sequence[str], tags: Sequence[int]) -> bool:
    first = next((turn for turn, count in enumerate(tags) if count), None)
    if first is None:
        return False
    # The first *block* closes at the first closing tag that has an opening tag before it.
    closed = texts[first].index("</answer>", texts[first].index("<answer>"))
    return "<reason>" in texts[first][closed:] or any("<reason>" in text for text in texts[first + 1 :])
