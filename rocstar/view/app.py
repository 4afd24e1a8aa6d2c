"""The ASGI application: access control, the JSON of each view, and the files of the page. It answers only GET and
changes only its own cache, until Ctrl-C or SIGTERM.

`/api/...` is for the page alone and may change with it."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import duckdb
import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rocstar.config.origins import ABSENT, provenances
from rocstar.config.recipe import resolved_from_json
from rocstar.errors import ConfigError, DataError, RocstarError
from rocstar.record.atomic import plain
from rocstar.record.folder import read_json
from rocstar.record.formats import Feedback, feedback_of
from rocstar.record.journal import Tail, read_journal
from rocstar.record.rollouts import COLUMNS, SHORT_COLUMNS, problem_of
from rocstar.record.table import BadFilter, Where
from rocstar.support.listen import ended_by_signals, is_loopback, listener, quiet_server, url_of
from rocstar.view import query
from rocstar.view.attempt import attempt_of, decoder_of
from rocstar.view.curves import Curves
from rocstar.view.index import SHORTEST, Index, Searches, sweep_cache
from rocstar.view.query import evaluation_of, paired
from rocstar.view.sources import Library, RunSource, overview
from rocstar.view.whatif import RecordedGroup, TriedSettings, recorded_group

STATIC = Path(__file__).parent / "static"
COOKIE = "rocstar_view"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
# Whatever a model wrote, the browser runs nothing but our own files and sends nothing anywhere else.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
EVENTS_SHOWN, BROKEN_SHOWN = 500, 5
GRACE_SECONDS = 1  # for answers under way when serving ends
MOST_INDEXES = 4  # open at once; the one that was asked for least recently is closed
Answer = Callable[["AppState", Request], Any]


class Gate:
    """Refuses before anything is read: other methods than GET, names of this machine that are not its own (DNS
    rebinding), pages of other sites, and, if there is a token, requests without it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token
        self.cookie = f"{COOKIE}_{sha256(token.encode()).hexdigest()[:8]}"  # a browser's cookies know no port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refusal(HTTPConnection(scope), scope["method"])
        await (refused or self.app)(scope, receive, guarded)

    def _refusal(self, asked: HTTPConnection, method: str) -> Response | None:
        headers = asked.headers
        if method not in ("GET", "HEAD"):
            return _json({"error": "this service only answers GET"}, 405)
        if not self.token and _host(headers) not in LOOPBACK_NAMES:
            return _json({"error": "this page is served on 127.0.0.1 and localhost only"}, 403)
        if _is_foreign(headers):
            return _json({"error": "another site asked"}, 403)
        return self._token_refusal(asked) if self.token else None

    def _token_refusal(self, asked: HTTPConnection) -> Response | None:
        given = asked.query_params.get("token", "")
        if given and hmac.compare_digest(given.encode(), self.token.encode()):
            response = RedirectResponse("/", status_code=303)  # the token leaves the address line and the history
            response.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
            return response
        kept = asked.cookies.get(self.cookie, "")
        if hmac.compare_digest(kept.encode(), self.token.encode()):
            return None
        return _json({"error": "open the address with its token, as rocstar view printed it"}, 401)


def _host(headers: Headers) -> str:
    try:
        return urlsplit(f"//{headers.get('host', '')}").hostname or ""
    except ValueError:
        return ""


def _is_foreign(headers: Headers) -> bool:
    origin = headers.get("origin")
    site = headers.get("sec-fetch-site", "none")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        return True
    return site not in ("none", "same-origin") and headers.get("sec-fetch-mode") != "navigate"


