"""inspect_ai: `sandbox="rocstar"` runs a task's tools behind our walls. inspect_ai finds this file by its entry point.

    Task(..., sandbox="rocstar")                                          daemons of this process
    Task(..., sandbox=SandboxEnvironmentSpec("rocstar", Settings(url="http://127.0.0.1:8700", wall_seconds=60)))

A service's token is in ROCSTAR_SANDBOX_TOKEN. inspect_ai takes a text in place of Settings for the name of a file, so
there is none.

A sample has one session: its files last from call to call, its commands run one at a time, and processes that a command
leaves running are killed when it ends. Not supported: another user than the sandbox's own, network, `connection()`, and
what inspect_ai builds on long-running processes (`exec_remote`, `bash_session`, `text_editor`, sandbox services).
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel

from rocstar.adapters import inside
from rocstar.adapters.python_tool import opened_client
from rocstar.errors import ConfigError
from rocstar.sandbox.call import (
    DaemonSettings,
    Isolation,
    Limits,
    ProgramOutcome,
    Response,
    SandboxDown,
    ServiceOutcome,
)
from rocstar.sandbox.client import SandboxClient, Session

INSIDE = Path(inside.__file__).read_text(encoding="utf-8")
PIECE_BYTES = 8 * 2**20  # of a file on its way in or out; a response fetches at most 16 MiB
STREAM_BYTES = 2**21 - 2**14  # of stdout and stderr each; both, and a traceback, fit into MAX_OUTPUT_BYTES
GRACE_SECONDS = 5.0  # between a command's own timeout and the end of its cell
LOST = 137  # exit code of a command with which the sandbox's process was killed
ERRORS: Mapping[str, type[OSError]] = {
    error.__name__: error
    for error in (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError, FileExistsError, OSError)
}
"""inspect_ai's exception types for kinds of errors."""


class InspectSettings(BaseModel, frozen=True, extra="forbid"):
    """Limits of a sample's sandbox, and where it runs."""

    url: str = ""  # a sandbox service; empty for daemons of this process
    wall_seconds: float = 120.0  # limit on one command that has no timeout of its own
    memory_bytes: int = 2 * 2**30  # address space of each process, and memory of all of a sample's together
    processes: int = 64  # processes and threads of a sample at once
    idle_seconds: float = 86_400.0
    """A sample without a command for so long loses its files. Of daemons of this process; a service has its own."""
    min_isolation: Isolation = Isolation.L3  # nothing is started or used below this level

    def limits(self) -> Limits:
        return Limits(
            wall_seconds=self.wall_seconds,
            cpu_seconds=self.wall_seconds,
            memory_bytes=self.memory_bytes,
            output_bytes=2 * (STREAM_BYTES + 2**14),
            processes=self.processes,
        )

    def connect(self) -> SandboxClient:
        """Raises SandboxDown."""
        daemon = DaemonSettings(
            preload=(), min_isolation=self.min_isolation, session_idle_seconds=self.idle_seconds, slots=1
        )
        return opened_client(self.url, daemon)


Settings = InspectSettings  # its name in tasks


def settings_of(config: SandboxEnvironmentConfigType | None) -> Settings:
    """Raises ConfigError."""
    if config is None or isinstance(config, Settings):
        return config or Settings()
    raise ConfigError(f"sandbox rocstar takes rocstar.adapters.inspect_ai.Settings, got {config!r}")


