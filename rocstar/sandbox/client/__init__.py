"""The caller's side of the sandbox: one client over one or many daemons."""

from rocstar.sandbox.client.client import SandboxClient, run_once
from rocstar.sandbox.client.session import Session

__all__ = ["SandboxClient", "Session", "run_once"]
