"""/openapi.json, made from the shapes themselves, and /docs, a page made from that: no script, no other host."""

from __future__ import annotations

import ast
import html
import inspect
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from typing import Any, Literal, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.responses import Response as HttpResponse

from rocstar.sandbox import wire
from rocstar.sandbox.service import code_judge, native, sandbox_fusion, session_api, shapes
from rocstar.sandbox.service.http import Path, json_response
from rocstar.sandbox.service.ledger import OUTCOMES
from rocstar.sandbox.service.shapes import encode

REF = "#/components/schemas/{name}"
POSTS: Mapping[str, tuple[type | None, str]] = {
    "/v1/run": (shapes.Call, "Run one program."),
    "/v1/batch": (shapes.Batch, "Run many; the answer is {results: [Response, ...]} in their order."),
    "/v1/stream": (shapes.Batch, "Run many; the answer is a line {index, result: Response} per call as it finishes."),
    "/v1/notebook": (shapes.Notebook, "Run cells that share their names; {results: [Response, ...]}, one per cell."),
    "/v1/sessions": (shapes.OpenSession, "Open a session, for cells that come one by one; a SessionState."),
    "/v1/sessions/{id}/cells": (shapes.Cell, "Run a cell of a session; its Response."),
    "/v1/sessions/{id}/branch": (None, "Another session with the same past; its SessionState."),
    "/run_code": (sandbox_fusion.RunCode, "As SandboxFusion."),
    "/run_jupyter": (sandbox_fusion.RunJupyter, "As SandboxFusion: cells of a notebook."),
    "/run": (code_judge.Submission, "As code-judge."),
    "/judge": (code_judge.Submission, "As code-judge, without the output."),
    "/run/batch": (code_judge.BatchSubmission, "As code-judge."),
    "/judge/batch": (code_judge.BatchSubmission, "As code-judge, without the output."),
    "/run/long-batch": (code_judge.BatchSubmission, "As code-judge: calls may wait for an hour."),
    "/judge/long-batch": (code_judge.BatchSubmission, "As code-judge: the same, without the output."),
}
GETS: Mapping[str, str] = {
    "/v1/sessions/{id}": "A session's SessionState.",
    "/status": "Isolation level, failed probes, queue, slots, calls by outcome (also /v1/status).",
    "/metrics": "The same and more for Prometheus.",
    "/ping": '"pong" (also /v1/ping); needs no token.',
    "/openapi.json": "This description.",
    "/mcp": "MCP's streamable HTTP (POST too): the tools run_python and python_session.",
    "/code-judge/status": "code-judge's own two fields. Its other paths are served under /code-judge too.",
}
DELETES: Mapping[str, str] = {"/v1/sessions/{id}": "End a session; cells of it that run are ended too."}
STATUSES: Mapping[int, str] = {
    200: "the program was run, whatever it did; `outcome` says what",
    201: "the session is open",
    204: "the session is closed",
    400: "the request cannot be served as it is",
    401: "no or a wrong token",
    403: "a web page of another site",
    404: "no such path; no such session, or not any more",
    408: "the request came too slowly",
    413: "the body, the batch or a session's history is too long",
    422: "the other services' paths: a field has another shape, or needs what is not served here",
    500: "we failed; safe to send again",
    503: "overloaded: not run; Retry-After says in how many seconds to come again",
    504: "SandboxFusion's paths: overloaded or a fault of ours",
}


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    bodies = [*dict.fromkeys(body for body, _ in POSTS.values() if body is not None), session_api.SessionState]
    _, schemas = msgspec.json.schema_components([*bodies, response_shape()], ref_template=REF)
    for shape in (*bodies, shapes.CallLimits, shapes.Base64, wire.Response, wire.Failure):
        explain(schemas[shape.__name__], shape)
    paths: dict[str, Any] = {path: {"post": operation(told, body)} for path, (body, told) in POSTS.items()}
    for method, described in (("get", GETS), ("delete", DELETES)):
        for path, told in described.items():
            paths.setdefault(path, {})[method] = {"summary": told, "responses": {"200": {"description": told}}}
    for path in [path for path in paths if "{id}" in path]:
        named = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        paths[path]["parameters"] = [named]
    info = {"title": "rocstar sandbox", "version": version("rocstar"), "description": summary_of(native)}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def response_shape() -> type:
    """`wire.Response` as msgspec can describe it: its two enums of outcomes as one list of names."""
    hints = get_type_hints(wire.Response)
    hints["outcome"] = Literal[OUTCOMES]
    return msgspec.defstruct("Response", list(hints.items()))


