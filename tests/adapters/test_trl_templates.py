"""Chat templates that models come with, as TRL ships them: which are taken with tools, and which call syntax is found.
What is taken puts opening, completions and replies together as the template renders the whole conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")

import trl

from rocstar.dialogue.calls import HERMES, LLAMA, XML, Syntax
from rocstar.dialogue.marked_calls import MARKED
from rocstar.dialogue.templates import template_for
from rocstar.errors import ConfigError
from rocstar.protocols import ToolSpec
from tests.dialogue.folders import folder_of

FOLDER = Path(trl.__file__).parent / "chat_templates"
PYTHON = ToolSpec(name="python", description="", parameters={"type": "object", "properties": {"code": {}}})
TAKEN = {
    "glm4moe": MARKED[-2],
    "gptoss": MARKED[-1],
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "qwen2_5": HERMES,
    "qwen3": HERMES,
    "qwen3_instruct_2507": HERMES,
    "qwen3_vl": HERMES,
    "qwen3_5_nothink": XML,
    "qwen3_5_think": XML,
    "qwen3_6": XML,
}
TAUGHT = ("cohere", "gemma", "gemma3", "phi3", "phi3_5")
"""They know no tools, and are taught ours."""
REFUSED = {
    "deepseekv3": "rewrites earlier turns",
    "lfm2_v2": "in no syntax that is read here",
    "nemotron_3_nano": "rewrites earlier turns",
    "qwen3_8": "rewrites earlier turns",
}


def source(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text()


@pytest.mark.parametrize(("name", "syntax"), [*TAKEN.items(), *((name, HERMES) for name in TAUGHT)])
def test_a_template_that_can_be_trained_under_is_taken(name: str, syntax: Syntax, tmp_path: Path) -> None:
    template = template_for("model", folder_of(tmp_path, source(name)), [PYTHON])
    assert template.calls is syntax and template.taught == (name in TAUGHT)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_one_that_cannot_is_refused_in_a_sentence(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        template_for("model", folder_of(tmp_path, source(name)), [PYTHON])
