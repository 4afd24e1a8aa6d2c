"""An engine over HTTP: one vLLM server, in an environment or on a machine of its own.

This file coordinates requests and the exchange of weights; the HTTP calls are in vllm_client.py, our extension of the
workers in inside_vllm/, starting a server in vllm_server.py (by hand: docs/vllm.md).

The server gets at most as many requests as it can decode at once, minus one row, which is reserved for canary rows:
otherwise they, and all requests that decode meanwhile, would wait for the end of a completion.

It differs from the torch engine in three ways. The same request may get another completion (`deterministic`): on GPUs
it carries its seed, but the rest of the batch changes the rounding of its logits, and on CPUs vLLM 0.32 crashes on a
request with a seed, so none is sent. top_p and top_k are refused, because vLLM reports log-probabilities either before
the temperature or after truncation. And new weights come from a folder or a sender, with canary rows that prove they
arrived."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from rocstar.engines.base import NOTHING, refuse_impossible, with_earlier
from rocstar.engines.sending import CallWorkers, SendWeights
from rocstar.engines.vllm_client import PATIENCE_SECONDS, VllmClient, VllmMetrics
from rocstar.engines.vllm_server import (
    CANARY_ROWS,
    LOGPROBS_MODE,
    SCHEDULING,
    RunningServer,
    StartServer,
    VllmServer,
    VllmSettings,
)
from rocstar.errors import ConfigError, ContractBroken, EngineUnavailable
from rocstar.protocols import NewestWeights
from rocstar.types import Canary, Completion, EngineLoad, Finish, Sampling, Weights, gaps, without_tokens

LOOK_SECONDS = 0.1  # between two reads of /metrics while requests run; one costs the server about 5 ms
IDLE_SECONDS = 1.0  # while none run
CONFIG = "config.json"
ABORT_SECONDS = 0.2  # between two attempts to abort a request that the server may not know yet
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""In nats, for one token of a canary row, where the learner computes in fp32. A server in fp32 differs by 2e-6."""
NOISES, LEAST_NOISE = 2.5, 2e-3
"""Times the rounding noise measured on this model, and the least such noise in nats, where the learner computes in
bf16. A correct server gives 0.8 to 1.2 times the noise, whatever the model."""


class VllmFacts(msgspec.Struct):
    """Facts that a worker process reports."""

    vocab_size: int
    """Rows of the embedding."""
    max_tokens: int
    """Longest sequence, prompt included."""
    logprobs_mode: str
    dtype: str
    """Number type of the weights."""
    rows: int
    """Requests that decode at once at most."""
    scheduling: str
    """The rule by which vLLM chooses the next waiting request."""
    device: str = "cpu"
    """Kind of device that it computes on; if it does not report one, it gets no seeds."""


