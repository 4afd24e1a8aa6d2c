"""Code of the user's own: found where the recipe is, and one sentence for each way in which it is not."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocstar.errors import ConfigError
from rocstar.parts.build import AttemptParts
from rocstar.parts.lengths import tokens_of_prompts
from rocstar.protocols import Advantage, PolicyLoss, PolicyTokens, Resampler
from rocstar.rollout.environment import ToolEnvironment
from rocstar.rollout.episode import run_episode
from rocstar.support.plugins import code_of, is_reference, load, named
from rocstar.types import Choice, Sampling, Stop
from tests.rollout.examples import ANSWER, CODEC, PROBLEM, conversation, limits
from tests.scripted import ScriptedEngine, ScriptedTool


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_page_has_the_signatures_and_fields_that_code_of_ones_own_gets() -> None:
    page = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text()
    told = page.partition("Their signatures")[2].partition("```python\n")[2].partition("```")[0]
    given = {one.name: one for one in ast.walk(ast.parse(told)) if isinstance(one, ast.FunctionDef)}
    for name, protocol in {"loss": PolicyLoss, "advantage": Advantage, "__call__": Resampler}.items():
        taken = inspect.signature(protocol.__call__)
        mine = [(arg.arg, ast.unparse(arg.annotation)) for arg in given[name].args.args if arg.annotation]
        assert mine == [(one.name, one.annotation) for one in list(taken.parameters.values())[1:]]
        assert ast.unparse(given[name].returns or ast.Constant(None)) == taken.return_annotation
    for name, kind in {"tokens": PolicyTokens, "choice": Choice}.items():
        assert re.findall(rf"^\| `{name}\.(\w+)` \|", page, re.MULTILINE) == [one.name for one in fields(kind)]


def test_a_module_beside_the_recipe_a_dotted_one_and_a_file_are_found(modules: Path) -> None:
    assert is_reference("mine:Tool") and not is_reference("python")
    write(modules / "plug_neighbour.py", "value = 7")
    write(modules / "plug_mine.py", "from plug_neighbour import value\ndef score():\n    return value")
    write(modules / "plug_package" / "inner.py", "class Tool:\n    pass")
    write(modules / "scores" / "plug_reward.py", "def score():\n    return 1")
    assert load("plug_mine:score", folders=[modules])() == 7
    assert load("plug_package.inner:Tool", folders=[modules]).__name__ == "Tool"
    assert load("scores/plug_reward.py:score", folders=[modules])() == 1


def test_the_first_folder_comes_first_and_the_current_one_is_searched_for_files(
    modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(modules / "a" / "plug_same.py", "def where():\n    return 'a'")
    write(modules / "b" / "plug_same.py", "def where():\n    return 'b'")
    write(modules / "plug_here.py", "def where():\n    return 'here'")
    monkeypatch.chdir(modules)
    assert load("plug_same:where", folders=[modules / "b", modules / "a"])() == "b"
    assert load("plug_here.py:where", folders=[modules / "a"])() == "here"


def test_files_that_settings_name_are_known_by_their_hashes(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With packages around them, installed ones too; what they import is not followed."""
    write(modules / "plug_score.py", "from plug_near import value")
    write(modules / "plug_near.py", "value = 7")
    write(modules / "plug_parts" / "__init__.py", "")
    write(modules / "plug_parts" / "tool.py", "from .core import Tool")
    write(modules / "plug_parts" / "core.py", "")
    write(modules / "here" / "agent.py", "print 'hello'")
    monkeypatch.chdir(modules / "here")
    settings = {"a": "plug_score.py:score", "b": ["python", "plug_parts.tool:Tool", "mcp:python agent.py"], "c": 1}
    settings |= {"url": "http://host:80", "d": "rocstar.adapters.roc:x", "e": "statistics:fmean"}
    before = code_of(settings, [modules])
    assert set(before) == {"agent.py", "plug_parts/__init__.py", "plug_parts/tool.py", "plug_score.py", "statistics.py"}
    write(modules / "plug_score.py", "value = 8")
    write(modules / "plug_near.py", "value = 8")
    after = code_of(settings, [modules])
    assert {name for name in before if before[name] != after[name]} == {"plug_score.py"}


