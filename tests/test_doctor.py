"""What `rocstar doctor` says of this machine, and of one that lacks something."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocstar.cli.main import run
from rocstar.cli.verbs import doctor
from rocstar.cli.verbs.doctor import State, findings
from rocstar.sandbox import container
from rocstar.support import exits
from rocstar.support.exits import install_command
from tests.commands import json_of


def test_a_machine_that_runs_these_tests_can_train(tmp_path: Path) -> None:
    found = {finding.name: finding for finding in findings(tmp_path / "runs")}
    assert found["packages [train]"].state is State.OK
    assert found["sandbox"].state is not State.MISSING
    assert "isolation L" in found["sandbox"].found
    assert str(tmp_path) in found["disk"].found
    assert all(finding.remedy for finding in found.values() if finding.state is not State.OK)


def test_the_limits_of_a_container_are_told_beside_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "cpus", lambda: 0.5)
    monkeypatch.setattr(container, "memory_limit", lambda: 400_000_000)
    told = doctor._computer().found
    assert told.startswith("0.5 of ") and "by the limit of this container or job" in told and "0.4 of " in told
    monkeypatch.setattr(container, "cpus", lambda: 1e6)
    monkeypatch.setattr(container, "memory_limit", lambda: None)
    assert " of " not in doctor._computer().found.partition("(")[0]


def test_little_room_is_told_with_how_to_get_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=64 * 2**20))
    found = doctor._disk("shared memory", Path("/dev/shm"), doctor.SHARED_BYTES, doctor.SHARED_REMEDY)
    assert found.found.startswith("0.1 GB free") and "--shm-size" in found.remedy
    assert "TMPDIR" in doctor._temporary().remedy

    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in /tmp")

    monkeypatch.setattr("tempfile.gettempdir", none)
    assert doctor._temporary().state is State.MISSING


def test_a_cpu_without_products_in_bf16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from rocstar.engines import torch_gpus

    monkeypatch.setattr(torch_gpus, "gpus", list)
    for multiplies in (True, False):
        monkeypatch.setattr(torch_gpus, "cpu_multiplies_bf16", lambda multiplies=multiplies: multiplies)
        assert ("bfloat16 is several times as slow" in doctor._torch().found) is not multiplies


def test_what_is_missing_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the README's first command installs is enough for the sandbox of a run; the other packages of the sandbox's
    extra are for `sandbox serve`."""
    hidden = ("ray", "transformers", "uvloop", "httptools", "websockets")
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name in hidden else object())
    found = {finding.name: finding for finding in doctor._extras()}
    train = found["packages [train]"]
    assert train.state is State.MISSING
    assert train.found == "without transformers"
    assert train.remedy == install_command("train")
    assert {found[f"packages [{extra}]"].state for extra in ("cluster", "sandbox")} == {State.LIMITED}


def test_what_the_training_extra_brings_is_enough_for_rocstar_serve(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = exits.find_spec
    monkeypatch.setattr(exits, "find_spec", lambda name: None if name in ("uvloop", "httptools") else there(name))
    run(["serve", "nosuch", "--runs", str(tmp_path)])
    assert "there is no run nosuch" in capsys.readouterr().err


def test_a_python_without_vllm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROCSTAR_VLLM_PYTHON", sys.executable)
    assert doctor._vllm().state is State.MISSING
    monkeypatch.setenv("ROCSTAR_VLLM_PYTHON", "/nowhere/python")
    assert "/nowhere/python" in doctor._vllm().found


def test_json_is_one_object_and_a_machine_that_cannot_train_ends_with_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = doctor.Finding(name="sandbox", state=State.MISSING, found="no namespaces", remedy="see docs")
    monkeypatch.setattr(doctor, "findings", lambda runs: iter([lacking]))
    assert json_of(capsys, "doctor", code=3)["findings"][0]["found"] == "no namespaces"
