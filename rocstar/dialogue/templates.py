"""Templates by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rocstar.dialogue.template import COMPACT, PAPER, ChatMl, Template
from rocstar.errors import ConfigError
from rocstar.protocols import ToolSpec

TEMPLATES: Mapping[str, ChatMl] = {"paper": PAPER, "compact": COMPACT}
MODEL = "model"


def template_for(
    name: str,
    folder: Path | None,
    tools: Sequence[ToolSpec] = (),
    *,
    preamble: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Template:
    """The template of that name; `model` is the chat template of the model in `folder`, checked with `tools` (those
    of the recipe) and rendered with `options`. `preamble` replaces the text before each question. Raises
    ConfigError."""
    if name == MODEL:
        if folder is None:
            raise ConfigError("rollout.template 'model' is the model's own chat template and needs model.path; set it.")
        from rocstar.dialogue.model_template import load_model_template

        return load_model_template(folder, tools, preamble=preamble, options=options or {})
    template = template_named(name)
    return template if preamble is None else replace(template, preamble=preamble)


def template_named(name: str) -> ChatMl:
    """Our own template of that name. Raises ConfigError for any other name than `paper` and `compact`."""
    if name in TEMPLATES:
        return TEMPLATES[name]
    names = [*TEMPLATES, MODEL]
    nearest = get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise ConfigError(f"rollout.template {name!r} is unknown; the nearest is {nearest!r}, of {', '.join(names)}.")
