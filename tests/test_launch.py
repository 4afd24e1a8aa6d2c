"""The sandbox of a run: a child of its process, or daemons elsewhere, none of them below the level asked for."""

from __future__ import annotations

import asyncio

import pytest

from rocstar.cluster.here import started_sandbox
from rocstar.config.places import SandboxSection
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


def test_without_urls_it_is_a_child_of_this_process() -> None:
    with started_sandbox(SandboxSection(slots=1, preload=[])) as sandbox:
        assert asyncio.run(sandbox.run(Call(id="x", code="6 * 7"))).value == "42"
