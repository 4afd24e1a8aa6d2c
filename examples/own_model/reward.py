"""A reward of your own, with the signature that TRL's trainers take: one verdict for each completion.

`prompts` and `completions` are texts; every column of the JSONL comes as a keyword, one entry for each completion. 1 is
right, 0 is wrong, None is "cannot tell": such an attempt is left out rather than counted.
"""

import re

BOX = re.compile(r"\\boxed\{([^{}]*)\}")
WEIGHT = re.compile(r"\s*(\d+)\s*(?:g|grams?)?\s*")


def grams(prompts: list[str], completions: list[str], answer: list[str], **columns: object) -> list[float]:
    """1 where the last box holds the right number, with or without the word "grams"."""
    return [_right(BOX.findall(text), wanted) for text, wanted in zip(completions, answer, strict=True)]


def _right(boxes: list[str], wanted: str) -> float:
    found = WEIGHT.fullmatch(boxes[-1]) if boxes else None
    return float(found is not None and int(found[1]) == int(wanted))
