"""The API of SandboxFusion (github.com/bytedance/SandboxFusion), which verl and many other libraries use.

200: it was run, `status` and `run_result` report the result; 422: a field has another shape, or the request needs an
unsupported feature; 504: the service could not run it (overloaded or failed), the only status that verl retries.

Departures: only Python; `executor_pod_name` is null. Absolute paths below /mnt and /tmp mean the working directory,
which is mounted there for programs with their own file system. With another absolute path in `files` the program fails,
and one in `fetch_files` is not returned. Not served: notebooks (/run_jupyter), and the data sets of /submit.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from rocstar.sandbox import check
from rocstar.sandbox.call import Call, Limits, Outcome, ProgramOutcome, Response, ServiceOutcome
from rocstar.sandbox.service import native
from rocstar.sandbox.service.core import MEBIBYTE, BadRequest, Endpoints, HttpRequest, Service, decode, encode
from rocstar.sandbox.service.native import HttpReply
from rocstar.sandbox.settings import Settings

ANSWER_SECONDS = 8.0  # verl gives up compile_timeout + run_timeout + 10 s after its request: be earlier
TIMEOUTS: tuple[Outcome, ...] = (ProgramOutcome.WALL_TIMEOUT, ProgramOutcome.CPU_TIMEOUT)
OUR_PLACES = re.compile(r"^(?:/mnt/|/tmp/)(?=[^/])")


class RunCode(Struct, frozen=True, kw_only=True):
    code: str
    language: str = "python"
    compile_timeout: Annotated[float, Meta(ge=0)] = 10.0
    """Nothing is compiled; it is added to the call's patience, seconds."""
    run_timeout: native.Seconds = 10.0
    """Wall time of the program."""
    memory_limit_MB: int = -1
    """In addition to preloaded modules, MiB; -1 is the service's default."""
    stdin: str | None = None
    files: Annotated[dict[str, bytes | None], Meta(max_length=check.MAX_FILES)] = {}
    fetch_files: Annotated[tuple[str, ...], Meta(max_length=check.MAX_FILES)] = ()
    """Missing files are skipped."""

    def limits(self, settings: Settings) -> Limits:
        """The requested limits, reduced to what the operator allows instead of refused."""
        wall, memory = min(self.run_timeout, settings.max_wall_seconds), self.memory_limit_MB
        memory = min(memory if memory > 0 else settings.memory_mb, settings.max_memory_mb) * MEBIBYTE
        return Limits(wall_seconds=wall, cpu_seconds=wall, memory_bytes=memory)


async def run_code(request: HttpRequest) -> HttpReply:
    service, shape = request.service, decode(request.body, RunCode, 422)
    if shape.language != "python":
        raise BadRequest(f"language {shape.language!r} is not run here; only python is", 422)
    inside = {path: OUR_PLACES.sub("", path) for path in shape.fetch_files}
    fetched = {path: name for path, name in inside.items() if not name.startswith("/")}
    call = Call(
        id="",
        code=shape.code,
        stdin=shape.stdin or "",
        limits=shape.limits(service.settings),
        files={OUR_PLACES.sub("", path): content for path, content in shape.files.items() if content is not None},
        fetch=tuple(dict.fromkeys(fetched.values())),
        patience_seconds=shape.compile_timeout + ANSWER_SECONDS,
    )
    return answer(service, await service.run(call), fetched)


def answer(service: Service, response: Response, fetched: Mapping[str, str]) -> HttpReply:
    """RunCodeResponse. fetched: requested path -> path in the working directory."""
    status, code = "Success" if response.outcome is ProgramOutcome.OK else "Failed", 200
    if isinstance(response.outcome, ServiceOutcome):
        status, code = "SandboxError", 504
    body = {
        "status": status,
        "compile_result": None,
        "run_result": command_result(response) if code == 200 else None,
        "message": response.message,
        "executor_pod_name": None,
        "files": {path: response.files[name] for path, name in fetched.items() if name in response.files},
    }
    return HttpReply(encode(body), code, service.retry_headers(response.outcome))


def command_result(response: Response) -> dict[str, Any]:
    """CommandRunResult; both streams are always strings, because verl concatenates them."""
    timeout = response.outcome in TIMEOUTS
    return {
        "status": "TimeLimitExceeded" if timeout else "Finished",
        "execution_time": response.run_seconds,
        "return_code": None if timeout else return_code(response),
        "stdout": response.stdout,
        "stderr": response.stderr or response.message,
    }


def return_code(response: Response) -> int:
    """As in `subprocess`: the exit code, or minus the number of the signal. The sandbox's limits count as SIGKILL."""
    if response.exit_code is not None:
        return response.exit_code
    name = response.signal or "SIGKILL"
    number = name.removeprefix("SIG")  # a signal without a name is SIG37
    return -int(number) if number.isdecimal() else -int(signal.Signals[name])


ENDPOINTS: Endpoints = {("POST", "/run_code"): run_code}
