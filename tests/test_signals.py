"""Ctrl-C is answered, whatever Python is doing when it comes."""

from __future__ import annotations

import signal
import time

import pytest

from rocstar.support.signals import answered


class Odd:
    """Ctrl-C comes while it is taken apart."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("own_ctrl_c")
def test_a_ctrl_c_that_a_destructor_loses_comes_again() -> None:
    with answered(), pytest.raises(KeyboardInterrupt):
        Odd()
        time.sleep(5)


def test_what_else_a_destructor_raises_is_reported_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError("odd")

    reported: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: reported.append(unraisable.exc_value))
    with answered():
        Broken()
    assert [str(error) for error in reported] == ["odd"]
