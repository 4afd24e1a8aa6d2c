"""The sockets a service listens on: for each worker one on the service's address, over which the kernel spreads
connections, and, where there are several, a Unix one for what other workers pass on to it (`hop`)."""

from __future__ import annotations

import shutil
import socket
import tempfile
from dataclasses import dataclass

from rocstar.sandbox.service.settings import Settings

BACKLOG = 4096  # connections the kernel holds per worker until it takes them


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """By number of the worker."""

    public: list[socket.socket]
    private: list[socket.socket]
    """None for a single worker."""
    folder: str
    """Where the private ones are: only the service's own user may look into it. Empty where there are none."""

    @classmethod
    def open(cls, settings: Settings) -> Listeners:
        """Raises OSError."""
        public = listen(settings)
        if settings.workers == 1:
            return cls(public=public, private=[], folder="")
        folder = tempfile.mkdtemp(prefix="rocstar-")
        private = []
        for number in range(settings.workers):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(path_of(folder, number))
            listener.listen(BACKLOG)
            private.append(listener)
        return cls(public=public, private=private, folder=folder)

    def keep_only(self, number: int) -> None:
        """In a worker: let go of the others'."""
        for listeners in (self.public, self.private):
            for other, listener in enumerate(listeners):
                if other != number:
                    listener.close()

    def close(self) -> None:
        for listener in (*self.public, *self.private):
            listener.close()

    def remove(self) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def path_of(folder: str, number: int) -> str:
    """A worker's Unix socket."""
    return f"{folder}/worker{number}"


def listen(settings: Settings) -> list[socket.socket]:
    """One socket per worker on the same address: the kernel spreads connections over them. Raises OSError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    port, listeners = settings.port, []
    for _ in range(settings.workers):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if settings.workers > 1:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((settings.host, port))
        listener.listen(BACKLOG)
        port = listener.getsockname()[1]
        listeners.append(listener)
    return listeners