def test_code_has_the_same_hashes_from_wherever_it_is_asked(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(modules / "deep" / "plug_score.py", "")
    found = []
    for folder in (modules, modules / "deep", Path("/")):
        monkeypatch.chdir(folder)
        found.append(code_of([f"{modules}/deep/plug_score.py:score"]))
    assert found[0] == found[1] == found[2] and set(found[0]) == {"plug_score.py"}


def test_two_files_of_one_name_have_one_hash_of_both(modules: Path) -> None:
    named = [f"{modules}/{folder}/plug_score.py:score" for folder in "ab"]
    found = []
    for texts in (("1", "2"), ("3", "2"), ("1", "3")):
        for folder, text in zip("ab", texts, strict=True):
            write(modules / folder / "plug_score.py", text)
        found.append(code_of(named)["plug_score.py"])
    assert len(set(found)) == 3


def test_code_that_cannot_be_read_is_none(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(modules / "plug_score.py", "")
    assert set(code_of(["plug_score:score"], [modules])) == {"plug_score.py"}
    monkeypatch.setattr(Path, "read_bytes", locked)
    assert code_of(["plug_score:score"], [modules]) == {}


def locked(file: Path) -> bytes:
    raise PermissionError(file)


def test_a_long_sentence_that_looks_like_a_name_is_no_code() -> None:
    """As in languages that are written without spaces."""
    assert code_of(["\u7b54" * 400 + ":x " + "\u7b54" * 400 + ".py", "\ud800.py", "mcp:uvx something.py"]) == {}


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("plug_mine", "should be package.module:name or file.py:name"),
        (":score", "should be package.module:name or file.py:name"),
        ("plug_mine:", "should be package.module:name or file.py:name"),
        ("plug_mine:a b", "should be package.module:name or file.py:name"),
        (
            "some/plug_mine:score",
            "'some/plug_mine' is not the dotted name of a module; a file is written some/plug_mine.py",
        ),
        ("plug_gone:score", "there is no module plug_gone; looked in "),
        ("plug_gone.inner:score", "there is no module plug_gone; looked in "),
        ("plug_gone.py:score", "there is no file plug_gone.py; looked in "),
        ("plug_mine:scor", "has no 'scor'; the nearest is 'score'"),
        ("plug_empty:score", "has no 'score'; it defines no function and no class"),
        ("plug_mine:number", "number is of type int; give a function or a class"),
        ("plug_raises:score", "importing plug_raises failed: ZeroDivisionError: division by zero"),
        ("plug_syntax:score", "importing plug_syntax failed: SyntaxError: "),
        ("plug_mute:score", "importing plug_mute failed: Odd (its text cannot be read)"),
        ("plug_wants:score", "importing plug_wants failed: No module named 'plug_not_installed'"),
        ("a-b.py:score", "a-b.py cannot be imported; give the file a name of letters"),
    ],
)
def test_every_failure_is_one_sentence_that_names_the_setting(modules: Path, reference: str, said: str) -> None:
    write(modules / "plug_mine.py", "number = 3\ndef score():\n    pass")
    write(modules / "plug_empty.py", "")
    write(modules / "plug_raises.py", "1 / 0")
    write(modules / "plug_mute.py", "class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd")
    write(modules / "plug_syntax.py", "def")
    write(modules / "plug_wants.py", "import plug_not_installed")
    write(modules / "a-b.py", "def score():\n    pass")
    with pytest.raises(ConfigError) as refused:
        load(reference, folders=[modules], setting="evaluate.verifier")
    message = str(refused.value)
    assert message.startswith(f"evaluate.verifier = {reference!r}")
    assert said in message
    assert "\n" not in message
    assert ("ZeroDivisionError" in said) == isinstance(refused.value.__cause__, ZeroDivisionError)


def test_a_module_that_another_of_its_name_hides_is_refused_rather_than_mistaken(modules: Path) -> None:
    write(modules / "json.py", "def score():\n    pass")
    with pytest.raises(ConfigError, match=r"another module named json is loaded already \(.*\); rename yours"):
        load("json:score", folders=[modules])


