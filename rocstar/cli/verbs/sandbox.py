"""`rocstar sandbox ...`: the code execution service on its own. Nothing here loads torch."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rocstar.cli.verbs.common import STYLE, AsJson, options_of, print_json, write
from rocstar.errors import ConfigError
from rocstar.sandbox.settings import ISOLATION, MinIsolation, ServeOptions, Settings, TokenFile
from rocstar.support.exits import FAILED, OK, need

if TYPE_CHECKING:
    from rocstar.adapters.sandbox_bench.programs import KnownProgram
    from rocstar.sandbox.client import SandboxClient

STATUS_BYTES = 1 << 20  # of what it says, at most
STATUS_SECONDS = 30.0  # for a service to say how it is
FILE = re.compile(r"[^\s;()=#]+\.py")
PROGRAM = '{"code": TEXT, "input": TEXT} a line'

app = typer.Typer(**STYLE, help="The place where the model's programs run.")

Url = Annotated[str | None, typer.Option("--url", metavar="URL", help="A service; default: a sandbox of its own.")]


@app.command(name="exec")
def execute(
    code: Annotated[str, typer.Argument(metavar="CODE", help="A Python program or FILE.py; `-` reads it from stdin.")],
    url: Url = None,
    token_file: TokenFile = None,
    min_isolation: MinIsolation = "L3",
    as_json: AsJson = False,
) -> None:
    """Run one program in the sandbox and say what became of it.

    Example: rocstar sandbox exec 'sum(range(10))'"""
    import asyncio

    from msgspec import to_builtins

    from rocstar.sandbox.call import Call

    program = _program(code)
    with _sandbox(url, token_file, min_isolation) as client:
        response = asyncio.run(client.run(Call(id="exec", code=program)))
    if as_json:
        print_json({name: to_builtins(getattr(response, name)) for name in response.__struct_fields__})
    else:
        why = f": {response.message}" if response.message else ""
        note = f"[{response.outcome}{why}, {response.run_seconds:.3f} s, isolation {response.isolation}]\n"
        value = "" if response.value is None else f"{response.value}\n"
        write(sys.stdout, response.stdout + value)
        write(sys.stderr, response.stderr + note)
    raise typer.Exit(OK if response.outcome == "ok" else FAILED)


@app.command()
@options_of(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve programs over HTTP until Ctrl-C or SIGTERM.

    Example: rocstar sandbox serve --port 8700 --min-isolation L3"""
    need("sandbox")
    from rocstar.sandbox import check
    from rocstar.sandbox.service import serve as serve_until_told
    from rocstar.sandbox.service.core import complaint, default_limits

    settings = Settings(**asdict(options), token=_token(options.token_file))
    limits = default_limits(settings)  # with some, every call would be `rejected`
    of_machine = "" if settings.nodes else check.of_machine(limits)
    if problem := complaint(settings) or check.of_limits(limits) or of_machine:
        raise ConfigError(problem)
    try:
        code = serve_until_told(settings, lambda said: print(f"rocstar: {said}", file=sys.stderr, flush=True))
    except OSError as error:
        place, problem = f"{options.host}:{options.port}", str(error.strerror).partition(" (")[0]  # the place once
        raise ConfigError(f"cannot listen on {place} ({problem}); choose another --host or --port") from error
    raise typer.Exit(code)


