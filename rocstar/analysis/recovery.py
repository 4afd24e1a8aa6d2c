"""What a model does after a tool call failed.

The next call decides, one of a later turn: calls of the same turn were written before the failure was known.

    next call            what it is
    other text, works    REPAIRED
    same text            REPEATED (white space apart), whether it works now or not
    other text, fails    FAILED_AGAIN
    none                 GAVE_UP: it went on without the tool; CUT where a limit ended the attempt
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from rocstar.analysis.attempts import Attempt


class After(StrEnum):
    REPAIRED = "repaired"
    REPEATED = "repeated"
    FAILED_AGAIN = "failed again"
    GAVE_UP = "gave up"
    CUT = "cut"


def after_errors(attempt: Attempt) -> Iterator[tuple[str, After]]:
    """(class of the failure, what came after) for each failed call of an attempt."""
    for place, call in enumerate(attempt.calls):
        if call.error is None:
            continue
        following = next((later for later in attempt.calls[place + 1 :] if later.turn > call.turn), None)
        if following is None:
            yield call.error, After.CUT if attempt.cut else After.GAVE_UP
        elif following.text.split() == call.text.split():
            yield call.error, After.REPEATED
        else:
            yield call.error, After.REPAIRED if following.error is None else After.FAILED_AGAIN
