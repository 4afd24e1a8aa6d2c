"""Whole runs of a tiny recipe through the command line: killed, stopped, without a sandbox, looked at afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import pytest

from rocstar.config.tree import flat
from rocstar.evaluation.subject import find_agent
from rocstar.record.folder import RunFolder, read_json
from rocstar.record.journal import read_journal
from rocstar.record.rollouts import attempt_rows
from tests.tiny_run import (
    AS_PLAIN,
    COLD_STEPS,
    GLANCE,
    RL_STEPS,
    SFT_STEPS,
    Command,
    Ended,
    attempts,
    begun,
    finished_run,
    killed_run,
    last_checkpoint,
    metrics,
    metrics_lines,
    plain_run,
    results,
    stage_ends,
    started_cold,
    user,
    versions,
    weights,
    workplace,
)

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


OF_TWO_STEPS = ("stage.stage1.steps=2", "stage.stage3.steps=0", "evaluate.problems=0")
"""The one after which a run is killed, and the one that it makes when it goes on."""
FEW = ("rollout.attempts_per_problem=2", "resample.keep=2")
"""Attempts, where each starts a process."""
AS_STAGE1 = (*(one for one in AS_PLAIN if not one.startswith("evaluate.")), *OF_TWO_STEPS)
"""What `plain` did up to the end of stage1, without its evaluations."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    return finished_run(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return begun(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, ended = plain_run(tmp_path_factory.getbasetemp())
    assert ended.code == 0, ended.told
    assert sum(row.get("learn/updates", 0) for row in metrics(folder)) > 0, "else all runs are alike"
    return folder


def test_a_run_ends_with_a_table_and_learns_from_mixed_groups(finished: tuple[Path, Ended]) -> None:
    folder, ended = finished
    assert ended.code == 0, ended.told
    assert "before" in ended.out and "after" in ended.out
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, SFT_STEPS + RL_STEPS + 1))
    assert sum(row.get("learn/updates", 0) for row in rows) > 0
    assert all(row["policy/logprob_gap_max"] < 1e-4 for row in rows if "policy/logprob_gap_max" in row)
    assert rows[SFT_STEPS - 1]["loss"] < rows[0]["loss"] / 5
    filed = versions(folder)
    assert len(filed) == RL_STEPS * 8
    assert all(wrote == {version} for version, wrote in filed), "an attempt is filed under the version that wrote it"
    assert len({version for version, _ in filed}) > 2, "the run must have learnt something in between"
    run = RunFolder(folder / "runs" / "tiny")
    own = Counter(row["stage"] for row in rows)
    assert [row["stage_step"] for row in rows] == [n for stage in own for n in range(1, own[stage] + 1)]
    for name, step, _ in run.evaluations():
        wrote = {version for made in attempt_rows(run.evaluation(name, step) / "samples.parquet", ("turns",))
                 for turn in made["turns"] for version, _ in turn["version_spans"]}  # fmt: skip
        version = json.loads((run.checkpoint(step) / "state.json").read_text())["policy_version"]
        assert wrote == {version}, "an evaluation is answered by the weights of its step"
    spent = sum(row.get("cpu/evaluation", 0.0) for row in read_journal(run.metrics))
    assert read_json(run.summary)["cpu_seconds"]["evaluation"] > spent, "that of the last evaluation, too"
    record = json.loads((folder / "runs" / "tiny" / "pools" / "stage3.json").read_text())
    assert (record["attempts"], record["asked"]) == (2, 4), "stage3 keeps its choice of problems"