class AppState:
    """What is open: tables of attempts, curves, searches. Any thread may ask."""

    def __init__(self, library: Library, cache: Path | None) -> None:
        self.library, self.cache = library, cache
        self._indexes: dict[str, tuple[Index, Searches]] = {}
        self._curves: dict[Path, Curves] = {}
        self._opening = threading.Lock()

    def source(self, request: Request) -> RunSource:
        return self.library.source(request.path_params["name"])

    def opened(self, source: RunSource) -> tuple[Index, Searches]:
        """The table of a source, which goes on being filled."""
        key = str(source.root)
        with self._opening:
            known = self._indexes.pop(key, None)
            if known is None:
                index = Index.open(source, self.cache)
                known = index, Searches(index)
            self._indexes[key] = known
            old = [self._indexes.pop(name) for name in list(self._indexes)[:-MOST_INDEXES]]
        for index, _ in old:
            index.close()
        known[0].follow()
        return known

    def index(self, request: Request) -> Index:
        return self.opened(self.source(request))[0]

    def curves(self, source: RunSource) -> Curves:
        with self._opening:  # two threads must not take up the same lines
            curves = self._curves.setdefault(source.root, Curves(Tail(source.root / "metrics.jsonl")))
            return curves.refresh()

    def close(self) -> None:
        for index, _ in self._indexes.values():
            index.close()


# -- answers: one function a path; each takes what is open and the request, and returns what JSON can say -------------


def sources(state: AppState, request: Request) -> Any:
    shown = []
    for source in state.library.sources():
        try:
            curves, unread = state.curves(source), {}
        except OSError as error:  # another user's
            curves, unread = Curves(Tail(source.root / "metrics.jsonl")), {"broken": str(error)}
        shown.append({**overview(source, curves.spans()), "spark": curves.spark(), "last": curves.last(), **unread})
    return {"base": str(state.library.base), "first": state.library.first, "sources": shown}


def differs(state: AppState, request: Request) -> Any:
    """Settings that are not the defaults: `setting`, `a`, `b`."""
    if (run := state.source(request).run) is None:
        return []
    given = provenances(resolved_from_json(run.resolved), (), otherwise=f"run {run.name}")
    return [
        {"setting": one["key"], "a": None if one["default"] == ABSENT else one["default"], "b": one["value"]}
        for one in given
    ]


def run(state: AppState, request: Request) -> Any:
    source = state.source(request)
    curves = state.curves(source)
    shown = {
        **overview(source, curves.spans()),
        "last": curves.last(),
        "metrics": sorted(curves.names),
        "spans": curves.spans(),
    }
    if source.run is None:
        return shown
    return {
        **shown,
        "identity": source.run.identity,
        "settings": read_json(source.run.resolved) if source.run.resolved.is_file() else {},
        "events": read_journal(source.run.events)[-EVENTS_SHOWN:],
        "rollouts": sorted(step for part, step, _ in source.attempt_files() if part == "rollouts"),
        "broken_lines": curves.broken,
    }


def curves(state: AppState, request: Request) -> Any:
    found = state.curves(state.source(request))
    wanted = [name for name in request.query_params.get("metrics", "").split(",") if name][:64]
    return {"axes": found.axes(), "columns": {name: found.column(name) for name in wanted}, "spans": found.spans()}


def attempts(state: AppState, request: Request) -> Any:
    index, where, about = _filtered(state, request)
    rows = query.attempts(index, where, **_page(request.query_params))
    return {**about, "total": query.count(index, where), "rows": rows}


def facets(state: AppState, request: Request) -> Any:
    index, where, about = _filtered(state, request)
    spans = state.curves(index.source).spans()
    return {**about, "facets": query.facets(index, where), "stages": [span["name"] for span in spans]}


def groups(state: AppState, request: Request) -> Any:
    index, where, about = _filtered(state, request)
    return {**about, **query.groups(index, where, **_page(request.query_params))}


def group(state: AppState, request: Request) -> Any:
    index = state.index(request)
    file, grp = _file(index, request), _number(request.query_params, "grp")
    rows = query.group_of(index, file, grp)
    if not rows:
        raise KeyError(grp)
    return {"problem": query.problem_of(index, rows[0]["problem_id"]), "siblings": rows}


