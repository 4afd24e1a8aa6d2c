"""Prints what `tests/adapters/tokens.py` compared, as a table, after the tests."""

from __future__ import annotations

import pytest

from tests.adapters import tokens


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if tokens.LARGEST:
        terminalreporter.section("largest differences")
        terminalreporter.line(f"{'method':<32}{'reference':<34}{'loss':>9}{'gradient':>10}")
    for (method, reference), (loss, gradient) in sorted(tokens.LARGEST.items()):
        terminalreporter.line(f"{method:<32}{reference:<34}{loss:>9.1e}{gradient:>10.1e}")
