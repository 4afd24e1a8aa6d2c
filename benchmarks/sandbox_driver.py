"""One sandbox of one checkout, driven from outside: reads `WORKLOAD CALLS` lines, makes the calls, says `done`.

Started by `sandbox_peers.py` as `python sandbox_driver.py CHECKOUT SETTINGS`, so that checkouts of different age run
side by side under the same measurement. SETTINGS is JSON: {"walls": bool, "compiled": bool}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from typing import Any

WORKLOADS = {
    "W1": "print(1+1)",
    "W2": "import numpy as np; print(np.linalg.det(np.eye(4)))",
    "W3": "import sympy as sp; x=sp.symbols('x'); print(sp.integrate(sp.sin(x)**2,(x,0,1)))",
}
EXPECTED = {"W1": "2\n", "W2": "1.0\n", "W3": "-sin(1)*cos(1)/2 + 1/2\n"}


def current(walls: bool, compiled: bool) -> tuple[Any, Any, Any]:
    """A client not yet started, and the types of its calls and limits."""
    from rocstar.sandbox.call import Call, DaemonSettings, Isolation, Limits
    from rocstar.sandbox.client.client import SandboxClient
    from rocstar.sandbox.walls.plans import PLANS

    level, skipped = (Isolation.L1, 0) if walls else (Isolation.L0, len(PLANS) - 1)
    settings = DaemonSettings(slots=2, preload=(), compiled=compiled, min_isolation=level, skip_plans=skipped)
    return SandboxClient(settings), Call, Limits


def of_d725079(walls: bool, compiled: bool) -> tuple[Any, Any, Any]:
    """The same of the checkouts before the daemon."""
    client_of, jail, wire = (import_module(f"rocstar.sandbox.{name}") for name in ("client", "jail", "wire"))
    level, skipped = (wire.Isolation.L1, 0) if walls else (wire.Isolation.L0, len(jail.PLANS) - 1)
    settings = {"compiled": compiled, "min_isolation": level, "skip_plans": skipped}
    return client_of.SandboxClient(slots=2, preload=(), **settings), wire.Request, wire.Limits


async def run(client: Any, call: Any, limits: Any, workload: str, calls: int) -> None:
    code = WORKLOADS[workload]
    sent = [call(id=str(n), code=code, limits=limits, seed=n) for n in range(calls)]
    for response in await asyncio.gather(*map(client.run, sent)):
        if response.stdout != EXPECTED[workload]:
            raise AssertionError(f"{workload} ended with {response}")


def main() -> None:
    sys.path[0] = sys.argv[1]  # in place of this folder
    settings = json.loads(sys.argv[2])
    try:
        client, call, kind_of_limits = current(**settings)
    except ImportError:
        client, call, kind_of_limits = of_d725079(**settings)
    limits = kind_of_limits(wall_seconds=60.0, cpu_seconds=60.0)  # a busy machine must not end a call
    client.launch()
    client.await_hello()
    with client:
        info = client.info()
        print(json.dumps({"isolation": info.isolation, "fork_path": info.fork_path}), flush=True)
        for line in sys.stdin:
            workload, calls = line.split()
            asyncio.run(run(client, call, limits, workload, int(calls)))
            print("done", flush=True)


if __name__ == "__main__":
    main()
