"""What a run starts beside itself: its sandbox, a child of its process or daemons elsewhere, none of them below the
level asked for; and nothing at all where it is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rocstar.cli.main import _carry_out
from rocstar.cluster import started_sandbox
from rocstar.config.places import SandboxSection
from rocstar.errors import ConfigError
from rocstar.record.folder import RunFolder
from rocstar.sandbox.call import Call, DaemonInfo, Isolation, SandboxDown
from tests.sandbox.scripted import INFO, ScriptedDaemon

WEAK = DaemonInfo(isolation=Isolation.L1, slots=2)


def test_programs_run_at_the_urls_of_the_recipe() -> None:
    with ScriptedDaemon() as one, ScriptedDaemon() as other:
        section = SandboxSection(urls=[one.address, other.address], min_isolation="L3")
        with started_sandbox(section) as sandbox:
            asyncio.run(sandbox.run(Call(id="x", code="ok")))
            assert [node.label for node in sandbox.nodes] == section.urls
        assert len(one.calls) + len(other.calls) == 1


def test_a_daemon_below_the_level_asked_for_is_refused_by_name_before_anything_starts() -> None:
    with ScriptedDaemon(INFO) as strong, ScriptedDaemon(WEAK) as weak:
        section = SandboxSection(urls=[strong.address, weak.address], min_isolation="L2")
        told = f"{weak.address} does not serve: it offers isolation L1 and min_isolation asks for L2"
        with pytest.raises(SandboxDown, match=told), started_sandbox(section):
            pass


def test_a_run_that_is_refused_because_it_goes_on_starts_no_second_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr("rocstar.record.trackers._start", lambda *given: started.append(given))
    folder, material = RunFolder(tmp_path), Mock()
    material.recipe.run.trackers = ["tensorboard"]
    with folder.locked(), pytest.raises(ConfigError, match="is being written by process"):
        _carry_out(material, folder, resume=True, as_json=False)
    assert not started
