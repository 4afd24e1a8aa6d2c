"""A reward of your own, with the signature that TRL's trainers take: one number for each completion.

`prompts` and `completions` are texts; every column of the JSONL comes as a keyword, one entry for each completion.
"""

import re

BOX = re.compile(r"\\boxed\{([^{}]*)\}")


def exact_number(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 for the right number in the last box, 0.1 for another number there, else 0."""
    return [_score(BOX.findall(text), wanted) for text, wanted in zip(completions, answer, strict=True)]


def _score(boxes: list[str], wanted: str) -> float:
    if not boxes or not boxes[-1].strip().isdigit():
        return 0.0
    return 1.0 if int(boxes[-1]) == int(wanted) else 0.1
