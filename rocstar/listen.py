"""An address of this machine that a server of ours listens on, as a person gave it."""

from __future__ import annotations

import socket

from rocstar.errors import ConfigError
from rocstar.sandbox.service.core import is_loopback

__all__ = ["is_loopback", "listener", "url_of"]


def listener(host: str, port: int) -> socket.socket:
    """port: 0 takes a free one. Raises ConfigError where the address is taken or is none of this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port, or 0") from None


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
