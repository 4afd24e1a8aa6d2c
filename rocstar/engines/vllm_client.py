"""HTTP calls to a vLLM server, and the types of its answers. Every field of an answer is checked here.

Not here: sessions, weights and aborts, which `vllm.py` decides."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from rocstar.errors import ConfigError, EngineUnavailable
from rocstar.types import Completion, Finish, Sampling, VersionSpan

CONNECT_SECONDS = 10.0
PATIENCE_SECONDS = 600.0  # the longest request loads the weights of a large model
ANSWER_BYTES = 64 << 20  # one token of an answer takes about 100
OWN_CONNECTION = {"Content-Type": "application/json", "Connection": "close"}
VERSION = re.compile(r"[0-9]{1,18}")
VERSIONS = 10**9
"""A label on a server is the number of the client that set it, times this, plus the policy version."""
NAN = -9999.0  # what vLLM writes in place of a log-probability that is not a number
FINISHES = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORTED}
METRIC = re.compile(r"^vllm:(\w+)\{(.*)\} (\S+)$", re.MULTILINE)
CACHE = re.compile(
    r'^vllm:cache_config_info\{(?=.*\bblock_size="(\d+)")(?=.*\bnum_gpu_blocks="(\d+)").*\bkv_cache_size_tokens="(\d+)"',
    re.MULTILINE,
)

T = TypeVar("T")


class _Token(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _VllmChoice(msgspec.Struct):
    finish_reason: str
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _VllmUsage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Prompted(msgspec.Struct):
    logprob: float


class VllmAnswer(msgspec.Struct):
    choices: list[_VllmChoice]
    usage: _VllmUsage
    prompt_logprobs: list[dict[int, _Prompted] | None] | None = None


class _Control(msgspec.Struct):
    """The answer of every other path, which has some of these fields."""

    results: list[dict[str, Any]] = []
    success: bool = True
    status: str = ""
    weight_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMetrics:
    """Figures of GET /metrics."""

    capacity_tokens: int = 0
    """Tokens that the KV cache holds."""
    block_tokens: int = 1
    """Tokens of a block, the unit of cache allocation."""
    used_share: float = 0.0
    """Share of the KV cache that decoding requests use; 0 to 1."""
    running: int = 0
    """Requests that decode."""
    produced_tokens: int = 0
    """Since the server started."""
    preemptions: int = 0
    """How often a request that decoded lost its cache, since the server started."""


class VllmClient:
    """One server. Every method raises EngineUnavailable if the server can't be reached, gives an invalid answer or,
    except for `generate`, does not answer within `patience_seconds`.

    Each request has its own connection, so none is ever sent twice. On a reused one it could be lost: a server that was
    busy for longer than its keep-alive (5 s) closes the connection before it reads a request sent meanwhile. A second
    connection costs 1 ms of CPU here and 0.2 ms there."""

    def __init__(self, url: str, patience_seconds: float = PATIENCE_SECONDS, log: Path | None = None) -> None:
        """log: the file that a server of ours writes, which errors name. Raises ConfigError for an invalid URL."""
        self._url, self._patience = f"{url} (log: {log})" if log else url, patience_seconds
        problem = f"the URL of a vLLM server must be like http://127.0.0.1:8000, got {url}"
        try:
            base = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{problem}: {error}") from error
        if base.scheme not in ("http", "https") or not base.host:
            raise ConfigError(problem)
        self._client = 1 + secrets.randbelow(VERSIONS - 1)
        self._http = httpx.AsyncClient(
            base_url=base,
            verify=base.scheme == "https",  # reading the certificates takes 20 ms
            headers=OWN_CONNECTION,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, request_id: str, known: int, seeded: bool
    ) -> tuple[Completion, int | None]:
        """The completion, and how many tokens of the prompt were not fed again; None if the server does not report it.
        Waits for as long as the server takes; cancelling this ends the request there. known: ids are below it. seeded:
        whether the seed is sent."""
        seed = {"seed": sampling.seed} if seeded else {}
        body = {
            "request_id": request_id,
            "token_ids": token_ids,
            "sampling_params": {
                "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "stop_token_ids": sampling.stop_token_ids,
                **seed,
                "ignore_eos": True,  # the stop tokens are those of the request, not of the model's folder
                "logprobs": 0,  # of the sampled token only
                "detokenize": False,
            },
        }
        answer = await self._post("/inference/v1/generate", body, VllmAnswer, seconds=None)
        completion, cached = read_answer(answer, known)
        for span in completion.version_spans:
            if span.version // VERSIONS != self._client:
                raise EngineUnavailable(
                    f"vLLM at {self._url} writes with weights that another client gave it; give each run a server of "
                    "its own"
                )
        spans = tuple(VersionSpan(version % VERSIONS, tokens) for version, tokens in completion.version_spans)
        return replace(completion, version_spans=spans), cached

    async def score(self, token_ids: Sequence[int], *, request_id: str) -> list[float]:
        """[n-1] log-probabilities of each token but the first, recomputed, ahead of waiting requests."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "ignore_eos": True, "detokenize": False}
        body = {"request_id": request_id, "token_ids": token_ids, "sampling_params": sampling, "priority": -1}
        scored = (await self._post("/inference/v1/generate", body, VllmAnswer)).prompt_logprobs or []
        places = list(zip(token_ids[1:], scored[1:], strict=False))
        if len(scored) != len(token_ids) or any(not place or token not in place for token, place in places):
            raise EngineUnavailable(f"vLLM at {self._url} did not score the {len(token_ids)} tokens that it was given")
        return [place[token].logprob for token, place in places if place]

    async def abort(self, request_id: str) -> None:
        await self._post("/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]}, _Control)

    async def pause(self) -> None:
        """Nothing decodes from the return of this to `resume`; requests wait."""
        await self._post("/pause?mode=keep", {}, _Control)

    async def resume(self) -> None:
        await self._post("/resume", {}, _Control)

    async def sleep(self) -> None:
        """Free all GPU memory, weights included (level 2), until `wake`; requests wait, and are fed again."""
        await self._post("/sleep?level=2&mode=keep", {}, _Control)

    async def wake(self, part: str) -> None:
        """Allocate memory of a `part` again: `weights`, without their values, then `kv_cache`, which resumes
        requests."""
        woken = await self._post(f"/wake_up?tags={part}", {}, _Control)
        if part == "kv_cache" and woken.status != "awake":
            raise EngineUnavailable(f"vLLM at {self._url} did not wake: its status is {woken.status}")

    async def forget(self) -> None:
        """Drop all keys and values, also those of decoding requests, which are fed again."""
        done = await self._post("/reset_prefix_cache?reset_running_requests=true", {}, _Control)
        if not done.success:
            raise EngineUnavailable(f"vLLM at {self._url} could not drop its cache, so it may mix two policies")

    async def version(self) -> int:
        """Policy version last set, by any client; 0 if none was."""
        label = (await self._ask("GET", "/weight_info", _Control)).weight_version
        return int(label) % VERSIONS if VERSION.fullmatch(label) else 0

    async def set_version(self, version: int) -> None:
        """Stamped on every token written from now on."""
        await self._post("/update_weight_version", {"new_version": str(self._client * VERSIONS + version)}, _Control)

    async def call(self, method: str, *arguments: Any) -> list[dict[str, Any]]:
        """Call a method of every worker process; their results, at least one."""
        results = (await self._post("/collective_rpc", {"method": method, "args": arguments}, _Control)).results
        if not results:
            raise EngineUnavailable(f"vLLM at {self._url} has no worker that answers {method}")
        return results

    async def metrics(self) -> VllmMetrics:
        return read_metrics((await self._send("GET", "/metrics")).decode(errors="replace"), self._url)

    async def _post(self, path: str, body: Mapping[str, Any], answer: type[T], **options: Any) -> T:
        return await self._ask("POST", path, answer, content=msgspec.json.encode(body), **options)

    async def _ask(self, method: str, path: str, answer: type[T], **options: Any) -> T:
        content = await self._send(method, path, **options)
        try:
            return msgspec.json.decode(content, type=answer)
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineUnavailable(f"vLLM at {self._url} answered {path} with another type: {error}") from error

    async def _send(self, method: str, path: str, content: bytes = b"", **options: float | None) -> bytes:
        """The body of a successful answer. seconds: timeout, by default `patience_seconds`."""
        seconds = options.get("seconds", self._patience)
        if self._http.is_closed:
            raise EngineUnavailable(f"vLLM at {self._url} was asked {path} after its engine was closed")
        try:
            async with asyncio.timeout(seconds), self._http.stream(method, path, content=content) as response:
                status, body = response.status_code, await self._read(response, path)
        except TimeoutError:
            raise EngineUnavailable(f"vLLM at {self._url} did not answer {path} within {seconds:g} s") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineUnavailable(f"vLLM at {self._url} could not be reached: {error!r}") from error
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"vLLM at {self._url} broke the connection before its answer to {path} was whole: {error!r}"
            ) from error
        if status != 200:
            reason = " ".join(body[:300].decode(errors="replace").split())
            raise EngineUnavailable(f"vLLM at {self._url} answered {path} with {status}: {reason}")
        return body

    async def _read(self, response: httpx.Response, path: str) -> bytes:
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > ANSWER_BYTES:
                raise EngineUnavailable(f"vLLM at {self._url} answered {path} with more than {ANSWER_BYTES} bytes")
        return bytes(body)


