"""Both sides show that they know the token, and neither sends it. What follows is not encrypted."""

from __future__ import annotations

import hashlib
import hmac
import secrets

NODE, ROUTER = "node", "router"


def new_nonce() -> str:
    return secrets.token_hex(16)


def proof(token: str, role: str, nonce: str, name: str) -> str:
    """What `role` answers to the other's nonce. The role is part of it, so that no answer can be sent back."""
    return hmac.new(token.encode(), f"{role}\0{nonce}\0{name}".encode(), hashlib.sha256).hexdigest()


def is_proven(given: object, token: str, role: str, nonce: str, name: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), proof(token, role, nonce, name).encode())
