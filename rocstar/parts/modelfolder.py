"""Model folders: where one is, facts that are read before anything starts, without its weights and without torch, and
a copy with more tokens."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rocstar.errors import ConfigError, first_line
from rocstar.parts.gguf import KNOWN, convert, refuse_taken, whole_model
from rocstar.record.folder import RunFolder, find_checkpoint, list_runs
from rocstar.support.exits import need
from rocstar.support.layers import ENGINE_LAYERS, LOOKS_AHEAD, OTHER_ATTENTION, SINKS, named_keys, refuse_quantised
from rocstar.support.scratch import cache_home
from rocstar.support.weights import fingerprint_of, hash_of, layout_of_folder, refuse_changed, refuse_other_base

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
WEIGHTS = ("*.safetensors", "*.bin")
ADAPTER = "adapter_config.json", "adapter_model.safetensors"
"""Files of an adapter in PEFT's format."""
TOKENIZER = ("*token*.json", "*.jinja", "vocab*", "merges.txt", "*.model")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
OTHER_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Keys that scale logits; 1 has no effect."""
HUB_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    folder: Path
    positions: int
    """Longest sequence that the model was made for, tokens."""
    embeddings: int
    """Rows of its embedding: token ids it knows."""
    cache: tuple[int, int, int] | None
    """Layers, key heads and width of a head; None if config.json does not give them under the usual keys."""


def find_model(name: str, over: tuple[Path, ...] = ()) -> Path:
    """The folder of a model: `name` itself, the converted model of a GGUF file or an adapter's folder, or the hub's
    model of that id. Raises ConfigError, also for missing weights; DataError for the changed model of a checkpoint.
    over: adapters whose base it is."""
    refuse_changed(Path(name).parent, f"{Path(name).name}/")
    folder = _found(name, over)
    stored, layers = layout_of_folder(folder), _config(folder).get("num_hidden_layers")
    if stored and isinstance(layers, int) and layers > len(stored):  # to make them would take hours and all memory
        raise ConfigError(
            f"{folder}/config.json has num_hidden_layers {layers}, and the files hold {len(stored)} tensors; correct it"
        )
    return folder


def _found(name: str, over: tuple[Path, ...]) -> Path:
    folder = Path(name)
    if adapter := adapter_in(folder):
        return _merged(folder, adapter, over)
    if (folder / "config.json").is_file():
        return folder
    if is_gguf(folder):
        return _made_of(folder, folder.stem, lambda made: convert(folder.resolve(), made))
    if not folder.exists() and folder.name in KNOWN:
        raise ConfigError(f"there is no folder {name}; write it with `rocstar model get {folder.name} --to {name}`")
    if folder.exists() or not HUB_ID.fullmatch(name):
        raise ConfigError(f"model.path {name} is not a model folder: it has no config.json; give a Hugging Face folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # the network or the hub may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"the model {name} is no folder here and cannot be fetched from the hub ({reason}); download it where "
            "there is a network and give its folder"
        ) from None


def identity_of(folder: Path) -> dict[str, str]:
    """Hashes that identify a folder's model: of its weights, and of the files that define its architecture and
    tokenizer. Raises OSError."""
    texts = {file for pattern in (*TOKENIZER, "*config.json") for file in folder.glob(pattern)}
    return {"weights": fingerprint_of(folder), "tokenizer and config": hash_of(sorted(texts))}


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def adapter_in(folder: Path) -> Path | None:
    """The adapter of a folder without other weights: its own, or a checkpoint's."""
    own = folder / "adapter"
    found = next((place for place in (own, folder) if all((place / name).is_file() for name in ADAPTER)), None)
    return None if found == own and any(folder.glob("model*.safetensors")) else found


def _merged(named: Path, adapter: Path, over: tuple[Path, ...]) -> Path:
    """The folder of an adapter's model with the adapter merged into it, created on first use. Raises ConfigError."""
    base, config, over = None, adapter / ADAPTER[0], (*over, named.resolve(), adapter.resolve())
    with suppress(ValueError, KeyError, TypeError):
        base = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
    if not isinstance(base, str) or Path(base).resolve() in over:
        raise ConfigError(f"{config} names {base!r} as base_model_name_or_path, which is no other model; correct it")
    try:
        model = find_model(base, over)
    except ConfigError as error:
        raise ConfigError(f"{adapter} is an adapter of {base}, which is needed and missing: {error}") from None

    def make(folder: Path) -> Path:
        need("lora")
        with whole_model(folder) as made:
            _merge(adapter, model, named, made)
        return folder

    refuse_other_base(adapter, model)
    marks = hashlib.sha256(repr([identity_of(part) for part in (model, named, adapter)]).encode()).hexdigest()
    own = f"{named.resolve().parent.name}-{model.name}-{marks[:8]}"
    return _made_of(adapter / ADAPTER[1], own, make)


