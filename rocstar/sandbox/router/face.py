"""The face of a router that brings its own nodes: that of `SandboxClient`. Where nodes come from is the subclass's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rocstar.sandbox.router import codec
from rocstar.sandbox.router.nouns import Node
from rocstar.sandbox.router.router import Router
from rocstar.sandbox.session import Session
from rocstar.sandbox.wire import HostInfo, Limits, Request, Response


class RouterFace(ABC):
    """A router and what its nodes said of themselves when they were started."""

    def __init__(self, router: Router, infos: Sequence[HostInfo]) -> None:
        self.router = router
        self.infos = infos

    @abstractmethod
    def close(self) -> None:
        """End the nodes and the router. May be called twice."""

    async def run(self, request: Request) -> Response:
        """See `Router.run`."""
        return await self.router.run(request)

    def open_session(self, *, limits: Limits | None = None, seed: int | None = None) -> Session:
        """See `Router.open_session`."""
        return self.router.open_session(limits=limits, seed=seed)

    def info(self) -> HostInfo:
        """Of all nodes together, as they were started."""
        return codec.combined(self.infos)

    def nodes(self) -> list[Node]:
        return self.router.nodes()

    def cpu_seconds(self) -> float:
        return self.router.cpu_seconds()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
