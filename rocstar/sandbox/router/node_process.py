"""Starting a node as a process of this machine, and seeing it out. Not here: what it does (`node_main`)."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rocstar.sandbox.router import codec
from rocstar.sandbox.wire import HostInfo, SandboxDown

START_SECONDS = 120.0  # preloading can be slow on a cold, shared file system
LEAVE_SECONDS = 5.0
KEPT = ("PATH", "TMPDIR", "HOME")  # of our environment; the rest may hold secrets
ROOT = str(Path(__file__).resolve().parents[3])
# A node runs this very package, wherever it lies, without our folder staying ahead of the standard library.
BOOT = "import sys; sys.path.insert(0, {root!r}); import rocstar.sandbox; del sys.path[0]; \
from rocstar.sandbox.router.node_main import main; sys.exit(main())"


class NodeProcess:
    """A running node that ends with us, however we end."""

    def __init__(self, *, address: str, token: str, label: str, settings: Sequence[str], folder: str) -> None:
        """Start one. settings: options of `node_main`. folder: where its log goes. Raises OSError."""
        self.label = label
        self.log = Path(folder) / f"{label}.log"
        self.started = time.monotonic()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-s", "-c", BOOT.format(root=ROOT)),
                    *("--router", address, "--token-file", "-", "--label", label),
                    *("--parent", str(os.getpid()), *settings),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"LANG": "C.UTF-8", **{name: os.environ[name] for name in KEPT if name in os.environ}},
                cwd="/",
                start_new_session=True,  # Ctrl-C in a terminal is for us
            )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin:  # it died at once; whoever waits for it sees that
            self.process.stdin.write(f"{token}\n".encode())

    def await_ready(self) -> HostInfo:
        """What it is, once its sandbox runs. Raises SandboxDown."""
        stdout = self.process.stdout
        assert stdout is not None
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        line = stdout.readline() if poll.poll(1000 * START_SECONDS) else b""
        if not line:
            self.process.kill()
            self.process.wait()
            reason = self.log.read_text().strip() or f"no answer within {START_SECONDS} seconds"
            raise SandboxDown(f"sandbox {self.label} did not start: {reason}")
        return codec.parse_info(json.loads(line)["info"])

    def see_out(self) -> None:
        """Reap it; kill it when it does not end."""
        try:
            self.process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
