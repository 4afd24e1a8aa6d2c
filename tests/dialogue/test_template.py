import json
from pathlib import Path
from typing import Any

import pytest

from rocstar.dialogue.bpe import train_bpe
from rocstar.dialogue.calls import render_call
from rocstar.dialogue.segments import text_of
from rocstar.dialogue.template import PREAMBLE, SYSTEM
from rocstar.dialogue.templates import template_named
from rocstar.errors import ConfigError
from rocstar.protocols import ToolSpec, tool_schema

PYTHON = ToolSpec(
    name="python",
    description='Run Python; say "größer" <b>&</b> it is kept.',
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
OTHER = ToolSpec(name="search", description="Look it up.", parameters={"type": "object", "properties": {}})
CALL = render_call("python", {"code": "print(6*7)"})


def test_compact_shows_nothing_but_roles_and_question() -> None:
    template = template_named("compact")
    assert text_of(template.opening("6*7?", [PYTHON])) == "<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(template.reply(["42"])) == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_paper_opening_states_system_tools_preamble_and_an_open_reason_tag() -> None:
    text = text_of(template_named("paper").opening("6*7?", [PYTHON, OTHER]))
    system, user, assistant = text.split("<|im_end|>\n")
    assert system.startswith(f"<|im_start|>system\n{SYSTEM}\n\n# Tools\n")
    schemas = system.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line)["function"]["name"] for line in schemas] == ["python", "search"]
    assert "größer" in schemas[0]
    assert user == f"<|im_start|>user\n{PREAMBLE}6*7?"
    assert "\\boxed{}" in PREAMBLE and "<answer>" in PREAMBLE
    assert assistant == "<|im_start|>assistant\n<reason>"


def test_a_given_system_text_replaces_the_default_but_not_the_tools_block_which_stands_where_there_are_tools() -> None:
    paper = template_named("paper")
    text = text_of(paper.opening("Q", [PYTHON], system="Be brief."))
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n") and SYSTEM not in text
    assert text_of(paper.opening("Q", [])).startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")


def test_tool_texts_of_one_turn_are_merged_into_one_user_turn_and_reason_is_opened_again() -> None:
    assert text_of(template_named("paper").reply(["1", "2"])) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<reason>"
    )


def test_an_unknown_template_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'papr' is unknown; the nearest is 'paper'"):
        template_named("papr")


def saved_tokenizer(folder: Path, name: str) -> Any:
    transformers = pytest.importorskip("transformers", reason="the chat template is rendered by transformers")
    codec = train_bpe(["6*7?"], vocab_size=256, markers=template_named(name).markers, word_merges=False)
    codec.save(folder, template_named(name))
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["paper", "compact"])
def test_the_saved_chat_template_renders_the_same_conversation(name: str, tmp_path: Path) -> None:
    tokenizer, template = saved_tokenizer(tmp_path, name), template_named(name)
    question = 'What is "6 * 7"\n\\frac{1}{2} <b> ü?'
    for tools in ([], [PYTHON], [PYTHON, OTHER]):
        for system in (None, "Be brief.", ""):
            schemas = [tool_schema(spec) for spec in tools] or None
            first = [] if system is None else [{"role": "system", "content": system}]
            messages = [*first, {"role": "user", "content": question}]
            written = text_of(template.opening(question, tools, system))
            render = {"tools": schemas, "tokenize": False, "add_generation_prompt": True}
            assert tokenizer.apply_chat_template(messages, **render) == written

            messages += [{"role": "assistant", "content": f"why</reason>{CALL}{CALL}"}]
            messages += [{"role": "tool", "content": "42"}, {"role": "tool", "content": ""}]
            written += f"why</reason>{CALL}{CALL}{template.stop}" + text_of(template.reply(["42", ""]))
            assert tokenizer.apply_chat_template(messages, **render) == written

            messages += [{"role": "assistant", "content": CALL}, {"role": "tool", "content": "<b>"}]
            written += CALL + template.stop + text_of(template.reply(["<b>"]))
            assert tokenizer.apply_chat_template(messages, **render) == written
