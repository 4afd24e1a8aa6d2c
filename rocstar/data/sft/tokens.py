"""What a build notes down about a tokenizer's folder; reading it is `rocstar.dialogue.tokenizer_files`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rocstar.dialogue.tokenizer_files import found_file, text_of_file

FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")


def special_tokens(folder: Path) -> tuple[str, ...]:
    """Strings this tokenizer turns into one token of their own wherever they stand, so that no text may hold them."""
    whole = found_file(folder, "tokenizer.json")
    if whole:
        return tuple(token["content"] for token in json.loads(text_of_file(whole)).get("added_tokens", ()))
    settings = json.loads(text_of_file(files)) if (files := found_file(folder, "tokenizer_config.json")) else {}
    return tuple(token["content"] for token in settings.get("added_tokens_decoder", {}).values())


def folder_digest(folder: Path) -> str:
    """SHA-256 over the tokenizer's files as they are on disk."""
    digest = hashlib.sha256()
    for name in FILES:
        if found := found_file(folder, name):
            digest.update(found.name.encode() + b"\0" + found.read_bytes())
    return digest.hexdigest()
