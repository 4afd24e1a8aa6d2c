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

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rocstar.engines.torch_cache import SlotCache
from rocstar.engines.torch_rows import Work
from rocstar.engines.torch_sampling import draw, uniforms
from rocstar.engines.torch_table import RowTable
from rocstar.types import Completion, Finish

PREFILL_FROM = 16  # tokens to feed; below it, riding along in decode steps is cheaper than a pass of its own
MIN_BATCH = 4  # rows; CPU matrix products change their summation order below four rows
LENGTH_STEP = 16  # positions; cache reads are rounded up to it
PREFILL_TOKENS = 8192  # tokens in one padded prefill pass; bounds its memory


class SlotDecoder:
    """Decodes up to `rows` sequences at once with `model`, each at most `positions` tokens long."""

    def __init__(self, model: Any, *, rows: int, positions: int) -> None:
        self._model = model
        self._cache = SlotCache(model, max(rows, MIN_BATCH), positions)
        self._table = RowTable(self._cache, max(rows, MIN_BATCH), positions)
        self._columns = self._table.columns
        self._clock = 0
        self.positions = positions
        self.version = 0
        self.fed_tokens = 0

    @property
    def active(self) -> int:
        """Rows decoding now."""
        return self._table.active

    @property
    def used_tokens(self) -> int:
        """Positions held by rows, decoding or paused."""
        return self._table.used_tokens

    def forget_all(self) -> None:
        """Drop every cached key and value (new weights); active rows feed their tokens again."""
        self._table.forget_all()

    # -- entering and leaving -----------------------------------------------------------------------------------

    def admit(self, waiting: Sequence[Work]) -> int:
        """Start as many of `waiting` as fit, in order; returns how many that were."""
        started = 0
        for work in waiting:
            if not self._table.place(work, clock=self._clock, version=self.version):
                break
            started += 1
        self._prefill()
        return started

    def close_session(self, session_id: str) -> Work | None:
        """Free a session's row; returns its request if one was still running."""
        return self._table.close(session_id)

    def abort(self, request_id: str) -> tuple[Work, Completion] | None:
        """End one request early with what it has."""
        index = self._table.running(request_id)
        if index is None:
            return None
        completion = self._completion(index, Finish.ABORTED)
        work = self._table.pause(index, clock=self._clock)
        self._table.pause_finished()
        return work, completion

    def drop_everything(self) -> list[Work]:
        """Free all rows (after a failure); returns the requests that were running."""
        return self._table.clear()

    # -- feeding ------------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Feed long stretches of known tokens, all but the last; siblings copy from the first of them."""
        columns, table, fresh = self._columns, self._table, []
        copies: dict[int, list[int]] = {}
        for index in range(table.active):
            if columns.known[index] - columns.cached[index] <= PREFILL_FROM:
                continue
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
        positions = torch.from_numpy(np.where(valid, offsets, self.positions))
        length = _round_up(int(end.max()), self.positions)
        mask = torch.arange(length).view(1, 1, 1, -1) > positions.view(len(indices), 1, -1, 1)
        self._forward(torch.tensor(indices), torch.from_numpy(ids), positions, mask, length, keep=1)
        columns.cached[indices] = end

    def _forward(
        self,
        rows: torch.Tensor | None,
        ids_NT: torch.Tensor,
        positions_NT: torch.Tensor,
        hidden_N1TL: torch.Tensor,
        length: int,
        keep: int,
    ) -> torch.Tensor:
        device = self._cache.store.device
        self.fed_tokens += ids_NT.numel()
        positions = positions_NT.to(device)
        self._cache.aim(None if rows is None else rows.to(device), positions, length)
        mask = torch.zeros(hidden_N1TL.shape, dtype=self._cache.store.dtype, device=device)
        mask.masked_fill_(hidden_N1TL.to(device), torch.finfo(mask.dtype).min)
        logits: torch.Tensor = self._model(
            input_ids=ids_NT.to(device),
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=keep,
        ).logits
        return logits

    # -- one step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[tuple[Work, Completion]]:
        """Feed one token per active row, sample where due; returns what finished."""
        if not self.active:
            return []
        self._clock += 1
        columns, count = self._columns, self.active
        batch = max(count, MIN_BATCH)
        at = columns.cached[:batch].copy()
        at[count:] = self.positions  # filler rows write to scratch
        length = _round_up(int(at[:count].max()) + 1, self.positions)
        positions = torch.from_numpy(at).unsqueeze(1)
        ids = torch.from_numpy(columns.ids[np.arange(batch), at]).unsqueeze(1)
        mask = torch.arange(length).view(1, 1, 1, -1) > positions.view(batch, 1, 1, 1)
        logits = self._forward(None, ids, positions, mask, length, keep=1)[:, -1]
        columns.cached[:count] += 1
        due = np.flatnonzero(columns.cached[:count] == columns.known[:count])
        return self._sample(logits, due) if len(due) else []

    def _sample(self, logits: torch.Tensor, due: np.ndarray) -> list[tuple[Work, Completion]]:
        columns = self._columns
        noise = uniforms(columns.seeds[due], columns.known[due] - columns.start[due])
        chosen = logits if len(due) == logits.shape[0] else logits[torch.from_numpy(due).to(logits.device)]
        tokens, logprobs = draw(chosen, columns.temperatures[due], columns.top_ps[due], columns.top_ks[due], noise)
        ids, values = tokens.cpu().numpy(), logprobs.float().cpu().numpy()
        columns.ids[due, columns.known[due]] = ids
        columns.logprobs[due, columns.known[due]] = values
        columns.known[due] += 1
        stopped = (columns.stops[due] == ids[:, None]).any(1)
        ended = np.flatnonzero(stopped | (columns.known[due] >= columns.limit[due]))
        finished = []
        for place in ended:
            index = int(due[place])
            completion = self._completion(index, Finish.STOP if stopped[place] else Finish.LENGTH)
            finished.append((self._table.pause(index, clock=self._clock), completion))
        if finished:
            self._table.pause_finished()
        return finished

    def _completion(self, index: int, finish: Finish) -> Completion:
        row, _ = self._table.at_work(index)
        begin, end = int(self._columns.start[index]), int(self._columns.known[index])
        return Completion(
            token_ids=tuple(self._columns.ids[index, begin:end].tolist()),
            logprobs=tuple(self._columns.logprobs[index, begin:end].tolist()),
            finish=finish,
            policy_versions=(row.first_version, self.version),
        )


def _round_up(length: int, most: int) -> int:
    return min(-(-length // LENGTH_STEP) * LENGTH_STEP, most)