def test_transformers_loads_the_last_checkpoint_unchanged(finished: tuple[Path, Ended]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_folder = last_checkpoint(finished[0]) / "model"
    model, report = AutoModelForCausalLM.from_pretrained(model_folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    rendered = tokenizer.apply_chat_template([user(4)], add_generation_prompt=True, return_tensors="pt")
    prompt = "<|im_start|>user\nAdd 4 and 3<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(rendered["input_ids"][0]) == prompt
    with torch.no_grad():
        logits = model(**rendered).logits
    assert logits.shape[-1] == len(tokenizer)
    assert "<" in tokenizer.decode(logits[0, -1].argmax())  # a tool call or an answer


def test_a_conversation_with_a_run_needs_no_reward_function(finished: tuple[Path, Ended]) -> None:
    talked_to = find_agent("tiny", finished[0] / "runs", ["evaluate.verifier=not.there:score"], None)
    assert talked_to.recipe.evaluate.verifier == "boxed"


DEADLY = """
import os
from pathlib import Path
from rocstar.learning.advantages import ADVANTAGES
from rocstar.run import probe as module

async def noted(*given, probe=module.probe):
    Path("probed").touch()
    await probe(*given)

module.probe = noted

def deadly(rewards, settings):
    if Path("armed").exists() and len(rewards) > 2:  # in the learner's turn: it is tried on two before a run begins
        Path("armed").unlink()
        os.kill(os.getpid(), 9)
    return ADVANTAGES["grpo"](rewards, settings)
"""


def test_a_run_killed_and_stopped_again_and_again_ends_as_if_nothing_had_been(
    plain: Path, start: tuple[str, ...], tmp_path: Path
) -> None:
    """kill -9 in the cold start, while it learns and around the end of a stage, then Ctrl-C, each followed by --resume;
    the last time by a process that loads everything anew, as a person's command does."""
    folder = workplace(tmp_path / "w")
    (folder / "own.py").write_text(DEADLY)
    command = Command.start(folder, "train", "tiny.toml", *start, *AS_PLAIN, "learning.advantage=own.py:deadly")
    saved = folder / "runs" / "tiny" / "checkpoints" / "step=000001"  # amid the cold start
    assert command.once(saved.exists, command.process.kill).code == -signal.SIGKILL
    (folder / "armed").touch()
    assert Command.start(folder, "train", "--resume", "tiny").wait().code == -signal.SIGKILL
    assert not (folder / "armed").exists() and (folder / "probed").exists(), "before the first step is learnt from"
    command = Command.start(folder, "train", "--resume", "tiny")
    assert command.after_step(COLD_STEPS + 2, command.process.kill).code == -signal.SIGKILL
    command = Command.start(folder, "train", "--resume", "tiny")
    stopped = command.after_step(COLD_STEPS + 3, command.interrupt)
    assert stopped.code == 130, stopped.told
    at = len(metrics_lines(folder))
    told = f"rocstar: stopped; step {at} is saved; continue with: rocstar train --resume tiny"
    assert stopped.told.splitlines()[-1] == told
    assert last_checkpoint(folder).name == f"step={at:06d}"
    ended = started_cold(folder, "train", "--resume", "last")
    assert ended.code == 0, ended.told
    assert metrics(folder) == metrics(plain)
    assert dict(flat(results(folder))) == dict(flat(results(plain)))
    assert attempts(folder) == attempts(plain)
    assert set(stage_ends(folder)) == set(stage_ends(plain))
    assert weights(folder) == weights(plain)


def test_a_run_that_rolls_ahead_is_killed_and_stopped_and_learns_from_every_recorded_attempt_once(
    plain: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Time decides which weights wrote what, so the tokens are not those of another run; everything else is. Groups
    that teach nothing are replaced ahead of learning as well."""
    folder = workplace(tmp_path / "w")
    stale = ("rollout.max_staleness_steps=1", "learning.importance_cap=2")
    steps = ("stage.stage1.steps=3", "stage.stage3.steps=1")
    settings = ("evaluate.problems=0", "rollout.refill=2", *steps, *stale)
    start = begun(tmp_path_factory.getbasetemp(), steps=0)
    command = Command.start(folder, "train", "tiny.toml", *start, *settings)
    assert command.after_step(1, command.process.kill).code == -signal.SIGKILL
    command = Command.start(folder, "train", "--resume", "tiny")
    stopped = command.after_step(2, command.interrupt)
    assert stopped.code == 130, stopped.told
    assert last_checkpoint(folder).name == f"step={len(metrics_lines(folder)):06d}"
    ended = Command.start(folder, "train", "--resume", "tiny").wait()
    assert ended.code == 0, ended.told

    rows, made = metrics(folder), attempts(folder)
    of_plain = [{**one, "step": one["step"] - COLD_STEPS} for one in attempts(plain)]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        of_step = [attempt for attempt in made if attempt["step"] == row["step"]]
        groups = 2 + row["refill/groups"]
        assert len({(attempt["problem_id"], attempt["index"]) for attempt in of_step}) == len(of_step) == 4 * groups
        assert sum(attempt["kept"] for attempt in of_step) == row["roc/kept"]
        assert row["group/usable"] == 2 or groups == 4 or row["stage"] == "stage3"  # of four problems
    assert any(row["refill/groups"] for row in rows)
    state = json.loads((last_checkpoint(folder) / "state.json").read_text())
    assert state["policy_version"] == sum(row["learn/updates"] for row in rows) > 0
    drawn = [[[a["problem_id"] for a in w if a["step"] == step][:8] for step in (1, 2)] for w in (made, of_plain)]
    assert drawn[0] == drawn[1], "the problems of each step follow from the seed"

    ages = [filed - version for filed, wrote in versions(folder) for version in wrote]
    assert min(ages) >= 0 and 0 < max(ages) <= 2 == max(row["staleness/max"] for row in rows)
    assert all(row["policy/logprob_gap_max"] < 1e-4 for row in rows if "policy/logprob_gap_max" in row)
    learnt = [row for row in rows if row["learn/updates"]]
    assert all(0 < row["learn/importance_weight"] <= 2 for row in learnt)
    fresh = [row["learn/importance_weight"] for row in learnt if row["staleness/max"] == 0]
    assert fresh == pytest.approx([1] * len(fresh), abs=1e-4)
    replayed = Command.start(folder, "replay", "tiny", "--json").wait()
    assert replayed.code == 0, replayed.told


def children_of(command: Command, module: str) -> list[psutil.Process]:
    """Its own processes that carry out this module."""
    children = psutil.Process(command.process.pid).children()
    return [child for child in children if any(module in word for word in child.cmdline())]


def test_a_run_whose_second_rank_is_killed_goes_on_alone_as_if_nothing_had_been(
    start: tuple[str, ...], tmp_path: Path
) -> None:
    """Up to the last digits, in which sums over ranks differ."""
    whole, killed = workplace(tmp_path / "whole"), workplace(tmp_path / "killed")
    given = ("train", "tiny.toml", *start, "stage.stage3.steps=0", "evaluate.problems=0")
    assert Command.start(whole, *given).wait().code == 0
    command = Command.start(killed, *given, "cluster.learners=2")
    ended = command.after_step(COLD_STEPS + 2, lambda: children_of(command, "rocstar.cluster")[0].kill())
    assert ended.code == 1
    sentence = ended.told.splitlines()[-1]
    seen = ("learner ranks lost one another", "learner rank 1 ended with SIGKILL")  # whichever comes first
    assert sentence.startswith(tuple(f"rocstar: {one}" for one in seen)) and "resume" in sentence
    assert Command.start(killed, "train", "--resume", "tiny", "cluster.learners=1").wait().code == 0
    assert sum(row.get("learn/updates", 0) for row in metrics(whole)) > 0
    for mine, other in zip(metrics(killed), metrics(whole), strict=True):
        assert mine.pop("stage") == other.pop("stage")
        assert mine == pytest.approx(other, abs=1e-5, rel=1e-5)
    last, two = metrics(killed)[-1]["step"], Command.start(killed, "replay", "tiny").wait()
    assert two.code == 2 and re.search(r"made by 2 learners and step \d+ by 1, and a replay has one", two.told)
    assert Command.start(killed, "replay", "tiny", "--step", str(last)).wait().code == 0


TWO_ENGINES = '\n[[engine]]\nname = "t"\nkind = "torch"\ncount = 2\n'


def test_a_run_whose_engines_take_turns_loses_no_attempt_by_the_death_of_one(
    plain: Path, start: tuple[str, ...], tmp_path: Path
) -> None:
    """Engines sleep while the learner computes: every attempt is there with its very tokens."""
    folder = workplace(tmp_path / "w")
    recipe = folder / "tiny.toml"
    recipe.write_text(recipe.read_text() + TWO_ENGINES)
    command = Command.start(folder, "train", "tiny.toml", *start, *AS_STAGE1, "cluster.colocate=true")
    ended = command.after_step(COLD_STEPS + 1, lambda: children_of(command, "rocstar.engines.torch_engine")[-1].kill())
    assert ended.code == 0, ended.told
    of_plain = [row for row in metrics(plain) if row["step"] <= COLD_STEPS + 2]
    assert [undisturbed(row) for row in metrics(folder)] == [undisturbed(row) for row in of_plain]
    made = [one for one in attempts(plain) if one["step"] <= COLD_STEPS + 2]
    assert attempts(folder) == made and versions(folder) == versions(plain)[: len(made)]
    lost = [each for each in read_journal(folder / "runs" / "tiny" / "events.jsonl") if each["event"] == "engine_lost"]
    assert lost and {each["reason"] for each in lost} == {"the engine process ended with SIGKILL"}
    assert sum(row.get("engine/lost", 0) for row in metrics(folder)) == len(lost)
    assert weights(folder) == weights(plain, COLD_STEPS + 2)


NO_SERVER = '\n[[engine]]\nname = "v"\nkind = "vllm"\npython = "/bin/false"\n'


def test_imitation_alone_starts_no_engine_and_is_no_success_where_all_its_updates_were_skipped(
    start: tuple[str, ...], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    model = shutil.copytree(start[0].removeprefix("model.path="), tmp_path / "absurd")
    weights = {name: tensor * 1e30 for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    recipe = workplace(tmp_path / "w") / "tiny.toml"
    recipe.write_text(recipe.read_text() + NO_SERVER)
    alone = ("stage.stage1.steps=0", "stage.stage3.steps=0", "evaluate.problems=0")
    ended = Command.start(recipe.parent, "train", recipe.name, f"model.path={model}", *start[1:], *alone).wait()
    assert ended.code == 1 and "SFT stages need no engine" in ended.told, ended.told
    assert len(metrics(recipe.parent)) == COLD_STEPS
    assert ended.told.count("stage cold learnt nothing: no update of it had a finite gradient; take a model") == 1


def undisturbed(row: dict[str, Any]) -> dict[str, Any]:
    """Metrics without what happened to engines."""
    return {name: value for name, value in row.items() if not name.startswith("engine/")}


def test_a_sandbox_killed_in_the_middle_costs_no_attempt_its_reward(
    plain: Path, start: tuple[str, ...], tmp_path: Path
) -> None:
    """Either the run goes on with a new sandbox, or it says in a sentence that it cannot; never a reward of 0."""
    folder = workplace(tmp_path / "w")
    command = Command.start(folder, "train", "tiny.toml", *start, *AS_STAGE1)
    ended = command.after_step(COLD_STEPS + 1, lambda: children_of(command, "sandbox.daemon")[0].kill())
    assert "Traceback" not in ended.told, ended.told
    events = {each["event"] for each in read_journal(folder / "runs" / "tiny" / "events.jsonl")}
    assert "sandbox_lost" in events and (ended.code or "sandbox_restarted" not in events)
    if ended.code == 0:
        assert metrics(folder) == metrics(plain)[: COLD_STEPS + 2]
    else:
        assert ended.code in (1, 3)
        assert "sandbox" in ended.told.splitlines()[-1].lower()
        faults = [row for row in attempts(folder) if row["stop"] == "environment_failed"]
        assert all(row["reward"] is None and not row["kept"] for row in faults)


@pytest.fixture
def service() -> Iterator[str]:
    """A sandbox elsewhere: its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "rocstar", "sandbox", "serve", f"--port={port}", "--preload="]
    running = subprocess.Popen(command, env={**os.environ, "ROCSTAR_SANDBOX_TOKEN": "secret"})
    while running.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(GLANCE)
    yield f"http://127.0.0.1:{port}"
    running.terminate()
    assert running.wait(60) == 0


def test_a_run_whose_programs_run_elsewhere_learns_the_same(
    plain: Path, start: tuple[str, ...], service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = workplace(tmp_path / "w")
    given = ("train", "tiny.toml", f"sandbox.urls={service}", *start, *AS_STAGE1)
    refused = Command.start(folder, *given).wait()
    assert refused.code == 3 and "ROCSTAR_SANDBOX_TOKEN" in refused.told, refused.told
    monkeypatch.setenv("ROCSTAR_SANDBOX_TOKEN", "secret")
    command = Command.start(workplace(tmp_path / "v"), *given)
    own: list[psutil.Process] = []
    ended = command.after_step(COLD_STEPS + 1, lambda: own.extend(children_of(command, "sandbox")))
    assert ended.code == 0, ended.told
    assert not own, "it needs no sandbox of its own"
    assert metrics(command.folder) == metrics(plain)[: COLD_STEPS + 2]


def test_a_run_whose_tool_is_an_mcp_server_is_killed_and_resumed_as_if_nothing_had_been(
    start: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("mcp", reason="needs the extra [mcp]")
    server = Path(__file__).parent / "tools" / "mcp_server.py"
    tool = f'sandbox.tools=["mcp:{sys.executable} {server} {tmp_path} python"]'
    whole, given = workplace(tmp_path / "whole"), ("train", "tiny.toml", tool, *start, *FEW, *OF_TWO_STEPS)
    ended = Command.start(whole, *given).wait()
    assert ended.code == 0, ended.told
    killed = killed_run(tmp_path / "killed", COLD_STEPS + 1, *given)
    assert Command.start(killed, "train", "--resume", "tiny").wait().code == 0
    assert any(row["calls"] > row["failed_calls"] for row in attempts(whole)), "no call went well"
    assert not any(row["fault"] for row in attempts(whole))
    assert attempts(killed) == attempts(whole) and metrics(killed) == metrics(whole)
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])]
    assert not left, "servers end with their attempts, and with a run that is killed"


def test_a_model_that_never_calls_the_tool_ends_with_a_table(tmp_path: Path) -> None:
    folder = workplace(tmp_path / "w", with_tool=False)
    short = ("stage.cold.steps=25", "stage.stage1.steps=1", "stage.stage3.steps=1")
    ended = Command.start(folder, "train", "tiny.toml", *short).wait()
    assert ended.code == 0, ended.told
    assert "attempts without the tool" in ended.out
    assert ended.told.count("warning: stage1: 100% of the attempts never called a tool; ") == 1
    rows = attempts(folder)
    guessed = {(row["step"], row["problem_id"]) for row in rows if row["reward"]}  # by luck, on some machines
    assert not any(row["kept"] for row in rows if (row["step"], row["problem_id"]) not in guessed)
    lucky = Counter(step for step, _ in guessed)
    assert all(row["drop/equal_rewards"] == 8 * (2 - lucky[row["step"]]) / 2 for row in metrics(folder)[25:])


REWARDS = '''
import re
import shutil

def graded(completions, answer, **columns):
    """Half of the credit for any box, all of it for the right one; a wrong word costs something."""
    boxes = re.findall(r"boxed\\{(\\d+)\\}", completions[0])
    return [-0.25 if not boxes else 1.0 if boxes[-1] == answer[0] else 0.5]

def broken(completions, answer, **columns):
    return [float("nan")]
'''


def test_a_run_learns_from_graded_rewards_and_tells_that_they_were_changed_before_it_goes_on(
    start: tuple[str, ...], tmp_path: Path
) -> None:
    """At f664d51 a reward of 0.5 passed `reward test` and the dry run, and ended the run in its first evaluation. One
    that was put back before a step was made with another: tests/test_continued.py."""
    folder = workplace(tmp_path / "w")
    (folder / "rewards.py").write_text(REWARDS)
    few = ("stage.stage1.steps=2", "stage.stage3.steps=0", "evaluate.every_steps=1", "run.checkpoint_seconds=1000")
    graded = (*start, "evaluate.verifier=rewards.py:graded", *few)
    ended = Command.start(folder, "train", "tiny.toml", *graded).wait()
    assert ended.code == 0 and "rewards.py: not what" not in ended.told, ended.told
    at = COLD_STEPS + 2
    kept = sorted(path.name for path in (folder / "runs" / "tiny" / "checkpoints").iterdir())
    assert kept == [f"step={step:06d}" for step in (COLD_STEPS, at - 1, at)], "a run is saved before it evaluates"
    made = attempts(folder)
    assert {row["reward"] for row in made} >= {0.5, 1.0} and {row["reward"] for row in made} <= {-0.25, 0.0, 0.5, 1.0}
    assert all((row["verdict"] == "right") == (row["reward"] > 0.5) for row in made)
    learnt = [row for row in made if row["advantage"]]
    assert {row["reward"] for row in learnt} >= {0.5, 1.0}
    rl = [row for row in metrics(folder) if "reward/mean" in row]
    of_steps = [[attempt["reward"] for attempt in made if attempt["step"] == row["step"]] for row in rl]
    assert [row["reward/mean"] for row in rl] == pytest.approx([fmean(rewards) for rewards in of_steps])
    assert any(row["reward/mean"] != row["verdict/right"] for row in rl)
    found = [json.loads(path.read_text())["accuracy"]["value"] for path in (folder / "runs").rglob("result.json")]
    assert found and all(value in (0.0, 0.5, 1.0) for value in found)  # of two problems

    (folder / "rewards.py").write_text(REWARDS.replace("0.5", "0.25"))
    ended = Command.start(folder, "train", "--resume", "tiny", "stage.stage1.steps=3").wait()
    assert ended.code == 0 and "code.rewards.py: changed since the run last computed" in ended.told, ended.told
    assert "the evaluations differ in code.rewards.py" in ended.told, "before and after"
    changes = json.loads((folder / "runs" / "tiny" / "run.json").read_text())["changes"]
    assert [(row["step"], row["setting"]) for row in changes] == [(at, "stage.stage1.steps"), (at, "code.rewards.py")]


def test_a_reward_that_is_no_number_ends_the_run_by_the_fault_budget_and_names_the_case(tmp_path: Path) -> None:
    folder = workplace(tmp_path / "w")
    (folder / "rewards.py").write_text(REWARDS)
    few = ("stage.cold.steps=2", "sft.warmup_steps=0", "evaluate.problems=0")  # of evaluations: test_evaluate.py
    broken = ("evaluate.verifier=rewards.py:broken", *few)
    ended = Command.start(folder, "train", "tiny.toml", *broken).wait()
    assert ended.code != 0
    last = ended.told.strip().splitlines()[-1]
    assert "step 3: 100% of the attempts" in last and "run.fault_budget" in last
    assert "rewards.py:broken gave nan as the reward of attempt" in last
    assert "'Add " in last and "Traceback" not in ended.told


def test_a_run_that_replaces_groups_and_has_notebooks_is_killed_and_replayed_as_if_nothing_had_been(
    start: tuple[str, ...], plain: Path, tmp_path: Path
) -> None:
    """With another advantage in one stage, each step replayed to the bit."""
    kinds = ("stage.stage1.learning.advantage=rloo",)
    short = ("evaluate.problems=0", "stage.stage1.steps=2", "stage.stage3.steps=1")
    given = ("tiny.toml", *start, *short, "rollout.refill=2", "sandbox.tools=notebook", *kinds)
    whole = workplace(tmp_path / "whole")
    ended = Command.start(whole, "train", *given).wait()
    assert ended.code == 0, ended.told
    assert "at most 48 tokens, rloo advantages, up to 2 rounds of further groups\n" in ended.told
    assert re.search(r"^stage1 step .* refilled \d ", ended.told, re.MULTILINE)
    made, rows = attempts(whole), [row for row in metrics(whole) if "refill/groups" in row]
    assert any(row["calls"] > row["failed_calls"] for row in made), "no cell of a notebook went well"
    assert not any(row["fault"] for row in made)
    assert len(rows) == 3 and sum(row["refill/groups"] for row in rows)
    first = {(row["step"], row["problem_id"]) for row in attempts(plain)}
    for row in rows:
        own = [attempt for attempt in made if attempt["step"] == row["step"]]
        problems = list(dict.fromkeys(attempt["problem_id"] for attempt in own))
        assert len(problems) == 2 + row["refill/groups"] == len(own) / 4
        tokens = sum(sum(attempt["loss_mask"]) for attempt in own if attempt["problem_id"] in problems[2:])
        assert tokens == row["refill/tokens"]
        assert row["group/usable"] <= 2
        if row["stage"] == "stage1":  # a pool of four problems, so two rounds leave none
            assert {(row["step"], problem) for problem in problems[:2]} <= first
            assert row["group/usable"] == 2 or len(problems) == 4
        learnt = [attempt for attempt in own if attempt["kept"]]
        assert len({attempt["problem_id"] for attempt in learnt}) == row["group/usable"]
    killed = killed_run(tmp_path / "killed", COLD_STEPS + 1, "train", *given)
    ended = Command.start(killed, "train", "--resume", "tiny").wait()
    assert ended.code == 0, ended.told
    assert attempts(killed) == made and metrics(killed) == metrics(whole)
    replayed = Command.start(killed, "replay", "tiny", "--json").wait()
    assert replayed.code == 0, replayed.told
    assert [step["differs"] for step in json.loads(replayed.out)["steps"]] == [{}] * 3
