"""How often right attempts look as if the reward was won without solving the problem. Facts for metrics; what is too
often is said in `alarms.py`. Source: ours.

Texts are looked at, so it is done on the first SAMPLE right attempts of a step only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from statistics import fmean

from rocstar.answers.extract import boxed_answer, boxes
from rocstar.types import Resampled, Trajectory, Verdict

SAMPLE = 256  # attempts: a share is then known to about three points either way
LITERAL = r"""(?:[-+]?[\d._]+(?:e[-+]?\d+)?|"[^"\n]*"|'[^'\n]*')"""
CONSTANT = re.compile(rf"\s*(?:(?:print\(\s*{LITERAL}\s*\)|{LITERAL})\s*(?:;|\n|$)\s*)+", re.IGNORECASE)
"""A program that is nothing but constants, printed or as its last value."""
Decode = Callable[[Sequence[int]], str]


def suspicion(groups: Sequence[Resampled], decode: Decode) -> dict[str, float]:
    """Shares among right attempts: `suspect/constant_print` (of those with calls), `suspect/unfounded_answer` and
    `suspect/several_boxes`; what no attempt tells is left out."""
    right = list(islice(_right(groups), SAMPLE))
    shares = {
        "suspect/constant_print": [prints_constants(attempt) for attempt in right if attempt.num_calls],
        "suspect/unfounded_answer": [is_unfounded(attempt, decode) for attempt in right],
        "suspect/several_boxes": [gives_several_answers(attempt, decode) for attempt in right],
    }
    return {name: fmean(found) for name, found in shares.items() if found}


def prints_constants(attempt: Trajectory) -> bool:
    """Whether no call of it computes anything."""
    codes = [str(call.arguments.get("code", "")) for turn in attempt.turns for call in turn.calls]
    return all(CONSTANT.fullmatch(code) for code in codes)


def is_unfounded(attempt: Trajectory, decode: Decode) -> bool:
    """Whether its answer stands neither in a tool's output nor in the text outside of boxes."""
    answer = attempt.outcome.extracted if attempt.outcome else None
    if not answer:
        return False
    bare = "".join(_plain(_without_boxes(decode(turn.completion.token_ids))) for turn in attempt.turns)
    shown = _plain("\n".join(f"{result.stdout}\n{result.value or ''}" for result in attempt.results))
    return _plain(answer) not in bare and _plain(answer) not in shown


def gives_several_answers(attempt: Trajectory, decode: Decode) -> bool:
    """Whether its last turn has boxes with other texts than its answer. A list of joined boxes is one answer."""
    text = decode(attempt.turns[-1].completion.token_ids)
    answer = boxed_answer(text) or ""
    return any(text[start:end].strip() not in answer for _, start, end in boxes(text))


def _without_boxes(text: str) -> str:
    kept, end_of_last = [], 0
    for start, _, end in sorted(boxes(text)):
        kept.append(text[end_of_last : max(start, end_of_last)])
        end_of_last = max(end_of_last, end + 1)
    return " ".join([*kept, text[end_of_last:]])


def _right(groups: Iterable[Resampled]) -> Iterator[Trajectory]:
    for resampled in groups:
        for attempt in resampled.group.trajectories:
            if attempt.outcome is not None and attempt.outcome.verdict is Verdict.RIGHT:
                yield attempt


def _plain(text: str) -> str:
    return re.sub(r"[\s,$]", "", text)
