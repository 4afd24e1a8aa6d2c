"""Tokens that a policy was unsure of, and what kind they are: the paper's §5.4 with a rule in place of reading by hand.

The paper marks the 20% of an attempt's tokens with the highest entropy and finds two kinds by eye: forking tokens,
known from chains of thought, and reflection tokens on tool responses, dense runs right after a reply. It gives no
lexicon and no counts. Our rule looks at place and entropy; words are only counted afterwards. A marked token is

    call         inside a tool call
    answer       inside the answer block
    mark         the token that ends a completion, or a mark of the template outside of those two: `<|im_start|>`,
                 `</reason>`; it says who speaks or what follows, and no thought forks there
    reflection   in a completion that follows a tool reply, before its first call or answer, in a run that begins among
                 the first NEAR tokens of that completion; a run is RUN or more marked tokens with no more than GAP
                 others between two neighbours
    forking      any other

docs/analysis.md publishes the rule with an example.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

from rocstar.analysis.attempts import Attempt, TurnSpan, share_of
from rocstar.dialogue.calls import LLAMA
from rocstar.dialogue.marked_calls import OPENINGS

SHARE = 0.2  # of an attempt's tokens; paper §5.4
NEAR = 32  # tokens of a completion that count as directly after the reply
RUN = 3  # marked tokens that make a run
GAP = 2  # unmarked tokens that a run may hold between two marked ones
MOST_WORDS = 20_000  # kept while counting, of all steps together

_CALLS = "|".join(
    re.escape(opens) + (rf".*?(?:{re.escape(closes)}|\Z)" if closes else ".*") for opens, closes in OPENINGS.items()
)
_BLOCK = re.compile(
    rf"(?P<call>{_CALLS})|"
    r"(?P<answer><answer>).*?(?:</answer>|\Z)|<\|channel\|>\w+|<[|｜][^<|｜>\s]{1,40}[|｜]>|\[/?(?:ARGS|INST|[A-Z]+_[A-Z]+)\]|"
    r"</?(?:reason|think|tool_call|answer|tool_response|arg_key|arg_value)>",
    re.DOTALL,
)

Piece = Callable[[int], str]
"""One token's text."""


class TokenKind(StrEnum):
    CALL = "call"
    ANSWER = "answer"
    MARK = "mark"
    REFLECTION = "reflection"
    FORKING = "forking"


Words = Counter[tuple[TokenKind, str]]
"""Marked tokens by kind and text."""


@dataclass(slots=True)
class TokenCounts:
    """Sums over attempts that have entropies."""

    attempts: int = 0
    tokens: int = 0
    entropy: float = 0.0
    """Summed, nats."""
    marked: int = 0
    kinds: Counter[TokenKind] = field(default_factory=Counter)
    """Marked tokens by kind."""
    after_ok: int = 0
    """Reflection tokens after a reply without a failure."""
    after_error: int = 0
    in_calls: int = 0
    """Tokens in calls, marked or not."""
    call_entropy: float = 0.0

    def figures(self) -> dict[str, Any]:
        outside, entropy = self.tokens - self.in_calls, self.entropy - self.call_entropy
        return {
            "attempts": self.attempts,
            "tokens": self.tokens,
            "entropy": share_of(self.entropy, self.tokens),
            "entropy_in_calls": share_of(self.call_entropy, self.in_calls),
            "entropy_outside_calls": share_of(entropy, outside),
            **{f"{kind}_tokens": self.kinds[kind] for kind in TokenKind},
            **{f"{kind}_share": share_of(self.kinds[kind], self.marked) for kind in TokenKind},
            "reflection_after_ok": self.after_ok,
            "reflection_after_error": self.after_error,
        }


