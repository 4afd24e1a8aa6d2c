"""Asking a service from a command: one request, one answer, the standard library's client."""

from __future__ import annotations

import http.client
import json
from typing import Any

from rocstar.sandbox.service.connection import Address
from rocstar.sandbox.wire import SandboxDown

TIMEOUT_SECONDS = 700.0  # longer than the longest call an operator allows by default


def ask(address: Address, method: str, path: str, message: Any = None) -> Any:
    """The decoded answer, whatever its status. Raises SandboxDown when there is no service to answer."""
    where = f"{address.host}:{address.port}"
    headers = {"content-type": "application/json"}
    if address.token:
        headers["authorization"] = f"Bearer {address.token}"
    connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_SECONDS)
    try:
        body = None if message is None else json.dumps(message).encode()
        connection.request(method, address.prefix + path, body, headers)
        text = connection.getresponse().read()
    except (OSError, http.client.HTTPException) as error:
        raise SandboxDown(
            f"no sandbox service answers at {where} ({error}); start one: rocstar sandbox serve"
        ) from error
    finally:
        connection.close()
    try:
        return json.loads(text)
    except ValueError:
        raise SandboxDown(f"what answers at {where} is not a sandbox service: {text[:80]!r}") from None


def checked(answer: Any) -> Any:
    """The answer, unless it is a refusal: `{"error": sentence}`. Raises SandboxDown."""
    if isinstance(answer, dict) and set(answer) == {"error"}:
        raise SandboxDown(f"the sandbox service refused: {answer['error']}")
    return answer