def _merge(adapter: Path, base: Path, named: Path, folder: Path) -> None:
    """Fill `folder` with the model in `base` and the adapter merged into it, in the dtype of `base`. named: folder
    whose tokenizer holds, where it has one. Raises ConfigError for an adapter that PEFT cannot put there, OSError."""
    from pickle import UnpicklingError

    from peft import PeftModel
    from safetensors import SafetensorError

    from rocstar.learning.models import load_model

    model = load_model(base)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # PEFT uses old names of transformers
            warnings.filterwarnings("error", "Found missing adapter keys")  # which it would leave unchanged
            adapted = PeftModel.from_pretrained(model, str(adapter))
            if unused := adapted.load_adapter(str(adapter), adapted.active_adapter).unexpected_keys:  # says nothing
                raise ValueError(f"nothing takes {len(unused)} of its tensors, such as {unused[0]}")
            merged = adapted.merge_and_unload()
            if broken := next((name for name, part in merged.named_parameters() if not part.isfinite().all()), None):
                raise ValueError(f"its {broken} becomes nan or inf")
    except (KeyError, RuntimeError, SafetensorError, TypeError, UnpicklingError, ValueError, UserWarning) as error:
        raise ConfigError(f"{adapter} holds no adapter that fits the model in {base}: {first_line(error)}") from error
    merged.to(model.config.dtype).save_pretrained(folder)
    for file in (file for pattern in TOKENIZER for source in (base, named) for file in source.glob(pattern)):
        shutil.copyfile(file, folder / file.name)


def _made_of(file: Path, name: str, make: Callable[[Path], Path]) -> Path:
    """The cached folder made from the current version of a file."""
    file = file.resolve()
    state = file.stat()
    key = hashlib.sha256(f"{file} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
    folder = cache_home() / "models" / f"{name}-{key}"
    try:
        return folder if folder.exists() else make(folder)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder}: {error.strerror}; name another folder with XDG_CACHE_HOME"
        ) from error
    except ConfigError:
        if not folder.exists():
            raise
        return folder  # another process was first


def model_named(name: str, runs: Path) -> tuple[Path, RunFolder | None, int]:
    """The model folder that a folder's path, a hub id, RUN or RUN@STEP means, the run it is of and the step: None and 0
    for a plain model. Raises ConfigError, also for a name that a model here and a run both have."""
    on_hub = HUB_ID.fullmatch(name) and not Path(name).parent.exists()
    if on_hub or is_gguf(Path(name)) or (Path(name) / "config.json").is_file() or adapter_in(Path(name)):
        if Path(name).name == name and ((runs / name / "run.json").is_file() or (name == "last" and list_runs(runs))):
            raise ConfigError(f"{name} is a model here and a run in {runs}; write ./{name}, or the path of the run")
        return find_model(name), None, 0
    run, step = find_checkpoint(name, runs)
    return find_model(str(run.checkpoint(step) / "model")), run, step


def model_name(folder: Path) -> str:
    """The folder's name, or the hub's name of a model in the hub's cache."""
    folder = folder.resolve()
    return folder.parents[1].name.rpartition("--")[2] if folder.parent.name == "snapshots" else folder.name


