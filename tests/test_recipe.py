"""Recipes: merging, overrides, and what a person reads when something is wrong."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from rocstar.config.recipe import GONE, changed, load_recipe, recipe_text, resolved_from_json
from rocstar.config.sections import (
    STAGES,
    Recipe,
    RlStage,
    RolloutSection,
    RolloutStage,
    RunSection,
    SftSection,
    StageDataSection,
    StageRolloutSection,
)
from rocstar.config.values import Section
from rocstar.errors import ConfigError
from rocstar.record.folder import RunFolder
from rocstar.sandbox.check import BOUNDS

ROOT = Path(__file__).parent.parent
PARENT = """\
[run]
name = "parent"

[rollout]
max_turns = 3
temperature = 0.7

[data]
families = ["gcd", "fib"]

[[stage]]
name = "sft"
kind = "sft"
steps = 5

[[stage]]
name = "stage1"
kind = "rl"
steps = 10
[stage.rollout]
max_response_tokens = 64
max_turns = 2
"""

CHILD = """\
extends = "parent.toml"

[rollout]
temperature = 1
max_turns = 6

[data]
families = ["powmod"]

[[stage]]
name = "stage1"
steps = 20
[stage.rollout]
max_response_tokens = 80

[[stage]]
name = "stage2"
kind = "rl"
steps = 4
learning = { learning_rate = 1e-4 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "parent.toml").write_text(PARENT)
    (tmp_path / "child.toml").write_text(CHILD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stage(recipe: Recipe, name: str) -> Any:
    return next(stage for stage in recipe.stage if stage.name == name)


def complaint(path: str | Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_planning_and_checks_ask_any_stage_that_makes_attempts() -> None:
    class Other(RolloutStage):
        kind: Literal["other"] = "other"
        sft: SftSection = SftSection()
        learner_section: ClassVar[str] = "sft"

    rollout = StageRolloutSection(problems_per_step=2, attempts_per_problem=3, max_response_tokens=7)
    one = Other(name="own", steps=1, data=StageDataSection(), rollout=rollout)
    recipe = Recipe().model_copy(update={"stage": [one]})
    assert recipe.rollout_stages == [one] and recipe.rollouts == [rollout] and recipe.rl_stages == []
    assert recipe.longest_response == 7 and "6 attempts of a step of stage own" in str(recipe.idle_engines(7))


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    assert load_recipe(tmp_path / "empty.toml") == Recipe(run=RunSection(modules=[str(tmp_path)]))


def test_modules_are_found_beside_the_recipe_and_beside_those_it_extends_unless_it_says_where(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "base.toml").write_text("")
    (tmp_path / "mine" / "child.toml").write_text('extends = "../base.toml"')
    assert load_recipe(tmp_path / "mine" / "child.toml").run.modules == [str(tmp_path / "mine"), str(tmp_path)]
    there = str(tmp_path / "mine")
    assert load_recipe(tmp_path / "base.toml", [f"run.modules={there}"]).run.modules == [there]


def test_stages_carry_full_copies_of_the_base_and_their_own_keys(folder: Path) -> None:
    recipe = load_recipe("parent.toml")
    assert [s.name for s in recipe.stage] == ["sft", "stage1"]
    assert stage(recipe, "stage1").rollout.temperature == 0.7
    assert stage(recipe, "stage1").rollout.max_turns == 2
    assert recipe.rollout.max_turns == 3
    assert recipe.rollout.max_response_tokens == RolloutSection().max_response_tokens


def test_a_child_overrides_key_by_key_replaces_lists_and_appends_stages(folder: Path) -> None:
    recipe = load_recipe("child.toml")
    assert recipe.run.name == "parent"
    assert recipe.data.families == ["powmod"]
    assert [s.name for s in recipe.stage] == ["sft", "stage1", "stage2"]
    stage1 = stage(recipe, "stage1")
    assert (stage1.kind, stage1.steps, stage1.rollout.max_response_tokens) == ("rl", 20, 80)
    # The parent's own stage key beats the child's base section.
    assert (stage1.rollout.max_turns, stage1.rollout.temperature) == (2, 1.0)
    assert stage(recipe, "stage2").rollout.max_turns == 6
    assert stage(recipe, "stage2").learning.learning_rate == 1e-4


def test_extends_is_relative_to_the_file_and_may_be_a_chain(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "grandchild.toml").write_text('extends = "../child.toml"\nrun.seed = 7\n')
    recipe = load_recipe("deep/grandchild.toml")
    assert (recipe.run.seed, recipe.run.name, len(recipe.stage)) == (7, "parent", 3)


def test_a_circle_is_refused_with_its_files_and_a_mistake_of_a_parent_names_the_parent(folder: Path) -> None:
    (folder / "a.toml").write_text('extends = "b.toml"')
    (folder / "b.toml").write_text('extends = "a.toml"')
    assert re.search(r"a\.toml -> .*b\.toml -> .*a\.toml: .*circle", complaint("a.toml"))
    (folder / "parent.toml").write_text(PARENT.replace("temperature", "temprature"))
    assert complaint("child.toml").startswith("parent.toml line 6: unknown key rollout.temprature")


def test_an_override_reaches_the_base_and_every_stage_or_one_stage_and_later_ones_win(folder: Path) -> None:
    recipe = load_recipe("parent.toml", ["rollout.max_turns=5", "run.seed=3"])
    assert recipe.rollout.max_turns == stage(recipe, "stage1").rollout.max_turns == 5 and recipe.run.seed == 3
    of_a_stage = ["rollout.max_turns=5", "stage.stage1.rollout.max_turns=7", "stage.stage1.steps=1"]
    recipe = load_recipe("parent.toml", of_a_stage)
    assert (stage(recipe, "stage1").rollout.max_turns, stage(recipe, "stage1").steps) == (7, 1)
    assert recipe.rollout.max_turns == 5


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ('data.train_files=["a.jsonl", "b.csv"]', "data", "train_files", ["a.jsonl", "b.csv"]),
        ("data.train_files=a.jsonl", "data", "train_files", ["a.jsonl"]),
        ("data.columns.question=Body", "data", "columns", {"question": ["Body"], "answer": "answer"}),
        ("run.name=2024", "run", "name", "2024"),
        ("run.name=a b = c", "run", "name", "a b = c"),
        ("rollout.preamble= Solve: ", "rollout", "preamble", "Solve: "),
        ("run.save_rollouts=false", "run", "save_rollouts", False),
        ("data.max_problems=none", "data", "max_problems", None),
    ],
)
def test_override_values_are_toml_else_text(folder: Path, override: str, section: str, key: str, value: object) -> None:
    assert load_recipe("parent.toml", ["data.source=files", override]).model_dump()[section][key] == value