def count_tokens(counts: TokenCounts, attempt: Attempt, piece: Piece) -> dict[int, TokenKind]:
    """Add an attempt to `counts`; its marked tokens by place, with their kinds; none without entropies."""
    if attempt.entropies is None:
        return {}
    written = [place for turn in attempt.turns for place in range(turn.start, turn.end)]
    marked = marked_places(attempt.entropies, written)
    inside = {place: kind for turn in attempt.turns for place, kind in enclosed(attempt, turn, piece)}
    calls = [place for place, kind in inside.items() if kind is TokenKind.CALL]
    kinds = kinds_of(attempt, marked, inside)
    counts.attempts += 1
    counts.tokens += len(written)
    counts.entropy += sum(attempt.entropies[place] for place in written)
    counts.in_calls += len(calls)
    counts.call_entropy += sum(attempt.entropies[place] for place in calls)
    counts.marked += len(marked)
    for place, kind in kinds.items():
        counts.kinds[kind] += 1
        if kind is TokenKind.REFLECTION:
            failed = turn_of(attempt, place).after == "error"
            counts.after_error += failed
            counts.after_ok += not failed
    return kinds


def count_words(words: Words, attempt: Attempt, kinds: Mapping[int, TokenKind], piece: Piece) -> None:
    """Add the marked tokens of an attempt. The rarest words are forgotten where there are more than MOST_WORDS."""
    words.update((kind, piece(attempt.token_ids[place])) for place, kind in kinds.items())
    if len(words) > MOST_WORDS:
        for word, _ in words.most_common()[MOST_WORDS // 2 :]:
            del words[word]


def marked_places(entropies: Sequence[float], written: Sequence[int]) -> set[int]:
    """The SHARE of the written tokens with the highest entropy, at least one; the earlier one of equals."""
    count = max(1, round(SHARE * len(written))) if written else 0
    return set(sorted(written, key=lambda place: (-entropies[place], place))[:count])


def kinds_of(attempt: Attempt, marked: set[int], inside: Mapping[int, TokenKind]) -> dict[int, TokenKind]:
    """The rule at the head of this file. inside: places in calls, answers and marks, with which of them."""
    kinds = {place: inside.get(place, TokenKind.FORKING) for place in sorted(marked)}
    blocks = [place for place, kind in inside.items() if kind is not TokenKind.MARK]
    for turn in attempt.turns:
        if turn.after is not None:
            end = min((place for place in blocks if turn.start <= place < turn.end), default=turn.end)
            outside = [place for place in sorted(marked) if turn.start <= place < end and place not in inside]
            for run in runs_of(outside):
                if run[0] < turn.start + NEAR:
                    kinds.update(dict.fromkeys(run, TokenKind.REFLECTION))
    return kinds


def runs_of(places: Sequence[int]) -> Iterator[list[int]]:
    """Runs of RUN or more places, ascending, with at most GAP others between two neighbours."""
    run: list[int] = []
    for place in [*places, None]:
        if place is not None and (not run or place - run[-1] <= GAP + 1):
            run.append(place)
            continue
        if len(run) >= RUN:
            yield run
        run = [] if place is None else [place]


def enclosed(attempt: Attempt, turn: TurnSpan, piece: Piece) -> Iterator[tuple[int, TokenKind]]:
    """Places of the tokens of a completion that stand in a tool call or an answer block, their tags included, and of
    marks."""
    texts = [piece(token) for token in attempt.token_ids[turn.start : turn.end]]
    ends = list(accumulate(map(len, texts)))
    for begin, end, kind in blocks("".join(texts), called=turn.called):
        first, last = bisect_right(ends, begin), bisect_left(ends, end)
        yield from ((turn.start + number, kind) for number in range(first, last + 1))
    if turn.ended and turn.end > turn.start:
        yield turn.end - 1, TokenKind.MARK


def blocks(text: str, *, called: bool = False) -> Iterator[tuple[int, int, TokenKind]]:
    """Where calls, answers and marks stand in the text of a completion; a block never closed goes to its end. called:
    calls were read in it, Llama's perhaps, which are JSON without marks."""
    for found in _BLOCK.finditer(text):
        kind = TokenKind.CALL if found["call"] else TokenKind.ANSWER if found["answer"] else TokenKind.MARK
        yield found.start(), found.end(), kind
    for call in LLAMA.read(text) if called and not any(mark in text for mark in OPENINGS) else ():
        yield call.begin, call.end, TokenKind.CALL


def turn_of(attempt: Attempt, place: int) -> TurnSpan:
    return next(turn for turn in attempt.turns if turn.start <= place < turn.end)
