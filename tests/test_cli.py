"""The command line as a new user meets it: quick help, one sentence per mistake, the right exit code."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from rocstar import cluster
from rocstar.cli import main as cli
from rocstar.errors import ConfigError, ContractBroken, EngineUnavailable, RunHalted
from rocstar.record.atomic import write_json
from rocstar.record.folder import RunFolder
from rocstar.sandbox.call import DaemonInfo, Isolation
from rocstar.support import exits
from tests.commands import json_and_words, json_of
from tests.files import jsonl
from tests.sandbox.scripted import ScriptedDaemon

RECIPE = """\
[run]
name = "tiny"

[data]
pool = 40

[rollout]
max_response_tokens = 64

[evaluate]
problems = 8

[sft]
batch_rows = 8
warmup_steps = 0

[[stage]]
name = "cold"
kind = "sft"
steps = 2

[[stage]]
name = "stage1"
kind = "rl"
steps = 3
"""

CarryOut = Callable[..., None]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sandbox of this machine's is taken as tried: it is started before each run, and takes half of the CPU here."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    tried = cluster.started_sandbox
    monkeypatch.setattr(cluster, "started_sandbox", lambda section: tried(section) if section.urls else nullcontext())
    return tmp_path


def install(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Any) -> None:
    """Put a stand-in for a module that loads torch or starts processes."""
    stand_in = ModuleType(module)
    vars(stand_in).update(functions)
    monkeypatch.setitem(sys.modules, module, stand_in)


def train_with(monkeypatch: pytest.MonkeyPatch, carry_out: CarryOut) -> None:
    monkeypatch.setattr(exits, "find_spec", lambda module: module)  # as where everything is installed
    monkeypatch.setattr(cli, "launch", carry_out)


def finish(recipe: Any, folder: RunFolder, screen: Any, *, resume: bool) -> None:
    """A run that is over at once."""
    screen.step("stage1", 3, 3, {"reward/mean": 0.5})
    figure = {"value": 0.98, "interval": [0.96, 0.99], "n": 400}
    write_json(folder.summary, {"accuracy_after": figure, "cpu_seconds": {"sft": 1.5}})


def child(*arguments: str, python: str = "") -> subprocess.CompletedProcess[str]:
    code = python or "from rocstar.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def loaded(verbs: Sequence[Sequence[str]], modules: set[str]) -> tuple[list[str], str]:
    """What one process for all these verbs writes to stdout, with a line after each of which of the modules are loaded,
    and to stderr."""
    each = f"main.run(verb); print('loaded', *{modules} & set(sys.modules))"
    done = child(python=f"import sys; from rocstar.cli import main\nfor verb in {list(map(list, verbs))}: {each}\n")
    return done.stdout.splitlines(), done.stderr


def test_help_loads_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "rich", "transformers", "pyarrow", "sympy", "asyncio"}
    out, told = loaded([["--help"], ["--version"], ["train", "--help"]], heavy | {"pydantic"})
    *found, last = (line for line in out if line.startswith("loaded"))
    assert (told, found) == ("", ["loaded", "loaded"]) and any("rocstar" in line for line in out)
    assert last in ("loaded", "loaded pydantic")  # recent versions of typer read a verb's arguments with it


def test_what_cannot_be_asked_is_told_before_torch_is_loaded() -> None:
    Path("odd.jsonl").write_text('{"height": 1, "width": 2}\n')
    at = ["eval", "some", "--endpoint", "http://127.0.0.1:9/v1"]
    missing = [["eval", "nosuch", "--data", "t.jsonl"], ["chat", "nosuch"], ["serve", "nosuch"]]
    data = [["--data", "odd.jsonl"], ["--data", "absent.jsonl"], ["--benchmark", "aime24", "--data-folder", "absent"]]
    out, told = loaded([*missing, *([*at, *given] for given in data)], {"torch", "transformers"})
    assert out == ["loaded"] * 6
    sentences = ["height, width do not fit any known layout", "absent.jsonl does not exist", "absent is not a folder"]
    expected = [*["rocstar: there is no run nosuch"] * 3, *sentences]
    assert all(said in line for said, line in zip(expected, told.splitlines(), strict=True)), told


def test_training_prints_the_table_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_with(monkeypatch, finish)
    assert cli.run(["train", "tiny.toml", "rollout.max_turns=2"]) == exits.OK
    told = capsys.readouterr()
    assert "98.0% (96.0 to 99.0)" in told.out
    assert "stage1 step 3/3  reward .500" in told.err
    assert "reward" not in told.out
    resolved = json.loads(Path("runs/tiny/config.resolved.json").read_text())
    assert resolved["stage"][1]["rollout"]["max_turns"] == 2
    assert "# override: 'rollout.max_turns=2'" in Path("runs/tiny/config.toml").read_text()


def test_json_is_one_object_on_stdout_and_runs_are_listed_where_they_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_with(monkeypatch, finish)
    trained = json_of(capsys, "train", "tiny.toml")
    assert json_of(capsys, "runs", "show", "last") == trained
    assert trained["summary"]["accuracy_after"]["interval"] == [0.96, 0.99]
    assert json_of(capsys, "runs", "list") == {"runs": [trained], "may_not_be_read": []}
    assert cli.run(["train", "tiny.toml"]) == exits.OK
    assert cli.run(["runs", "list"]) == exits.OK
    listed = capsys.readouterr().out
    assert "tiny-2" in listed and "98.0%" in listed
    for verb, place in (("train", "elsewhere"), ("sft", "there")):
        assert cli.run([verb, "tiny.toml", "--runs", place]) == exits.OK
        assert Path(place, "tiny", "run.json").is_file()
    capsys.readouterr()
    assert cli.run(["runs", "list", "--runs", "nowhere"]) == exits.OK
    told = capsys.readouterr()
    assert told.out == "" and told.err.strip() == "there are no runs in nowhere"


def test_sft_carries_out_only_the_cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    carried_out: list[str] = []
    train_with(monkeypatch, lambda material, *_, **__: carried_out.extend(s.name for s in material.recipe.stage))
    assert cli.run(["sft", "tiny.toml"]) == exits.OK
    assert carried_out == ["cold"]


def test_a_dry_run_prints_what_differs_and_makes_no_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocstar.support.screen.Screen.never_silent", never_silent := Mock(wraps=nullcontext))
    assert cli.run(["train", "tiny.toml", "run.seed=4", "run.name=模型", "--dry-run"]) == exits.OK
    assert re.search(r"prompts for \d+ s$", never_silent.call_args.args[0]())
    lines = capsys.readouterr().out.splitlines()
    assert any(each.startswith('run.name = "模型"  (') for each in lines)
    assert "run.seed = 4  (default 0; command line: run.seed=4)" in lines
    line = 1 + Path("tiny.toml").read_text().splitlines().index("max_response_tokens = 64")
    told = rf"rollout\.max_response_tokens = 64  \(default \d+; tiny\.toml:{line}\)"
    assert any(re.fullmatch(told, each) for each in lines)
    assert not any(told.startswith("run.save_rollouts") or ".epochs = 0" in told for told in lines)  # their defaults
    assert not Path("runs").exists()
    for taken, free in (("tiny", "tiny-2"), ("tiny-2", "tiny-3")):
        Path("runs", taken).mkdir(parents=True)
        assert cli.run(["train", "tiny.toml", "--dry-run"]) == exits.OK
        assert f"; run folder: runs/{free}\n" in capsys.readouterr().err


def test_code_that_a_recipe_names_loads_torch_in_the_environment_of_a_run(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL asks once in what order it sums, so a run whose loss had loaded torch before differed from its replay."""
    monkeypatch.delenv("MKL_CBWR")
    reward = 'import os\nassert "MKL_CBWR" in os.environ\ndef right(completions, answer, **columns): return [1.0]\n'
    (workplace / "own.py").write_text(reward)
    assert cli.run(["train", "tiny.toml", "evaluate.verifier=own.py:right", "--dry-run"]) == exits.OK