def read_answer(answer: VllmAnswer, known: int) -> tuple[Completion, int | None]:
    """As `VllmClient.generate`, with labels for versions. Raises EngineUnavailable for an answer that contradicts
    itself, or that has ids from `known` on."""
    if len(answer.choices) != 1:
        raise EngineUnavailable(f"vLLM gave {len(answer.choices)} completions where one was asked for")
    (choice,) = answer.choices
    tokens = choice.logprobs.content if choice.logprobs else []
    if choice.token_ids != [token.token_id for token in tokens]:
        raise EngineUnavailable(f"vLLM gave {len(choice.token_ids)} tokens, and log-probabilities of others")
    if wrong := [t for t in tokens if not (0 <= t.token_id < known and NAN < t.logprob < 1e-3)]:
        raise EngineUnavailable(
            f"vLLM gave token {wrong[0].token_id} the log-probability {wrong[0].logprob}; ids lie below {known}, and "
            f"{NAN} stands for one that is not a number"
        )
    if choice.finish_reason not in FINISHES:
        raise EngineUnavailable(f"vLLM ended a completion with {choice.finish_reason!r}, which is none of its reasons")
    details = answer.usage.prompt_tokens_details
    completion = Completion(
        token_ids=tuple(choice.token_ids),
        logprobs=tuple(min(0.0, token.logprob) for token in tokens),
        version_spans=_spans(choice),
        finish=FINISHES[choice.finish_reason],
    )
    return completion, details.cached_tokens if details else None


