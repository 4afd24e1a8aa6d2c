"""A template, and a syntax of calls, of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocstar.config.recipe import load_recipe
from rocstar.dialogue.segments import text_of
from rocstar.errors import ConfigError
from rocstar.parts.build import AttemptParts
from rocstar.protocols import ToolSpec
from tests.dialogue.folders import byte_level, folder_of

ROOT = Path(__file__).parents[2]
PYTHON = ToolSpec(name="python", description="", parameters={"type": "object", "properties": {"code": {}}})
TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}
{%- if tools and loop.last or loop.first and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ m.content }}{% for c in m.tool_calls or [] %}
{{- '[CALLING]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endif %}
{%- endfor %}"""
"""The shape of the newer Mistral's, with calls that nobody else writes."""
MINE = """
import json
import re

from rocstar.dialogue.model_template import load_model_template
from rocstar.dialogue.segments import ours
from rocstar.types import ToolCall

CALL = re.compile(r"\\[CALLING\\](\\w+)\\[ARGS\\](.*?)(?=\\[CALLING\\]|</s>|$)", re.DOTALL)


class Calls:
    reserved = ("[CALLING]", "[ARGS]")

    def parse(self, text, first_id=0):
        return [
            ToolCall(id=f"call_{n}", tool=each[1], arguments=json.loads(each[2]), raw=each[2])
            for n, each in enumerate(CALL.finditer(text), start=first_id)
        ]

    def render(self, tool, arguments):
        return (ours(f"[CALLING]{tool}[ARGS]{json.dumps(arguments)}"),)

    def strip(self, text):
        return CALL.sub("", text)


def template(folder, tools, *, preamble, options):
    return load_model_template(folder, tools, preamble=preamble, options=options, syntaxes=[Calls()])


def broken(folder, tools, *, preamble, options):
    raise ValueError("no such thing")


def other(folder, tools, *, preamble, options):
    return folder
"""


def parts(folder: Path, name: str) -> AttemptParts:
    (folder / f"{folder.name}.py").write_text(MINE)  # a module of a name that is loaded already is refused
    asked = [f"rollout.template={name}", f"run.modules=['{folder}']"]
    return AttemptParts(load_recipe(ROOT / "recipes" / "1.5b-1gpu.toml", asked))


def test_a_template_with_calls_that_nobody_else_reads_is_brought_with_its_parser(tmp_path: Path) -> None:
    """Such a one was told to use 'paper', and there, for want of <|im_end|>, 'model'."""
    folder = folder_of(tmp_path / "model", TEMPLATE, bos_token="<s>", eos_token="</s>")
    with pytest.raises(ConfigError, match=r"in no syntax that is read here .* of your own .*'package\.module:name'"):
        parts(tmp_path, "model").template(folder)
    template = parts(tmp_path, f"{tmp_path.name}:template").template(folder)
    assert text_of(template.opening("6*7?", [PYTHON])).startswith("<s>[AVAILABLE_TOOLS]")
    said = text_of(template.calls.render("python", {"code": "6*7"}))
    (call,) = template.calls.parse(f"So. {said}")
    assert (call.tool, call.arguments) == ("python", {"code": "6*7"}) and template.stop == "</s>"
    assert text_of(template.reply(["42"])) == "[TOOL_RESULTS]42[/TOOL_RESULTS]" and "[CALLING]" in template.reserved
    byte_level("</s>").save(tmp_path / "saved", template)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("broken", r": ValueError: no such thing \(\w+\.py, line \d+\)"),
        ("other", r" made no template: \w+ has no stop"),
        ("none", ".* 'none'"),
    ],
)
def test_what_makes_no_template_is_told_in_a_sentence(name: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^rollout\.template = '{tmp_path.name}:{name}'{told}"):
        parts(tmp_path, f"{tmp_path.name}:{name}").template(tmp_path)


def test_a_template_of_ones_own_is_that_of_a_pretrained_model() -> None:
    with pytest.raises(ConfigError, match=r"'mine:template' is that of a pretrained model; set model\.path"):
        load_recipe(ROOT / "recipes" / "quickstart.toml", ["rollout.template=mine:template"])