def operation(told: str, body: type | None) -> dict[str, Any]:
    result = {"application/json": {"schema": {"$ref": REF.format(name="Response")}}}
    responses: dict[str, Any] = {str(status): {"description": meaning} for status, meaning in STATUSES.items()}
    if body in (shapes.Call, shapes.Cell):
        responses["200"]["content"] = result
    described: dict[str, Any] = {"summary": told, "responses": responses}
    if body is not None:
        schema = {"$ref": REF.format(name=body.__name__)}
        described["requestBody"] = {
            "required": body is not shapes.OpenSession,
            "content": {"application/json": {"schema": schema}},
        }
    return described


def explain(schema: dict[str, Any], shape: type) -> None:
    """Put the sentence under each field of the source into the schema: it is written once."""
    sentences = field_sentences(shape)
    for name, field in schema.get("properties", {}).items():
        if name in sentences:
            field["description"] = sentences[name]


def field_sentences(shape: type) -> dict[str, str]:
    """Field -> the string that follows it in the class's source."""
    body = ast.parse(inspect.getsource(shape)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def summary_of(module: Any) -> str:
    return (module.__doc__ or "").strip().split("\n\n")[0]


async def described(request: Request) -> HttpResponse:
    """GET /openapi.json."""
    return json_response(encode(document()))


async def docs(request: Request) -> HttpResponse:
    """GET /docs."""
    return HTMLResponse(page(document()))


def page(described: Mapping[str, Any]) -> str:
    rows = "".join(
        path_row(path, method, told)
        for path, methods in described["paths"].items()
        for method, told in methods.items()
        if method != "parameters"
    )
    statuses = "".join(f"<tr><td>{code}<td>{html.escape(told)}" for code, told in STATUSES.items())
    shapes_told = "".join(shape_table(name, schema) for name, schema in described["components"]["schemas"].items())
    return PAGE.format(version=version("rocstar"), rows=rows, statuses=statuses, shapes=shapes_told)


def path_row(path: str, method: str, told: Mapping[str, Any]) -> str:
    body = told.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = body.get("$ref", "").rpartition("/")[2]
    link = f'<a href="#{name}">{name}</a>' if name else ""
    return f"<tr><td>{method.upper()}<td><code>{path}</code><td>{link}<td>{html.escape(told['summary'])}"


def shape_table(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", [])
    rows = "".join(
        f"<tr><td><code>{field}</code><td>{'needed' if field in required else ''}"
        f"<td>{html.escape(told.get('description', ''))}"
        for field, told in schema.get("properties", {}).items()
    )
    return f'<h3 id="{name}">{name}</h3><table>{rows}</table>' if rows else ""


PATHS: list[Path] = [("GET", "/openapi.json", described), ("GET", "/docs", docs), ("GET", "/", docs)]

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>rocstar sandbox</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
td{{padding:.15rem 1rem .15rem 0;vertical-align:top}}pre{{background:#8882;padding:1rem;overflow:auto}}</style>
<h1>rocstar sandbox {version}</h1>
<pre>curl localhost:8700/v1/run -d '{{"code": "print(6 * 7)"}}'</pre>
<h2>Paths</h2><table>{rows}</table><h2>Status codes</h2><table>{statuses}</table><h2>Shapes</h2>{shapes}</html>
"""
