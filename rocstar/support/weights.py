"""Inspects the weight files of a model folder by their headers: shapes, a fingerprint, unused tensors, and whether a
checkpoint is unchanged. Loads no torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rocstar.errors import ConfigError, DataError

WHOLE = ("model.safetensors", "pytorch_model.bin")
"""One of them holds all weights, or an index beside its shards says which holds what; as transformers chooses."""
LFS = b"version https://git-lfs"
MOST_HEADER = 100_000_000
"""Bytes of the longest header that the safetensors library reads."""
SAMPLES, SAMPLE_BYTES = 64, 1 << 14  # of each file: 1 MiB, however large the model is
BASE_NOTE = "base_weights.txt"  # beside an adapter of ours: `fingerprint_of` the model that it was trained over
BESIDE_TEXT = re.compile(r"(^|\.)(vision|visual|audio|image|speech|multi_modal|mm_|embed_vision|embed_audio|mtp)")
"""Parts of published models that a model of text leaves out: towers of other senses, heads for further tokens."""
FURTHER_TOKEN = re.compile(r"(.*\.layers\.\d+\.)eh_proj\.")
"""Begins the names of a layer that predicts further tokens and is numbered as if it followed the last (DeepSeek-V3)."""


def layout_of_folder(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor; empty where there are no safetensors. Raises ConfigError for weights that are not all
    there."""
    return {name: shape for file in _files(folder) for name, shape in _shapes(file).items()}


def fingerprint_of(folder: Path) -> str:
    """`hash_of` a folder's weights."""
    return hash_of(_files(folder))


def hash_of(files: Iterable[Path]) -> str:
    """A hash of files, of weights by evenly spaced parts: training changes nearly every number. Raises OSError."""
    digest = hashlib.sha256()
    for file in files:
        whole = file.suffix not in (".safetensors", ".bin", ".distcp")
        with file.open("rb") as opened:
            for number in range(1 if whole else SAMPLES):
                opened.seek(file.stat().st_size * number // SAMPLES)
                digest.update(opened.read(-1 if whole else SAMPLE_BYTES))
    return digest.hexdigest()


def refuse_other_base(adapter: Path, base: Path) -> None:
    """Raises ConfigError if an adapter was trained over other weights than `base` holds now."""
    note = adapter / BASE_NOTE
    if note.is_file() and note.read_bytes() != fingerprint_of(base).encode():
        raise ConfigError(f"{adapter} is an adapter of weights that {base} does not hold any more; put them back")


def marks_of(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """The `bytes` and `hashes` of a checkpoint's files by name, from state.json."""
    files = {str(file.relative_to(checkpoint)): file for file in checkpoint.rglob("*") if file.is_file()}
    sizes = {name: file.stat().st_size for name, file in files.items()}
    return {"bytes": sizes, "hashes": {name: hash_of([file]) for name, file in files.items()}}


def refuse_changed(checkpoint: Path, part: str = "") -> None:
    """Raises DataError for a file of a checkpoint whose name begins with `part` and that was cut, lost or replaced
    since it was written; nothing for any other folder. Older checkpoints have no marks, or sizes alone."""
    marks: dict[str, Any] = {"bytes": {}, "hashes": {}}
    with suppress(DataError):
        marks |= state_of(checkpoint)
    for name, size in marks["bytes"].items():
        file, mark = checkpoint / name, marks["hashes"].get(name)
        there = file.stat().st_size if file.is_file() else None
        if not name.startswith(part) or (there == size and mark in (None, mark and hash_of([file]))):
            continue
        found = "is another file than was written" if there == size else f"has {there} bytes, and {size} were written"
        found = "is not there any more" if there is None else found
        raise DataError(f"{file} {found}; {put_back(checkpoint)}")


def state_of(checkpoint: Path) -> dict[str, Any]:
    """What state.json holds. Raises DataError."""
    with suppress(OSError, ValueError, TypeError):
        return {**json.loads((checkpoint / "state.json").read_bytes())}
    raise DataError(f"{checkpoint / 'state.json'} is not there or is no JSON object; {put_back(checkpoint)}")


def put_back(checkpoint: Path) -> str:
    """The remedy for a broken checkpoint."""
    return f"put it back from a copy, or move the folder {checkpoint.name} away to go on from the checkpoint before it"


def _files(folder: Path) -> list[Path]:
    """The files that transformers reads. Raises ConfigError if an index names a missing file."""
    for name in WHOLE:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            try:
                shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
                missing = [shard for shard in shards if not (folder / shard).is_file()]
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ConfigError(f"{index} is no index of weights ({error!r}); fetch the whole model again") from None
            if missing:
                raise ConfigError(
                    f"{folder} lacks {len(missing)} of the {len(shards)} files of weights that {index.name} names, "
                    f"such as {missing[0]}; fetch the whole model"
                )
            return [folder / shard for shard in shards]
    return []


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors in a file of safetensors by its header; nothing for a file of another kind. Raises ConfigError
    where it is not whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            begins = opened.read(len(LFS))
            opened.seek(8)
            length = int.from_bytes(begins[:8], "little")
            text = opened.read(min(length, MOST_HEADER)) if file.suffix == ".safetensors" else b"{}"
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    if begins == LFS:
        raise ConfigError(f"{file} is a git-LFS pointer and no weights; fetch them with `git lfs pull` in its folder")
    if file.suffix != ".safetensors":
        return {}
    whole, shapes, whole_numbers = 8 + length, {}, []
    try:
        if size >= whole:
            tensors = [(name, tensor) for name, tensor in json.loads(text).items() if name != "__metadata__"]
            shapes = {name: tuple(map(int, tensor["shape"])) for name, tensor in tensors}
            whole_numbers = [name for name, each in tensors if name.endswith(".weight") and each["dtype"][0] in "IU"]
            whole += max((int(tensor["data_offsets"][1]) for _, tensor in tensors), default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        raise ConfigError(f"{file} has no header of safetensors; fetch it again") from None
    if size != whole:
        least = "at least " if size < 8 + length else ""
        raise ConfigError(f"{file} holds {size} bytes of {least}{whole}, so it is not whole; fetch it again")
    if whole_numbers:
        raise ConfigError(
            f"{file} holds integers for {whole_numbers[0]}: quantised weights; take the unquantised model"
        )
    return shapes


def foreign(names: Iterable[str]) -> list[str]:
    """The unused tensors that are not parts of published models beside the text model."""
    rest = sorted(name for name in names if not BESIDE_TEXT.search(name))
    further = tuple({found[1] for name in rest if (found := FURTHER_TOKEN.match(name))})
    return [name for name in rest if not name.startswith(further)] if further else rest


def refuse_misfits(source: object, loading_info: Mapping[str, Iterable[Any]]) -> None:
    """Raises ConfigError for missing, mismatched and unknown tensors of a folder, by the loading info of transformers,
    or one of its form."""
    found = {
        "missing": sorted(loading_info["missing_keys"]),
        "of another shape": sorted(name for name, *_ in loading_info["mismatched_keys"]),
        "unknown to such a model": foreign(loading_info["unexpected_keys"]),
    }
    if wrong := [f"tensors {what}: {len(names)}, such as {names[0]}" for what, names in found.items() if names]:
        raise ConfigError(
            f"{source} does not hold the weights of the model that its config.json describes ({'; '.join(wrong)}); "
            "correct config.json or fetch the whole model again"
        )
