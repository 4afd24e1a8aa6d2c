"""One sandbox of one checkout, driven from outside: reads `WORKLOAD CALLS` lines, makes the calls, says `done`.

Started by `sandbox_peers.py` as `python sandbox_driver.py CHECKOUT SETTINGS`, so that checkouts of different age run
side by side under the same measurement. SETTINGS is JSON: {"walls": bool, "compiled": bool}.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

WORKLOADS = {
    "W1": "print(1+1)",
    "W2": "import numpy as np; print(np.linalg.det(np.eye(4)))",
    "W3": "import sympy as sp; x=sp.symbols('x'); print(sp.integrate(sp.sin(x)**2,(x,0,1)))",
}
EXPECTED = {"W1": "2\n", "W2": "1.0\n", "W3": "-sin(1)*cos(1)/2 + 1/2\n"}


def client_of(walls: bool, compiled: bool) -> Any:
    """A client not yet started."""
    from rocstar.sandbox.call import DaemonSettings, Isolation
    from rocstar.sandbox.client.client import SandboxClient
    from rocstar.sandbox.walls.plans import PLANS

    level, skipped = (Isolation.L1, 0) if walls else (Isolation.L0, len(PLANS) - 1)
    settings = DaemonSettings(slots=2, preload=(), compiled=compiled, min_isolation=level, skip_plans=skipped)
    return SandboxClient(settings)


async def run(client: Any, workload: str, calls: int) -> None:
    from rocstar.sandbox.call import Call, Limits

    code = WORKLOADS[workload]
    limits = Limits(wall_seconds=60.0, cpu_seconds=60.0)  # a busy machine must not end a call
    sent = [Call(id=str(n), code=code, limits=limits, seed=n) for n in range(calls)]
    for response in await asyncio.gather(*map(client.run, sent)):
        if response.stdout != EXPECTED[workload]:
            raise AssertionError(f"{workload} ended with {response}")


def main() -> None:
    sys.path[0] = sys.argv[1]  # in place of this folder
    client = client_of(**json.loads(sys.argv[2]))
    client.launch()
    client.await_hello()
    with client:
        info = client.info()
        print(json.dumps({"isolation": info.isolation, "fork_path": info.fork_path}), flush=True)
        for line in sys.stdin:
            workload, calls = line.split()
            asyncio.run(run(client, workload, int(calls)))
            print("done", flush=True)


if __name__ == "__main__":
    main()
