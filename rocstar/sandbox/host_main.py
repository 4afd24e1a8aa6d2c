"""Entry point of the host process: fork the nursery while this process is still small, then become the host."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from typing import Any


def main() -> None:
    config = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes us
    commands, nursery_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        commands.close()
        os.close(config["fd"])
        run_nursery(nursery_end, config["preload"], config["workdirs"])
    nursery_end.close()
    run_host(config, commands)


def run_nursery(commands: socket.socket, preload: list[str], workdirs: str) -> None:
    """Never returns."""
    from rocstar.sandbox import nursery

    try:
        nursery.main(commands, preload, workdirs)
    finally:
        os._exit(0)


def run_host(config: dict[str, Any], commands: socket.socket) -> None:
    from rocstar.sandbox import host

    host.run(config, commands)
