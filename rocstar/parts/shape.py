"""The shape of a model, and what follows from it: parameters, bytes and operations a token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rocstar.config.sections import ModelSection
from rocstar.errors import ConfigError
from rocstar.learning.memory import of_rules
from rocstar.support.weights import BESIDE_TEXT, layout_of_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense decoder with grouped-query attention and a gated MLP (Qwen2.5, Qwen3, Llama)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    vocabulary: int
    """Rows of the embedding."""
    tied: bool
    """The LM head is the embedding."""
    normed: bool = False
    """Queries and keys have norms (Qwen3)."""
    rules: tuple[int, int, int] = (0, 0, 0)
    """As `of_rules`."""
    stored: int = 0
    """Parameters in the folder's files of weights; 0 where there are none."""

    @property
    def parameters(self) -> int:
        """Those that are stored, else of a dense decoder without norms and biases, which are under 0.1%."""
        if self.stored:
            return self.stored
        attention = self.hidden * self.head_width * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def matrices(self) -> int:
        """Parameters inside layers."""
        return self.parameters - self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def computed(self) -> int:
        """Parameters that each token is multiplied with: all but the embedding that is only looked up."""
        return self.parameters - (0 if self.tied else self.hidden * self.vocabulary)

    @property
    def linear(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the matrices of a layer."""
        hidden, inner, queries = self.hidden, self.intermediate, self.heads * self.head_width
        keys = self.kv_heads * self.head_width
        attention = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
        mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        rooms = {"self_attn": attention, "mlp": mlp}
        return {f"{room}.{name}_proj": size for room, inside in rooms.items() for name, size in inside.items()}

    def adapters(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of adapters of this rank; targets: names of linear layers, none for all."""
        ends = {name.rpartition(".")[2]: sum(size) for name, size in self.linear.items()}
        return self.layers * rank * sum(ends.get(name, 0) for name in targets or ends)

    def trained(self, model: ModelSection) -> int:
        """Parameters that learn under these settings."""
        return self.adapters(model.lora_rank, model.lora_targets) if model.lora_rank else self.parameters

    def kv_bytes(self, itemsize: int) -> int:
        """Bytes of the keys and values of one token; itemsize: bytes of one number."""
        return 2 * self.layers * self.kv_heads * self.head_width * itemsize

    def forward_flops(self, context: float) -> float:
        """Operations for one token after `context` others: two for each parameter, and in each layer four for each
        number of its queries and each token attended to."""
        return 2.0 * self.computed + 4.0 * self.layers * self.heads * self.head_width * context


PUBLISHED: Mapping[str, Shape] = {
    "Qwen/Qwen3-14B-Base": Shape(
        hidden=5120,
        layers=40,
        heads=40,
        kv_heads=8,
        head_width=128,
        intermediate=17408,
        vocabulary=151936,
        tied=False,
        normed=True,
    ),
    "Qwen/Qwen2.5-32B-Instruct": Shape(
        hidden=5120, layers=64, heads=40, kv_heads=8, head_width=128, intermediate=27648, vocabulary=152064, tied=False
    ),
    "Qwen/Qwen2.5-7B-Instruct": Shape(
        hidden=3584, layers=28, heads=28, kv_heads=4, head_width=128, intermediate=18944, vocabulary=152064, tied=False
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": Shape(
        hidden=1536, layers=28, heads=12, kv_heads=2, head_width=128, intermediate=8960, vocabulary=151936, tied=True
    ),
}
"""Shapes from their config.json, so that the paper's recipes can be planned before anything is downloaded."""


def shape_of(model: ModelSection) -> Shape:
    """The shape of random weights by the section itself, else from the folder's config.json, else a published one.
    Raises ConfigError for a model that is neither here nor known."""
    if model.path is None:
        return Shape(
            hidden=model.hidden_size,
            layers=model.num_layers,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_width=model.hidden_size // model.num_heads,
            intermediate=model.intermediate_size,
            vocabulary=model.vocab_size,
            tied=True,
            normed=True,
        )
    file = Path(model.path) / "config.json"
    if file.is_file():
        return _from_config(json.loads(file.read_bytes()), file)
    if model.path in PUBLISHED:
        return PUBLISHED[model.path]
    raise ConfigError(
        f"model.path {model.path!r} is no folder here and none of {', '.join(PUBLISHED)}; to plan, a folder with its "
        "config.json is enough"
    )


def known_shape(model: ModelSection, folder: Path | None) -> Shape | None:
    """The shape of the model in a folder, or of random weights; None where it shows only when it is loaded."""
    with suppress(ConfigError):
        return shape_of(model if folder is None else model.model_copy(update={"path": str(folder)}))
    return None


def _from_config(config: Mapping[str, Any], file: Path) -> Shape:
    if any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(f"{file} is a mixture of experts; only dense decoders can be planned")
    if config.get("mamba_d_state") or config.get("ssm_state_size"):
        raise ConfigError(f"{file} has layers of Mamba; only decoders without can be planned")
    if isinstance(config.get("intermediate_size"), list):
        raise ConfigError(f"{file} has MLPs of a width for each layer; only decoders of one width can be planned")
    layout: Mapping[str, tuple[int, ...]] = {}
    with suppress(ConfigError):  # of files that are not whole; config.json alone is enough to plan
        layout = layout_of_folder(file.parent)
    try:
        heads = config["num_attention_heads"]
        return Shape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_width=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            normed=str(config.get("model_type")).startswith("qwen3"),
            rules=of_rules(config),
            stored=sum(prod(shape) for name, shape in layout.items() if not BESIDE_TEXT.search(name)),
        )
    except KeyError as error:
        raise ConfigError(f"{file} lacks {error.args[0]}; only dense decoders can be planned") from None
