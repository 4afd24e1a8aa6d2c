"""The embedded engine: any transformers causal LM, continuous batching, on CPU or one GPU.

Here is only the asynchronous side: who waits for what. The arithmetic is in torch_decoder.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rocstar.engines.torch_attention import use_slot_attention
from rocstar.engines.torch_decoder import SlotDecoder
from rocstar.engines.torch_rows import MAX_STOPS, Work
from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.types import Completion, EngineLoad, Finish, Sampling, Weights


class TorchEngine:
    """Engine over a transformers model held in this process.

    `rows` sequences decode at once, each at most `positions` tokens long. One named thread does the arithmetic."""

    def __init__(self, model: Any, *, rows: int, positions: int) -> None:
        use_slot_attention(model)
        self._model = model.eval().requires_grad_(False)
        self._decoder = SlotDecoder(model, rows=rows, positions=positions)
        self._capacity = rows * positions
        self._waiting: list[Work] = []
        self._closing: list[tuple[str, list[Work]]] = []  # with what had not begun by then: the id may come back
        self._aborting: list[str] = []
        self._driver: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch-engine")

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        """Raises ConfigError for a request that makes no sense, EngineUnavailable when the arithmetic fails."""
        self._refuse_impossible(token_ids, sampling)
        if len(token_ids) >= self._decoder.positions:
            return _nothing(self._decoder.version, Finish.LENGTH)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append(
            Work(
                request_id=request_id,
                session_id=session_id,
                token_ids=tuple(token_ids),
                sampling=sampling,
                owner=future,
            )
        )
        self._wake()
        try:
            return await future
        except asyncio.CancelledError:
            self._aborting.append(request_id)
            self._wake()
            raise

    def load(self) -> EngineLoad:
        return EngineLoad(
            capacity_tokens=self._capacity,
            used_tokens=self._decoder.used_tokens,
            running=self._decoder.active,
            waiting=len(self._waiting),
        )

    async def load_weights(self, weights: Weights) -> None:
        """Read model.safetensors of a Hugging Face folder into the model in place, between two decode steps."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._take, weights)

    async def abort(self, request_id: str) -> None:
        self._aborting.append(request_id)
        self._wake()

    async def close_session(self, session_id: str) -> None:
        self._closing.append((session_id, [work for work in self._waiting if work.session_id == session_id]))
        self._wake()

    async def close(self) -> None:
        """Stop the thread; waiters get EngineUnavailable."""
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        self._fail_all(EngineUnavailable("the engine was closed"))
        self._thread.shutdown()

    # -- the driver -------------------------------------------------------------------------------------------------

    def _refuse_impossible(self, token_ids: Sequence[int], sampling: Sampling) -> None:
        if not token_ids:
            raise ConfigError("a request must have at least one token to continue, got none")
        if sampling.max_new_tokens < 1:
            raise ConfigError(f"a request must allow at least one new token, got {sampling.max_new_tokens}")
        if len(sampling.stop_token_ids) > MAX_STOPS:
            raise ConfigError(f"at most {MAX_STOPS} stop tokens, got {len(sampling.stop_token_ids)}")

    def _take(self, weights: Weights) -> None:
        try:
            tensors = weights.tensors or load_file(
                f"{weights.folder}/model.safetensors", device=str(self._model.device)
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise EngineUnavailable(
                f"weights {weights.version} could not be read from {weights.folder}: {error}"
            ) from error
        own = {name: tensor.shape for name, tensor in self._model.state_dict().items()}
        tied = set(self._model._tied_weights_keys or ()) if self._model.config.tie_word_embeddings else set()
        given = {name: tensor.shape for name, tensor in tensors.items()}
        misfits = sorted(name for name in (own.keys() - tied) | given.keys() if own.get(name) != given.get(name))
        if misfits:
            raise EngineUnavailable(
                f"weights in {weights.folder} do not fit the model: {len(misfits)} tensors are missing, unknown or of "
                f"another shape, such as {misfits[0]}"
            )
        self._model.load_state_dict(tensors, strict=False)
        self._decoder.forget_all()
        self._decoder.version = weights.version

    def _wake(self) -> None:
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Consumes waiting requests, aborts and closed sessions; produces completions; waits for one decode step at
        a time on the engine thread; ends when nothing is left and is started again by the next request."""
        loop = asyncio.get_running_loop()
        while self._waiting or self._closing or self._aborting or self._decoder.active:
            try:
                self._leave()
                finished = await loop.run_in_executor(self._thread, self._advance)
            except RuntimeError as error:
                self._fail_all(EngineUnavailable(f"decoding failed: {error}"))
                return
            except Exception as error:  # a bug of ours: whoever waits must hear of it, or waits for ever
                self._fail_all(error)
                return
            for work, completion in finished:
                _resolve(work, completion)

    def _advance(self) -> list[tuple[Work, Completion]]:
        with torch.inference_mode():
            del self._waiting[: self._decoder.admit(tuple(self._waiting))]
        return self._decoder.step()

    def _leave(self) -> None:
        for request_id in self._aborting:
            ended = self._decoder.abort(request_id)
            if ended:
                _resolve(*ended)
            self._withdraw([work for work in self._waiting if work.request_id == request_id])
        self._aborting.clear()
        for session_id, unstarted in self._closing:
            work_or_none = self._decoder.close_session(session_id)
            if work_or_none:
                _resolve(work_or_none, _nothing(self._decoder.version))
            self._withdraw([work for work in unstarted if work in self._waiting])
        self._closing.clear()

    def _withdraw(self, works: Sequence[Work]) -> None:
        """End requests that have not begun."""
        for work in works:
            self._waiting.remove(work)
            _resolve(work, _nothing(self._decoder.version))

    def _fail_all(self, error: Exception) -> None:
        works = self._waiting + self._decoder.drop_everything()
        self._waiting = []
        for work in works:
            if not work.owner.done():
                work.owner.set_exception(error)


def _nothing(version: int, finish: Finish = Finish.ABORTED) -> Completion:
    return Completion(token_ids=(), logprobs=(), finish=finish, policy_versions=(version, version))


def _resolve(work: Work, completion: Completion) -> None:
    if not work.owner.done():
        work.owner.set_result(completion)
