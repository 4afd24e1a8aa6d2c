"""Code of the user's own, named in a recipe: `package.module:name`, or `file.py:name` with a path.

Modules are looked up as Python does for a script: first in the folders given (of a recipe: `run.modules`), then in the
current one, then where Python looks. Those folders are put in front of `sys.path` and stay there, because a module may
import its neighbours later. A `file.py` is a module found in that file's folder.

Every failure is one ConfigError sentence that starts with the setting and its value. An error that the user's code
raises while it is imported is kept as the cause.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, contextmanager, suppress
from difflib import get_close_matches
from functools import cache
from importlib.machinery import PathFinder
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rocstar.errors import ConfigError, RocstarError

MAX_RAISED = 200  # characters of a user's error
NAMED = re.compile(r"""[^\s"'\\]+\.py\b|[^\W\d][\w.]*(?=:[^\W\d])""")
"""A file of Python, or the module of a reference, in the text of settings."""
TICKS = 10  # of a time limit, of which one may pass while the run is stopped or busy
HASH = 16  # digits that are shown to a person
OURS = Path(__file__).resolve().parents[1]
PathLike = str | Path
T = TypeVar("T")


def is_reference(text: str) -> bool:
    """Whether a setting names something of the user's own rather than something built in."""
    return ":" in text


def is_function(text: str) -> bool:
    """Whether a setting that takes a command, too, names a function of the user's own."""
    return is_reference(text) and " " not in text.strip()


def load(reference: str, *, folders: Sequence[PathLike] = (), setting: str = "plug-in") -> Any:
    """The callable (function or class) that `reference` names.

    folders: searched first, the first one first; also for a relative `file.py`. setting: key of the recipe, for
    messages. Raises ConfigError when the reference has another form, there is no such module, importing it fails, it
    holds no such name, or that is not callable. Source: ours."""
    said = f"{setting} = {reference!r}"
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise ConfigError(f"{said} should be package.module:name or file.py:name")
    module, searched = _module_named(place, [*(Path(folder).resolve() for folder in folders), Path.cwd()], said)
    return _callable_in(_imported(module, searched, said), name, said)


def named(
    name: str,
    built_in: Mapping[str, T],
    *,
    setting: str,
    takes: Sequence[str],
    keywords: Sequence[str] = (),
    folders: Sequence[PathLike] = (),
) -> T:
    """What a setting names: an entry of `built_in`, or code of the user's own that can be called with the arguments
    `takes` and `keywords`. Raises ConfigError."""
    said = f"{setting} = {name!r}"
    if name in built_in:
        return built_in[name]
    if not is_reference(name):
        close = get_close_matches(name, built_in, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"{said} is none of {', '.join(built_in)}; did you mean {close!r}? Your own is written package.module:name"
        )
    found: T = load(name, folders=folders, setting=setting)
    check_call(found, takes, keywords, said=said)
    if inspect.iscoroutinefunction(found):
        raise ConfigError(f"{said} is async, and nothing would wait for it; write it with def")
    return found


def check_call(found: Any, positional: Sequence[str], keywords: Sequence[str] = (), *, said: str) -> None:
    """Raise ConfigError when `found` cannot be called with these arguments. said: `setting = 'reference'`."""
    try:
        signature = inspect.signature(found)
    except ValueError:  # a builtin without one
        return
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError as error:
        expected = ", ".join([*positional, *(f"{keyword}=..." for keyword in keywords)])
        raise ConfigError(f"{said} should take ({expected}), but it takes {signature}: {error}") from None


@contextmanager
def own_code(said: str, own: Any) -> Iterator[None]:
    """Turn exceptions of `own` into a ConfigError that begins with `said`; our own errors stay unchanged."""
    try:
        yield
    except RocstarError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{said}: {raised_by(own, error)}") from error


def raised_by(own: Any, error: BaseException) -> str:
    """Describes an exception of user code, with the last line of its file in the traceback, if any."""
    function = inspect.unwrap(own) if callable(own) else own
    file = None
    with suppress(TypeError):  # of a builtin
        file = inspect.getfile(function if inspect.isclass(function) or inspect.isroutine(function) else type(function))
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    place = f" ({Path(file).name}, line {lines[-1]})" if file and lines else ""
    return f"{' '.join(in_words(error).split())[:MAX_RAISED]}{place}"


