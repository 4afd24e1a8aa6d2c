"""Runs programs behind the walls of one plan, without daemon or zygote: an interpreter of its own for the tests of
`walls`, which may be forked, confined and killed. Prints one JSON object a line: first what the slot knows, then what
each program printed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback

from rocstar.sandbox.walls import plans
from rocstar.sandbox.walls.cgroups import Membership
from rocstar.sandbox.walls.plans import Walls


def main() -> None:
    """Arguments: the plan's name, a folder, and programs; each runs in a fork of the slot, in a fresh directory."""
    name, folder, *programs = sys.argv[1:]
    plan = next(plan for plan in plans.PLANS if plan.name == name)
    if pid := os.fork():  # the child becomes the keeper, and this process stands for its zygote
        os.waitpid(pid, 0)
        return
    try:
        walls = plans.start(plan, 0, folder, Membership())
    except OSError as error:
        say({"problem": str(error)})
        os._exit(0)
    say({"problem": "", "keeper": walls.keeper, "process": walls.process, "failed": walls.failed})
    for program in programs:
        run(walls, program)
    os._exit(0)


def run(walls: Walls, program: str) -> None:
    pid = os.fork()
    if pid == 0:
        os.close(walls.reset)
        os.chdir(walls.workdir)
        os.setpgid(0, 0)
        walls.inside.enter_call()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            try:
                exec(program, {"__name__": "__main__"})
            except Exception:
                print(traceback.format_exc())
        say({"output": output.getvalue()})
        os._exit(0)
    os.waitpid(pid, 0)
    with contextlib.suppress(ChildProcessError):
        while True:
            walls.kill_all(pid)
            os.wait()
    say({"renewed": walls.renew()})


def say(message: dict[str, object]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