@app.command()
def status(
    url: Annotated[str, typer.Argument(metavar="URL", help="A service.")] = "http://127.0.0.1:8700",
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """What a service says of itself."""
    from http import HTTPStatus
    from http.client import HTTPConnection, HTTPException
    from urllib.parse import urlsplit

    from rocstar.sandbox.call import SandboxDown

    if not url.startswith("http://"):
        raise ConfigError(f"{url!r} is no address of a service; write http://host:port")
    token = _token(token_file)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:  # by a client that follows no redirect, to which it would send the token
        place = urlsplit(url)
        connection = HTTPConnection(place.hostname or "", place.port, timeout=STATUS_SECONDS)
        connection.request("GET", f"{place.path.rstrip('/')}/v1/status", headers=headers)
        answer = connection.getresponse()
        if answer.status != HTTPStatus.OK:
            hint = "; set ROCSTAR_SANDBOX_TOKEN to its token" if answer.status == HTTPStatus.UNAUTHORIZED else ""
            raise SandboxDown(f"no sandbox service answers at {url} ({answer.status} {answer.reason}){hint}")
        found = json.loads(answer.read(STATUS_BYTES))
    except (OSError, ValueError, RecursionError, HTTPException) as error:
        raise SandboxDown(f"no sandbox service answers at {url} ({error})") from error
    if not isinstance(found, dict):
        raise SandboxDown(f"what answers at {url} is no sandbox service")
    _print(found, as_json)


@app.command()
def probe(url: Url = None, token_file: TokenFile = None, as_json: AsJson = False) -> None:
    """Say how well programs are walled off here, or at a service, and what is missing.

    Example: rocstar sandbox probe"""
    from msgspec import to_builtins

    with _sandbox(url, token_file, "L1") as client:
        _print(to_builtins(client.info()), as_json)


@app.command()
def bench(
    systems: Annotated[list[str], typer.Argument(metavar="SYSTEM...", help="Services to ask, in this order.")],
    programs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSONL of {code, input}: their truth is what bare Python does.")
    ] = None,
    callers: Annotated[str, typer.Option(metavar="N,N", help="Calls under way at once.")] = "1,10,100",
    calls: Annotated[int, typer.Option(min=10, help="Least calls at each number of callers.")] = 200,
    slots: Annotated[int, typer.Option(min=1, help="Programs at once, of `here` and `python`.")] = 2,
    attacks: Annotated[
        bool, typer.Option("--attacks", help="Also try what no program may do: 3 GiB, 600 processes, for seconds.")
    ] = False,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Ask code execution services, ours and others', the same programs: right ends, attacks held, time and CPU a call.

    SYSTEM: here, python (a fresh interpreter each), http://HOST:PORT, code-judge:URL, sandbox-fusion:URL, mcp:COMMAND.

    Example: rocstar sandbox bench here python mcp:'npx my-server' --attacks"""
    import asyncio

    from rocstar.adapters.sandbox_bench.measure import compared, rows
    from rocstar.data.rows import read_rows

    asked = [] if programs is None else [_asked(*row, programs) for row in read_rows(programs)]
    if programs is not None and not asked:
        raise ConfigError(f"{programs} holds no program; write {PROGRAM}")
    for system in systems:
        need("mcp" if system.startswith("mcp:") else "sandbox")
    counts = [int(word) if word.isdecimal() else 0 for word in callers.split(",")]
    if not all(counts):
        raise ConfigError(f"--callers {callers} are no counts; write 1,10,100")
    found = asyncio.run(
        compared(systems, asked, counts, token=_token(token_file), attacks=attacks, calls=calls, slots=slots)
    )
    if as_json:
        print_json({system: asdict(one) for system, one in found.items()})
    else:
        for line in rows(found):
            write(sys.stdout, line + "\n")
    raise typer.Exit(OK if all(one.is_well for one in found.values()) else FAILED)


def _asked(line: int, row: Any, file: Path) -> KnownProgram:
    from rocstar.adapters.sandbox_bench.programs import KnownProgram

    code = row.get("code") if isinstance(row, dict) else None
    stdin = row.get("input", row.get("stdin", "")) if isinstance(row, dict) else None
    if not isinstance(code, str) or not isinstance(stdin, str) or not code:
        raise ConfigError(f"{file}, line {line}: no program; write {PROGRAM}")
    return KnownProgram(f"{file.name}, line {line}", code, "", stdin=stdin)


def _program(code: str) -> str:
    """The program itself, or what a file holds: text that looks like a file's name is one, as no program looks so."""
    from importlib.util import decode_source

    if code != "-" and not FILE.fullmatch(code) and not (code.endswith(".py") and os.path.isfile(code)):
        return code
    try:
        return decode_source(sys.stdin.buffer.read() if code == "-" else Path(code).read_bytes())
    except OSError as error:
        raise ConfigError(f"{code} cannot be read ({error.strerror}); give a program or a file of one") from None
    except (UnicodeDecodeError, SyntaxError) as error:
        raise ConfigError(f"the program in {code} is no text ({error}); save it as UTF-8") from None


def _sandbox(url: str | None, token_file: Path | None, min_isolation: str) -> SandboxClient:
    """The service at `url`, or a sandbox of this process."""
    from rocstar.sandbox.client import SandboxClient

    if min_isolation not in ISOLATION:
        raise ConfigError(f"--min-isolation {min_isolation} is none of {', '.join(ISOLATION)}; give one of them")
    if url is None:
        return SandboxClient.start(slots=1, preload=(), min_isolation=min_isolation)
    need("sandbox")
    return SandboxClient.connect([url], token=_token(token_file), min_isolation=min_isolation)


def _token(file: Path | None) -> str:
    if file is None:
        return os.environ.get("ROCSTAR_SANDBOX_TOKEN", "")
    try:
        token = file.read_text().strip().partition("\n")[0].strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--token-file {file} cannot be read ({error})") from None
    if not token:
        raise ConfigError(f"--token-file {file} is empty; write the token there")
    return token


def _print(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        print(f"{name:<18}{' '.join(_words(value)) or '-'}")


def _words(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{name}={item}" for name, item in value.items()]
    return [word for item in value for word in _words(item)] if isinstance(value, list | tuple) else [str(value)]
