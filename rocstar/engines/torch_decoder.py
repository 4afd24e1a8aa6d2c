"""The decode loop of the torch engine, one step at a time; synchronous, no asyncio, no clock.

A step is one forward pass over a flat list of tokens: one of each sequence that has sampled one, and several of those
that have more to feed (a prompt, a tool's reply). A sequence whose known tokens are all fed samples its next one.

    known  P0 P1 P2 | A0        the sequence knows four tokens,
    cached P0 P1 P2             three have keys and values; this step feeds A0, then samples A1

A long prompt is fed in stretches of PREFILL_TOKENS and delays no other sequence. On CPU results are bit-identical
however a prompt is cut and whichever sequences run beside it, so they do not depend on timing. A token is sampled under
temperature, top-k and top-p by one uniform number, which depends only on the token's identity.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from rocstar.engines.pages import PAGE, PagePool
from rocstar.engines.torch_cache import Aim, PagedCache
from rocstar.engines.torch_compact import filled
from rocstar.engines.torch_forward import drop_weights, forward_of, take_weights
from rocstar.engines.torch_states import MIN_ROWS
from rocstar.engines.torch_table import Ints, SequenceTable, Work
from rocstar.errors import EngineUnavailable
from rocstar.support.processes import give_memory_back
from rocstar.types import Completion, EngineLoad, Finish, Weights, spans_of

PREFILL_TOKENS = 256  # of prompts and replies in one step, beside one token of each sequence
GPU_PREFILL_TOKENS = 1024
BLOCK = 32  # tokens whose probabilities are summed at once
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Floats = npt.NDArray[np.float64]

Ended = tuple[Work, Completion | EngineUnavailable]


class PagedDecoder:
    """Decodes up to `rows` sequences at once with `model`, each at most `positions` tokens long, in `pages` pages.

    Only ids below `vocab_size` are drawn (all when None): an embedding may be larger than its tokenizer. Every method
    belongs to the one thread that calls `step`."""

    def __init__(self, model: Any, *, rows: int, positions: int, pages: int, vocab_size: int | None = None) -> None:
        self._model = model
        self._cache = PagedCache(model, pages)
        self._pages = PagePool(pages)
        self._forward = forward_of(model, self._cache, positions)
        self._on_gpu = self._cache.keys.is_cuda
        self._recurrent = self._forward.is_recurrent
        self._table = SequenceTable(
            self._cache.copy_page, self._pages, rows=rows, positions=positions, recurrent=self._recurrent
        )
        self._vocab_size = model.get_input_embeddings().num_embeddings if vocab_size is None else vocab_size
        self._ended: list[Ended] = []
        self._asleep = False
        self.positions = positions
        self.version = 0
        self.fed_tokens = 0
        """Tokens that have gone through the model."""
        self.recomputed_tokens = 0
        """Those of them fed again because their pages were evicted."""
        self.produced_tokens = 0

    @property
    def active(self) -> int:
        """Sequences that decode now."""
        return len(self._table.running)

    @property
    def waiting(self) -> int:
        """Sequences that could decode but do not yet."""
        return 0 if self._asleep else len(self._table.waiting)

    def load(self) -> EngineLoad:
        """Pages count as used if a sequence holds them, decoding or not."""
        return EngineLoad(
            capacity_tokens=self._pages.count * PAGE,
            used_tokens=self._pages.used * PAGE,
            running=self.active,
            waiting=self.waiting,
            policy_version=self.version,
            produced_tokens=self.produced_tokens,
            recomputed_tokens=self.recomputed_tokens,
            evictions=self._table.evictions,
            keeps_idle=True,
        )

    def take(self, weights: Weights) -> None:
        """Load new weights; decoding sequences feed their tokens again. Raises EngineUnavailable."""
        self._forward.renew(take_weights(self._model, weights))
        give_memory_back()  # the old weights, which another thread may have made
        self._table.forget_all()
        self._cache.wake()
        self.version, self._asleep = weights.version, False
        self._admit()

    def sleep(self) -> None:
        """Free the memory of weights and cache, and start nothing until new weights are loaded."""
        self._asleep = True
        self._table.forget_all()
        self._forward.sleep()
        drop_weights(self._model)
        self._cache.sleep()

    # -- entering and leaving -----------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Start a request, or queue it behind its session's running one or for room."""
        self._table.submit(work)
        self._admit()

    def _admit(self) -> None:
        if not self._asleep:
            self._table.admit()

    def abort(self, request_id: str) -> None:
        """End one request early with its tokens so far."""
        work = self._table.abort(request_id)
        if work is not None:
            self._end([work], Finish.ABORTED)

    def close_session(self, session_id: str) -> None:
        """End a session's requests and free its pages."""
        self._end(self._table.close(session_id), Finish.ABORTED)
        if not self._pages.used:
            self._cache.release()

    def evict(self) -> None:
        """Give the pages of the newest session that does not decode to waiting requests."""
        self._table.evict()
        self._admit()

    def drop_everything(self) -> list[Work]:
        """Free all pages (after a failure); returns the requests that had not ended. `clear` has to follow."""
        return self._table.clear()

    def clear(self) -> None:
        """Zero the cache. Raises RuntimeError if the GPU has failed for good."""
        self._cache.clear()

    def _end(self, works: Iterable[Work], finish: Finish) -> None:
        for work in works:
            spans = spans_of(work.versions)
            written = Completion(token_ids=work.written, logprobs=work.logprobs, finish=finish, version_spans=spans)
            self._ended.append((work, written))
        self._admit()

    # -- one step -------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Ended]:
        """Feed and sample; returns the requests that ended since the last step."""
        if self.active:
            rows, counts = self._table.plan(GPU_PREFILL_TOKENS if self._on_gpu else PREFILL_TOKENS)
            if len(rows):
                self._advance(rows, counts)
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, rows: Ints, counts: Ints) -> None:
        """Feed `counts` tokens of each of `rows`, and sample where all are fed."""
        columns = self._table.columns
        ends = np.cumsum(counts)
        due = columns.cached[rows] + counts == columns.known[rows]
        noise = uniforms(columns.seeds[rows], columns.known[rows] - columns.start[rows])[due]
        noise_N = torch.from_numpy(noise).to(self._cache.keys.device)  # now: a copy waits for the GPU's queued work
        logits = self._feed(rows, counts, ends[due] - 1)
        again = np.clip(columns.lost[rows] - columns.cached[rows], 0, counts)
        self.recomputed_tokens += int(again.sum())
        self.fed_tokens += int(ends[-1])
        columns.cached[rows] += counts
        if due.any():
            self._sample(logits[: int(due.sum())], rows[due], noise_N)

    def _feed(self, rows: Ints, counts: Ints, sampled: Ints) -> torch.Tensor:
        """The logits of the tokens at `wanted` in the list, which come first, and of fillers."""
        columns, device = self._table.columns, self._cache.keys.device
        rows_T = np.repeat(rows, counts)
        offsets = np.arange(len(rows_T)) - np.repeat(np.cumsum(counts) - counts, counts)
        positions_T = columns.cached[rows_T] + offsets
        ids_T = columns.ids[rows_T, positions_T].astype(np.int64)
        pages_T = columns.tables[rows_T, positions_T // PAGE].astype(np.int64)
        lacking = self._filled(len(rows_T)) - len(rows_T)
        if lacking > 0:  # fillers write to page 0, and read the same pages as the last token
            rows_T, positions_T, ids_T = (np.pad(each, (0, lacking), "edge") for each in (rows_T, positions_T, ids_T))
            pages_T = np.pad(pages_T, (0, lacking))
        begins = None
        if self._recurrent:
            columns.begins[rows, columns.cached[rows]] = True
            begins = torch.from_numpy(columns.begins[rows_T, positions_T])
        sampled = np.pad(sampled, (0, self._filled(len(sampled)) - len(sampled)))
        arrays = rows_T, positions_T, pages_T, columns.tables
        row, position, page, tables = (torch.from_numpy(each).to(device) for each in arrays)
        self._cache.aim = Aim(row, position, page, tables, begins)
        return self._forward(torch.from_numpy(ids_T).to(device), torch.from_numpy(sampled).to(device))

    def _filled(self, count: int) -> int:
        return filled(count) if self._on_gpu else max(count, MIN_ROWS)

    def _sample(self, logits: torch.Tensor, rows: Ints, noise_N: torch.Tensor) -> None:
        columns = self._table.columns
        logits[:, self._vocab_size :] = -torch.inf
        known = columns.known[rows]
        tokens, logprobs = draw(logits, columns.temperatures[rows], columns.top_ps[rows], columns.top_ks[rows], noise_N)
        ids, values = tokens.cpu().numpy(), logprobs.cpu().numpy()
        if not (finite := np.isfinite(values)).all():
            self._fail(rows[~finite].tolist())
            rows, known, ids, values = rows[finite], known[finite], ids[finite], values[finite]
        columns.ids[rows, known], columns.logprobs[rows, known] = ids, values
        columns.versions[rows, known] = self.version
        columns.known[rows] += 1
        self.produced_tokens += len(rows)
        stopped = (columns.stops[rows] == ids[:, None]).any(1)
        over = stopped | (columns.known[rows] >= columns.limit[rows])
        if not over.any():
            return
        by_stop = dict(zip(rows[over].tolist(), stopped[over].tolist(), strict=True))
        for sequence in [sequence for sequence in self._table.running if sequence.row in by_stop]:
            assert sequence.row is not None
            self._end([self._table.end(sequence)], Finish.STOP if by_stop[sequence.row] else Finish.LENGTH)

    def _fail(self, rows: list[int]) -> None:
        """End the sessions of these rows and drop their cache, which may hold nan too."""
        error = EngineUnavailable(f"the weights of version {self.version} give logprobs that are not finite")
        for sequence in [sequence for sequence in self._table.running if sequence.row in rows]:
            pages = tuple(sequence.pages)
            self._ended += [(work, error) for work in self._table.close(sequence.session_id)]
            self._cache.clear([0, *(page.number for page in pages if not page.holders)])
        self._admit()


# -- sampling ----------------------------------------------------------------------------------------------------------


def uniforms(seeds: Ints, counters: Ints) -> Floats:
    """One number in [0, 1) for each (seed, counter): [n], [n] -> [n]. Source: the SplitMix64 finaliser."""
    with np.errstate(over="ignore"):
        state = seeds.astype(np.uint64) + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        state = (state ^ (state >> np.uint64(30))) * _MIX_1
        state = (state ^ (state >> np.uint64(27))) * _MIX_2
        state = state ^ (state >> np.uint64(31))
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def draw(
    logits_NV: torch.Tensor, temperatures: Floats, top_ps: Floats, top_ks: Ints, noise_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample one token per row; noise: from `uniforms`, on the device of the logits.

    Returns token ids [N] and their natural-log probability [N] after temperature and before truncation, which a learner
    can recompute. A row of temperature 0 takes the most likely token and reports its probability at temperature 1."""
    greedy = temperatures == 0
    if not np.isin(temperatures, (0, 1)).all():
        divisor = torch.from_numpy(np.where(greedy, 1.0, temperatures)).to(logits_NV.device, torch.float32)
        logits_NV = logits_NV.float() / divisor.unsqueeze(1)
    full = torch.softmax(logits_NV, dim=-1, dtype=torch.float32)
    weights_NV, cut = full, ~greedy & ((top_ps < 1) | (top_ks > 0))
    if cut.any():  # only the rows that use it: a row must not depend on its neighbours' settings
        rows = torch.from_numpy(np.flatnonzero(cut)).to(full.device)
        weights_NV = full.clone()
        weights_NV[rows] = _truncate(full[rows], top_ps[cut], top_ks[cut])
    tokens = _inverse(weights_NV, noise_N)
    if greedy.any():
        tokens = torch.where(torch.from_numpy(greedy).to(full.device), full.argmax(-1), tokens)
    return tokens, full.gather(1, tokens.unsqueeze(1)).squeeze(1).log()


def _inverse(weights_NV: torch.Tensor, noise_N: torch.Tensor) -> torch.Tensor:
    """The token at which the running sum of a row first exceeds its share `noise` of the whole: [N].

    First the block of BLOCK tokens, then the token in it, since a running sum is slow where a plain sum is fast."""
    count, size = weights_NV.shape
    blocks = F.pad(weights_NV, (0, -size % BLOCK)).view(count, -1, BLOCK)
    ends = blocks.sum(-1).double().cumsum(-1)
    target = noise_N.unsqueeze(1) * ends[:, -1:]
    block = _first_above(ends, target)
    before = F.pad(ends, (1, 0)).gather(1, block)
    inside = blocks[torch.arange(count, device=blocks.device), block.squeeze(1)].double().cumsum(-1)
    return (block * BLOCK + _first_above(inside, target - before)).squeeze(1)


def _first_above(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[N, 1] the first place of each row that exceeds its target; if rounding leaves none, the last with weight."""
    last = (ends < ends[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(ends, target, right=True), last)


def _truncate(full_NV: torch.Tensor, top_ps: Floats, top_ks: Ints) -> torch.Tensor:
    """The k likeliest tokens and of these the smallest set of mass p; the rest is zero."""
    ordered, order = full_NV.sort(dim=-1, descending=True)
    size = full_NV.shape[1]
    ranks = torch.arange(size, device=full_NV.device)
    ks = torch.from_numpy(np.where(top_ks > 0, top_ks, size)).to(full_NV.device).unsqueeze(1)
    ordered = ordered.masked_fill(ranks >= ks, 0.0)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    mass_before = ordered.cumsum(-1) - ordered
    ps = torch.from_numpy(np.where(top_ps < 1, top_ps, np.inf)).to(ordered).unsqueeze(1)
    ordered = ordered.masked_fill((mass_before >= ps) & (ranks > 0), 0.0)
    return torch.empty_like(ordered).scatter_(1, order, ordered)
