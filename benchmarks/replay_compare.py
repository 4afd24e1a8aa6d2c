"""Compares what a cell shows with what was recorded of it, for `sandbox_replay`. Pure: texts in, words out."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

TIME_LIMITS = ("CellTimeout", "TimeoutError", "Timeout waiting for reply")  # ours first
COLOURS = re.compile(r"\x1b?\[[0-9;]*m")
ERROR_LINE = re.compile(r"^ ?(?:[a-z_]\w*\.)*([A-Z]\w+)(?::|$)", re.MULTILINE)
SHORT_ERROR = re.compile(r"[\w.]*(?:Error|Exception)(?:: [^\n]*)?\n?")  # ToRA's way to tell of one
RANDOM, ADDRESS = re.compile(r"\brandom\b"), re.compile(r"\b0x[0-9a-f]{6,}")
NOTHING = "<empty_execution>"  # how MathCoder recorded a cell that showed nothing
TRACEBACK = re.compile(r"^-{20,}\s+([A-Za-z]\w*(?: waiting for reply)?)\s+Traceback")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What one cell shows here."""

    text: str
    """What it printed, then its last value."""
    warnings: str = ""
    """What it wrote to stderr."""
    error: str = ""
    """Class of what it raised; empty if nothing."""


def agreement(recorded: str, shown: Shown) -> str:
    """In which way they agree, empty if they do not: `error` (of the same class; any two time limits are one class),
    `output` (equal but for white space), `warnings` (the same with what was written to stderr before it), `set order`
    (equal but for the order of sets, which IPython's printer sorts and repr does not)."""
    raised = error_of(recorded)
    if raised or shown.error:
        return "error" if raised == as_class(shown.error) else ""
    wanted = squeezed("" if recorded == NOTHING else recorded)
    if wanted == squeezed(shown.text):
        return "output"
    if shown.warnings and wanted == squeezed(shown.warnings + shown.text):
        return "warnings"
    order = sorted_sets(recorded)
    return "set order" if order and order == sorted_sets(shown.text) else ""


def error_of(recorded: str) -> str:
    """Class of the error a recorded output tells of, of a chain the last one; empty if none."""
    plain = COLOURS.sub("", recorded)
    heading = TRACEBACK.match(plain)
    if heading or plain.startswith("Cell In[") or SHORT_ERROR.fullmatch(plain):
        named = ERROR_LINE.findall(plain) or [heading[1] if heading else ""]
        return as_class(named[-1])
    return ""


def as_class(error: str) -> str:
    return "time limit" if error in TIME_LIMITS else error.rpartition(".")[2]


def squeezed(text: str) -> str:
    return "".join(text.split())


def sorted_sets(text: str) -> str:
    """The text as an expression whose sets are in order; empty when it is none or has none."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ""
    sets = [node for node in ast.walk(tree) if isinstance(node, ast.Set)]
    for node in reversed(sets):  # inner ones first
        node.elts.sort(key=ast.dump)
    return ast.dump(tree) if sets else ""


def cause(recorded: str, shown: Shown, code: str, *, follows: bool) -> str:
    """Why a cell that differs does, as far as texts tell; the first that holds. code: of the cell and of those before
    it; follows: one of those differs too."""
    reasons = {
        "recorded: Jupyter gave up waiting": error_of(recorded) == "time limit",
        "our time limit for a cell": as_class(shown.error) == "time limit",
        "ended by a limit of the sandbox": shown.error.startswith("program:"),
        "library not installed": shown.error == "ModuleNotFoundError",
        "follows a cell that differs": follows,
        "recorded: a complaint of IPython itself": "The history saving thread" in recorded,
        "randomness or an address in memory": bool(RANDOM.search(code) or ADDRESS.search(recorded)),
        "other numpy: its scalars show their type": "np." in shown.text,
        "written to stderr": bool(shown.warnings),
        "recorded output was cut": is_cut(recorded, shown),
        "other sympy": "sympy" in code,
    }
    return next((name for name, holds in reasons.items() if holds), "other")


def is_cut(recorded: str, shown: Shown) -> bool:
    wanted, whole = squeezed(recorded).removesuffix("..."), squeezed(shown.text)
    return bool(wanted) and whole.startswith(wanted) and len(wanted) < len(whole)
