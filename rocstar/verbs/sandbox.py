"""`rocstar sandbox ...`: the code execution service on its own. Nothing here loads torch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocstar.errors import ConfigError
from rocstar.exits import FAILED, OK, need
from rocstar.verbs.common import STYLE, AsJson, print_json, write

if TYPE_CHECKING:
    from rocstar.sandbox.service.connection import Address

MEBIBYTE = 2**20

ISOLATION = ("L1", "L2", "L3", "L4")  # sandbox.wire.Isolation, which help pages do not load


def _level(given: str) -> str:
    if given not in ISOLATION:
        raise ConfigError(f"--min-isolation {given} is none of {', '.join(ISOLATION)}; give one of them")
    return given


app = typer.Typer(**STYLE, help="The place where the model's programs run.")

Url = Annotated[str | None, typer.Option("--url", metavar="URL", help="A service; default: a sandbox of its own.")]
Token = Annotated[str, typer.Option("--token", envvar="ROCSTAR_SANDBOX_TOKEN", help="The service's token.")]
MinIsolation = Annotated[
    str, typer.Option(metavar="L1|L2|L3|L4", callback=_level, help="Refuse to start below this level.")
]
Preload = Annotated[str, typer.Option(metavar="A,B", help="Modules imported before programs are forked; '' for none.")]


@app.command(name="exec")
def execute(
    code: Annotated[str, typer.Argument(metavar="CODE", help="A Python program; `-` reads it from stdin.")],
    url: Url = None,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Run one program in the sandbox and say what became of it.

    Example: rocstar sandbox exec 'sum(range(10))'"""
    program = sys.stdin.read() if code == "-" else code
    response = _run_once(program) if url is None else _ask(url, token, "POST", "/v1/run", {"code": program})
    if as_json:
        print_json(response)
    else:
        why = f": {response['message']}" if response["message"] else ""
        note = f"[{response['outcome']}{why}, {response['run_seconds']:.3f} s, isolation {response['isolation']}]\n"
        value = "" if response["value"] is None else f"{response['value']}\n"
        write(sys.stdout, response["stdout"] + value)
        write(sys.stderr, response["stderr"] + note)
    raise typer.Exit(OK if response["outcome"] == "ok" else FAILED)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8700,
    workers: Annotated[int, typer.Option(help="Processes; one serves a few thousand calls a second.")] = 1,
    slots: Annotated[int, typer.Option(help="Programs alive at once; 0: four per core.")] = 0,
    runnable: Annotated[int, typer.Option(help="Young programs at once; 0: two per core.")] = 0,
    preload: Preload = "numpy,sympy",
    min_isolation: MinIsolation = "L1",
    token: Token = "",
    open_to_network: Annotated[bool, typer.Option("--open-to-network", help="No token on a public address.")] = False,
    wall_seconds: Annotated[float, typer.Option(help="Limit of a call that names none.")] = 5.0,
    memory_mb: Annotated[int, typer.Option(help="Same, of memory.")] = 512,
    max_wall_seconds: Annotated[float, typer.Option(help="Longest limit a caller may ask for.")] = 600.0,
    max_memory_mb: Annotated[int, typer.Option(help="Same, of memory.")] = 4096,
    patience_seconds: Annotated[float, typer.Option(help="How long a single call waits for its turn.")] = 60.0,
    max_queue: Annotated[int, typer.Option(help="Calls waiting in a worker before more are refused.")] = 100_000,
    max_batch: Annotated[int, typer.Option(help="Calls in one batch.")] = 50_000,
    request_seconds: Annotated[float, typer.Option(help="Within which a request must have arrived.")] = 30.0,
    keep_alive_seconds: Annotated[float, typer.Option(help="How long a connection may idle.")] = 65.0,
    max_sessions: Annotated[int, typer.Option(help="Sessions held at once.")] = 1000,
    session_idle_seconds: Annotated[float, typer.Option(help="How long a session may be without a cell.")] = 3600.0,
    drain_seconds: Annotated[float, typer.Option(help="How long calls may take after SIGTERM.")] = 120.0,
) -> None:
    """Serve programs over HTTP until Ctrl-C or SIGTERM.

    Example: rocstar sandbox serve --port 8700 --min-isolation L3"""
    need("sandbox")
    from rocstar.sandbox.service.settings import Settings, complaint, default_runnable, default_slots
    from rocstar.sandbox.service.supervisor import Supervisor
    from rocstar.sandbox.wire import Limits

    settings = Settings(
        host=host,
        port=port,
        workers=workers,
        slots=slots or max(default_slots(), workers),
        runnable=runnable or max(default_runnable(), workers),
        preload=_modules(preload),
        min_isolation=min_isolation,
        token=token,
        open_to_network=open_to_network,
        limits=Limits(wall_seconds=wall_seconds, cpu_seconds=wall_seconds, memory_bytes=memory_mb * MEBIBYTE),
        max_wall_seconds=max(max_wall_seconds, wall_seconds),
        max_memory_bytes=max(max_memory_mb, memory_mb) * MEBIBYTE,
        patience_seconds=patience_seconds,
        max_queue=max_queue,
        max_batch=max_batch,
        request_seconds=request_seconds,
        keep_alive_seconds=keep_alive_seconds,
        max_sessions=max_sessions,
        session_idle_seconds=session_idle_seconds,
        drain_seconds=drain_seconds,
    )
    if problem := complaint(settings):
        raise ConfigError(problem)
    try:
        code = Supervisor(settings, _say).run()
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from error
    raise typer.Exit(code)


