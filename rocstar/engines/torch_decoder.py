"""The decode loop of the torch engine, one step at a time; synchronous, no asyncio, no clock.

Every active row feeds exactly one token a step: a token that is already known (the end of a prompt, a short tool
reply) or the one sampled in the step before. A row that has fed all it knows gets its next token sampled. So
prompts, replies and sampling share one batch, and nobody waits for anybody.

    known  P0 P1 P2 | A0        the row knows four tokens,
    cached P0 P1 P2             three have keys and values; this step feeds A0, then samples A1

Long unknown stretches (prompts, long replies) are fed by one padded prefill up to their last token. Siblings copy
the cache of the first of them. Which way a token is fed depends only on its own sequence, and every way gives the
same bits on CPU, so results do not depend on timing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rocstar.engines.torch_cache import SlotCache
from rocstar.engines.torch_forward import forward_of
from rocstar.engines.torch_rows import Work
from rocstar.engines.torch_sampling import draw, uniforms
from rocstar.engines.torch_table import RowTable
from rocstar.engines.torch_weights import take_weights
from rocstar.types import Completion, Finish, Weights, spans_of

PREFILL_FROM = 16  # tokens to feed; below it, riding along in decode steps is cheaper than a pass of its own
MIN_BATCH = 4  # rows; CPU matrix products change their summation order below four rows
LENGTH_STEP = 16  # positions; cache reads are rounded up to it
PREFILL_TOKENS = 8192  # tokens in one padded prefill pass; bounds its memory

Ended = tuple[Work, Completion]


class SlotDecoder:
    """Decodes up to `rows` sequences at once with `model`, each at most `positions` tokens long.

    Only ids below `vocab_size` are drawn (all when None): an embedding may be larger than its tokenizer. Every method
    belongs to the one thread that calls `step`."""

    def __init__(self, model: Any, *, rows: int, positions: int, vocab_size: int | None = None) -> None:
        self._model = model
        self._cache = SlotCache(model, max(rows, MIN_BATCH), positions)
        self._forward = forward_of(model, self._cache)
        self._table = RowTable(self._cache, rows, positions)
        self._columns = self._table.columns
        self._places = torch.arange(positions, device=model.device)
        self._vocab_size = model.get_input_embeddings().num_embeddings if vocab_size is None else vocab_size
        self._waiting: deque[Work] = deque()
        self._ended: list[Ended] = []
        self._clock = 0
        self.positions = positions
        self.version = 0
        self.fed_tokens = 0
        self.produced_tokens = 0

    @property
    def active(self) -> int:
        """Rows decoding now."""
        return self._table.active

    @property
    def waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        """Positions held by rows, decoding or paused."""
        return self._table.used_tokens

    def take(self, weights: Weights) -> None:
        """Go on with new weights; active rows feed their tokens again. Raises EngineUnavailable."""
        take_weights(self._model, weights)
        self._table.forget_all()
        self.version = weights.version

    # -- entering and leaving -----------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Start a request, or let it wait: behind its session's running one, or for a free row."""
        if self._table.knows(work.session_id):
            self._table.place(work, clock=self._clock)
        else:
            self._waiting.append(work)
            self._admit()

    def abort(self, request_id: str) -> None:
        """End one request early with what it has."""
        self._withdraw(lambda work: work.request_id == request_id)
        index = self._table.running(request_id)
        if index is not None:
            self._end(index, Finish.ABORTED)
            self._rearrange()

    def close_session(self, session_id: str) -> None:
        """End a session's requests and free its row."""
        self._withdraw(lambda work: work.session_id == session_id)
        self._drop(self._table.close(session_id))
        self._admit()

    def evict(self) -> None:
        """Give the row paused longest to whoever waits; its session feeds its tokens again when it comes back."""
        self._table.evict()
        self._admit()

    def drop_everything(self) -> list[Work]:
        """Free all rows (after a failure); returns the requests that had not ended."""
        works = [*self._table.clear(), *self._waiting]
        self._waiting.clear()
        self._cache.clear()
        return works

    def _admit(self) -> None:
        while self._waiting and self._table.place(self._waiting[0], clock=self._clock):
            self._waiting.popleft()

    def _withdraw(self, meant: Callable[[Work], bool]) -> None:
        """End requests that have not begun."""
        self._drop([work for work in self._waiting if meant(work)])
        self._waiting = deque(work for work in self._waiting if not meant(work))
        for row in self._table.rows:
            if row is not None and row.behind:
                self._drop([work for work in row.behind if meant(work)])
                row.behind = [work for work in row.behind if not meant(work)]

    def _drop(self, works: Sequence[Work]) -> None:
        self._ended += [(work, nothing(Finish.ABORTED)) for work in works]

    def _end(self, index: int, finish: Finish) -> None:
        completion = self._completion(index, finish)
        self._ended.append((self._table.pause(index, clock=self._clock), completion))

    def _rearrange(self) -> None:
        """After some requests ended: the next of their sessions begin."""
        self._table.pause_finished()
        for row in [row for row in self._table.rows[self.active :] if row is not None and row.behind]:
            self._table.place(row.behind.pop(0), clock=self._clock)

    # -- feeding ------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Feed long stretches of known tokens, all but the last; siblings copy from the first of them."""
        columns, table, fresh = self._columns, self._table, []
        copies: dict[int, list[int]] = {}
        lacking = columns.known[: table.active] - columns.cached[: table.active]
        for index in np.flatnonzero(lacking > PREFILL_FROM).tolist():
            row, _ = table.at_work(index)
            opening = tuple(columns.ids[index, : columns.known[index] - 1].tolist())
            donor = table.openings.get(opening)
            if donor is not None:
                copies.setdefault(table.rows.index(donor), []).append(index)
                continue
            fresh.append(index)
            if not row.opening:
                row.opening = opening
                table.openings[opening] = row
        for indices in self._prefill_batches(fresh):
            self._prefill_rows(indices)
        for source, targets in copies.items():
            length = int(columns.known[targets[0]]) - 1
            self._cache.copy_prefix(source, targets, length)
            columns.cached[targets] = length

    def _prefill_batches(self, indices: list[int]) -> list[list[int]]:
        columns = self._columns
        batches: list[list[int]] = []
        for index in sorted(indices, key=lambda i: columns.known[i] - columns.cached[i]):
            longest = int(columns.known[index] - columns.cached[index])
            if not batches or (len(batches[-1]) + 1) * longest > PREFILL_TOKENS:
                batches.append([])
            batches[-1].append(index)
        return batches

    def _prefill_rows(self, indices: list[int]) -> None:
        columns = self._columns
        begin, end = columns.cached[indices], columns.known[indices] - 1
        width = int((end - begin).max())
        offsets = begin[:, None] + np.arange(width)[None, :]
        valid = offsets < end[:, None]
        ids = np.where(valid, columns.ids[np.array(indices)[:, None], np.minimum(offsets, self.positions)], 0)
        length = _round_up(int(end.max()), self.positions)
        self._feed(torch.tensor(indices), ids, np.where(valid, offsets, self.positions), length)
        columns.cached[indices] = end

    def _feed(
        self, rows: torch.Tensor | None, ids_NT: np.ndarray, positions_NT: np.ndarray, length: int
    ) -> torch.Tensor | None:
        """Feed tokens to `rows`, or one to each of the first; the latter gives logits [N, V]."""
        device, dtype = self._cache.keys.device, self._cache.keys.dtype
        self.fed_tokens += ids_NT.size
        positions = torch.from_numpy(positions_NT).to(device)
        self._cache.aim(None if rows is None else rows.to(device), positions, length)
        later = self._places[:length] > positions.unsqueeze(-1).unsqueeze(1)
        mask = torch.zeros(later.shape, dtype=dtype, device=device).masked_fill_(later, torch.finfo(dtype).min)
        return self._forward(torch.from_numpy(ids_NT).to(device), positions, mask, rows is None)

    # -- one step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Ended]:
        """Feed one token per active row, sample where due; returns the requests that ended since the last step."""
        if self.active:
            self._prefill()
            self._decode()
        ended, self._ended = self._ended, []
        return ended

    def _decode(self) -> None:
        self._clock += 1
        columns, count = self._columns, self.active
        batch = max(count, MIN_BATCH)
        at = columns.cached[:batch].copy()
        at[count:] = self.positions  # filler rows write to scratch
        length = _round_up(int(at[:count].max()) + 1, self.positions)
        logits = self._feed(None, columns.ids[np.arange(batch), at][:, None], at[:, None], length)
        assert logits is not None
        columns.cached[:count] += 1
        due = np.flatnonzero(columns.cached[:count] == columns.known[:count])
        if len(due):
            self._sample(logits, due)

    def _sample(self, logits: torch.Tensor, due: np.ndarray) -> None:
        columns = self._columns
        logits[:, self._vocab_size :] = -torch.inf
        noise = uniforms(columns.seeds[due], columns.known[due] - columns.start[due])
        chosen = logits if len(due) == logits.shape[0] else logits[torch.from_numpy(due).to(logits.device)]
        tokens, logprobs = draw(chosen, columns.temperatures[due], columns.top_ps[due], columns.top_ks[due], noise)
        ids, values = tokens.cpu().numpy(), logprobs.cpu().numpy()
        if not np.isfinite(values).all():
            raise RuntimeError(f"the weights of version {self.version} give logprobs that are not finite")
        columns.ids[due, columns.known[due]] = ids
        columns.logprobs[due, columns.known[due]] = values
        columns.versions[due, columns.known[due]] = self.version
        columns.known[due] += 1
        self.produced_tokens += len(due)
        stopped = (columns.stops[due] == ids[:, None]).any(1)
        ended = np.flatnonzero(stopped | (columns.known[due] >= columns.limit[due]))
        for place in ended.tolist():
            self._end(int(due[place]), Finish.STOP if stopped[place] else Finish.LENGTH)
        if len(ended):
            self._rearrange()
            self._admit()

    def _completion(self, index: int, finish: Finish) -> Completion:
        begin, end = int(self._columns.start[index]), int(self._columns.known[index])
        return Completion(
            token_ids=tuple(self._columns.ids[index, begin:end].tolist()),
            logprobs=tuple(self._columns.logprobs[index, begin:end].tolist()),
            finish=finish,
            version_spans=spans_of(self._columns.versions[index, begin:end].tolist()),
        )


def nothing(finish: Finish) -> Completion:
    """A completion without tokens."""
    return Completion(token_ids=(), logprobs=(), finish=finish)


def _round_up(length: int, most: int) -> int:
    return min(-(-length // LENGTH_STEP) * LENGTH_STEP, most)
