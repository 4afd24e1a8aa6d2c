"""transformers models for learning: initialised at random or loaded from a folder or the hub, and checked; and torch's
devices, dtypes and threads."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rocstar.config.sections import ModelSection
from rocstar.errors import ConfigError, first_line
from rocstar.support.layers import refuse_quantised
from rocstar.support.processes import give_memory_back
from rocstar.support.weights import refuse_misfits

UNLOADED = "can't be loaded as a causal language model"
NEEDS_CODE = (
    "needs Python code of its own (auto_map in its config.json), and code of a model folder is not run here; take a "
    "model whose class transformers has"
)
MALLOC_TRIM_THRESHOLD, MALLOC_MMAP_THRESHOLD, LARGEST_INT = -1, -3, 2**31 - 1  # of mallopt(3); bytes
LARGEST_KEPT = 2**26  # bytes: kept blocks as large as a chunk's logits (128 MiB) left holes that the next did not fit
use_threads, threads_in_use = torch.set_num_threads, torch.get_num_threads
"""The first is a setting of the whole process, so only commands that own the process call it."""


def random_model(shape: ModelSection, seed: int) -> Any:
    """A fresh transformers Qwen3ForCausalLM in fp32; `shape.vocab_size` is the whole vocabulary, markers included.

    Matrices start at std 1/sqrt(fan-in) and output projections at zero, so that every layer begins as the identity
    (transformers' default of 0.02 suits widths in the thousands). Source: ours."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
        dtype=torch.float32,
    )
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.ndim == 2:
                spread = 0.02 if "embed" in name else parameter.shape[1] ** -0.5
                parameter.normal_(0, spread, generator=generator)
    return model


def load_model(source: str | Path, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """A transformers causal LM from a Hugging Face folder or a hub id, its weights in `dtype` on `device`.

    `model.config.dtype` stays what the source says, so that an export can use it. Weights are read file by file,
    without a second copy. Raises ConfigError, also for weights that are not finite or do not fit config.json."""
    from pickle import UnpicklingError

    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # the bar is shown for milliseconds and would clutter stderr
    folder = Path(source).expanduser()
    if folder.exists() and not (folder / "config.json").is_file():
        raise ConfigError(f"{source} is not a model folder: it has no config.json")
    name = str(folder) if folder.exists() else str(source)
    config = config_of(name)
    refuse_quantised(source, config.to_dict())
    config._attn_implementation = None  # what the class prefers: a folder may name a kernel of the hub, which is code
    kept = config.dtype or torch.float32
    if not (isinstance(kept, torch.dtype) and kept.is_floating_point and kept.itemsize > 1):
        raise ConfigError(f"{source}/config.json has dtype {kept}; set it to that of its weights, such as bfloat16")
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            device_map={"": device} if str(device) != "cpu" else None,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with their names
        )
    except UnpicklingError as error:  # torch's own advice is to run what is inside
        raise ConfigError(
            f"{source} {UNLOADED}: its weights are a pickle that is no plain tensors, and code in it is not run here; "
            "take the model as safetensors"
        ) from error
    except (ImportError, OSError, ValueError, SafetensorError) as error:  # ImportError: of a package
        raise ConfigError(f"{source} {UNLOADED}: {first_line(error)}") from error
    except (ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{source} {UNLOADED} ({error!r}); correct its config.json or fetch the whole model again"
        ) from error
    refuse_misfits(source, loading_info)
    broken = next((name for name, weights in model.named_parameters() if not weights.detach().isfinite().all()), None)
    if broken is not None:
        raise ConfigError(
            f"{source} is broken: its tensor {broken} holds nan or inf; fetch the model again, or take an earlier "
            "checkpoint"
        )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    ties = model._tied_weights_keys and model.config.tie_word_embeddings  # some classes tie nothing
    if ties and head is not None and head.weight is not embedding.weight:
        # Transformers goes on with both; a checkpoint would hold one of them.
        raise ConfigError(
            f"{source} holds an output head that differs from its embedding, and its config.json ties them "
            "(tie_word_embeddings); set that to false, or fetch the model again"
        )
    model.config.dtype = kept
    return model


def config_of(source: str | Path) -> Any:
    """The transformers config of a folder or hub id; no code of a model folder is run. Raises ConfigError, also if
    transformers has no causal LM of that type."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except StrictDataclassError as error:
        raise ConfigError(
            f"{source}/config.json describes no model that can be made: {first_line(error.__cause__ or error)}"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(f"{source} {NEEDS_CODE}") from error
        problem = UNLOADED if Path(source).exists() else "is neither a folder nor can it be fetched"
        raise ConfigError(f"{source} {problem}: {first_line(error)}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
            raise ConfigError(f"{source} {NEEDS_CODE}")
        raise ConfigError(f"{source} {UNLOADED}: transformers has none of type {config.model_type}")
    return config


def device_of(model: ModelSection, rank: int = 0) -> torch.device:
    """Where the learner computes; with several ranks on one machine, each has its own GPU. Raises ConfigError."""
    if model.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError('model.device is "cuda" but torch finds no GPU here; set model.device to "cpu" or "auto"')
    if model.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank)


def compute_dtype(model: ModelSection, device: torch.device) -> torch.dtype:
    """The dtype of the forward and backward pass; weights that are trained stay fp32."""
    narrow = device.type == "cuda" if model.dtype == "auto" else model.dtype == "bfloat16"
    return torch.bfloat16 if narrow else torch.float32


def keep_freed_memory() -> None:
    """From now on this process keeps what tensors free until `give_back`, but for the largest blocks. glibc gives each
    large block back to the system at once, and the kernel clears the pages of the next one anew."""
    with suppress(AttributeError):  # another C library
        for option, value in ((MALLOC_TRIM_THRESHOLD, LARGEST_INT), (MALLOC_MMAP_THRESHOLD, LARGEST_KEPT)):
            ctypes.CDLL(None).mallopt(option, value)


def give_back() -> None:
    """Return freed memory to the system, and to processes that share a GPU: glibc and torch keep it for the next
    pass."""
    torch.cuda.empty_cache()
    give_memory_back()