def test_a_dry_run_shows_the_first_prompt_as_the_model_will_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["train", "tiny.toml", "rollout.template=paper", "--dry-run"]) == exits.OK
    _, _, prompt = capsys.readouterr().err.partition("the first prompt, as the model will read it:\n")
    assert prompt.startswith("<|im_start|>system\nThe User brings") and '"name": "python"' in prompt
    shown = json_of(capsys, "train", "tiny.toml", "rollout.template=paper", "--dry-run")["first_prompt"]
    assert shown.endswith("<|im_start|>assistant\n<reason>") and prompt.startswith(shown)
    assert json_of(capsys, "sft", "tiny.toml", "evaluate.problems=0", "--dry-run")["first_prompt"] is None


SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def test_a_prompt_of_messages_is_what_the_model_will_read(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk = [*SAID, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2?"}]
    jsonl(workplace / "a.jsonl", {"prompt": talk, "answer": "4"})
    changes = ["data.source=files", "data.train_files=a.jsonl", "data.test_files=a.jsonl", "rollout.template=compact"]
    jsonl(workplace / "b.jsonl", {"messages": [*SAID, {"role": "assistant", "content": "2"}]})
    told = ["train", "tiny.toml", *changes, "evaluate.problems=0", "sft.rows_file=b.jsonl", "--dry-run", "--json"]
    assert cli.run(told) == exits.OK
    assert json.loads(capsys.readouterr().out)["first_prompt"] == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n"
        "<|im_start|>assistant\n2<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_rows_without_a_reference_need_a_reward_function(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jsonl(workplace / "a.jsonl", {"prompt": SAID})
    (workplace / "without_reference.py").write_text("def right(completions): return [1.0]\n")
    jsonl(workplace / "b.jsonl", {"messages": [*SAID, {"role": "assistant", "content": "2"}]})
    files = ["data.source=files", "data.train_files=a.jsonl", "data.columns.answer=", "evaluate.problems=0"]
    told = ["train", "tiny.toml", *files, "sft.rows_file=b.jsonl", "rollout.template=compact", "--dry-run"]
    assert cli.run(told) == exits.USAGE
    assert "data.columns.answer names no column" in capsys.readouterr().err
    assert cli.run([*told, "evaluate.verifier=without_reference.py:right"]) == exits.OK


def test_a_dry_run_says_that_a_step_takes_all_problems_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    there = 40
    assert cli.run(["train", "tiny.toml", f"rollout.problems_per_step={there}", "--dry-run"]) == exits.OK
    assert "so each step takes all" not in capsys.readouterr().err
    given = [f"rollout.problems_per_step={there}", "rollout.refill=1", "--dry-run"]
    assert cli.run(["train", "tiny.toml", *given]) == exits.OK
    assert f"takes all {there} and makes {there * 32} attempts, and rollout.refill finds no further ones\n" in (
        capsys.readouterr().err
    )
    given = [f"rollout.problems_per_step={there + 1}", "rollout.attempts_per_problem=8", "resample.keep=4"]
    assert cli.run(["train", "tiny.toml", *given, "--dry-run", "--json"]) == exits.OK
    told = capsys.readouterr().err
    assert f"stage stage1 has {there} problems and rollout.problems_per_step is {there + 1}" in told
    assert f"so each step takes all {there} and makes {there * 8} attempts" in told


def test_a_plan_counts_the_problems_that_are_there_or_what_the_recipe_says_where_none_are_yet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    absent = ("data.source='files'", "data.train_files=['train.jsonl']", "evaluate.problems=0")
    all_of_40, more = (planned(f"rollout.problems_per_step={asked}", capsys=capsys) for asked in (40, 2000))
    assert all_of_40[0] == more[0] and "each step takes all 40" in more[1]
    few, many = (planned(f"rollout.problems_per_step={asked}", *absent, capsys=capsys) for asked in (40, 80))
    assert "train.jsonl does not exist" in many[1]
    assert many[0]["stages"][1]["tokens"] > 1.5 * few[0]["stages"][1]["tokens"]


def planned(*settings: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """The plan, and what was said beside it."""
    few = ("rollout.attempts_per_problem=2", "resample.keep=2", *settings)
    return json_and_words(capsys, "plan", "tiny.toml", *few)


def test_a_dry_run_tells_each_source(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCSTAR_SANDBOX_TOKEN", "hush")
    Path("child.toml").write_text('extends = "tiny.toml"\n[run]\nname = "child"\nkeep_checkpoints = 7\n')
    given = ["rollout.top_p=0.5", "rollout.max_turns=3", "stage.stage1.rollout.max_turns=2", "sandbox.preload=[]"]
    assert cli.run(["train", "child.toml", *given, "--dry-run", "--json"]) == exits.OK
    told = capsys.readouterr().out
    found = {row["key"]: row for row in json.loads(told)["differs"]}
    assert "hush" not in told
    assert found["run.keep_checkpoints"]["source"] == "child.toml:4"
    assert found["rollout.max_response_tokens"]["source"].startswith("tiny.toml:")
    assert found["run.name"]["value"] == "child" and found["run.name"]["source"] == "child.toml:3"
    assert not any(key.startswith("stage.") and key.endswith(".name") for key in found)
    assert found["rollout.top_p"]["source"] == "command line: rollout.top_p=0.5"
    assert (found["sandbox.preload"]["value"], found["sandbox.preload"]["default"]) == ([], ["numpy", "sympy"])
    assert "stage.stage1.rollout.top_p" not in found  # as the run's
    assert found["stage.stage1.rollout.max_turns"] == {
        "key": "stage.stage1.rollout.max_turns",
        "value": 2,
        "default": 3,
        "source": "command line: stage.stage1.rollout.max_turns=2",
    }
    assert found["run.modules"]["source"] == "derived from the others"
    assert found["ROCSTAR_SANDBOX_TOKEN"]["source"] == "environment variable"


def test_a_finished_run_that_is_resumed_shows_its_result_without_loading_anything_heavy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train_with(monkeypatch, finish)
    assert cli.run(["train", "tiny.toml"]) == exits.OK
    code = "import sys; from rocstar.cli import main; code = main.run(sys.argv[1:])\n"
    code += "print({'torch', 'transformers', 'pyarrow', 'sympy'} & set(sys.modules)); sys.exit(code)"
    done = child("train", "--resume", "tiny", python=code)
    assert done.returncode == exits.OK and "run tiny is finished" in done.stderr
    assert "98.0% (96.0 to 99.0)" in done.stdout and done.stdout.endswith("set()\n")


def test_resume_reads_the_settings_of_the_run_and_takes_no_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[int, str, bool]] = []

    def carry_out(material: Any, folder: RunFolder, screen: Any, *, resume: bool) -> None:
        seen.append((material.recipe.run.seed, folder.name, resume))

    train_with(monkeypatch, carry_out)
    assert cli.run(["train", "tiny.toml", "run.seed=4"]) == exits.OK
    Path("tiny.toml").unlink()
    assert cli.run(["train", "--resume", "last"]) == exits.OK
    assert seen == [(4, "tiny", False), (4, "tiny", True)]
    assert cli.run(["train", "run.seed=5", "--resume", "tiny"]) == exits.USAGE
    assert "takes no 'run.seed=5'" in capsys.readouterr().err


def test_a_resumed_run_may_learn_on_another_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    train_with(monkeypatch, lambda material, *_, **__: seen.append(material.recipe.cluster.learners))
    assert cli.run(["train", "tiny.toml", "cluster.learners=2"]) == exits.OK
    for given in (["cluster.learners=1"], []):  # the run keeps its own settings
        assert cli.run(["train", "--resume", "tiny", *given]) == exits.OK
    assert seen == [2, 1, 2]
    capsys.readouterr()
    found = json_of(capsys, "train", "--resume", "tiny", "cluster.learners=3", "--dry-run")
    assert found["settings"]["cluster"]["learners"] == 3
    assert {row["key"]: row["source"] for row in found["differs"]}["rollout.max_response_tokens"] == "run tiny"
    assert cli.run(["train", "--resume", "tiny", "cluster.learner=1"]) == exits.USAGE
    assert "did you mean cluster.learners?" in capsys.readouterr().err
    assert seen == [2, 1, 2]


def test_ctrl_c_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    train_with(monkeypatch, interrupted)
    assert cli.run(["train", "tiny.toml"]) == exits.INTERRUPTED
    assert capsys.readouterr().err.endswith(
        "rocstar: stopped; no step is saved yet; continue with: rocstar train --resume tiny\n"
    )
    assert cli.run(["train", "tiny.toml", "run.folder=elsewhere"]) == exits.INTERRUPTED
    assert capsys.readouterr().err.endswith("--resume elsewhere/tiny\n")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (RunHalted("12 of 100 attempts failed"), exits.FAILED, "12 of 100 attempts failed"),
        (EngineUnavailable("the engine is gone"), exits.NOT_READY, "the engine is gone"),
        (
            OSError(errno.ENOSPC, "No space left on device", "r.parquet"),
            exits.FAILED,
            "the disk is full (r.parquet); free some space, then continue with: rocstar train --resume tiny",
        ),
        (MemoryError("x cannot be read"), exits.NOT_READY, "x cannot be read; end other programs, or raise the limit"),
        (FileNotFoundError(2, "No usable temporary directory found in x"), exits.NOT_READY, "in x; free some space"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), exits.FAILED, "/x: Permission denied"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), exits.NOT_READY, "torch is not installed"),
        (ModuleNotFoundError("", name="transformers.models"), exits.NOT_READY, "install what is missing with"),
        (ModuleNotFoundError("", name="their_rewards"), exits.NOT_READY, "put its folder on PYTHONPATH"),
        (RuntimeError("can't start new thread"), exits.NOT_READY, "raise the limit of this user (ulimit -u)"),
        (SystemExit("a library's last words"), exits.FAILED, "a library's last words"),
        (SystemExit(0), exits.FAILED, "your code, or a library, called sys.exit(0)"),
    ],
)
def test_a_failure_is_one_sentence_with_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, sentence: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    train_with(monkeypatch, fail)
    assert cli.run(["train", "tiny.toml"]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("rocstar: ") and sentence in last


def test_a_command_that_can_start_no_thread_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("threading.Thread.start", Mock(side_effect=RuntimeError("can't start new thread")))
    monkeypatch.setattr("sys.argv", ["rocstar", "runs", "list"])
    with pytest.raises(SystemExit, match=str(exits.NOT_READY)):
        cli.main()
    assert "raise the limit of this user (ulimit -u)" in capsys.readouterr().err
    assert signal.set_wakeup_fd(-1) == -1, "what signals wrote to is closed, and forgotten"


@pytest.mark.parametrize("verb", ["train", "sft"])
def test_a_run_that_cannot_start_for_want_of_torch_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.setattr(exits, "find_spec", lambda module: None if module == "torch" else module)
    assert cli.run([verb, "tiny.toml"]) == exits.NOT_READY
    told = capsys.readouterr().err
    assert told.startswith("rocstar: torch is not installed; ") and told.count("\n") == 1
    assert not Path("runs").exists()
    assert cli.run([verb, "tiny.toml", "--dry-run"]) == exits.OK


@pytest.mark.parametrize("given", [[], ["--dry-run"]])
def test_a_sandbox_that_isolates_too_little_is_refused_before_there_is_a_folder(
    capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    with ScriptedDaemon(DaemonInfo(isolation=Isolation.L1, slots=2)) as weak:
        code = cli.run(["train", "tiny.toml", f'sandbox.urls=["{weak.address}"]', *given])
    assert code == exits.NOT_READY
    told = f"rocstar: {weak.address} does not serve: it offers isolation L1 and min_isolation asks for L3"
    assert capsys.readouterr().err.splitlines()[-1].startswith(told)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "error",
    [ContractBroken("a bug"), KeyError("x"), RuntimeError("another"), ModuleNotFoundError("", name="rocstar.x")],
)
def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    train_with(monkeypatch, fail)
    with pytest.raises(type(error)):
        cli.run(["train", "tiny.toml"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["runs", "show", "x"], "there is no run x in runs"),
        (["trian"], "rocstar: no such command 'trian'"),
        (["eval"], "rocstar: missing argument 'SUBJECT'; see rocstar eval --help"),
    ],
)
def test_a_mistake_on_the_command_line_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert cli.run(arguments) == exits.USAGE
    assert sentence in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("given", [["train", "tiny.toml", "rollout.max_turns=" + "x" * 100_000], ["x" * 100_000]])
