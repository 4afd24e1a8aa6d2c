"""The files of a Hugging Face folder that define how text becomes ids and where generation ends.

Read are `tokenizer.json` or the older `vocab.json` and `merges.txt` (also gzipped), tokenizer_config.json,
chat_template.jinja, generation_config.json and config.json."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rocstar.errors import ConfigError, first_line

# How GPT-4-like byte-level BPEs (Qwen2 and later) cut text before merging: contractions, words with one leading other
# character, single digits, runs of punctuation with their line ends, line ends, other blanks.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files beside a tokenizer."""

    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    """tokenizer_config.json."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json."""
    eos_ids: tuple[int, ...] = ()
    """End-of-sequence ids named by generation_config.json and config.json."""
    chat_template: str | None = None
    """chat_template.jinja."""

    def token(self, name: str) -> str | None:
        """A token that tokenizer_config.json names, such as `eos_token`, with or without its flags."""
        value = self.tokenizer.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        return text if isinstance(text, str) and text else None

    @property
    def eos_token(self) -> str | None:
        return self.token("eos_token")


def read_model_files(folder: Path) -> ModelFiles:
    """Missing files count as empty. Raises ConfigError for one that is not a JSON object."""
    generation = _object(folder, "generation_config.json")
    template = found_file(folder, "chat_template.jinja")
    eos_ids = (number for facts in (generation, _object(folder, "config.json")) for number in _eos_ids(facts))
    return ModelFiles(
        tokenizer=_object(folder, "tokenizer_config.json"),
        generation=generation,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        chat_template=None if template is None else text_of_file(template),
    )


def read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> Tokenizer:
    """`settings` is the folder's tokenizer_config.json. Raises ConfigError."""
    whole = found_file(folder, "tokenizer.json")
    if whole:
        text = text_of_file(whole)
        try:
            return Tokenizer.from_str(text)
        except Exception as error:  # the library has no narrower one
            raise ConfigError(f"{whole} cannot be read as a tokenizer ({error}); fetch the model again.") from None
    vocab, merges = found_file(folder, "vocab.json"), found_file(folder, "merges.txt")
    if not folder.is_dir():
        raise ConfigError(f"{folder} no longer exists; for a live run, take its newest checkpoint.")
    if not vocab or not merges:
        raise ConfigError(
            f"{folder} has no tokenizer.json and no vocab.json with merges.txt; save a fast tokenizer into it."
        )
    kind = str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    if kind not in ("Qwen2Tokenizer", "GPT2Tokenizer"):
        raise ConfigError(
            f"{folder} holds a {kind or 'tokenizer of unnamed class'} without tokenizer.json, of which only Qwen2 and "
            "GPT2 ones can be read; load it with transformers and save it again."
        )
    try:
        qwen = kind == "Qwen2Tokenizer"
        return _byte_level(json.loads(text_of_file(vocab)), text_of_file(merges), settings, qwen=qwen)
    except ConfigError:
        raise
    except Exception as error:  # as above
        raise ConfigError(
            f"{vocab}, {merges.name} and tokenizer_config.json make no tokenizer ({first_line(error)}); fetch the "
            "model again."
        ) from error


def without_prefix_spaces(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that adds no space before a text, and removes none when decoding; unchanged if it does neither. Texts
    are encoded piece by piece here, and a space at each seam would belong to no author."""
    if tokenizer.encode("a", add_special_tokens=False).tokens[:1] in ([], ["a"]):
        return tokenizer
    parts = json.loads(tokenizer.to_str())
    for name, other_way in (("normalizer", "Prepend"), ("pre_tokenizer", ""), ("decoder", "Strip")):
        parts[name] = _without_prefix(parts[name], other_way)
    return Tokenizer.from_str(json.dumps(parts))


def found_file(folder: Path, name: str) -> Path | None:
    """The file, plain or gzipped, or None."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def text_of_file(path: Path) -> str:
    """Raises ConfigError for a file that is not UTF-8, or not whole."""
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); fetch the model again.") from None


def _without_prefix(part: Any, dropped: str) -> Any:
    """A part of a tokenizer, and the parts it is made of, with the prefix space switched off; parts of the type
    `dropped`, which only add or remove it, are omitted."""
    if not isinstance(part, dict) or part.get("type") == dropped:
        return None
    lists = {key: value for key, value in part.items() if isinstance(value, list) and key.endswith("s")}
    inner = {key: [_without_prefix(one, dropped) for one in value] for key, value in lists.items()}
    changed = part | {key: [one for one in value if one is not None] for key, value in inner.items()}
    changed |= {"prepend_scheme": "never"} if "prepend_scheme" in part else {}
    return changed | ({"add_prefix_space": False} if "add_prefix_space" in part else {})


def _byte_level(vocab: Any, merges: str, settings: Mapping[str, Any], *, qwen: bool) -> Tokenizer:
    pairs = (line.partition(" ") for line in merges.splitlines() if line and not line.startswith("#version"))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, _, right in pairs]))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not qwen)
    tokenizer.pre_tokenizer = whole
    if qwen:
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    tokenizer.decoder = decoders.ByteLevel()
    added = settings.get("added_tokens_decoder", {})
    for _, token in sorted(added.items(), key=lambda item: int(item[0])):
        kept = {flag: token[flag] for flag in _FLAGS if flag in token}
        (tokenizer.add_special_tokens if token.get("special") else tokenizer.add_tokens)(
            [AddedToken(token["content"], **kept)]
        )
    return tokenizer


def _object(folder: Path, name: str) -> dict[str, Any]:
    path = found_file(folder, name)
    if path is None:
        return {}
    try:
        value = json.loads(text_of_file(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__} and must hold a JSON object.")
    return value


def _eos_ids(facts: Mapping[str, Any]) -> list[int]:
    value = facts.get("eos_token_id")
    listed = value if isinstance(value, list) else [value]
    return [number for number in listed if type(number) is int and 0 <= number < 2**31]
