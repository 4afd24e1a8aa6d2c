"""Prints what `tests/adapters/tokens.py` compared, as a table, after the tests."""

from __future__ import annotations

import sys

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    tokens = sys.modules.get("tests.adapters.tokens")  # which wants torch; not every test here does
    largest = tokens.LARGEST if tokens else {}
    if largest:
        terminalreporter.section("largest differences")
        terminalreporter.line(f"{'method':<32}{'reference':<34}{'loss':>9}{'gradient':>10}")
    for (method, reference), (loss, gradient) in sorted(largest.items()):
        terminalreporter.line(f"{method:<32}{reference:<34}{loss:>9.1e}{gradient:>10.1e}")