def in_words(error: BaseException) -> str:
    """The type and text of an exception of user code, whose own `__str__` may raise anything."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__} (its text cannot be read)"


def copied(value: Any) -> Any:
    """A copy for user code, which may change the dicts and lists that it gets; all else is shared. Raises
    RecursionError."""
    if isinstance(value, dict):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if isinstance(value, list) else value


def _module_named(place: str, folders: list[Path], said: str) -> tuple[str, list[Path]]:
    """(dotted name, folders to search) of `package.module` or of `some/file.py`."""
    if not place.endswith(".py"):
        if not all(part.isidentifier() for part in place.split(".")):
            raise ConfigError(
                f"{said}: {place!r} is not the dotted name of a module; a file is written {place}.py:name"
            )
        return place, folders
    found = [file for folder in folders if (file := folder / place).is_file()]
    if not found:
        raise ConfigError(f"{said}: there is no file {place}; {_searched(folders)}")
    if not found[0].stem.isidentifier():
        raise ConfigError(f"{said}: {found[0].name} cannot be imported; give the file a name of letters, digits and _")
    return found[0].stem, [found[0].parent.resolve(), *folders]


def _imported(module: str, folders: list[Path], said: str) -> ModuleType:
    for folder in reversed(folders):
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        sys.path.insert(0, str(folder))
    _refuse_a_taken_name(module.partition(".")[0], folders, said)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(f"{error.name}.")):
            raise ConfigError(f"{said}: there is no module {error.name}; {_searched(folders)}") from None
        raise ConfigError(f"{said}: importing {module} failed: {error}") from error
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise ConfigError(f"{said}: importing {module} failed: {in_words(error)}") from error


def _refuse_a_taken_name(top: str, folders: list[Path], said: str) -> None:
    """Refuse a module that an already loaded one of the same name would hide."""
    loaded = sys.modules.get(top)
    spec = PathFinder.find_spec(top, [str(folder) for folder in folders]) if loaded else None
    if spec is None or spec.origin is None:
        return
    used = getattr(loaded, "__file__", None)
    if used is None or Path(used).resolve() != Path(spec.origin).resolve():
        raise ConfigError(f"{said}: another module named {top} is loaded already ({used or 'of Python'}); rename yours")


def _callable_in(module: ModuleType, name: str, said: str) -> Any:
    if not hasattr(module, name):
        names = [other for other, value in vars(module).items() if callable(value) and not other.startswith("_")]
        close = get_close_matches(name, names, n=1, cutoff=0.0)
        hint = f"the nearest is {close[0]!r}" if close else "it defines no function and no class"
        raise ConfigError(f"{said}: {module.__file__} has no {name!r}; {hint}")
    found = getattr(module, name)
    if not callable(found):
        raise ConfigError(f"{said}: {name} is of type {type(found).__name__}; give a function or a class")
    return found


def _searched(folders: Sequence[Path]) -> str:
    return f"looked in {', '.join(map(str, dict.fromkeys(folders)))} and where Python looks; run.modules adds folders"


def code_of(settings: Any, folders: Sequence[PathLike] = ()) -> dict[str, str]:
    """A hash of each file of the user's own that these settings name, in a reference or in a command, by its path in
    the folder where it was looked up; not of what those files import. Source: ours."""
    searched = [*(Path(folder).resolve() for folder in folders), Path.cwd(), *map(Path, sys.path)]
    found: dict[Path, str] = {}
    for place in NAMED.findall(json.dumps(settings, ensure_ascii=False)):
        if place == "mcp":  # the prefix of an MCP server's command, and an installed package
            continue
        for name in accumulate(place.split("."), "{}.{}".format):  # the packages around it, too
            home, file = _file_of(name, searched)
            if file is not None and not file.resolve().is_relative_to(OURS):
                is_below = file.is_relative_to(home) and not os.path.isabs(name)
                found[file] = str(file.relative_to(home)) if is_below else file.name
    hashes: dict[str, Any] = {}
    for file in sorted(found):
        with suppress(OSError):  # unreadable, and so nothing that runs
            content = file.read_bytes()
            hashes.setdefault(found[file], hashlib.sha256()).update(content)
    return {name: mark.hexdigest()[:HASH] for name, mark in hashes.items()}


def _file_of(place: str, folders: Sequence[Path]) -> tuple[Path, Path | None]:
    """(where it was looked up, the file)."""
    path = place.replace(".", "/")
    names = [place] if place.endswith(".py") else [f"{path}.py", f"{path}/__init__.py"]
    tried = ((folder.absolute(), os.path.abspath(folder / name)) for folder in folders for name in names)
    # A sentence of settings may look like a name, of any length; os.path takes all.
    return next(((folder, Path(file)) for folder, file in tried if os.path.isfile(file)), (Path(), None))


def run_in_daemon_thread(call: Callable[[], Any], name: str) -> Future[Any]:
    """The result of a call of user code, in a daemon thread, which can't be stopped; a thread of a pool, or of anyio,
    would delay the interpreter's exit. Exceptions that coroutines can't raise, that would cancel the waiting task, or
    that would end the process, become a RuntimeError."""
    done = Future[Any]()
    done.set_running_or_notify_cancel()  # a caller that stops waiting does not cancel it

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError)
            done.set_exception(error if plain else RuntimeError(in_words(error)))

    threading.Thread(target=run, name=name, daemon=True).start()
    return done


@asynccontextmanager
async def time_limit(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout`, in ticks: while this process is stopped, or its event loop is busy, at most one passes, for
    what has ended meanwhile is not known yet."""
    async with asyncio.timeout(None) as limit:

        async def expire() -> None:
            for _ in range(TICKS):
                await asyncio.sleep(seconds / TICKS)
            limit.reschedule(0.0)

        ticking = asyncio.create_task(expire())
        try:
            yield limit
        finally:
            ticking.cancel()


@cache
def own_loop() -> asyncio.AbstractEventLoop:
    """The event loop of the user's coroutines, in a daemon thread. There is one, because the clients that they keep
    belong to a loop; what blocks in it blocks nothing of ours."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:  # a task that they start may end it, by sys.exit; the others go on
            with suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    threading.Thread(target=run, name="own coroutines", daemon=True).start()
    return loop
