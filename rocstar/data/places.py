"""What a build reads is there, and it can write where it should: looked at before anything is made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rocstar.errors import ConfigError, DataError


def refuse_missing(paths: Iterable[str | Path]) -> None:
    """Raises DataError for the first path that is not there; `hf:NAME@SPLIT` is not looked up."""
    for path in paths:
        if not str(path).startswith("hf:") and not Path(path).exists():
            raise DataError(f"{path} does not exist; check the path.")


def output_folder(path: Path, setting: str) -> Path:
    """Makes the folder, where it is not there yet. `setting` is what names it, for the message. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{setting}{path} cannot be a folder to write into ({error.strerror}); choose another"
        ) from None
    return path
