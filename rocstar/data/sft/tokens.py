"""A tokenizer from a published folder: `tokenizer.json`, or the older `vocab.json` and `merges.txt`, plain or gzip."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocstar.errors import ConfigError

if TYPE_CHECKING:
    from rocstar.dialogue.codec import Codec

# How GPT-4-like byte-level BPEs (Qwen2 and later) cut text before merging: contractions, words with one leading other
# character, single digits, runs of punctuation with their line ends, line ends, other blanks.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json")


def load_codec(folder: Path) -> Codec:
    """The codec of a folder. A folder without tokenizer.json is taken for a Qwen2 one, the only such kind we know.
    Raises ConfigError."""
    from rocstar.dialogue.codec import Codec

    if (folder / "tokenizer.json").is_file():
        return Codec.load(folder)
    files = {name: found for name in FILES if (found := _found(folder, name))}
    missing = [name for name in FILES[1:] if name not in files]
    if missing:
        raise ConfigError(f"{folder} has no tokenizer.json and no {missing[0]}; give the folder of a tokenizer")
    settings = json.loads(_text(files["tokenizer_config.json"]))
    if not str(settings.get("tokenizer_class", "")).startswith("Qwen2"):
        raise ConfigError(
            f"{folder} holds a {settings.get('tokenizer_class')}; without tokenizer.json only Qwen2 ones can be read"
        )
    return Codec(_qwen(files), settings)


def special_tokens(folder: Path) -> tuple[str, ...]:
    """Strings this tokenizer turns into one token of their own wherever they stand, so that no text may hold them."""
    whole = _found(folder, "tokenizer.json")
    if whole:
        return tuple(token["content"] for token in json.loads(_text(whole)).get("added_tokens", ()))
    settings = json.loads(_text(files)) if (files := _found(folder, "tokenizer_config.json")) else {}
    return tuple(token["content"] for token in settings.get("added_tokens_decoder", {}).values())


def folder_digest(folder: Path) -> str:
    """SHA-256 over the tokenizer's files as they are on disk."""
    digest = hashlib.sha256()
    for name in FILES:
        if found := _found(folder, name):
            digest.update(found.name.encode() + b"\0" + found.read_bytes())
    return digest.hexdigest()


def _found(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _text(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()


def _qwen(files: dict[str, Path]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = json.loads(_text(files["vocab.json"]))
    lines = _text(files["merges.txt"]).splitlines()
    pairs = (line.partition(" ") for line in lines if line and not line.startswith("#version"))
    merges = [(left, right) for left, _, right in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = json.loads(_text(files["tokenizer_config.json"])).get("added_tokens_decoder", {})
    for _, token in sorted(added.items(), key=lambda item: int(item[0])):
        kept = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        (tokenizer.add_special_tokens if token["special"] else tokenizer.add_tokens)(
            [AddedToken(token["content"], **kept)]
        )
    return tokenizer
