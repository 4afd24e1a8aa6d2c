"""`python -m rocstar.sandbox.router.node_main`: a node process. Says `ready` and what it is on stdout, then serves.

Ends after SIGTERM once its calls are done (exit code 0); at once after SIGINT and when its parent dies; when a router
refuses it or the sandbox cannot be had (3, with the reason on stderr).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rocstar.sandbox.client import SandboxClient
from rocstar.sandbox.router import codec
from rocstar.sandbox.router.agent import NodeAgent
from rocstar.sandbox.router.uplink import Refused
from rocstar.sandbox.router.work import SandboxWork
from rocstar.sandbox.wire import SandboxDown

NOT_READY = 3


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return run(options)
    except SandboxDown as error:
        print(error, file=sys.stderr)
    except ExceptionGroup as group:
        down, rest = group.split((SandboxDown, Refused))
        if rest is not None or down is None:
            raise
        print(*down.exceptions, sep="\n", file=sys.stderr)
    return NOT_READY


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rocstar-sandbox-node", description="Run a sandbox node for a router.")
    parser.add_argument("--router", action="append", required=True, metavar="ADDRESS", help="host:port or unix:/path")
    parser.add_argument("--token-file", required=True, metavar="PATH", help="holds the routers' token; - reads stdin")
    parser.add_argument("--slots", type=int, default=4 * (os.cpu_count() or 1), help="programs at once")
    parser.add_argument("--preload", default="numpy,sympy", metavar="A,B", help="modules imported before forking")
    parser.add_argument("--min-isolation", default="L1", metavar="LEVEL")
    parser.add_argument("--label", default="", help="name of this node, the same after a restart")
    parser.add_argument("--capacity", type=int, help="calls taken at once; default: four per slot")
    parser.add_argument("--parent", type=int, help="process id; end when it does")
    return parser


def run(options: argparse.Namespace) -> int:
    token = sys.stdin.readline() if options.token_file == "-" else Path(options.token_file).read_text()
    preload = [name for name in options.preload.split(",") if name]
    with SandboxClient.start(
        slots=options.slots, preload=preload, min_isolation=options.min_isolation, node=options.label
    ) as client:
        asyncio.run(serve(client, options, token.strip()))
    return 0


async def serve(client: SandboxClient, options: argparse.Namespace, token: str) -> None:
    loop = asyncio.get_running_loop()
    agent = NodeAgent(
        SandboxWork(client), routers=options.router, token=token, label=options.label, capacity=options.capacity
    )
    loop.add_signal_handler(signal.SIGTERM, agent.leave)
    loop.add_signal_handler(signal.SIGINT, end_now, client)
    if options.parent:
        end_with(options.parent, loop, client)
    print(json.dumps({"ready": agent.name, "info": codec.info_message(client.info())}), flush=True)
    await agent.serve()


def end_with(parent: int, loop: asyncio.AbstractEventLoop, client: SandboxClient) -> None:
    """Nobody is left to serve when this process is gone."""
    try:
        loop.add_reader(os.pidfd_open(parent), end_now, client)
    except ProcessLookupError:
        end_now(client)


def end_now(client: SandboxClient) -> None:
    client.close()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
