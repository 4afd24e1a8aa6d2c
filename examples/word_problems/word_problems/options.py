"""The settings of `[data.options]`: how questions are shown and how training rows are varied."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    numbers: Literal["digits", "masked"] = "digits"
    """Whether the question shows 18 or n0."""
    program: Literal["inline", "bound", "unordered"] = "inline"
    """print(18-4); n0=18;n1=4 on a line and then print(n0-n1); or print(abs(18-4))."""
    answer_share: Share = 0.25
    """Share of demonstrations that go on to the answer turn."""
    redraws: int = Field(default=24, ge=0)
    """How many times each problem's numbers are drawn again."""
    same_length_share: Share = 0.6
    """Chance that a whole number that is drawn again keeps its count of digits; else it has 1 to 4."""
    wordings: Count = 1
    """Different wordings made of each row; only of use with a share below."""
    rename_share: Share = 0.0
    """Chance that a thing that is counted gets another name."""
    decoy_share: Share = 0.0
    """Chance of a sentence that counts something the question does not ask for."""
    shuffle_share: Share = 0.0
    """Chance that the sentences before the question change places."""
    distractor_share: Share = 0.0
    """Chance of a sentence from another question."""
    oversample: Count = 1
    """How many times rows of two or more operators are shown for each time the others are."""
    swap_share: Share = 0.0
    """Chance, for each + and *, that its operands change places in the program."""
    ask_twice: bool = False
    """Put the last sentence of each question first as well; also in held-out problems."""
    holdout: int = Field(default=0, ge=0)
    """Training questions set aside; without data.test_files they are the held-out problems."""
    pool: Count = 2400
    """Training problems drawn once for RL."""
