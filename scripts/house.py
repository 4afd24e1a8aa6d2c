"""Draws the rooms of rocstar/ by floors, from the imports: `python scripts/house.py`. docs/architecture.md holds the
picture, and a test compares. A room stands above all that it imports; imports for type checking alone are left out."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "rocstar"
WIDTH = 100


def room_graph() -> Mapping[str, set[str]]:
    """Room -> the rooms that it imports, errors and types left out: nearly all import those."""
    graph: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        room = file.relative_to(PACKAGE).with_suffix("").parts[0]
        if not room.startswith("__"):
            graph.setdefault(room, set()).update(_rooms_in(ast.parse(file.read_text(encoding="utf-8"))) - {room})
    nouns = {"errors", "types", "protocols"}
    return {room: {other for other in others if other not in nouns} for room, others in graph.items()}


def _rooms_in(tree: ast.AST) -> set[str]:
    targets = [name for node in _running(tree) for name in _targets(node)]
    return {target.split(".")[1] for target in targets if target.startswith("rocstar.")}


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module == "rocstar":
        return [f"rocstar.{alias.name}" for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _running(child)


def floors(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Rooms by floor, the top first. Raises RecursionError where rooms import each other in a circle."""

    @cache
    def floor(room: str) -> int:
        return 1 + max((floor(other) for other in graph[room]), default=0)

    found: dict[int, list[str]] = defaultdict(list)
    for room in sorted(graph):
        found[floor(room)].append(room)
    return [found[number] for number in sorted(found, reverse=True)]


def drawn() -> str:
    """One line a room, the top floor first: what it stands on directly, that is, not through another room."""
    graph = room_graph()

    @cache
    def below(room: str) -> frozenset[str]:
        return frozenset(graph[room]).union(*(below(other) for other in graph[room]))

    lines = []
    for level in floors(graph):
        for room in level:
            through = set().union(*(below(other) for other in graph[room]))
            on = sorted(graph[room] - through)
            lines.append(f"{room:<12}{'on ' + ', '.join(on) if on else ''}".rstrip())
        lines.append("-" * 12)
    return "\n".join(lines[:-1])


if __name__ == "__main__":
    print(drawn())
