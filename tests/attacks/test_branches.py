"""The attacks that need nothing but a program, each in a branch of a session that was forked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rocstar.sandbox.call import ProgramOutcome, Response
from tests.attacks import test_reaching, test_using_up
from tests.attacks.support import names, promised
from tests.sandbox.driver import Daemon, eventually


class Branching(Daemon):
    """Runs each program in a branch of a session of its own, of which nothing is left when it is answered."""

    def run(self, code: str, **fields: Any) -> Response:
        if "session" in fields:
            return super().run(code, **fields)
        limits = {name: fields[name] for name in ("memory_bytes", "processes") if name in fields}
        before = {*self.below()}
        self.cell("parent", 1, "kept = 1", **limits)
        assert super().run("", session="parent", cell=2, branches=("branch",), **limits).outcome is ProgramOutcome.OK
        response = self.cell("branch", 2, code, **fields)
        assert self.cell("parent", 2, "kept", **limits).value == "1"
        self.end("branch")
        self.end("parent")
        assert eventually(lambda: before >= {*self.below()} and before >= {*self.slots()})
        return response


@pytest.fixture(scope="module", params=[0, 1], ids=["root", "user"])
def branching(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with Branching(skip_plans=request.param, slots=1) as daemon:
        promised(daemon, "L3")
        yield daemon


OF_PROGRAMS = {
    "test_fork_bomb_ends_at_the_wall_limit",
    "test_limits_cannot_be_raised",
    "test_memory_of_a_call_is_limited_whatever_its_number_of_processes_and_told_even_if_the_first_goes_on",
    "test_exit_hooks_and_messages_that_never_end_are_killed",
}
"""They ask for figures of a whole process, or for its end, which cells do not have, be they of a branch or not."""
ATTACKS = [
    attack
    for module in (test_reaching, test_using_up)
    for name, attack in vars(module).items()
    if name.startswith("test_") and name not in OF_PROGRAMS and [*inspect.signature(attack).parameters] == ["daemon"]
]


@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.__name__.removeprefix("test_") for attack in ATTACKS])
def test_it_holds_in_a_branch(branching: Daemon, attack: Callable[[Daemon], None]) -> None:
    attack(branching)


@pytest.mark.parametrize("what", test_reaching.REFUSED)
def test_what_is_reached_for_from_a_branch_is_refused(branching: Daemon, what: str) -> None:
    calls, errors = test_reaching.REFUSED[what]
    found = names(branching, *calls)
    assert len(found) == len(calls) and set(found) <= errors