def what_if(state: AppState, request: Request) -> Any:
    index = state.index(request)
    recorded = _recorded(state, index, request)
    made = [{"kept": c.kept, "reason": str(c.reason)} for c in recorded.choice().choices]
    used = recorded.another({})
    tried = {name: text for name, text in request.query_params.items() if name in TriedSettings.model_fields and text}
    found = recorded.another(tried) if tried else used
    chances = [sibling["chance"] for sibling in used["siblings"]]
    return {**found, "recomputed": made, "used": used["settings"], "chances": chances}


def attempt(state: AppState, request: Request) -> Any:
    index = state.index(request)
    file, row = _file(index, request), _number(request.query_params, "row")
    found = index.bodies(file, row, row, (*COLUMNS, "fields"))
    at = index.ask("SELECT grp FROM attempts WHERE file = ? AND row = ?", [file, row])
    if not found or not at:
        raise KeyError("attempt")
    folder = index.source.tokenizer()
    part, step = request.query_params.get("part", "rollouts"), found[0]["step"]
    shown = attempt_of(found[0], decoder_of(folder) if folder else None, _feedback(index, part, step))
    return {**shown, "grp": at[0][0]}


def _feedback(index: Index, part: str, step: int) -> Feedback | None:
    """How results were shown to the model in a step or an evaluation; None where settings do not say it."""
    run = index.source.run
    try:
        if part == "rollouts" and run:
            return feedback_of(read_json(run.resolved))
        return feedback_of(evaluation_of(index, part.removesuffix("/greedy"), step).get("setup", {}))
    except (DataError, KeyError, OSError):
        return None


def evaluation(state: AppState, request: Request) -> Any:
    asked, index = request.query_params, state.index(request)
    name, step = asked.get("eval", ""), _number(asked, "step")
    shown = {"result": evaluation_of(index, name, step), "indexing": index.waiting}
    if not asked.get("against"):
        return shown
    other, _, rest = asked["against"].partition("/")
    its_name, _, its_step = rest.rpartition("/")
    at = _number({"against": its_step}, "against")
    against = state.opened(state.library.source(other))[0]
    for one in (index, against):
        one.settle()
    return {**shown, "paired": paired((against, its_name, at), (index, name, step))}


ANSWERS: dict[str, Answer] = {
    "/api/sources": sources,
    "/api/run/{name}": run,
    "/api/run/{name}/differs": differs,
    "/api/run/{name}/curves": curves,
    "/api/run/{name}/attempts": attempts,
    "/api/run/{name}/facets": facets,
    "/api/run/{name}/groups": groups,
    "/api/run/{name}/group": group,
    "/api/run/{name}/what-if": what_if,
    "/api/run/{name}/attempt": attempt,
    "/api/run/{name}/evaluation": evaluation,
}


def application(library: Library, *, token: str = "", cache: Path | None = None) -> Starlette:
    """The page over a library. token: required of browsers; "" for none, on loopback only. cache: folder of the
    tables."""
    state = AppState(library, cache)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sweep_cache(cache)
        yield
        state.close()

    routes = [Route(path, _endpoint(state, answer)) for path, answer in ANSWERS.items()]
    page = Mount("/", StaticFiles(directory=STATIC, html=True))
    return Starlette(routes=[*routes, page], middleware=[Middleware(Gate, token=token)], lifespan=lifespan)


def _endpoint(state: AppState, answer: Answer) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(_answered, state, answer, request)

    return endpoint


def _answered(state: AppState, answer: Answer, request: Request) -> Response:
    try:
        return _json(answer(state, request))
    except (BadFilter, ConfigError, ValueError) as error:
        return _json({"error": str(error)}, 400)
    except KeyError as error:
        return _json({"error": f"there is no {error.args[0]} here (any more)"}, 404)
    except (RocstarError, OSError, duckdb.Error) as error:
        return _json({"error": str(error).splitlines()[0]}, 500)


def _json(value: Any, status: int = 200) -> Response:
    try:
        content = msgspec.json.encode(value, enc_hook=plain)
    except UnicodeEncodeError:  # half a surrogate pair, which a model can write; escaped, a browser can show it
        content = json.dumps(plain(value)).encode()
    return Response(content, status, {"Cache-Control": "no-store"}, "application/json")