def test_the_resolved_recipe_survives_json(folder: Path) -> None:
    recipe = load_recipe("child.toml", ["data.max_problems=none"])
    (folder / "resolved.json").write_text(json.dumps(recipe.resolved()))
    assert resolved_from_json("resolved.json") == recipe


def test_a_run_begun_before_stale_tokens_were_weighed_goes_on_without(folder: Path) -> None:
    values = load_recipe("child.toml", ["rollout.max_staleness_steps=1"]).resolved()
    begun = [one for one in values["stage"] if one.get("rollout")]
    assert begun and all(one["learning"]["importance_cap"] == 2 for one in begun)
    for one in begun:
        one["learning"]["importance_cap"] = None
    (folder / "resolved.json").write_text(json.dumps(values))
    later = resolved_from_json("resolved.json")
    assert {each.learning.importance_cap for each in later.rl_stages} == {0.0}


def test_a_run_that_never_used_a_setting_that_is_gone_goes_on(folder: Path) -> None:
    values = load_recipe("child.toml").resolved()
    here = [values, *(one for one in values["stage"] if one.get("rollout"))]
    for part, (section, key, unused) in itertools.product(here, GONE):
        part[section][key] = unused
    (folder / "resolved.json").write_text(json.dumps(values))
    assert resolved_from_json("resolved.json") == load_recipe("child.toml")
    here[-1]["rollout"]["carry_over"] = 0.1
    (folder / "resolved.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"rollout\.carry_over: .* go on with the one that run\.json names"):
        resolved_from_json("resolved.json")


def test_paths_are_those_of_the_folder_a_run_starts_in_wherever_it_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rows.jsonl", "more.jsonl", "talks.jsonl"):
        (tmp_path / name).write_text("")
    (tmp_path / "some" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    asked = [
        "data.source=files",
        "data.train_files=rows.jsonl",
        'data.test_files=["more.jsonl", "hf:openai/gsm8k@test"]',
    ]
    (tmp_path / "own.toml").write_text(
        '[model]\npath = "some/model"\n[[stage]]\nname = "cold"\nkind = "sft"\nsteps = 1\n'
        '[stage.sft]\nrows_file = "talks.jsonl"\n[[stage]]\nname = "rl"\nkind = "rl"\nsteps = 1\n'
    )
    recipe = load_recipe("own.toml", asked)
    resolved = RunFolder.create(recipe, tmp_path / "runs", [], recipe_text="").resolved
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    later = resolved_from_json(resolved)
    assert recipe.data.train_files == ["rows.jsonl"]  # what complaints show
    assert later.data.train_files == stage(later, "rl").data.train_files == [str(tmp_path / "rows.jsonl")]
    assert later.data.test_files == [str(tmp_path / "more.jsonl"), "hf:openai/gsm8k@test"]
    assert stage(later, "cold").sft.rows_file == str(tmp_path / "talks.jsonl")
    assert later.model.path == str(tmp_path / "some" / "model")
    hub = load_recipe(tmp_path / "own.toml", ["model.path=Qwen/Qwen3-8B"])
    assert hub.resolved()["model"]["path"] == "Qwen/Qwen3-8B"


def test_a_resolved_recipe_that_does_not_fit_is_refused(folder: Path) -> None:
    (folder / "resolved.json").write_text('{"run": {"sed": 1}}')
    with pytest.raises(ConfigError, match=r"resolved\.json does not fit .*run\.sed"):
        resolved_from_json("resolved.json")
    (folder / "resolved.json").write_text('{"run": {"se')
    with pytest.raises(ConfigError, match=r"resolved\.json holds no settings \(Invalid JSON.*\); put it back"):
        resolved_from_json("resolved.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        resolved_from_json("absent.json")


def test_the_copied_text_says_where_it_came_from(folder: Path) -> None:
    text = recipe_text("child.toml", ["run.seed=3"])
    assert text.startswith("# copy of child.toml") and "# override: 'run.seed=3'" in text and CHILD in text


@pytest.mark.parametrize(
    ("body", "line", "parts"),
    [
        ("[rollout]\n\nmax_turn = 2\n", 3, ["unknown key rollout.max_turn", "rollout.max_turns"]),
        ("[rollout]\nkeep = 2\n", 2, ["unknown key rollout.keep", "resample.keep"]),
        ("[rollout]\ncarry_overs = 2\n", 2, ["unknown key rollout.carry_overs"]),
        ("[learning]\ncovariance_low = 2\n", 2, ["learning.covariance_low was removed; learning.top_entropy"]),
        ("[rollouts]\nmax_turns = 2\n", 1, ["unknown key rollouts", "rollout"]),
        ("[learning]\nzzz = 2\n", 2, ["unknown key learning.zzz", "the keys there are loss, advantage, optimizer"]),
        ("[rollout]\nmax_turns = 'two'\n", 2, ["rollout.max_turns = 'two'", "integer"]),
        ("[rollout]\nmax_turns = 0\n", 2, ["rollout.max_turns = 0", "greater than or equal to 1"]),
        ("[resample]\nmethod = 'rok'\n", 2, ["resample.method = 'rok'", "did you mean 'roc'"]),
        ("rollout.max_turns = true\n", 1, ["rollout.max_turns = True", "integer"]),
        ("[data]\ncolumns = { qestion = 'Body' }\n", 2, ["data.columns.qestion", "data.columns.question"]),
        ("a = 1\nb = = 2\n", 2, ["not valid TOML"]),
        (f"a = {'1' * 5000}", 0, ["too long to be read (Exceeds the limit"]),
        (f"a = {'[' * 50_000}", 0, ["nested too deep"]),
        ("[[stage]]\nname = 's'\nkind = 'sft'\nstepz = 3\n", 4, ["unknown key stage.s.stepz", "steps"]),
        ("[[stage]]\nname = 's'\nkind = 'sft'\n", 1, ["stage.s: steps is missing; give steps or epochs"]),
        ("[[stage]]\nname='a'\nkind='sft'\nsteps=1\n[[stage]]\nname='b'\nkind='rl'\nsteps=1\n[stage.rollout]\nmax_turns=0\n",
         10, ["stage.b.rollout.max_turns = 0"]),
        ("[resample]\nkeep = 4\n[[stage]]\nname='b'\nkind='rl'\nsteps=1\n[stage.rollout]\nattempts_per_problem=2\n",
         2, ["stage.b: ", "resample.keep 4 needs"]),
        ("[[stage]]\nname='w'\nkind='sft'\nsteps=1\n[stage.model]\ndevice='cpu'\n", 5,
         ["unknown key stage.w.model; model holds for the whole run; set it in [model]"]),
        ("[model]\nlora_alpha=8\n", 2, ["model.lora_alpha is not read where model.lora_rank is 0"]),
        ("[learning]\nloss='sapo'\nclip_low=0.1\n", 3, ["learning.clip_low is not read where learning.loss is 'sapo'"]),
        ("[run]\nsave_rollouts=false\n[data]\ndrop_solved_attempts=2\ndrop_solved_age=3\n[[stage]]\nname='w'\nkind='rl'\n"
         "steps=1\n", 5, ["data.drop_solved_age 3 counts recorded attempts and run.save_rollouts is false"]),
        ("[end]\nwindow=5\n", 2, ["end.window is not read where end.reward_gain is None"]),
        ("[evaluate]\nproblems=0\nattempts=2\n", 3, ["evaluate.attempts is not read where evaluate.problems is 0"]),
        ("[evaluate]\nproblems=0\ngreedy=false\n", 3, ["evaluate.greedy is not read where evaluate.problems is 0"]),
        ("[[stage]]\nname='w'\nkind='rl'\nsteps=1\n[sft]\nbatch_rows=4\n", 6,
         ["sft.batch_rows is not read where no stage has the kind 'sft'"]),
        ("[[stage]]\nname='w'\nkind='sft'\nsteps=1\n[learning]\nbeta1=0.8\n", 6,
         ["learning.beta1 is not read where no stage has the kind 'rl'"]),
        ("[data]\nsource='files'\ntrain_files=['x']\n[evaluate]\nproblems=4\n", 5,
         ["evaluate.problems is not read where data.test_files is empty"]),
        ("[rollout]\nagents_at_once=2\n", 2, ["rollout.agents_at_once is not read where rollout.agent is None"]),
        ("[[stage]]\nname='w'\nkind='rl'\nsteps=1\n[stage.rollout]\ntemplate='paper'\n", 6,
         ["stage.w.rollout.template; rollout.template holds for the whole run; set it in [rollout]"]),
        ("[[stage]]\nname='w'\nkind='sft'\nsteps=1\n[stage.rollout]\nmax_turns=2\n", 5,
         ["unknown key stage.w.rollout; rollout belongs to a stage of another kind ('rl')"]),
        ("[[engine]]\nname='e'\nkind='torhc'\n", 1, ["engine.e.kind is unknown; set it to one of 'torch', 'vllm'"]),
        ("[[engine]]\nname='e'\nkind='vllm'\nurl='http://a'\ncount=2\n", 1, ["url names one server that runs already"]),
        ("[[engine]]\nname='e'\nkind='torch'\ncount=0\n", 4, ["engine.e.count = 0", "greater than or equal to 1"]),
        ("[[engine]]\nname='e'\nkind='torch'\nconut=2\n", 4, ["unknown key engine.e.conut", "did you mean count?"]),
        ("[[stage]]\nname='a'\nkind='sftt'\nsteps=1\n", 1, ["stage.a.kind is unknown; set it to one of 'sft', 'rl'"]),
        ("[[stage]]\nname = 'a'\nsteps = 1\n", 1, ["stage.a.kind is missing; set it to one of 'sft', 'rl'"]),
        ("extends = 3\n", 1, ["extends takes one file name"]),
        ("[stage]\nname = 'a'\n", 0, ["[[stage]]"]),
        ("[[stage]]\nkind = 'sft'\n", 0, ["number 1 has no name"]),
        ("[[stage]]\nname = 'a'\n[[stage]]\nname = 'a'\n", 0, ["number 2 is called 'a' like another"]),
        ("[[engine]]\nkind = 'torch'\n", 0, ["[[engine]] number 1 has no name"]),
        ("\nextends = 'parnt.toml'\n", 2, ["parnt.toml", "did you mean parent.toml"]),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_names_file_line_and_key(folder: Path, body: str, line: int, parts: list[str]) -> None:
    """line 0: of tables that TOML tells no line of."""
    (folder / "bad.toml").write_text(body)
    message, place = complaint("bad.toml"), f"bad.toml line {line}" if line else "bad.toml:"
    assert message.startswith((f"{place}: ", f"{place} "))
    assert all(part in message for part in parts), message


RL = "[[stage]]\nname='w'\nkind='rl'\nsteps=1\n"
SENT = "[cluster]\nweights='sent'\n"
LORA = "[[stage]]\nname='w'\nkind='sft'\nsteps=1\nsft.optimizer='muon'\n[model]\nlora_rank=8\n"
VLLM = "[[engine]]\nname='v'\nkind='vllm'\n"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (f"{SENT}{RL}", "cluster.weights 'sent' is for vLLM servers that the run starts"),
        (f"{SENT}{VLLM}url='http://127.0.0.1:1'\n{RL}", "without a url"),
        (f"{SENT}{VLLM}[[engine]]\nname='t'\nkind='torch'\n{RL}", "have only .* of kind 'vllm'"),
        (f"{SENT}[model]\npath='x'\nlora_rank=8\n{VLLM}{RL}", "adapters are a small file"),
        (LORA, "model.lora_rank 8 trains adapters .* set model.path"),
        (f"{LORA}path='x'\n", "muon' of stage w .* set it to 'adamw'"),
        (f"{VLLM}[rollout]\ntop_p=0.9\n", "top_p must be 1 and top_k 0 for engines of kind 'vllm'"),
        (f"{RL}[resample]\ndrop_void_turns=true\n[rollout]\nmax_turns=1\n",
         "drop_void_turns looks for turns without a call, and rollout.max_turns 1 leaves no turn"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_held_together_are_refused(folder: Path, body: str, told: str) -> None:
    (folder / "bad.toml").write_text(body)
    assert re.search(told, complaint("bad.toml"))


def test_engines_are_entries_with_names_and_each_process_has_one_of_its_own(folder: Path) -> None:
    (folder / "more.toml").write_text(
        "extends = 'parent.toml'\n[[engine]]\nname = 'e'\nkind = 'torch'\n[[engine]]\nname='f'\nkind='torch'\n"
    )
    assert load_recipe(folder / "parent.toml").engine == []
    found = load_recipe(folder / "more.toml", ["engine.e.count=2"]).engine
    assert [entry.names for entry in found] == [["e-0", "e-1"], ["f-0"]]
    resumed = changed(load_recipe(folder / "more.toml"), ["engine.f.count=3"], {})
    assert [entry.count for entry in resumed.engine] == [1, 3]
    (folder / "none.toml").write_text("extends = 'more.toml'\nengine = []\n")
    assert load_recipe(folder / "none.toml").engine == []  # it changed nothing, in silence


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("rollout.max_turn=2", "did you mean rollout.max_turns?"),
        ("rolout.max_turns=2", "did you mean rollout?"),
        ("max_turns=2", "did you mean rollout.max_turns?"),
        ("trainer.total_epochs=2", "unknown key trainer; the keys there are run, model,"),  # not data.train_files
        ("actor_rollout_ref.rollout.n=8", "engine, stage; docs/moving.md says what those of TRL and verl are called"),
        ("stage1.steps=2", "did you mean stage.stage1.KEY?"),
        ("rollout.max_turns=many", "rollout.max_turns = 'many' should be a valid integer"),
        ("run.threads=many", "run.threads = 'many' should be a valid integer or 'auto'"),
        ("rollout.max_turns.x=1", "rollout.max_turns = {'x': 1} should be a valid integer"),
        ("rollout.max_turns", "not of the form section.key=value"),
        (".max_turns=2", "not of the form section.key=value"),
        ("stage.stage1=2", "stage.NAME.key=value"),
        ("stage.stag1.steps=2", "did you mean stage1?"),
        ("stage.stage1.step=2", "unknown key stage.stage1.step; did you mean steps?"),
        ("rollout.attempts_per_problem=8", "raise rollout.attempts_per_problem"),
        ("extends=x.toml", "unknown key extends"),
    ],
)
def test_a_mistake_in_an_override_names_the_override(folder: Path, override: str, part: str) -> None:
    message = complaint("parent.toml", "run.seed=1", override)
    assert message.startswith(f"override {override!r}") and part in message, message


@pytest.mark.parametrize(
    "key",
    ["model.path=x", "sandbox.slots=1", "sandbox.min_isolation=L1", "evaluate.problems=3", "rollout.engine_rows=2",
     "rollout.kv_tokens=64", "rollout.template=paper", "data.test_files=a.jsonl", "run.seed=1", "cluster.learners=2"],
)  # fmt: skip
def test_a_stage_refuses_what_holds_for_the_whole_run(folder: Path, key: str) -> None:
    """At d725079 such keys were accepted in a stage and read nowhere."""
    name = key.partition("=")[0]
    told = complaint("parent.toml", f"stage.stage1.{key}")
    assert re.search(rf"unknown key stage\.stage1\.[a-z_.]+; {name.partition('.')[0]}", told), told
    assert f"set it in [{name.partition('.')[0]}]" in told


def sections(model: type[Section]) -> dict[str, type[Section]]:
    return {name: f.annotation for name, f in model.model_fields.items() if isinstance(f.annotation, type)}


@pytest.mark.parametrize("kind", STAGES)
def test_what_a_stage_may_change_is_a_part_of_the_base(kind: str) -> None:
    base = sections(Recipe)
    for name, section in sections(STAGES[kind]).items():
        if name in base:
            assert section.model_fields.keys() <= base[name].model_fields.keys()


@pytest.mark.parametrize(
    "override",
    ["learning.learning_rate=-1e-6", "learning.learning_rate=nan", "learning.clip_low=-0.2", "sft.max_grad_norm=0",
     "rollout.temperature=-1", "rollout.temperature=inf", "rollout.temperature=1e-3",
     "evaluate.temperature=1e-9", "learning.beta2=1.0", "evaluate.temperature=-0.1", "model.rope_theta=1e-308",
     # No array holds these, or nobody waits for them.
     "rollout.top_k=9223372036854775808", "learning.epochs=10000000000000000000", "learning.clip_high=1e300",
     "data.pool=1000000000", "evaluate.problems=1000000000", "sft.batch_rows=10000000",
     "stage.sft.steps=9223372036854775808"],
)  # fmt: skip
def test_numbers_that_cannot_be_meant_are_refused(folder: Path, override: str) -> None:
    assert complaint("parent.toml", override).startswith(f"override {override!r}: ")


def test_stale_tokens_are_weighed_unless_the_recipe_says_otherwise(folder: Path) -> None:
    """At 4ca74a3 they got no correction: with one update a step the loss's own ratio is 1."""
    for settings, cap in (([], None), ([""], 2), (["=0"], 0), (["=3"], 3)):
        ahead = ["rollout.max_staleness_steps=1"] * bool(settings)
        recipe = load_recipe("parent.toml", ahead + [f"learning.importance_cap{value}" for value in settings if value])
        assert stage(recipe, "stage1").learning.importance_cap == cap
        assert Recipe.model_validate(recipe.resolved()) == recipe
    assert "learning.importance_cap 0.5 would cap tokens" in complaint("parent.toml", "learning.importance_cap=0.5")


def test_a_pretrained_model_starts_from_the_papers_values(tmp_path: Path) -> None:
    """At d725079: 4e-4 without warm-up, Muon at 0.02, 256 characters of feedback, a checkpoint a minute, 512 rows."""
    (tmp_path / "mine.toml").write_text("[model]\npath = 'x'\n[[stage]]\nname = 'a'\nkind = 'rl'\nsteps = 1\n")
    recipe = load_recipe(tmp_path / "mine.toml")
    (only,) = recipe.stage
    assert isinstance(only, RlStage)
    assert (only.learning.learning_rate, only.learning.warmup_steps, only.learning.updates_per_step) == (1e-6, 20, 1)
    assert (only.rollout.max_response_tokens, only.rollout.max_turns, only.rollout.attempts_per_problem) == (
        8192,
        10,
        32,
    )
    assert (recipe.sft.optimizer, recipe.sft.adamw_learning_rate, recipe.sft.decay) == ("adamw", 5e-6, "cosine")
    assert (recipe.rollout.template, recipe.rollout.feedback_max_chars) == ("paper", 4096)
    assert recipe.run.checkpoint_seconds >= 600 and recipe.rollout.engine_rows <= 64


@pytest.mark.parametrize(
    "path", sorted(file for place in ("recipes", "examples") for file in (ROOT / place).rglob("*.toml")), ids=str
)
def test_no_recipe_of_ours_says_what_is_not_read(path: Path) -> None:
    if "data" not in path.parts[len(ROOT.parts) :]:  # those are of other kinds
        assert load_recipe(path).stage or path.name == "base.toml"  # which others extend


def test_what_a_parent_says_may_lose_its_use(folder: Path) -> None:
    (folder / "parent.toml").write_text(PARENT + "[model]\nnum_layers = 2\n")
    assert load_recipe("child.toml", ["model.path=x", "data.source=files"]).model.num_layers == 2
    told = complaint("child.toml", "model={path='x', num_layers=3}")
    assert "model.num_layers is not read where model.path is 'x'" in told


def test_a_key_that_one_stage_reads_is_read(folder: Path) -> None:
    assert load_recipe("parent.toml", ["data.max_problems=3", "stage.stage1.data.source=files"])
    assert "data.max_problems is not read" in complaint("parent.toml", "data.max_problems=3")
    assert load_recipe("parent.toml", ["learning.gate_right=2", "stage.stage1.learning.loss=sapo"])
    assert load_recipe("parent.toml", ["learning.gate_right=2", "learning.loss=own:loss"])


def test_a_stage_named_as_a_section_does_not_hide_its_keys(folder: Path) -> None:
    (folder / "own.toml").write_text("[[stage]]\nname = 'sft'\nkind = 'sft'\nsteps = 1\n")
    assert "did you mean sft.muon_learning_rate or sft.adamw_learning_rate?" in complaint(
        "own.toml", "sft.learning_rate=1e-3"
    )
    assert "did you mean sft.batch_rows?" in complaint("own.toml", "sft.batch_row=1")


def test_a_missing_recipe_names_the_nearest_one(folder: Path) -> None:
    assert complaint("parnt") == "there is no recipe parnt; did you mean parent.toml?"
    for typed in ("first", "recipes/first.toml"):  # one of ours, and not here
        assert complaint(typed) == f"there is no recipe {typed}; rocstar recipes copy first writes recipes/first.toml"
    (folder / "recipes").mkdir()
    (folder / "recipes" / "quickstart.toml").write_text("")
    assert "did you mean recipes/quickstart.toml?" in complaint("quickstart.tml")
    assert "give the path of a TOML recipe" in complaint("zzzzzz/qqqqq.toml")
    (folder / "theirs").mkdir()
    (folder / "theirs" / "base.toml").write_text("")  # where `recipes copy theirs/base` puts it
    assert "did you mean theirs/base.toml?" in complaint("base.toml")
    assert "cannot be read" in complaint(folder)
    (folder / "latin.toml").write_bytes(b"# caf\xe9\n")
    assert "not UTF-8" in complaint("latin.toml")


@pytest.mark.parametrize("key", ["slots=3", "preload=numpy"])
def test_what_a_sandbox_elsewhere_settles_itself_is_refused(folder: Path, key: str) -> None:
    urls = 'sandbox.urls=["http://a:8700", "http://b:8700"]'
    assert load_recipe("parent.toml", [urls]).sandbox.urls == ["http://a:8700", "http://b:8700"]
    told = complaint("parent.toml", urls, f"sandbox.{key}")
    assert f"sandbox.{key.partition('=')[0]} is not read where sandbox.urls is" in told


@pytest.mark.parametrize("url", ["a:8700", "https://a", "http://", "http://a/v1/run", "http://user@a"])
def test_what_is_no_address_of_a_sandbox_is_refused(folder: Path, url: str) -> None:
    assert f"'{url}' is no address of a sandbox" in complaint("parent.toml", f"sandbox.urls={url}")


def test_every_default_can_be_written_in_a_recipe() -> None:
    """Else a setting could be read on its page and set nowhere."""
    for name, kind in Recipe.model_fields.items():
        defaults = Recipe().model_dump(mode="json")[name]
        for field, value in defaults.items() if isinstance(defaults, dict) else ():
            assert isinstance(kind.annotation, type) and issubclass(kind.annotation, Section)
            if value is not None:
                kind.annotation.model_validate({field: value}, strict=True)


def test_limits_of_programs_are_those_that_a_sandbox_takes() -> None:
    """Else a run starts whose every call is refused."""
    fields = {"timeout_seconds": "wall_seconds"} | {name: name for name in BOUNDS if name != "wall_seconds"}
    for field, limit in fields.items():
        for beyond in (0, int(BOUNDS[limit][1]) * 2):
            with pytest.raises(ConfigError, match=f"sandbox.{field}"):
                changed(Recipe(), [f"sandbox.{field}={beyond}"], {})


@pytest.mark.parametrize("key", ["run.name", "run.folder", "data.source"])
def test_a_text_that_settings_cannot_keep_is_refused(folder: Path, key: str) -> None:
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_recipe(folder / "child.toml", [f"{key}=a\udcff"])
    with pytest.raises(ConfigError, match="holds a NUL character"):
        load_recipe(folder / "child.toml", [rf'{key}="a\u0000"'])