@dataclass(slots=True)
class SessionCache:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one request that decodes."""
    tokens: int = 0
    """Keys and values it left in the cache."""
    version: int = 0
    """Version of the weights that computed them."""


@dataclass(slots=True)
class Request:
    session_id: str
    sent_as: str | None = None
    """Its id on the server, once it is there."""
    aborted: bool = False
    failed: str | None = None
    """Why its caller gets EngineUnavailable, once it does."""
    task: asyncio.Task[Completion] = field(init=False)


class VllmEngine:
    """Engine over the vLLM server at a URL, or one that it starts itself; ids from `vocab_size` on are never sampled.

    Nothing runs before the first `restart`. Each engine needs its own server: weights, pauses and the vocabulary are
    the server's, for all of its clients."""

    deterministic = False
    """Whether the same request gets the same completion."""

    def __init__(
        self,
        server: str | VllmSettings,
        *,
        vocab_size: int,
        patience_seconds: float = PATIENCE_SECONDS,
        start: StartServer = VllmServer.start,
    ) -> None:
        """patience_seconds: a server that takes longer for an answer that needs no tokens has failed; whether it makes
        progress with requests is the fleet's to judge. start: starts a server of its own."""
        self._server_name = ""
        self._place, self._known, self._patience, self._start = server, vocab_size, patience_seconds, start
        self.url = server if isinstance(server, str) else ""
        self._server: RunningServer | None = None
        self._client: VllmClient | None = None
        self._facts: VllmFacts | None = None
        self._workers: Sequence[Mapping[str, Any]] = ()
        self._watch: asyncio.Task[None] | None = None
        self._broken: str | None = "the engine has not been started"
        self._asleep = False
        self._settled = asyncio.Event()  # unset while weights are exchanged, and while the server sleeps
        self._settled.set()
        self._request_sent = asyncio.Event()  # set when a request is sent
        self._exchange = asyncio.Lock()
        self._rows = asyncio.Semaphore(0)
        self._requests: dict[str, Request] = {}
        self._sessions: dict[str, SessionCache] = {}
        self._name, self._numbers = secrets.token_hex(4), count()  # no two engines give a request the same id
        self._version = 0
        self._metrics = self._first = VllmMetrics()
        self._earlier = NOTHING
        self._recomputed = self._evictions = self._checked = self._preempted_for_weights = 0

    @property
    def pid(self) -> int | None:
        """Process id, on its machine, of the server that this engine started."""
        return self._server.pid if self._server else None

    def whereabouts(self) -> dict[str, str | int]:
        log = {"log": str(self._place.log)} if isinstance(self._place, VllmSettings) else {}
        return {**({"pid": self.pid} if self.pid else {}), "url": self.url, **log}

    async def restart(self, newest: NewestWeights | None) -> None:
        """Close the current server and begin again: start a server of its own on its model, or open the one at a URL;
        then load the newest weights, if any. Raises ConfigError if the server's options are not those of docs/vllm.md,
        EngineUnavailable if it can't be started or reached."""
        await self.close()
        self._broken = "the engine could not be started"
        if isinstance(self._place, VllmSettings):
            self._server_name = secrets.token_hex(8)
            settings = replace(_beginning(self._place, newest and newest()), name=self._server_name)
            self._server = await self._start(settings)
            self.url = self._server.url
        log = self._place.log if isinstance(self._place, VllmSettings) else None
        await self._open(VllmClient(self.url, self._patience, log))
        if newest and (weights := newest()):
            await self.load_weights(weights)

    async def close(self) -> None:
        """End a server of its own, leave one at a URL unchanged; callers get EngineUnavailable."""
        self._earlier = self.load()
        self._broken = f"the engine {self.url} was closed"
        self._first, self._metrics = VllmMetrics(), VllmMetrics(capacity_tokens=self._metrics.capacity_tokens)
        self._recomputed = self._evictions = self._checked = self._preempted_for_weights = 0
        if self._watch:
            self._watch.cancel()
        await asyncio.gather(*self._fail_all(self._broken), return_exceptions=True)
        self._sessions.clear()
        if self._client:
            await self._client.close()
        if self._server:
            await self._server.close()
        self._watch = self._client = self._server = self._facts = None
        self._asleep = False
        self._settled.set()

    async def _open(self, client: VllmClient) -> None:
        self._client = client
        try:
            reports = await self._recognised(client)
        except EngineUnavailable as error:
            raise EngineUnavailable(f"{error}; docs/vllm.md lists the options that it must be started with") from error
        self._facts, self._workers = _suitable(reports, self._known, self.url), reports
        self._rows = asyncio.Semaphore(self._facts.rows - CANARY_ROWS)
        await client.resume()  # an earlier user may have died while it was paused
        self._version = await client.version()
        await client.set_version(self._version)
        self._metrics = self._first = await client.metrics()
        self._broken = None
        self._watch = asyncio.create_task(self._look(client))

    async def _recognised(self, client: VllmClient) -> list[dict[str, Any]]:
        """The workers' reports. Raises EngineUnavailable if they belong not to the server that this engine started but
        to another that got its port; that one is left unchanged."""
        reports = await client.call("rocstar_open", self._known, self._server_name)
        for name in {worker.get("name") for worker in reports} - {self._server_name} if self._server_name else ():
            raise EngineUnavailable(
                f"the server at {self.url} is not the one that was started there: it is called {name or 'nothing'}, "
                f"ours {self._server_name}"
            )
        return reports

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Completion:
        """Waits while weights are exchanged. Raises ConfigError for an invalid request or one that this engine can't
        obey, EngineUnavailable when the server fails."""
        room = self._started()[1].max_tokens - len(token_ids)
        _refuse(token_ids, sampling, self._known)
        if room < 1:
            return without_tokens(Finish.LENGTH)
        sampling = replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens))
        request = Request(session_id)
        request.task = asyncio.create_task(self._complete(request, tuple(token_ids), sampling))
        self._requests[request_id] = request
        try:
            return await request.task
        except asyncio.CancelledError:
            if (asking := asyncio.current_task()) and asking.cancelling():
                raise
            if request.failed:
                raise EngineUnavailable(request.failed) from None
            return without_tokens(Finish.ABORTED)
        finally:
            if self._requests.get(request_id) is request:
                del self._requests[request_id]

    def load(self) -> EngineLoad:
        """As of the last look, a fraction of a second old; requests not reported as decoding count as waiting. Used
        tokens are those of decoding requests, in whole blocks: vLLM keeps prefixes of paused sessions only until their
        room is needed, and does not count them."""
        metrics, first, requests = self._metrics, self._first, len(self._requests)
        running = min(metrics.running, requests)
        produced = metrics.produced_tokens - first.produced_tokens - self._checked
        preempted = metrics.preemptions - first.preemptions - self._preempted_for_weights
        load = EngineLoad(
            capacity_tokens=metrics.capacity_tokens,
            used_tokens=round(metrics.used_share * metrics.capacity_tokens) if requests else 0,
            running=running,
            waiting=requests - running,
            policy_version=self._version,
            produced_tokens=max(0, produced),
            recomputed_tokens=self._recomputed,
            evictions=self._evictions + max(0, preempted),
        )
        return with_earlier(load, self._earlier)

    async def load_weights(self, weights: Weights) -> None:
        """Pause, exchange, resume, and check the canary rows. Requests in flight continue under the new weights, which
        feed all of their tokens again. Weights that could not be read change nothing; after any other failure nothing
        is served until a later call succeeds."""
        if weights.folder is None or not weights.canary:
            raise ContractBroken(f"weights {weights.version} need a folder and canary rows to go to a vLLM server")
        async with self._exchange:  # before a sender expects it: an engine given twice would wait for itself
            client, facts = self._started()
            self._settled.clear()

            async def load(call: CallWorkers, workers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
                return await call("rocstar_load", weights.folder)

            try:
                with weights.sender.expecting() if weights.sender else nullcontext(load) as send:
                    preempted = await self._take(client, weights, send)
                await self._check(client, weights, facts)
                self._preempted_for_weights += (await client.metrics()).preemptions - preempted
                self._version, self._broken = weights.version, None
            except EngineUnavailable as error:
                self._broken = self._broken and str(error)
                raise
            finally:
                if self._broken:
                    self._fail_all(self._broken)
                self._settled.set()

    async def sleep(self) -> None:
        async with self._exchange:
            if self._client is None or self._asleep:
                return
            self._settled.clear()
            try:
                if self._server_name:
                    await self._recognised(self._client)
                await self._client.sleep()
                if self._facts and self._facts.device == "cpu":
                    await self._client.call("rocstar_release")
            except BaseException:
                await self.close()
                raise
            self._asleep = True

    async def close_session(self, session_id: str) -> None:
        """Abort the session's requests; returns when they have ended."""
        requests = [request for request in self._requests.values() if request.session_id == session_id]
        await asyncio.gather(*(self._end(request) for request in requests))
        self._sessions.pop(session_id, None)

    # -- one request ------------------------------------------------------------------------------------------------

    async def _complete(self, request: Request, token_ids: tuple[int, ...], sampling: Sampling) -> Completion:
        session = self._sessions.setdefault(request.session_id, SessionCache())
        async with session.turn, self._rows:
            await self._settled.wait()
            client, facts = self._opened()
            request.sent_as = self._next_id()
            self._request_sent.set()
            seeded = facts.device != "cpu"
            written, cached = await client.generate(
                token_ids, sampling, request_id=request.sent_as, known=self._known, seeded=seeded
            )
            await self._settled.wait()  # a completion of weights that prove wrong is not returned
            self._opened()
            self._count(session, len(token_ids), written, cached)
        if written.finish is Finish.ABORTED and not request.aborted:
            raise EngineUnavailable(f"vLLM at {self.url} aborted a request that this engine did not abort")
        return written

    def _next_id(self) -> str:
        return f"{self._name}-{next(self._numbers)}"

    async def _end(self, request: Request) -> None:
        """Abort until its answer arrives: the server may not know the request yet. An answer that does not come is not
        waited for."""
        request.aborted = True
        for _ in range(ceil(self._patience / ABORT_SECONDS)):
            if not (request.sent_as and self._client) or request.task.done():
                break
            try:
                await self._client.abort(request.sent_as)
            except EngineUnavailable:
                break
            await asyncio.wait({request.task}, timeout=ABORT_SECONDS)
        request.task.cancel()

    def _count(self, session: SessionCache, prompt: int, written: Completion, cached: int | None) -> None:
        """Count an eviction of the session's cache since its last request. Only whole blocks stay cached."""
        block = self._metrics.block_tokens
        if written.version_spans and cached is not None:
            expected = min(session.tokens, prompt - 1) // block * block
            if session.version == written.version_spans[0].version and cached < expected:
                self._recomputed += expected - cached
                self._evictions += 1
            session.tokens, session.version = prompt + len(written.token_ids) - 1, written.version_spans[-1].version

    # -- weights ----------------------------------------------------------------------------------------------------

    async def _take(self, client: VllmClient, weights: Weights, send: SendWeights) -> int:
        """Returns how many requests had lost their cache before."""
        before, self._broken = self._broken, f"an exchange of weights was interrupted at {self.url}"
        if self._server_name:
            await self._recognised(client)
        await (client.wake("weights") if self._asleep else client.pause())
        preempted = (await client.metrics()).preemptions
        got = await send(client.call, self._workers)
        if all("refused" in worker for worker in got) and not self._asleep:
            await client.resume()
            self._broken = before
            raise EngineUnavailable(f"weights {weights.version} in {weights.folder} were refused: {got[0]['refused']}")
        if wrong := [worker for worker in got if worker]:
            raise EngineUnavailable(f"weights {weights.version} in {weights.folder} were taken in part: {wrong[0]}")
        await client.forget()
        await client.set_version(weights.version)
        await (client.wake("kv_cache") if self._asleep else client.resume())
        self._asleep = False
        return preempted

    async def _check(self, client: VllmClient, weights: Weights, facts: VllmFacts) -> None:
        """Raises EngineUnavailable if the server's log-probabilities are not those of the weights."""
        rows = [row for row in weights.canary if len(row.token_ids) < facts.max_tokens]
        self._checked += len(rows)  # vLLM must write a token to score a row
        scored = await asyncio.gather(*(client.score(row.token_ids, request_id=self._next_id()) for row in rows))
        for row, ours in zip(rows, scored, strict=True):
            if far := too_far(row, ours, facts.dtype):
                raise EngineUnavailable(
                    f"vLLM at {self.url} does not compute with weights {weights.version}: log-probabilities of a "
                    f"canary row of {len(row.token_ids)} tokens {far}"
                )

    # -- facts ------------------------------------------------------------------------------------------------------

    async def _look(self, client: VllmClient) -> None:
        """Updates `_metrics` while the server answers; waits for a request to be sent, or IDLE_SECONDS; ends when the
        engine is closed."""
        while True:
            if not self._requests:
                with suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_SECONDS):  # wait_for may swallow a cancellation
                        await self._request_sent.wait()
            self._request_sent.clear()
            await asyncio.sleep(LOOK_SECONDS / 2)  # by then the server has begun the request
            with suppress(EngineUnavailable):  # the next request raises it
                self._metrics = await client.metrics()
            await asyncio.sleep(LOOK_SECONDS / 2)

    def _started(self) -> tuple[VllmClient, VllmFacts]:
        if self._client is None or self._facts is None:
            raise EngineUnavailable(self._broken or "the engine has not been started")
        return self._client, self._facts

    def _opened(self) -> tuple[VllmClient, VllmFacts]:
        """Raises EngineUnavailable if nothing may be served."""
        if self._broken:
            raise EngineUnavailable(self._broken)
        return self._started()

    def _fail_all(self, reason: str) -> list[asyncio.Task[Completion]]:
        """Callers get EngineUnavailable."""
        requests = list(self._requests.values())
        for request in requests:
            request.failed = reason
            request.task.cancel()
        return [request.task for request in requests]