@sandboxenv(name="rocstar")
class RocstarSandbox(SandboxEnvironment):  # type: ignore[misc, unused-ignore]
    """The sandbox of one sample."""

    _clients: ClassVar[dict[Settings, SandboxClient]] = {}
    _tasks: ClassVar[Counter[Settings]] = Counter()
    """Tasks that use each client; inspect_ai calls classes, so they are kept here."""

    def __init__(self, session: Session, settings: Settings) -> None:
        super().__init__()
        self._session = session
        self._settings = settings

    @classmethod
    def default_concurrency(cls) -> int:
        return DaemonSettings().session_slots

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return Settings.model_validate(config)

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        """Raises ConfigError, and SandboxDown where the sandbox can't be had: then no sample starts."""
        settings = settings_of(config)
        if settings not in cls._clients:
            cls._clients[settings] = settings.connect()
        cls._tasks[settings] += 1

    @classmethod
    async def task_cleanup(cls, task_name: str, config: SandboxEnvironmentConfigType | None, cleanup: bool) -> None:
        """Sandboxes end with their task, whatever `cleanup` says: nothing of them could be looked at afterwards."""
        settings = settings_of(config)
        cls._tasks[settings] -= 1
        if not cls._tasks[settings] and settings in cls._clients:
            cls._clients.pop(settings).close()

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        settings = settings_of(config)
        return {"default": cls(cls._clients[settings].open_session(limits=settings.limits()), settings)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            await environment.as_type(RocstarSandbox)._session.close()

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,  # noqa: ASYNC109  # inspect_ai's signature
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """As in inspect_ai; a command that times out is not retried, and commands wait for each other. Raises
        OutputLimitExceededError over 2 MiB of a stream."""
        if user is not None:
            raise SandboxUserUnsupportedError(f"sandbox rocstar runs all as one user of its own and has no {user!r}")
        request = f"run({cmd!r}, {cwd!r}, {env or {}!r}, {timeout!r}, {STREAM_BYTES})"
        seconds = self._settings.wall_seconds if timeout is None else timeout + GRACE_SECONDS
        response = await self._ask(request, input or b"", seconds)
        if response.state_lost:
            why = f"the sandbox was ended ({response.kill_reason or response.outcome}): its files are gone\n"
            return ExecResult(False, LOST, response.stdout, f"{response.stderr}{why}")
        code, dropped = ast.literal_eval(response.value or "None, False")
        if code is None:
            raise TimeoutError(f"{cmd[0]} ran longer than {timeout or self._settings.wall_seconds:g} seconds")
        if dropped:
            raise OutputLimitExceededError(f"{STREAM_BYTES} bytes", response.stdout or response.stderr)
        return ExecResult(code == 0, code, response.stdout, response.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        data = _bytes(contents)
        for start in range(0, max(1, len(data)), PIECE_BYTES):
            self._whole(await self._ask(f"write({file!r}, append={start > 0})", data[start : start + PIECE_BYTES]))

    async def read_file(self, file: str, text: bool = True) -> Any:
        """Raises OutputLimitExceededError over inspect_ai's limit."""
        data, size = b"", 1
        while len(data) < size:
            response = self._whole(await self._ask(f"read({file!r}, {len(data)}, {PIECE_BYTES})", None))
            size = int(response.value or 0)
            if size > SandboxEnvironmentLimits.MAX_READ_FILE_SIZE:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
            piece = response.files.get(inside.OUTPUT, b"")
            if size and not piece:
                raise SandboxUnavailableError(f"the sandbox sent {len(data)} of the {size} bytes of {file}")
            data += piece
        return data.decode() if text else data

    async def _ask(self, request: str, content: str | bytes | None, wall_seconds: float | None = None) -> Response:
        """Call a function of inside.py. Raises SandboxUnavailableError, and what the function raised."""
        files = {} if content is None else {inside.INPUT: _bytes(content)}
        code = f"{INSIDE}\nclear(OUTPUT)\n{request}\n"
        try:
            response = await self._session.run(code, files=files, fetch=[inside.OUTPUT], wall_seconds=wall_seconds)
        except SandboxDown as error:
            raise SandboxUnavailableError(str(error)) from error
        if isinstance(response.outcome, ServiceOutcome) or response.outcome is ProgramOutcome.REJECTED:
            raise SandboxUnavailableError(
                f"the sandbox could not run a command ({response.outcome}: {response.message})"
            )
        if response.outcome is ProgramOutcome.EXCEPTION and response.exception is not None and not response.state_lost:
            kind, message = response.exception.type, response.exception.message
            raise ERRORS[kind](message) if kind in ERRORS else SandboxUnavailableError(f"{kind}: {message}")
        return response

    def _whole(self, response: Response) -> Response:
        """Raises SandboxUnavailableError where the sandbox's process did not survive."""
        if response.state_lost or response.outcome is not ProgramOutcome.OK:
            raise SandboxUnavailableError(f"the sandbox ended under a file ({response.outcome}); its files are gone")
        return response


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