def test_a_sentence_that_repeats_a_long_value_is_cut_in_its_middle(
    capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    assert cli.run(given) == exits.USAGE
    told = capsys.readouterr().err
    assert told.startswith("rocstar: ") and " ... " in told and len(told) < exits.MOST_SENTENCE + 20
    assert told.endswith(("should be a valid integer\n", "see rocstar --help\n"))


def test_traceback_shows_where_an_error_came_from() -> None:
    with pytest.raises(ConfigError, match=r"there is no recipe nope\.toml"):
        cli.run(["train", "nope.toml", "--traceback"])


def test_an_evaluation_is_a_table_or_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}

    def measure(spec: Any, screen: Any) -> list[dict[str, Any]]:
        asked.clear()
        asked.update(vars(spec))
        return [
            {
                "avg@4": {"value": 0.5, "interval": [0.4, 0.6], "n": 30},
                "mean_response_tokens": 23.25,
                "evaluation": "t/t-1",
                "saved": "runs/evals/t/t-1",
            }
        ]

    monkeypatch.setattr(exits, "find_spec", lambda module: module)  # as where everything is installed
    install(monkeypatch, "rocstar.evaluation.command", evaluations=measure)
    Path("last").mkdir()
    Path("last/config.json").write_text("{}")
    Path("t.jsonl").write_text('{"Body": "A story.", "Question": "How many?", "question": "Which?", "answer": "3"}\n')
    asking = ["--question", "Body", "--question", "Question", "--template", "papr", "rollout.top_p=0.5"]
    assert cli.run(["eval", "last", "--data", "t.jsonl", "--n", "4", *asking]) == exits.OK
    table, told = capsys.readouterr()
    assert "rocstar view t/t-1" in told.splitlines()[-1]
    assert "50.0%" in table and "40.0 to 60.0" in table and "mean response tokens" in table
    assert (asked["model"], asked["data"], asked["n"]) == ("last", "t.jsonl", 4)
    assert asked["question"] == ["Body", "Question"]
    assert (asked["template"], asked["settings"]) == ("papr", [asking[-1]])
    assert json_of(capsys, "eval", "last", "--data", "t.jsonl")["avg@4"]["n"] == 30


