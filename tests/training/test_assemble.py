"""From a recipe to the tools of its attempts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from rocstar.training.assemble import make_conversation, tool_spec

from rocstar.config import RolloutSection, SandboxSection
from rocstar.errors import ConfigError
from rocstar.recipe import load_recipe
from rocstar.rollout.environment import Conversation
from rocstar.sandbox.client import SandboxClient
from rocstar.tools.notebook import NotebookTool
from rocstar.tools.python import PythonTool
from tests.rollout.examples import CODEC

RECIPES = Path(__file__).parents[2] / "recipes"
CLIENT = SandboxClient(slots=1, preload=())  # never started: nothing is run here


def talk(*, max_turns: int = 4, **settings: object) -> Conversation:
    rollout = RolloutSection(max_turns=max_turns, tool_name="jupyter_code")
    return make_conversation(CODEC, CLIENT, rollout, SandboxSection.model_validate(settings))


def test_programs_are_one_tool_for_all_attempts_and_what_a_recipe_gets_without_a_word() -> None:
    (tool,) = talk().tools
    assert isinstance(tool, PythonTool) and talk().own_tools() == ()


def test_each_attempt_has_a_notebook_of_its_own() -> None:
    made = talk(tool="notebook")
    (one,), (other,) = made.own_tools(), made.own_tools()
    assert made.tools == () and one is not other
    assert isinstance(one, NotebookTool) and isinstance(other, NotebookTool)


@pytest.mark.parametrize("kind", ["program", "notebook"])
def test_demonstrations_show_the_tool_that_rollouts_have(kind: str) -> None:
    made = talk(tool=kind)
    (tool,) = (*made.tools, *made.own_tools())
    assert tool_spec(CLIENT, SandboxSection.model_validate({"tool": kind}), "jupyter_code") == tool.spec


def test_a_single_turn_has_no_tool() -> None:
    made = talk(max_turns=1, tool="notebook")
    assert (*made.tools, *made.own_tools()) == ()


def test_a_tool_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"sandbox.tool.*program.*notebook"):
        load_recipe(RECIPES / "quickstart.toml", ["sandbox.tool=jupyter"])
