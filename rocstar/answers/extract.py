"""Find the final answer in text a model wrote, and what the assistant wrote in an attempt. Pure text scanning in linear
time; the answer is judged in `grade.py`.

"so <answer>it is \\boxed{\\frac{1}{2}}</answer>"   strict and lenient: "\\frac{1}{2}"
"so \\boxed{3} <answer>three</answer>"             strict: None, lenient: "3"
"\\boxed{3} and then \\boxed{4"                     "3", the last box that closes
"\\boxed{x = \\boxed{5}}"                           "5", the box that opens last
"\\boxed{3} or \\boxed{4}"                          "3, 4": joined boxes are one list, so a model can't answer twice
"Hence the answer is 5 metres."                   lenient: "5 metres", since nothing is boxed
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from rocstar.dialogue.calls import CallSyntax
from rocstar.errors import ContractBroken
from rocstar.protocols import TextCodec
from rocstar.types import FormatFacts, Stop, Trajectory

Truncated = Literal["wrong", "graded"]
"""What an attempt is that a limit or the end of its agent has cut: WRONG, or looked at like any other."""
CUT = (Stop.MAX_TOKENS, Stop.MAX_TURNS, Stop.AGENT_FAILED, Stop.AGENT_TIMEOUT)
MAX_PHRASE_CHARS = 400  # an answer in a sentence is shorter; the rest of a long line is other text
MAX_GAP_CHARS = 60  # between two boxes of one list

# A doubled backslash before `boxed` is what text looks like after one JSON round trip too many; as LaTeX it would
# be a line break followed by the letters "boxed{", which does not occur.
_BRACES = re.compile(r"(?P<box>\\\\?(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
_ANSWER_BLOCK = re.compile(r"<answer>((?:[^<]++|<(?!/?answer>))*+)</answer>")  # without backtracking: linear

_PAD = r"(?:\s|\$|\\[,;:! ()\[\]]|\\q?quad\b)*"
_LINK = rf"(?:[,;&]|\\text\{{\s*(?:and|or)\s*\}}|\b(?:and|or)\b)(?:{_PAD}\b(?:and|or)\b)?"
_NAME = r"(?:[A-Za-z]\w?(?:_\{?\w{1,4}\}?)?(?:\(\w\))?\s*=)?"
# One word may stand before the link: "\boxed{2} apples and \boxed{3} pears".
_JOINED = re.compile(rf"{_PAD}(?:[A-Za-z]+(?<!and)(?<!or))?{_PAD}{_LINK}{_PAD}{_NAME}{_PAD}")

_PHRASE = re.compile(r"\banswers?(?:\s{1,4}(?:is|are)\b|\s{0,2}\*{0,2}[:=])|####|^A:", re.IGNORECASE | re.MULTILINE)
_FINAL = re.compile(r"\bfinal\s+answers?\s*(?:is|are|[:=])(?![^.\n]{0,100}boxed)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?=\s|$)|\n")
_VERB = re.compile(r".*\b(?:is|are|be|equals)\b[:\s]+", re.DOTALL)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def strict_answer(text: str) -> str | None:
    """The box inside the last well-formed answer block; None if either is missing. Source: paper §2.2.1."""
    blocks = answer_blocks(text)
    return boxed_answer(blocks[-1]) if blocks else None


def lenient_answer(text: str) -> str | None:
    """The last box anywhere, or a final answer announced after it; else the text after the last "the answer is",
    "answer:", "####" or "A:" (at the start of a line). For texts of other models, never for rewards. Source: release,
    prime_math `match_answer`, without its guesses from other words; math-verify for the final answer."""
    boxed = boxed_answer(text)
    if boxed is None:
        return phrase_answer(text)
    last = deque(_FINAL.finditer(text, max(text.rfind("boxed{"), text.rfind("fbox{"))), maxlen=1)
    return (phrase_answer(text[last[0].start() :]) if last else None) or boxed


def last_answer(texts: Sequence[str], *, phrases: bool) -> str | None:
    """The last box of an attempt, one text per turn. phrases: without any box, the answer that its last turn
    announces."""
    boxes = (boxed_answer(text) for text in reversed(texts))
    found = next((box for box in boxes if box is not None), None)
    return phrase_answer(texts[-1]) if found is None and phrases and texts else found


def boxed_answer(text: str) -> str | None:
    """The last box, or as a list "a, b" the last boxes when only "and", "or", a comma or the like stands between.

    Equal boxes count once. Departure: the release takes the last box alone, so `\\boxed{3} or \\boxed{4}` gets full
    reward for either."""
    spans = sorted(boxes(text)) if "box" in text else []
    if not spans:
        return None
    group = [spans[-1]]
    for span in reversed(spans[:-1]):
        gap = text[span[2] + 1 : group[-1][0]]
        if len(gap) > MAX_GAP_CHARS or not _JOINED.fullmatch(gap):
            break
        group.append(span)
    contents = [text[start:end].strip() for _, start, end in reversed(group)]
    return ", ".join(dict.fromkeys(contents))


def boxed(answer: str) -> str:
    """A box around any text: if its braces would close the box early or leave it open, all of them are escaped."""
    command, end = "\\boxed{", " }" if answer.endswith("\\") else "}"
    whole = f"{command}{answer}{end}"
    if (0, len(command), len(whole) - 1) in boxes(whole):
        return whole
    return command + re.sub(r"(?<!\\)((?:\\\\)*)([{}])", r"\1\\\2", answer) + end


def phrase_answer(text: str) -> str | None:
    """The text after the last phrase that announces an answer, after the last "is" or "are" in it, up to the end of the
    sentence; a formula at its start or end is the answer. None without such a phrase or text."""
    last = deque(_PHRASE.finditer(text), maxlen=1)
    if not last:
        return None
    phrase = text[last[0].end() : last[0].end() + MAX_PHRASE_CHARS].strip(" \t\n*:")
    end = _SENTENCE_END.search(phrase)
    phrase = (phrase[: end.start()] if end else phrase).strip(" \t*")
    formulas = list(_MATH.finditer(phrase))
    if len(formulas) == 1 and (formulas[0].start() == 0 or formulas[0].end() == len(phrase)):
        return next(part for part in formulas[0].groups() if part is not None).strip() or None
    return _VERB.sub("", phrase) or None


def answer_blocks(text: str) -> list[str]:
    """Contents of the well-formed `<answer>...</answer>` blocks, in order: an opening tag and the next closing tag
    with no other answer tag between them."""
    return _ANSWER_BLOCK.findall(text)


def boxes(text: str) -> Iterator[tuple[int, int, int]]:
    """(start of the command, start and end of the content) of every `\\boxed{}` or `\\fbox{}` that closes, in order of
    closing. Escaped braces do not count. Source: paper §2.1 (final result in `\\boxed{}`); release, prime_math."""
    opened: list[tuple[int, int] | None] = []  # None for a plain brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if match["box"]:
            opened.append((match.start(), match.end()))
        elif token == "{":
            opened.append(None)
        elif token == "}" and opened:
            box = opened.pop()
            if box is not None:
                yield *box, match.start()


# -- of a whole attempt ------------------------------------------------------------------------------------------------


def counts_as_cut(trajectory: Trajectory, truncated: Truncated) -> bool:
    """Whether an attempt is WRONG unseen: a limit cut it, and such are not graded. Raises ContractBroken for an
    ENVIRONMENT_FAILED trajectory."""
    if trajectory.stop is Stop.ENVIRONMENT_FAILED:
        raise ContractBroken(
            f"attempt {trajectory.problem_id}/{trajectory.index} ended ENVIRONMENT_FAILED and has no outcome to verify."
        )
    return truncated == "wrong" and trajectory.stop in CUT


def written(codec: TextCodec, calls: CallSyntax, trajectory: Trajectory, ends: Collection[int] = ()) -> list[str]:
    """What the assistant wrote, one text per turn, without its tool calls and a last token that is one of `ends`;
    replies are left out, so neither a tool nor a program can answer for the model."""
    completions = (turn.completion.token_ids for turn in trajectory.turns)
    bare = (ids[:-1] if ids and ids[-1] in ends else ids for ids in completions)
    return [calls.strip(codec.decode(ids)) for ids in bare]


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
