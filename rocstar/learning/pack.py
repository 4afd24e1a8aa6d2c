"""Rows to packed tensors: dealt to ranks by token count, cut into micro-batches under a token budget, no padding.

    rows    A A A A | B B | C C C       budget 6 tokens, shortest first
    packed  [B B C C C]  [A A A A]

The tokens that carry loss are listed beside the sequence. Token t of a row is predicted at t - 1, so

    row     P0 P1 A0 A1 R0 A2           P prompt, A written by the policy, R tool reply
    weight   0  0  1  1  0  1
    places      P1 A0    R0             where hidden states are read, K of them
    targets     A0 A1    A2             what they predict

Siblings begin with the same tokens: those before the first place of their loss are computed once per micro-batch, and
attention lets each sibling see them (attention.py). Tokens after the last place are not computed at all:

    rows        P0 P1 P2 A0 A1 | P0 P1 P2 B0           P0 P1 shared; A1, B0 predict nothing
    packed      P0 P1 [P2] [P2 A0]

If all rows of a micro-batch begin alike, as with one system message, that beginning is computed once too.

Rows are sorted only within one optimizer update, so no update gets only short or only long rows. Row order inside it
does not change its gradient except for rounding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from rocstar.learning.attention import Document, DocumentLayout, layout_of
from rocstar.learning.memory import PassShape


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Some rows in one sequence: T tokens, at K of which a loss is taken."""

    indices: tuple[int, ...]
    """Indices of the rows, shortest first; empty for a rank that has nothing left while others do."""
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    """The position of each token in its row."""
    layout: DocumentLayout
    """How attention lays the rows out."""
    places_K: torch.Tensor
    """Position in the sequence of the token before each loss token, rows in order."""
    targets_K: torch.Tensor
    tokens_K: tuple[tuple[int, int], ...]
    """(row, index in it) of each loss token."""

    def pick(self, values: Sequence[Sequence[float]]) -> torch.Tensor:
        """Numbers of all tokens of all rows ([T] each) -> [K]."""
        return torch.tensor([values[i][t] for i, t in self.tokens_K], dtype=torch.float).to(self.ids_T.device)

    def per_token(self, values: Sequence[float]) -> torch.Tensor:
        """One number for each of all rows -> [K]."""
        return torch.tensor([values[i] for i, _ in self.tokens_K], dtype=torch.float).to(self.ids_T.device)


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows of each rank: each row, longest first, goes to the rank with the fewest tokens so far."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    tokens = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = tokens.index(min(tokens))
        hands[least].append(index)
        tokens[least] += lengths[index]
    return hands


def plan(
    lengths: Sequence[int],
    families: Sequence[tuple[int, ...]],
    indices: Sequence[int],
    fits: Callable[[int, int], bool],
    *,
    side_by_side: bool = False,
) -> list[tuple[int, ...]]:
    """`indices` cut into micro-batches whose (computed, attended) tokens fit, each exactly once; a row that is too long
    gets its own. A family is named by the tokens that its rows share, if any. Rows of a family are adjacent; families
    are ordered by their longest row, ascending."""
    names = [family or index for index, family in enumerate(families)]
    longest: dict[Hashable, int] = {}
    for index in indices:
        longest[names[index]] = max(longest.get(names[index], 0), lengths[index])
    first = {names[index]: index for index in sorted(indices, reverse=True)}
    batches: list[list[int]] = []
    computed = attended = 0
    for index in sorted(indices, key=lambda i: (longest[names[i]], first[names[i]], lengths[i], i)):
        follows = bool(batches) and names[batches[-1][-1]] == names[index]
        own = lengths[index] - (len(families[index]) if follows else 0)
        if side_by_side and batches:  # all are padded to the length of this one
            computed = attended = len(batches[-1]) * lengths[index]
        if not batches or not fits(computed + own, attended + lengths[index]):
            batches.append([])
            computed, attended, own = 0, 0, lengths[index]
        batches[-1].append(index)
        computed, attended = computed + own, attended + lengths[index]
    return [tuple(sorted(batch, key=lambda i: (lengths[i], i))) for batch in batches]