def _spans(choice: _VllmChoice) -> tuple[VersionSpan, ...]:
    place, spans = 0, []
    for span in choice.weight_versions or []:
        if span.start != place or span.end <= place or not VERSION.fullmatch(span.version):
            raise EngineUnavailable(f"vLLM says that version {span.version!r} wrote tokens {span.start} to {span.end}")
        spans.append(VersionSpan(int(span.version), span.end - span.start))
        place = span.end
    if place != len(choice.token_ids):
        raise EngineUnavailable(
            f"vLLM reports which weights wrote {place} of {len(choice.token_ids)} tokens; it must be 0.32 or newer"
        )
    return tuple(spans)


def read_metrics(text: str, url: str) -> VllmMetrics:
    found: dict[str, float] = {}
    for name, _, value in METRIC.findall(text):
        try:
            found[name] = found.get(name, 0.0) + float(value)
        except ValueError:
            continue
    cache = CACHE.search(text)
    if cache is None:
        raise EngineUnavailable(f"vLLM at {url} does not report the size of its KV cache; it must be 0.32 or newer")
    try:
        if not 0 <= (used := found["kv_cache_usage_perc"]) <= 1:
            raise ValueError(f"{used} of its KV cache is in use")
        return VllmMetrics(
            # vLLM keeps one block for itself; a block holds fewer tokens than its size where requests are shorter, or
            # layers with windows take blocks of their own.
            capacity_tokens=int(cache[3]) * (int(cache[2]) - 1) // int(cache[2]),
            block_tokens=max(1, int(cache[1])),
            used_share=used,
            running=int(found["num_requests_running"]),
            produced_tokens=int(found["generation_tokens_total"]),
            preemptions=int(found["num_preemptions_total"]),
        )
    except (KeyError, ValueError, ArithmeticError) as error:
        raise EngineUnavailable(f"vLLM at {url} has no such figure in its /metrics: {error}") from error
