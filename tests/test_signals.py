"""Ctrl-C is answered, whatever Python is doing when it comes."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from rocstar.run.stopper import SIGNALS
from rocstar.support.child import child_command, child_environment
from rocstar.support.signals import answered, terminated_as_interrupted


class Odd:
    """Ctrl-C comes while it is taken apart."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("own_ctrl_c")
def test_a_ctrl_c_that_a_destructor_loses_comes_again() -> None:
    with answered(), pytest.raises(KeyboardInterrupt):
        Odd()
        time.sleep(5)


@pytest.mark.usefixtures("own_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_ends_by_other_signals_as_by_ctrl_c(number: signal.Signals) -> None:
    with terminated_as_interrupted(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_what_else_a_destructor_raises_is_reported_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("odd")

    reported: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: reported.append(unraisable.exc_value))
    with answered():
        Broken()
    assert [str(error) for error in reported] == ["odd"]


def test_a_signal_that_reaches_the_whole_group_ends_no_child_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import os\ndef main(numbers):\n    for n in numbers: os.kill(os.getpid(), int(n))\n    return 7\n"
    (tmp_path / "hit.py").write_text(program)
    command = child_command("hit", *(str(int(one)) for one in SIGNALS))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert subprocess.run(command, env=child_environment({})).returncode == 7
