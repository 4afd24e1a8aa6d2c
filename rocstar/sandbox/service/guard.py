"""Who may call: a token where one is set, and no web page of another site.

Not here: what a program may do (the sandbox's walls).
"""

from __future__ import annotations

import hmac
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from rocstar.sandbox.service.settings import Settings, is_loopback
from rocstar.sandbox.service.shapes import BadRequest

OPEN_PATHS = ("/ping", "/v1/ping", "/code-judge/ping")  # a load balancer asks them and learns nothing
TOKEN_PREFIX = "/token/"


class Guard:
    """Refuses before a body is read. `/token/SECRET/run_code` is `/run_code` with a token: for clients that can be
    given an address and nothing else."""

    def __init__(self, settings: Settings) -> None:
        self.token = settings.token
        # A page in the operator's browser can reach a loopback address under a name of its own (DNS rebinding).
        self.only_plain_hosts = not settings.token and is_loopback(settings.host)

    def refusal(self, scope: Scope) -> BadRequest | None:
        """Why the request may not be served; None when it may."""
        headers = Headers(scope=scope)
        origin, host = headers.get("origin"), headers.get("host", "")
        if origin is not None and urlsplit(origin).netloc != host:
            return BadRequest(f"a page of {origin} may not call this service", 403)
        if self.only_plain_hosts and not is_plain(host):
            return BadRequest(f"the host name {host} is not this machine's address; use 127.0.0.1 or localhost", 403)
        given = self.given_token(scope, headers)
        if self.token and scope["path"] not in OPEN_PATHS and not same(given, self.token):
            return BadRequest("a token is needed: send it as `Authorization: Bearer TOKEN`", 401)
        return None

    def given_token(self, scope: Scope, headers: Headers) -> str:
        """From the header, or from the path, which is then shortened by it."""
        path: str = scope["path"]
        if path.startswith(TOKEN_PREFIX):
            token, slash, rest = path.removeprefix(TOKEN_PREFIX).partition("/")
            scope["path"] = slash + rest
            return token
        return headers.get("authorization", "").removeprefix("Bearer ")


def same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


@lru_cache(maxsize=1024)
def is_plain(host: str) -> bool:
    """`localhost` or an address, with or without a port. Browsers always send one; old clients may send none."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is None or is_loopback(name) or name.replace(".", "").isdigit() or ":" in name
