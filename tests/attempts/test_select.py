"""Which attempts of a run are chosen, by what became of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rocstar.cli.verbs.runs import app
from rocstar.errors import ConfigError, DataError
from rocstar.record import table
from rocstar.record.call_errors import failures
from rocstar.record.folder import RunFolder
from rocstar.record.rollouts import TOKEN_COLUMNS, AttemptRecord, write_attempts
from rocstar.record.table import select
from rocstar.types import Reason, Stop, Trajectory, Verdict
from tests.record.examples import PROBLEM, choice, decode, run, trajectory


def recorded(folder: RunFolder, step: int) -> Path:
    made = (
        (trajectory(0, failed=True), choice(0, False, Reason.DROPPED_QUALITY, errors=1.0)),
        (trajectory(1, verdict=Verdict.WRONG), choice(1, True, Reason.KEPT_NEGATIVE)),
        (trajectory(2), choice(2, True, Reason.KEPT_QUALITY)),
        (trajectory(3, verdict=None), None),
    )
    records = [AttemptRecord(problem=PROBLEM, trajectory=t, choice=c, policy_version=step) for t, c in made]
    write_attempts(folder.rollout_file(step), step, records, decode)
    return folder.rollout_file(step)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of two steps, to be read only."""
    folder = run(tmp_path_factory.mktemp("files"))
    return [recorded(folder, step) for step in (3, 4)]


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, [(step, index) for step in (3, 4) for index in range(4)]),
        ({"step": "4", "verdict": "right"}, [(4, 0), (4, 2)]),
        ({"step": "3", "verdict": "undecided,none"}, [(3, 3)]),
        ({"kept": "yes", "verdict": "wrong"}, [(3, 1), (4, 1)]),
        ({"kept": "no", "step": "3"}, [(3, 0), (3, 3)]),
        ({"error": "Exit Status"}, [(3, 0), (4, 0)]),
        ({"error": "ValueError"}, []),
        ({"stop": "environment_failed", "step": "3"}, [(3, 3)]),
        ({"q": "1+1", "step": "3"}, [(3, 0), (3, 1), (3, 2), (3, 3)]),
        ({"q": "<13>", "step": "3"}, [(3, 0), (3, 1), (3, 2), (3, 3)]),
        ({"q": "not there"}, []),
        ({"problem": f"{PROBLEM.id[:5]}*", "step": "5"}, []),
    ],
)
def test_an_attempt_is_chosen_by_each_thing_that_was_asked(
    files: list[Path], wanted: dict[str, str], found: list[tuple[int, int]]
) -> None:
    assert [(row["step"], row["index"]) for row in select(files, wanted)] == found


def test_rows_come_with_their_turns_and_without_their_tokens(files: list[Path]) -> None:
    row = next(select(files, {}))
    assert set(TOKEN_COLUMNS) & set(row) == {"prompt_ids"}
    assert row["turns"][0]["calls"][0]["arguments"] == {"code": "print(2)"}
    assert failures(row["turns"]) == ["exit status"]


def test_a_cut_file_is_refused_by_name(files: list[Path], tmp_path: Path) -> None:
    (cut := tmp_path / files[1].name).write_bytes(files[1].read_bytes()[:200])
    with pytest.raises(DataError, match=r"step=000004.parquet is not a complete file of attempts"):
        list(select([files[0], cut], {}))