def test_a_broken_run_keeps_no_other_from_being_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train_with(monkeypatch, finish)
    assert cli.run(["train", "tiny.toml"]) == exits.OK
    Path("runs/torn").mkdir()
    Path("runs/torn/run.json").write_text("{")
    Path("runs/latest").symlink_to("tiny")
    capsys.readouterr()
    listed = {row["name"]: row for row in json_of(capsys, "runs", "list")["runs"]}
    assert list(listed) == ["latest", "tiny", "torn"]
    assert "run.json does not hold a JSON object" in listed["torn"]["broken"]
    Path("runs/twin").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: path.name != "twin")  # which is another user's
    assert cli.run(["runs", "list"]) == exits.OK
    told = capsys.readouterr()
    assert "torn cannot be read" in told.out and told.err == "1 folder may not be read by this user: runs/twin\n"
    assert json_of(capsys, "runs", "list")["may_not_be_read"] == ["runs/twin"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["recipes", "list"]])
def test_a_full_disk_under_stdout_ends_in_one_sentence(arguments: list[str]) -> None:
    command = [sys.executable, "-c", "from rocstar.cli.main import main; main()", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == exits.FAILED
    assert done.stderr == "rocstar: the disk is full (while writing); free some space and try again\n"


def test_a_stream_that_is_closed_takes_nothing_and_no_file_takes_its_place(workplace: Path) -> None:
    program = (
        "import os\nfrom rocstar.cli.main import main\ntry:\n    main()\nfinally:\n"
        "    names = {os.readlink(f'/proc/self/fd/{number}') for number in range(3)}\n"
        "    open('said', 'w').write(f'{names} {os.get_inheritable(1)}')"
    )
    command = ["sh", "-c", '"$0" "$@" <&- >&- 2>&-', sys.executable, "-c", program, "runs", "list"]
    assert subprocess.run(command).returncode == 0
    assert (workplace / "said").read_text() == "{'/dev/null'} True"


@pytest.mark.parametrize("taken", ["full", "gone", "a closed terminal"])
def test_a_message_that_cannot_be_written_ends_no_command(taken: str) -> None:
    reading, writing = os.openpty() if taken == "a closed terminal" else os.pipe()
    os.close(reading)
    program = (
        "import os, sys\nfrom rocstar.support import exits\nexits.tell_without_fail()\n"
        "print('said', file=sys.stderr)\nprint('at the end', file=sys.__stderr__, flush=True)\nprint('done')"
    )
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, stderr=full if taken == "full" else writing, stdout=subprocess.PIPE, text=True)
        assert (done.returncode, done.stdout) == (0, "done\n")
        done = subprocess.run([*command, "result"], stdout=full if taken == "full" else writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert done.returncode == (1 if taken == "full" else 0), "a reader that has gone changes no exit code"