def _refuse(token_ids: Sequence[int], sampling: Sampling, known: int) -> None:
    refuse_impossible(token_ids, sampling, known)
    if sampling.top_p < 1 or sampling.top_k > 0:
        raise ConfigError(
            f"vLLM can't report log-probabilities from before truncation, so top_p {sampling.top_p} and top_k "
            f"{sampling.top_k} are refused; set top_p to 1 and top_k to 0, or use the torch engine"
        )


def _beginning(settings: VllmSettings, weights: Weights | None) -> VllmSettings:
    """Settings of a server that loads other weights before its first request: it starts on a copy of their config,
    because their folder may be deleted before the starting server reads it. Raises EngineUnavailable."""
    if weights is None or weights.folder is None:
        return settings
    model = settings.log.with_suffix(".model")
    try:
        model.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(weights.folder, CONFIG), model / CONFIG)
    except OSError as error:
        raise EngineUnavailable(
            f"the configuration of weights {weights.version} could not be copied: {error}"
        ) from error
    return replace(settings, model=model, reads_weights=False)


def _suitable(reports: list[dict[str, Any]], known: int, url: str) -> VllmFacts:
    """Raises ConfigError for a server that can't keep an engine's promises."""
    try:
        facts = msgspec.convert(reports[0], VllmFacts)
    except (IndexError, msgspec.ValidationError) as error:
        raise EngineUnavailable(f"vLLM at {url} did not report its settings: {error}") from error
    if facts.logprobs_mode != LOGPROBS_MODE:
        raise ConfigError(f"vLLM at {url} has --logprobs-mode {facts.logprobs_mode}; start it with {LOGPROBS_MODE}")
    if facts.scheduling != SCHEDULING:
        raise ConfigError(f"vLLM at {url} has --scheduling-policy {facts.scheduling}; start it with {SCHEDULING}")
    if facts.rows <= CANARY_ROWS:
        raise ConfigError(f"vLLM at {url} has --max-num-seqs {facts.rows}; start it with {CANARY_ROWS + 1} or more")
    if facts.vocab_size < known:
        raise ConfigError(f"the tokenizer has {known} ids and the model at {url} embeds {facts.vocab_size}")
    if facts.dtype not in TOLERANCES:
        raise ConfigError(f"vLLM at {url} must be started with --dtype {' or '.join(TOLERANCES)}, not {facts.dtype}")
    return facts


def too_far(row: Canary, ours: Sequence[float], dtype: str) -> str | None:
    """Describes how far `ours` ([n-1], of a server in `dtype`) are from a canary row; None if within tolerance."""
    found = gaps(ours[-len(row.logprobs) :], row.logprobs)
    if row.noise is None:
        gap, allowed, measure = max(found), TOLERANCES[dtype], "by up to"
    else:
        gap, allowed, measure = fmean(found), NOISES * max(row.noise, LEAST_NOISE), "in the mean by"
    return None if gap <= allowed else f"differ {measure} {gap:.3g} nats, and {allowed:.3g} is allowed"
