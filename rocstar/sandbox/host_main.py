"""Entry point of the host process."""

from __future__ import annotations

import json
import signal
import sys

from rocstar.sandbox import host_life


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which then closes us
    host_life.run(json.loads(sys.argv[1]))