def test_a_name_is_something_built_in_or_the_users_own(modules: Path) -> None:
    write(modules / "plug_mine.py", "def score(text): return 1\nasync def slow(text): return 1")
    built_in = {"plain": len, "strict": len}
    assert named("plain", built_in, setting="x.y", takes=("text",)) is len
    assert named("plug_mine:score", built_in, setting="x.y", takes=("text",), folders=[modules])("") == 1
    with pytest.raises(
        ConfigError, match=r"x\.y = 'plan' is none of plain, strict; did you mean 'plain'\? Your own is"
    ):
        named("plan", built_in, setting="x.y", takes=("text",))
    told = r"x\.y = 'plug_mine:score' should take \(text, more\), but it takes \(text\): too many"
    with pytest.raises(ConfigError, match=told):
        named("plug_mine:score", built_in, setting="x.y", takes=("text", "more"), folders=[modules])
    with pytest.raises(ConfigError, match=r"x\.y = 'plug_mine:slow' is async, and nothing would wait for it"):
        named("plug_mine:slow", built_in, setting="x.y", takes=("text",), folders=[modules])


def parts(modules: Path, environment: str) -> AttemptParts:
    recipe: Any = SimpleNamespace(
        run=SimpleNamespace(modules=[modules]), rollout=SimpleNamespace(environment=environment)
    )
    return AttemptParts(recipe)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("1 / 0", " = 'plug_world:world' failed: ZeroDivisionError: division by zero (plug_world.py, line 3)"),
        ("None", " = 'plug_world:world' made NoneType, which has no opening; see rocstar.protocols.Environment"),
        ("World()", ": opening failed: ZeroDivisionError: division by zero (plug_world.py, line 2)"),
    ],
)
def test_an_environment_that_raises_or_is_none_is_told_in_one_sentence(modules: Path, made: str, said: str) -> None:
    world = "class World:\n    opening = budget = reply = close = lambda self: 1 / 0"
    write(modules / "plug_world.py", f"{world}\ndef world(problem, conversation, limits, seed): return {made}")
    nobody: Any = None
    with pytest.raises(ConfigError) as refused:
        tokens_of_prompts(nobody, parts(modules, "plug_world:world").environment)(PROBLEM)
    assert str(refused.value) == f"rollout.environment{said}"


def test_the_prompt_of_a_problem_is_counted_once_unless_an_environment_may_read_more_of_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []

    class Own(ToolEnvironment):
        pass

    def opening(self: ToolEnvironment) -> tuple[int, ...]:
        opened.append(type(self).__name__)
        return (1, 2)

    monkeypatch.setattr(ToolEnvironment, "opening", opening)
    for environment in (ToolEnvironment, Own):
        tokens_of = tokens_of_prompts(conversation(), environment)
        assert (tokens_of(PROBLEM), tokens_of(PROBLEM)) == (2, 2)
    assert opened == ["ToolEnvironment", "Own", "Own"]


WORLD = """
from rocstar.rollout.environment import ToolEnvironment
class World(ToolEnvironment):
    {method}(self, *given):
        {does}
"""


@pytest.mark.parametrize(
    ("method", "does", "said"),
    [
        ("async def reply", "1 / 0", "ZeroDivisionError: division by zero (plug_world.py, line 5)"),
        ("async def reply", "return 1", "TypeError: it returned 1; let it return a rocstar.protocols.Reply"),
        ("def budget", "raise KeyError('x')", "KeyError: 'x' (plug_world.py, line 5)"),
        ("async def close", "1 / 0", "ZeroDivisionError: division by zero (plug_world.py, line 5)"),
    ],
)
async def test_an_environment_that_raises_in_an_attempt_is_a_fault_that_names_it(
    modules: Path, method: str, does: str, said: str
) -> None:
    """It ended the run as a fault of rocstar itself."""
    write(modules / "plug_world.py", WORLD.format(method=method, does=does))
    made = parts(modules, "plug_world:World").environment(PROBLEM, conversation(ScriptedTool({})), limits(), 0)
    engine, sampling = ScriptedEngine(CODEC, [ANSWER]), Sampling(max_new_tokens=1)
    attempt = await run_episode(engine, made, PROBLEM, index=0, sampling=sampling, session_id="s")
    assert (attempt.stop, attempt.outcome) == (Stop.ENVIRONMENT_FAILED, None)
    failed = f"rollout.environment: World.{method.split()[-1]} failed at problem 'What is 2 + 3?': {said}"
    assert attempt.fault is not None and attempt.fault.startswith(failed)
