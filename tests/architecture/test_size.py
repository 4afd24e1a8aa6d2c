"""How large the house may be. Who needs more raises a number here in the same commit and says what concept costs it;
who removes something lowers it. The numbers are of rooms, not of files."""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Mapping

import pytest

from tests.architecture.test_imports import PACKAGE, imported, modules, parsed, room_of

LINES_AND_FILES: Mapping[str, tuple[int, int]] = {
    "__main__": (17, 1),
    "adapters": (2103, 17),
    "agents": (1088, 4),
    "analysis": (1703, 10),
    "answers": (3724, 19),
    "cli": (3155, 21),
    "cluster": (721, 3),
    "config": (2092, 10),
    "data": (4259, 22),
    "dialogue": (1916, 11),
    "engines": (4573, 22),
    "errors": (106, 1),
    "evaluation": (3469, 20),
    "faults": (616, 4),
    "forecast": (1653, 7),
    "learning": (3344, 19),
    "parts": (1859, 9),
    "protocols": (306, 1),
    "record": (2574, 16),
    "rollout": (1633, 11),
    "run": (3924, 21),
    "sandbox": (8551, 39),
    "serving": (739, 6),
    "support": (2248, 16),
    "tools": (1004, 7),
    "train": (197, 1),
    "types": (600, 1),
    "view": (1821, 9),
}
CLASSES, FUNCTIONS = 531, 3934
LONGEST_CHAIN = 12
DOUBLED_CLASS_NAMES = 0
ENTRIES_AT_THE_TOP = 29
SIGNATURES_WITH_RECIPE = 20
BESIDE_THE_HOUSE: Mapping[str, int] = {"benchmarks/*.py": 7_457, "tests/**/*.py": 50_344}
"""Lines of what stands beside the package. Of benchmarks frame.py owns what they share."""
SLACK = 0.02
"""A budget that is this far above what there is must be lowered, so that what was given back stays given back."""


def sizes() -> dict[str, tuple[int, int]]:
    """(lines, files) by room."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for module, source in modules().items():
        found[room_of(module)][0] += source.count("\n")
        found[room_of(module)][1] += 1
    return {room: (lines, files) for room, (lines, files) in found.items() if room}


@pytest.mark.parametrize("room", sorted(sizes()))
def test_a_room_keeps_its_budget(room: str) -> None:
    lines, files = sizes()[room]
    assert room in LINES_AND_FILES, f"{room} has {lines} lines in {files} files and no budget yet"
    most_lines, most_files = LINES_AND_FILES[room]
    assert lines <= most_lines, f"{room} has {lines} lines, its budget is {most_lines}"
    assert files <= most_files, f"{room} has {files} files, its budget is {most_files}"
    assert most_lines <= lines * (1 + SLACK) + 10, f"{room} has only {lines} lines; lower its budget of {most_lines}"


def test_every_budget_is_of_a_room() -> None:
    assert LINES_AND_FILES.keys() == sizes().keys()


@pytest.mark.parametrize("files", BESIDE_THE_HOUSE)
def test_what_stands_beside_the_house_keeps_its_budget(files: str) -> None:
    lines = sum(file.read_text().count("\n") for file in PACKAGE.parent.glob(files))
    assert lines <= BESIDE_THE_HOUSE[files] <= lines * (1 + SLACK)


def kinds_of_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """What a function takes, by its annotations: `Recipe | None` is a Recipe and None."""
    annotations = [one.annotation for one in ast.walk(function.args) if isinstance(one, ast.arg) and one.annotation]
    return {kind for annotation in annotations for kind in ast.unparse(annotation).split(" | ")}


def test_names_keep_their_budget() -> None:
    nodes = [node for source in modules().values() for node in ast.walk(parsed(source))]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    doubled = sorted(name for name, count in classes.items() if count > 1)
    takes_recipe = sum("Recipe" in kinds_of_parameters(function) for function in functions)
    assert classes.total() <= CLASSES, f"{classes.total()} classes"
    assert len(functions) <= FUNCTIONS, f"{len(functions)} functions"
    assert len(doubled) <= DOUBLED_CLASS_NAMES, f"classes of one name in several files: {', '.join(doubled)}"
    assert takes_recipe <= SIGNATURES_WITH_RECIPE, f"{takes_recipe} functions take a whole recipe"


def test_entries_at_the_top_keep_their_budget() -> None:
    entries = sorted(path.name for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "py.typed"))
    assert len(entries) <= ENTRIES_AT_THE_TOP, ", ".join(entries)


@functools.cache
def chain_from(module: str) -> tuple[str, ...]:
    """The longest chain of imports from a module down. Raises RecursionError where imports go in a circle."""
    targets = {target for target, _ in imported(modules()[module])} & modules().keys() - {module}
    return (module, *max(map(chain_from, sorted(targets)), key=len, default=()))


def test_imports_go_one_way_and_not_far() -> None:
    longest = max(map(chain_from, modules()), key=len)
    assert len(longest) <= LONGEST_CHAIN, f"{len(longest)} modules: {' -> '.join(longest)}"