def test_short_memory_is_not_called_a_broken_file(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(table.SETTINGS, "memory_limit", "1KB")
    with pytest.raises(MemoryError, match=r"step=000003.parquet cannot be read for lack of memory"):
        list(select(files, {}))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--error", "Nope"], "; existing failures: exit status (2)"),
        (["--error", "Nope", "--wrong"], "; no call failed there"),
        (["--stop", "max_turns"], ""),
        (["--step", "9"], "; the steps that kept theirs go from 3 to 4"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(files: list[Path], asked: list[str], told: str) -> None:
    run = files[0].parent.parent
    shown = CliRunner().invoke(app, ["rollouts", run.name, "--runs", str(run.parent), *asked])
    assert shown.exit_code == 0, shown.output
    assert shown.output.strip() == f"{run.name} has no such attempt{told}"


@pytest.mark.parametrize("asked", [["--kept", "--dropped"], ["--wrong", "--undecided"]])
def test_options_that_exclude_each_other_are_refused(files: list[Path], asked: list[str]) -> None:
    run = files[0].parent.parent
    with pytest.raises(ConfigError, match=f"{asked[0]} and {asked[1]} exclude each other; give one of them"):
        CliRunner().invoke(app, ["rollouts", run.name, "--runs", str(run.parent), *asked], catch_exceptions=False)


@pytest.mark.parametrize(("asked", "count"), [("--kept", 4), ("--dropped", 4), ("--right", 4), ("--undecided", 2)])
def test_each_option_chooses_its_own(files: list[Path], asked: str, count: int) -> None:
    given = ["rollouts", str(files[0].parent.parent), "--json", asked]
    assert len(json.loads(CliRunner().invoke(app, given).stdout)["attempts"]) == count


def listed(base: Path, *made: Trajectory, gold: str = PROBLEM.answer) -> str:
    """What `runs rollouts` says of these attempts of a step, whose turns end with a template's mark."""
    folder, problem = run(base), replace(PROBLEM, answer=gold)
    records = [AttemptRecord(problem=problem, trajectory=one, choice=None, policy_version=1) for one in made]
    write_attempts(folder.rollout_file(1), 1, records, lambda ids: f"{decode(ids)}<|im_end|>")
    return CliRunner().invoke(app, ["rollouts", folder.name, "--runs", str(folder.path.parent)]).output


def test_a_graded_reward_is_shown_beside_the_verdict_and_a_reply_without_room_beside_the_stop(tmp_path: Path) -> None:
    whole, half = trajectory(0), trajectory(1, verdict=Verdict.WRONG)
    assert half.outcome is not None
    shown = listed(tmp_path / "graded", whole, replace(half, outcome=replace(half.outcome, reward=0.5)))
    assert " wrong     reward 0.5 " in shown and shown.count("reward") == 1
    cut = [replace(whole, stop=Stop.MAX_TOKENS, turns=turns) for turns in (whole.turns, whole.turns[:1])]
    shown = listed(tmp_path / "cut", *cut)
    assert "max_tokens:" in shown and shown.count("max_tokens (no room for the last reply):") == 1


def test_why_there_is_no_answer_to_show_is_told(tmp_path: Path) -> None:
    """What a function or an agent rewarded has an answer, and one that an agent left behind says how."""
    whole = trajectory(0)
    assert whole.outcome is not None
    unread = replace(whole.outcome, extracted=None)
    made = [replace(whole, outcome=replace(unread, method=method)) for method in ("function", "agent", "no_answer")]
    made.append(replace(made[2], stop=Stop.AGENT_FAILED, fault=f"python ended with 1: KeyError: {'x' * 90}"))
    told = [line.partition(" tokens, ")[2] for line in listed(tmp_path, *made).splitlines() if line.startswith("step ")]
    assert told == [
        "answered: judged by the reward function, '<13>' for '2'",
        "answered: rewarded by its agent",
        "answered: no answer",
        f"agent_failed: python ended with 1: KeyError: {'x' * 90}",
    ]
    shown = listed(tmp_path / "no reference", made[0], gold="")
    assert " 1 call, " in shown and "answered: judged by the reward function, '<13>'\n" in shown


def test_an_agents_attempt_is_shown_with_its_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocstar.dialogue.codec.Codec.load", lambda model: SimpleNamespace(decode=decode))
    monkeypatch.setattr("rocstar.record.folder.RunFolder.checkpoint_steps", lambda folder: [1])
    folder = run(tmp_path)
    file, asked = recorded(folder, 1), ["rollouts", folder.name, "--runs", str(tmp_path), "--limit", "1", "--full"]
    prompt = f"[prompt]\n{decode(next(table.select([file], {}))['prompt_ids'])}\n[assistant]"
    settings = json.loads(folder.resolved.read_text())
    for agent, shown in ((None, False), ("own.py:solve", True)):
        settings["rollout"] = {**settings.get("rollout", settings), "agent": agent}
        folder.resolved.write_text(json.dumps(settings))
        assert (prompt in CliRunner().invoke(app, asked).output) == shown


def test_an_export_goes_over_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = run(tmp_path), monkeypatch.setattr("rocstar.cli.verbs.runs._source", lambda *_: ([], None))
    for out, told in ((tmp_path, "is a folder"), (tmp_path / "not" / "a.csv", "lies in a folder that is not there")):
        asked = ["export", folder.name, "--runs", str(folder.path.parent), "--format", "csv", "--out", str(out)]
        with pytest.raises(ConfigError, match=f"{told}; name a file in a folder that is there with --out"):
            CliRunner().invoke(app, asked, catch_exceptions=False)


def test_an_export_of_nothing_says_so(tmp_path: Path) -> None:
    folder, out = run(tmp_path), tmp_path / "none.csv"
    record = AttemptRecord(problem=PROBLEM, trajectory=trajectory(0), choice=None, policy_version=1)
    write_attempts(folder.rollout_file(1), 1, [record], decode)
    asked = ["export", folder.name, "--runs", str(folder.path.parent), "--format", "csv", "--out", str(out)]
    done = CliRunner().invoke(app, [*asked, "--text", "zzz"])
    assert (done.exit_code, done.stderr) == (0, f"{folder.name} has no such attempt\n") and out.is_file()
    assert done.stdout == f"0 attempts in {out}\n"
