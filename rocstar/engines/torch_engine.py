"""The embedded engine: any transformers causal LM, continuous batching, on CPU or one GPU.

Event loops submit requests, one thread decodes. The arithmetic is in torch_decoder.py.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from safetensors import SafetensorError

from rocstar.engines.base import refuse_impossible
from rocstar.engines.pages import PAGE, kv_pages
from rocstar.engines.process import EngineSettings, run
from rocstar.engines.torch_cache import refuse_what_does_not_fit
from rocstar.engines.torch_decoder import PagedDecoder
from rocstar.engines.torch_forward import lowered
from rocstar.engines.torch_table import Work
from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.support.weights import refuse_misfits
from rocstar.types import Completion, EngineLoad, Finish, Sampling, Weights, without_tokens

PATIENCE_SECONDS = 1.0  # without decoding, before the cache of a session goes to a waiting request


class TorchEngine:
    """Engine over a transformers model held in this process.

    At most `rows` sequences decode at once, each at most `positions` tokens long, over keys and values of `kv_tokens`
    tokens in all (None: enough for `rows` such sequences), rounded up to whole pages; ids from `vocab_size` on are
    never drawn. A session keeps its pages between its requests; when they run out the newest is evicted
    (torch_table.py), and when nothing has decoded for PATIENCE_SECONDS a waiting request gets the pages of a session
    that waits for its tool. Raises ConfigError when keys and values of that size do not fit into the available memory,
    or one sequence does not fit into them."""

    def __init__(
        self, model: Any, *, rows: int, positions: int, kv_tokens: int | None = None, vocab_size: int | None = None
    ) -> None:
        self._embedded = model.get_input_embeddings().num_embeddings
        if vocab_size is not None and vocab_size > self._embedded:
            raise ConfigError(
                f"the tokenizer has {vocab_size} ids and the model embeds only {self._embedded}, so it belongs to "
                "another model; put the model's own tokenizer into its folder"
            )
        pages = kv_pages(kv_tokens, rows, positions)
        refuse_what_does_not_fit(model, pages * PAGE)
        lowered(model, model.dtype).eval().requires_grad_(False)
        self._device = model.device
        with self._on_device():
            self._decoder = PagedDecoder(model, rows=rows, positions=positions, pages=pages, vocab_size=vocab_size)
        self._open = True
        self._asked: set[asyncio.Future[Completion]] = set()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._load = self._decoder.load()
        self._last_active = time.monotonic()
        self._thread = threading.Thread(target=self._decode, name="torch-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        """Raises ConfigError for an invalid request, EngineUnavailable when the arithmetic fails."""
        self._refuse_when_closed()
        refuse_impossible(token_ids, sampling, self._embedded)
        if len(token_ids) >= self._decoder.positions:
            return without_tokens(Finish.LENGTH)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        work = Work(
            request_id=request_id,
            session_id=session_id,
            token_ids=tuple(token_ids),
            sampling=sampling,
            owner=future,
        )
        self._asked.add(future)
        self._inbox.put(partial(self._decoder.submit, work))
        try:
            return await future
        except asyncio.CancelledError:
            self._inbox.put(partial(self._decoder.abort, request_id))
            raise
        finally:
            self._asked.discard(future)

    def load(self) -> EngineLoad:
        return replace(self._load, waiting=max(0, len(self._asked) - self._load.running))

    async def load_weights(self, weights: Weights) -> None:
        """Copy weights into the model in place, between two decode steps."""
        await self._carried_out(partial(self._decoder.take, weights))

    async def sleep(self) -> None:
        """Free the memory of weights and cache until `load_weights`."""
        await self._carried_out(self._decoder.sleep)

    async def _carried_out(self, command: Callable[[], None]) -> None:
        self._refuse_when_closed()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._inbox.put(partial(self._carry_out, command, done))
        await done

    async def close_session(self, session_id: str) -> None:
        self._inbox.put(partial(self._decoder.close_session, session_id))

    async def close(self) -> None:
        """Stop the thread; waiters get EngineUnavailable."""
        self._open = False
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Selects the GPU for this thread's kernels and graphs; the default is the first one."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _refuse_when_closed(self) -> None:
        if not self._open:
            raise EngineUnavailable("the engine was closed")

    # -- the engine thread: nothing below is called from elsewhere --------------------------------------------------

    def _decode(self) -> None:
        with self._on_device():
            self._run()

    def _run(self) -> None:
        """Consumes the inbox; produces completions and `_load`; waits for the inbox while nothing decodes; ends when
        the engine is closed."""
        while True:
            try:
                if not self._open or not self._obey():
                    break
                ended = self._decoder.step()
                self._load = self._decoder.load()
                for work, found in ended:
                    failed = isinstance(found, EngineUnavailable)
                    _tell(work.owner, work.owner.set_exception if failed else work.owner.set_result, found)
            except RuntimeError as error:
                self._fail_all(EngineUnavailable(f"decoding failed: {error}"))
            except Exception as error:  # a bug of ours: waiting callers must get the error, or wait without end
                self._fail_all(error)
        self._fail_all(EngineUnavailable("the engine was closed"))

    def _obey(self) -> bool:
        """Run queued commands; wait for one while nothing decodes. Returns False when the engine ends."""
        idle = not self._decoder.active
        if not idle:
            self._last_active = time.monotonic()
        try:
            command = self._inbox.get(idle, max(0.0, self._patience()) if self._decoder.waiting else None)
            while command is not None:
                command()
                command = self._inbox.get(block=False)
            return False
        except queue.Empty:
            if self._decoder.waiting and not self._decoder.active and self._patience() <= 0:
                self._decoder.evict()
            return True

    def _patience(self) -> float:
        return self._last_active + PATIENCE_SECONDS - time.monotonic()

    def _carry_out(self, command: Callable[[], None], done: asyncio.Future[None]) -> None:
        try:
            command()
        except Exception as error:  # only the caller needs to know
            _tell(done, done.set_exception, error)
        else:
            self._load = self._decoder.load()
            _tell(done, done.set_result, None)

    def _fail_all(self, error: Exception) -> None:
        works = self._decoder.drop_everything()
        self._load = self._decoder.load()
        for work in works:
            _tell(work.owner, work.owner.set_exception, error)
        try:
            self._decoder.clear()
        except RuntimeError:  # the GPU has failed for good: no caller may wait for this engine any more
            self._open = False


def _tell(future: asyncio.Future[Any], setter: Callable[[Any], None], value: Any) -> None:
    """Settle a future of an event loop from the engine thread."""

    def settle() -> None:
        if not future.done():
            setter(value)

    with suppress(RuntimeError):  # the loop has ended, and the waiting caller with it
        future.get_loop().call_soon_threadsafe(settle)


# -- in a process of its own: the module that process.py starts ----------------------------------------------------


async def opened(settings: EngineSettings) -> TorchEngine:
    """Raises ConfigError if it does not fit into memory, EngineUnavailable if the folder cannot be read."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(settings.threads)
    try:
        config = AutoConfig.from_pretrained(settings.folder, trust_remote_code=False)
        config._attn_implementation = None  # a folder may name a kernel of the hub, which is code
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            settings.folder,
            config=config,
            dtype=getattr(torch, settings.dtype),
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with their names
        )
        refuse_misfits(settings.folder, loading_info)
    except (ConfigError, OSError, ValueError, SafetensorError) as error:
        raise EngineUnavailable(f"the model in {settings.folder} could not be loaded: {error}") from error
    model = model.to(settings.device)  # with GPUs, the first visible one
    engine = TorchEngine(
        model,
        rows=settings.rows,
        positions=settings.positions,
        kv_tokens=settings.kv_tokens,
        vocab_size=settings.vocab_size,
    )
    for parameter in model.parameters():
        if not parameter.untyped_storage().resizable():  # one view of a mapped file keeps the whole file in memory
            parameter.data = parameter.data.clone()
    if settings.version:  # else it has the folder's weights
        await engine.load_weights(Weights(version=settings.version, folder=settings.folder))
    return engine


main = partial(run, opened)
"""Entry point of the process."""