def pack(
    ids: Sequence[Sequence[int]],
    counted: Sequence[Sequence[bool]],
    tokens_per_microbatch: int,
    device: torch.device,
    *,
    share: bool = True,
    side_by_side: bool = False,
    rank: int = 0,
    ranks: int = 1,
    on_cpu: PassShape | None = None,
) -> list[MicroBatch]:
    """This rank's micro-batches, as many as every other rank has; `counted` ([T] a row) marks the tokens that carry
    loss.

    The first token of a row is not predicted and never counts. The budget counts tokens as attention does: shared ones
    in each row, padding included if rows stand side by side; `on_cpu` bounds it further by the memory of a pass."""
    rows = [_row(row, counts, share) for row, counts in zip(ids, counted, strict=True)]
    lengths, families = [row.length for row in rows], [row.prefix for row in rows]

    def fits(computed: int, attended: int) -> bool:
        return attended <= tokens_per_microbatch and (on_cpu is None or on_cpu.fits(computed, attended))

    plans = [plan(lengths, families, hand, fits, side_by_side=side_by_side) for hand in deal(lengths, ranks)]
    most = max(len(each) for each in plans)
    mine = plans[rank] + [()] * (most - len(plans[rank]))
    return [_micro(rows, indices, device, side_by_side) for indices in mine]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    ids: Sequence[int]
    places: Sequence[int]
    """Places of the tokens that predict a loss token."""
    prefix: tuple[int, ...]
    """Tokens that siblings may share."""

    @property
    def length(self) -> int:
        """Tokens to compute."""
        return self.places[-1] + 1 if self.places else 1


def _row(ids: Sequence[int], counted: Sequence[bool], share: bool) -> _Row:
    places = [t - 1 for t, yes in enumerate(counted) if yes and t]
    return _Row(ids=ids, places=places, prefix=tuple(ids[: places[0]]) if places and share else ())


COMMON = 16  # tokens; below it, copying them in front of each row costs what computing them once saves
NOTHING = _Row(ids=(0,), places=(), prefix=())  # an idle rank still takes part in the passes of the others


def _micro(rows: Sequence[_Row], indices: tuple[int, ...], device: torch.device, side_by_side: bool) -> MicroBatch:
    mine = [rows[index] for index in indices] or [NOTHING]
    tokens: list[int] = []
    positions: list[int] = []
    documents: list[Document] = []
    places_K: list[int] = []
    there: dict[tuple[int, ...], int] = {}
    common = _common([row.prefix for row in mine])
    for row in mine:
        parts = []
        for begin, end in pairwise(sorted({0, common, len(row.prefix), row.length})):
            shared = tuple(row.ids[:end]) if end <= len(row.prefix) else None
            first = len(tokens) if shared is None else there.setdefault(shared, len(tokens))
            if first == len(tokens):
                tokens.extend(row.ids[begin:end])
                positions.extend(range(begin, end))
            parts.append((first, end - begin))
        documents.append(parts)
        places_K.extend(len(tokens) - row.length + place for place in row.places)
    return MicroBatch(
        indices=indices,
        ids_T=torch.tensor(tokens).to(device),
        positions_T=torch.tensor(positions).to(device),
        layout=layout_of(documents, device, side_by_side=side_by_side),
        places_K=torch.tensor(places_K, dtype=torch.long).to(device),
        targets_K=torch.tensor([row.ids[p + 1] for row in mine for p in row.places], dtype=torch.long).to(device),
        tokens_K=tuple((index, place + 1) for index, row in zip(indices, mine, strict=False) for place in row.places),
    )


def _common(prefixes: Sequence[tuple[int, ...]]) -> int:
    """How many first tokens all rows share, such as a system message; 0 if computing them once saves too little."""
    shortest, longest = min(prefixes), max(prefixes)
    equal = next((n for n, (a, b) in enumerate(zip(shortest, longest, strict=False)) if a != b), len(shortest))
    return equal if equal >= COMMON else 0