def model_facts(folder: Path, *, torch_engine: bool = True, trained: bool = False) -> ModelFacts:
    """torch_engine: whether it must run there. trained: whether it must learn. Raises ConfigError for a model that
    cannot."""
    config = _config(folder)
    positions, embeddings = config.get("max_position_embeddings"), config.get("vocab_size")
    kind = f"{folder} holds a model of type {config.get('model_type', 'unknown')}"
    if not isinstance(positions, int) or not isinstance(embeddings, int):
        sizes = {"max_position_embeddings": positions, "vocab_size": embeddings}
        lacks = " and ".join(key for key, value in sizes.items() if not isinstance(value, int))
        raise ConfigError(
            f"{kind}, whose config.json lacks {lacks}; rocstar runs decoders like Qwen2.5, Qwen3 and Llama, so take "
            "one of those"
        )
    if trained and (why := _untrainable(config)):  # first: no other engine mends it
        raise ConfigError(
            f"{kind}, which has {why}; the learner trains decoders like Qwen2.5, Qwen3 and Llama, so take one of those"
        )
    if torch_engine and (why := _unfit(config)):
        raise ConfigError(
            f"{kind}, which has {why}; the torch engine runs decoders like Qwen2.5, Qwen3 and Llama, so take one of "
            "those or an [[engine]] of kind 'vllm'"
        )
    if torch_engine or trained:
        refuse_quantised(folder, config)
        if _is_doubtful(config):
            from rocstar.learning.models import config_of

            config_of(folder)
    if not any(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        raise ConfigError(f"{folder} has no weights ({', '.join(WEIGHTS)}); fetch the whole model")
    return ModelFacts(folder=folder, positions=positions, embeddings=embeddings, cache=_cache(config))


def _is_doubtful(config: dict[str, Any]) -> bool:
    """Whether support for the model must be checked with transformers, which loads torch and takes seconds: for most it
    has a folder of that name."""
    size, heads, found = config.get("hidden_size"), config.get("num_attention_heads"), find_spec("transformers")
    if isinstance(size, int) and isinstance(heads, int) and heads and size % heads:
        return True
    module = str(config.get("model_type")).replace("-", "_").removesuffix("_text")
    places = (Path(place, "models", module) for place in (found and found.submodule_search_locations) or ())
    return "auto_map" in config or not any(place.is_dir() for place in places)


def refuse_targets(folder: Path, targets: Sequence[str]) -> None:
    """Raises ConfigError for `model.lora_targets` without matrices in the model, as far as the folder shows."""
    if not targets and (experts := next(named_keys(_config(folder), EXPERTS), None)):
        raise ConfigError(
            f"{folder} is a mixture of experts ({experts}), and adapters leave out experts, which are one tensor a "
            "layer; name the linear layers that get adapters in model.lora_targets, or set model.lora_rank to 0"
        )
    stored = layout_of_folder(folder).items()
    inside = [name for name, shape in stored if re.search(r"\.\d+\..*\.weight$", name) and len(shape) == 2]
    of_experts = {name.split(".")[-2] for name in inside if re.search(r"\.experts\.\d+\.", name)}
    there = {name.split(".")[-2] for name in inside} - of_experts  # PEFT reads a name that both have as experts alone
    if wrong := [target for target in targets if there and target not in there]:
        why = (
            "experts have, and these get no adapters"
            if wrong[0] in of_experts
            else f"is not a linear layer of {folder}"
        )
        raise ConfigError(f"model.lora_targets names {wrong[0]!r}, which {why}; there are {', '.join(sorted(there))}")


def _unfit(config: dict[str, Any]) -> str | None:
    """Describes a feature that the torch engine does not support, or None: it keeps a key and a value of one width for
    each token of every layer, and each token attends to all before it, or to a window of them. The rest is checked when
    the engine is opened."""
    layers, cache, values = config.get("layer_types"), _cache(config), config.get("v_head_dim")
    if isinstance(layers, list) and (other := sorted({str(layer) for layer in layers} - ENGINE_LAYERS)):
        return f"layers of kind {', '.join(other)}"
    if config.get("model_type") in SINKS:
        return "attention sinks"
    if config.get("kv_lora_rank"):
        return f"compressed keys and values (kv_lora_rank {config['kv_lora_rank']})"
    if values and cache and values != cache[2]:
        return f"values of another width ({values}) than keys ({cache[2]})"
    return next(named_keys(config, OTHER_ATTENTION), None)


def _untrainable(config: dict[str, Any]) -> str | None:
    """Describes a feature that the learner does not support, or None: logits are the output embeddings applied to the
    last hidden states, independent of later tokens. The rest is checked when the model is loaded
    (`learning/forward.py`)."""
    if "type_vocab_size" in config:
        return f"embeddings of segments, as encoders like BERT have (type_vocab_size {config['type_vocab_size']})"
    return next(named_keys(config, (*OTHER_LOGITS, *LOOKS_AHEAD)), None)


def _cache(config: dict[str, Any]) -> tuple[int, int, int] | None:
    layers, heads, size = (config.get(k) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(size, int) and heads):
        return None
    return layers, config.get("num_key_value_heads") or heads, config.get("head_dim") or size // heads


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder}/config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{folder}/config.json does not hold a JSON object")
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def add_tokens(name: str, folder: Path, tokens: Sequence[str]) -> Path:
    """Write the model of that name into `folder`, which must not exist, with these tokens as special ones. Each gets
    the next id, and the mean of the known tokens' rows in the embedding and in the output head, which grow where they
    have no row for it: it is as probable as an average token until it is learned. Raises ConfigError."""
    from tokenizers import AddedToken

    from rocstar.dialogue.codec import Codec
    from rocstar.dialogue.tokenizer_files import read_model_files, read_tokenizer
    from rocstar.learning.models import load_model

    refuse_taken(folder)
    source = find_model(name)
    tokenizer = read_tokenizer(source, read_model_files(source).tokenizer)
    if there := [token for token in tokens if tokenizer.token_to_id(token) is not None]:
        raise ConfigError(f"the tokenizer in {source} has {', '.join(there)} already; leave out what it has")
    known = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
    model = load_model(source)
    rows = model.get_input_embeddings().weight.shape[0]
    model.resize_token_embeddings(max(rows, Codec(tokenizer).vocab_size), mean_resizing=False)
    new, known = [tokenizer.token_to_id(token) for token in tokens], [number for number in known if number < rows]
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    for weight in {id(table.weight): table.weight.detach() for table in tables if table is not None}.values():
        weight[new] = weight[known].mean(0)
    with whole_model(folder) as made:
        model.to(model.config.dtype).save_pretrained(made)
        for file in (file for pattern in TOKENIZER for file in source.glob(pattern)):
            shutil.copyfile(file, made / file.name)
        (made / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")
    return folder
