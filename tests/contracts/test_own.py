"""ROCSTAR_OWN names code for the suites beside this file."""

import pytest

from tests.contracts.own import own


@pytest.mark.parametrize("given", ["learning.los=mine.py:loss", "mine.py:loss", "learning.loss="])
def test_what_no_suite_would_try_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("ROCSTAR_OWN", f"learning.loss=mine.py:loss {given}")
    with pytest.raises(ValueError, match=f"ROCSTAR_OWN has '{given}'; "):
        own("learning.loss", "cispo")
