"""A set of nodes from which one can be drawn at random in constant time."""

from __future__ import annotations

import random
from collections.abc import Iterator

from rocstar.sandbox.router.nouns import Node


class Bag:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.places: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def add(self, node: Node) -> None:
        if node.name not in self.places:
            self.places[node.name] = len(self.nodes)
            self.nodes.append(node)

    def discard(self, node: Node) -> None:
        place = self.places.pop(node.name, None)
        if place is None:
            return
        last = self.nodes.pop()
        if place < len(self.nodes):  # the last one moves into the gap
            self.nodes[place] = last
            self.places[last.name] = place

    def draw(self, rng: random.Random) -> Node:
        return self.nodes[int(rng.random() * len(self.nodes))]
