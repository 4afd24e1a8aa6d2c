"""An MCP server on stdin and stdout that needs no package and misbehaves as told: `mcp_server.py FOLDER [FLAG...]`.

With the flag `python` its first tool has that name and runs any program.
Each start is a line in FOLDER/starts. Files in FOLDER change it while it runs: `dies` (once, in the next call),
`other_tools` (it lists another tool), `gone` (it does not start)."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FOLDER, FLAGS = Path(sys.argv[1]), sys.argv[2:]
CODE = {"code": {"type": "string"}, "input": {"type": "string"}}
count = 0


def schema(properties: dict[str, Any] | None = None, *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties or {}, "required": list(required)}


def tools() -> list[dict[str, Any]]:
    found = [
        {"name": "program", "description": "Does what a program does.", "inputSchema": schema(CODE, "code")},
        {"name": "count", "description": "Counts its calls.", "inputSchema": schema()},
    ]
    if "python" in FLAGS:
        found[0]["name"] = "python"
    if "doubled" in FLAGS:
        found.append(found[1])
    if "wrong_schema" in FLAGS:
        found[0]["inputSchema"]["type"] = "program"
    if (FOLDER / "other_tools").exists():
        found[1] = {**found[1], "description": "Counts something else."}
    return found


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], **more}


def called(name: str, arguments: dict[str, Any]) -> dict[str, Any] | None:
    """None: no answer."""
    global count
    code = arguments.get("code", "")
    dies = FOLDER / "dies"
    if code == "exit" or dies.exists():
        dies.unlink(missing_ok=True)
        print("the last words", file=sys.stderr, flush=True)
        os._exit(1)
    if name == "count":
        count += 1
        return {"result": text(str(count))}
    if "python" in FLAGS:
        out = io.StringIO()
        try:
            with redirect_stdout(out):
                exec(code, {})
        except Exception as error:
            return {"result": text(f"{type(error).__name__}: {error}", isError=True)}
        return {"result": text(out.getvalue())}
    if code == "print(6 * 7)":
        return {"result": text("42\n")}
    if code == "1 / 0":
        return {"result": text("ZeroDivisionError: division by zero\n", isError=True)}
    if code == "while True: pass":
        return None
    if code == "hang":
        time.sleep(60)
    if code == "garble":
        print('{"jsonrpc": "2.0", "id": 4, "res', flush=True)
        return None
    if code == "long":
        print("x" * 4096, flush=True)
        return None
    if code.startswith("id "):
        print(json.dumps({"jsonrpc": "2.0", "id": int(code[3:]), "result": text("42")}), flush=True)
        return None
    if code == "chat":
        for _ in range(9):
            print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}))
        return {"result": text("done")}
    if code == "half":
        return {"result": {"content": "no list"}}
    if code.startswith("error"):
        return {"error": {"code": int(code[5:]), "message": "it says no"}}
    return {"result": json.loads(code)}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        info = {"name": "scripted", "version": "1"}
        return {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}}
    if method == "tools/list":  # a page each
        page = int(params.get("cursor", 0))
        more = {"nextCursor": str(page + 1)} if page + 1 < len(tools()) else {}
        return {"result": {"tools": tools()[page : page + 1], **more}}
    if method == "tools/call":
        return called(params["name"], params.get("arguments", {}))
    return {"error": {"code": -32601, "message": f"no {method}"}}


def main() -> None:
    with open(FOLDER / "starts", "a") as starts:
        starts.write(f"{os.getpid()}\n")
    if (FOLDER / "gone").exists():
        sys.exit("no key was given")
    if "banner" in FLAGS:
        print("a server of ours, version 1", flush=True)
    if "child" in FLAGS or "far_child" in FLAGS:
        child = subprocess.Popen(["sleep", "600"], start_new_session="far_child" in FLAGS)
        (FOLDER / "child").write_text(str(child.pid))
    for line in sys.stdin:
        asked = json.loads(line)
        if (
            "id" in asked
            and not (FOLDER / "silent").exists()
            and (said := answer(asked["method"], asked.get("params", {})))
        ):
            print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **said}), flush=True)


if __name__ == "__main__":
    main()
