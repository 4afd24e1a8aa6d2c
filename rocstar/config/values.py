"""What the sections of a recipe are made of: their base class, and the kinds of values that several of them hold."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Any, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, lt=1)]
"""A learning rate."""
Seconds = Annotated[float, Field(gt=0, le=86400)]
"""A limit on something that is waited for, a day at most."""

LEAST_TEMPERATURE = 0.01  # vLLM draws at it where it is asked for less; far below it fp32 divides logits to infinity


def drawable(temperature: float) -> float:
    """The temperature. Raises ValueError for one that not every engine draws at."""
    if 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"{temperature:g} is less than {LEAST_TEMPERATURE:g}, the least that every engine draws at; raise it (an "
            "evaluation takes 0 too: always the most likely token)"
        )
    return temperature


Temperature = Annotated[float, AfterValidator(drawable)]


def _word(name: str) -> str:
    if not re.fullmatch(r"\w[\w.-]{0,49}", name):
        raise ValueError(
            f"{name!r} cannot be a name; use at most 50 letters, digits, - _ and . and begin with a letter or digit"
        )
    return name


Word = Annotated[str, AfterValidator(_word)]
"""A name that becomes a part of file names, or that a model writes."""


def built_in_or_own(names: Any) -> AfterValidator:
    """Validates that a value is one of a Literal's names or a reference to the user's own code (support/plugins.py)."""
    known = get_args(names)

    def check(name: str) -> str:
        if name not in known and ":" not in name:
            options = {"options": ", ".join(map(repr, known))}
            raise PydanticCustomError("literal_error", "Input should be {options} or package.module:name", options)
        return name

    return AfterValidator(check)


SETTLE = "settle"


def settled(path: str, info: ValidationInfo) -> str:
    """The absolute path, where validation asks for it and something is there; else the path."""
    return os.path.abspath(path) if info.context == SETTLE and os.path.exists(path) else path


Place = Annotated[str, AfterValidator(settled)]
"""A file or folder, relative to the folder that a run is started in, and absolute where validation has SETTLE for its
context. What is not there stays as it is: a hub id, or a mistake that is reported later."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def complaints(self) -> Iterator[str]:
        """What is wrong with values that are right each by itself, in words; the first refuses the section."""
        yield from ()

    @model_validator(mode="after")
    def refuse(self) -> Self:
        for complaint in self.complaints():
            raise ValueError(complaint)
        return self