def _filtered(state: AppState, request: Request) -> tuple[Index, Where, dict[str, Any]]:
    """The condition of the URL, and how far table and text search have come."""
    index, searches = state.opened(state.source(request))
    broken = [*index.source.refused, *index.broken()[:BROKEN_SHOWN]]
    asked, about = request.query_params, {"indexing": index.waiting, "broken": broken}
    stages = state.curves(index.source).spans() if asked.get("stage") else []
    text = asked.get("q", "")
    if not text:
        return index, query.filtered(asked, stages), about
    if len(text) < SHORTEST:
        raise BadFilter(f"q={text}: look for at least {SHORTEST} characters")
    search = searches.find(text)
    about |= {"searched": search.done, "of": len(search.files)}
    return index, query.filtered(asked, stages, search.number), about


def _recorded(state: AppState, index: Index, request: Request) -> RecordedGroup:
    file, step = _file(index, request), _number(request.query_params, "step")
    siblings = query.group_of(index, file, _number(request.query_params, "grp"))
    stage = next((s["name"] for s in state.curves(index.source).spans() if s["first"] <= step <= s["last"]), None)
    if not siblings or index.source.run is None or request.query_params.get("part") != "rollouts":
        raise BadFilter("only siblings of a training step were chosen among")
    if stage is None:
        raise BadFilter(f"metrics.jsonl does not say yet which stage step {step} belongs to")

    def read(with_tokens: bool) -> list[dict[str, Any]]:
        columns = [*SHORT_COLUMNS, *(("prompt_ids", "token_ids") if with_tokens else ())]
        return index.bodies(file, siblings[0]["row"], siblings[-1]["row"], columns)

    problem = problem_of(query.problem_of(index, siblings[0]["problem_id"]))
    repeats = bool(request.query_params.get("repetition_weight"))
    return recorded_group(index.source.run, stage, step, problem, read, repeats=repeats)


def _file(index: Index, request: Request) -> int:
    """Number of the file that a URL names by part and step. Raises KeyError."""
    part, step = request.query_params.get("part", "rollouts"), _number(request.query_params, "step")
    asked = "SELECT id FROM files WHERE part = ? AND step = ? AND broken IS NULL", [part, step]
    if not (found := index.ask(*asked)) and index.waiting:
        index.settle()
        found = index.ask(*asked)
    if not found:
        raise KeyError(f"{part} at step {step}")
    return int(found[0][0])


def _page(asked: Mapping[str, str]) -> dict[str, Any]:
    """Which rows of a list: how they are sorted, from which on, how many."""
    whole = {name: _number(asked, name, default) for name, default in (("offset", 0), ("limit", 100))}
    return {"sort": asked.get("sort") or "-step", **whole}


def _number(asked: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = asked.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal() or len(text) > 9:
        raise BadFilter(f"{name}={text} is no whole number")
    return int(text)


def serve(
    library: Library, *, host: str, port: int, browser: bool, tell: Callable[[str], None], cache: Path | None = None
) -> None:
    """Serve the page until Ctrl-C or SIGTERM. cache: folder of the tables. Raises ConfigError where the address is
    taken or is none of this machine's."""
    place = listener(host, port)
    token = "" if is_loopback(host) else secrets.token_urlsafe(24)
    # Everywhere is no name under which a browser elsewhere may find this machine.
    reachable = socket.gethostname() if host in ("0.0.0.0", "::") else host
    address = url_of(reachable, place.getsockname()[1])
    opened = f"{address}/?token={token}" if token else f"{address}/#{quote(library.first)}"
    app = application(library, token=token, cache=cache)
    more = {"server_header": False, "proxy_headers": False, "timeout_graceful_shutdown": GRACE_SECONDS}
    server = quiet_server(app, **more)
    with ended_by_signals(server):
        tell(f"{library.base} is shown at {opened} (Ctrl-C ends)")
        if browser:
            threading.Thread(target=webbrowser.open, args=(opened,), daemon=True).start()
        server.run([place])