@app.command()
def mcp(preload: Preload = "numpy,sympy", min_isolation: MinIsolation = "L1") -> None:
    """Serve one MCP client on stdin and stdout, with a sandbox of its own.

    Example, in a client's settings: {"command": "rocstar", "args": ["sandbox", "mcp"]}"""
    need("sandbox")
    need("mcp")
    from rocstar.sandbox.service.mcp_stdio import serve_stdio

    serve_stdio(preload=_modules(preload), min_isolation=min_isolation)


@app.command()
def status(
    url: Annotated[str, typer.Argument(metavar="URL", help="A service.")] = "http://127.0.0.1:8700",
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """What a service says of itself."""
    answer = _ask(url, token, "GET", "/v1/status")
    if as_json:
        print_json(answer)
        return
    for name, value in answer.items():
        print(f"{name:<18}{' '.join(_words(value)) or '-'}")


@app.command()
def bench(
    url: Url = None,
    token: Token = "",
    callers: Annotated[int, typer.Option(min=1, help="Calls under way at once.")] = 16,
    calls: Annotated[int, typer.Option(min=1, help="Calls in all, of each kind.")] = 500,
    as_json: AsJson = False,
) -> None:
    """Throughput and latency of a service; every answer is checked.

    Example: rocstar sandbox bench --callers 256 --calls 5000"""
    from rocstar.sandbox.service.bench import run_bench, table

    with _service(url, token) as address:
        rows = run_bench(address, callers=callers, calls=calls)
    print_json({"rows": rows}) if as_json else print(table(rows))
    raise typer.Exit(OK if all(row["right"] == row["calls"] for row in rows) else FAILED)


@app.command()
def probe(
    full: Annotated[bool, typer.Option("--full", help="All hostile programs, not the quick ones only.")] = False,
    url: Url = None,
    token: Token = "",
    as_json: AsJson = False,
) -> None:
    """Run hostile programs and say what the sandbox made of each, with the level in force.

    Example: rocstar sandbox probe --full --url http://127.0.0.1:8700"""
    from rocstar.sandbox.service.hostile import probe as carry_out

    with _service(url, token) as address:
        found = carry_out(address, full=full)
    if as_json:
        print_json(found)
    else:
        print(f"isolation {found['isolation']}; missing: {' '.join(found['failed_probes']) or 'nothing'}")
        for row in found["rows"]:
            print(f"{row['verdict']:<14}{row['row']}  [{row['outcome']}]")
    raise typer.Exit(FAILED if any(row["verdict"] == "fail" for row in found["rows"]) else OK)


@contextmanager
def _service(url: str | None, token: str) -> Iterator[Address]:
    """The service at `url`, or one for the time being."""
    need("sandbox")
    if url is not None:
        yield _address(url, token)
        return
    from rocstar.sandbox.service.local import local_service

    with local_service() as own:
        yield _address(own, "")


def _address(url: str, token: str) -> Address:
    need("sandbox")
    from rocstar.sandbox.service.connection import Address

    try:
        return Address.of(url, token)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _ask(url: str, token: str, method: str, path: str, message: Any = None) -> Any:
    from rocstar.sandbox.service.remote import ask, checked

    return checked(ask(_address(url, token), method, path, message))


def _run_once(program: str) -> dict[str, Any]:
    from rocstar.sandbox.client import run_once

    return asdict(run_once(program))


def _modules(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def _say(sentence: str) -> None:
    print(f"rocstar: {sentence}", file=sys.stderr, flush=True)


def _words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}={item}" for name, item in value.items()]
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
