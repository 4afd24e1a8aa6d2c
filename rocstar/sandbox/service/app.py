"""The ASGI application: which path is served by what. A table of paths instead of a router's layers: a waiting call
holds on to every layer above it, and tens of thousands may wait."""

from __future__ import annotations

import asyncio
import logging

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from rocstar.sandbox.service import code_judge, native, notebook_api, openapi, pages, sandbox_fusion, session_api
from rocstar.sandbox.service.guard import Guard
from rocstar.sandbox.service.http import Path, Service, told
from rocstar.sandbox.service.mcp_http import McpEndpoint
from rocstar.sandbox.service.shapes import BadRequest

LOG = logging.getLogger("uvicorn.error")
MCP_PATH = "/mcp"


def paths() -> list[Path]:
    own = [*native.PATHS, *notebook_api.PATHS, *session_api.PATHS, *pages.PATHS, *openapi.PATHS]
    return [*own, *code_judge.PATHS, *sandbox_fusion.PATHS]


class App:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.guard = Guard(service.settings)
        self.endpoints = {(method, path): endpoint for method, path, endpoint in paths()}
        self.known_paths = {path for _, path in self.endpoints}
        self.mcp = McpEndpoint(service)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.service.row.add("requests")
        scope["service"] = self.service
        refusal = self.guard.refusal(scope)
        if refusal is None and scope["path"] == MCP_PATH:
            await self.mcp(scope, receive, send)
            return
        request = Request(scope, receive, send)
        response = await self.answer(request) if refusal is None else told(refusal)
        if refusal is not None:
            self.service.row.add("refused")
        await response(scope, receive, send)

    async def answer(self, request: Request) -> HttpResponse:
        method = "GET" if request.method == "HEAD" else request.method
        path, request.scope[session_api.SESSION] = session_api.split(request.scope["path"])
        try:
            endpoint = self.endpoints.get((method, path))
            if endpoint is None:
                raise self.unknown(method, path)
            return await endpoint(request)
        except BadRequest as error:
            self.service.row.add("refused")
            return told(error)
        except asyncio.CancelledError:  # the drain took too long
            return told(BadRequest("the service is shutting down and could not finish this call; send it again", 503))
        except Exception as error:  # a bug of ours: its traceback goes to the log, a sentence to the caller
            LOG.exception("%s %s failed", method, path)
            return told(BadRequest(f"the service failed at {path} ({type(error).__name__}); its log says where", 500))

    def unknown(self, method: str, path: str) -> BadRequest:
        if path in self.known_paths:
            return BadRequest(f"{path} is not called by {method}; see GET /docs", 405)
        return BadRequest(f"there is no {path} here; GET /docs lists what there is", 404)
