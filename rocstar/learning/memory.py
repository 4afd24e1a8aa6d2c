"""Main memory of a learner: what a forward pass keeps for its backward pass, and the limit on it. Loads no torch.

These are the numbers that each layer of a Llama-like decoder of transformers keeps for the backward pass (h hidden
size, q and k widths of all queries and of all keys, i inner width of the MLP):

    a computed token    6 h + q + 4 i     two norms of three, attention output, gate, its SiLU, up, their product
                        + 2 q + 2 k       where queries and keys have norms (Qwen3)
                        + `of_rules`      in layers of gated delta rules (Qwen3.5)
    an attended place   2 q + 2 k         queries, keys, values and the output, as documents (attention.py)

Siblings that share a prompt compute it once and attend to it each. Source: ours, counted by
tests/learning/test_memory.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CPU_TOKENS = 4096  # of one pass: a layer's output stays near its caches; 16,384 cost 15 to 25% more
CPU_BYTES = 2**30  # kept by one pass, or the size of the weights if that is larger: smaller passes cost speed
FP32 = 4
GPU_CHUNK_ELEMENTS = 2**26
CHUNK_ELEMENTS = 2**25  # logits of one chunk: 128 MiB in fp32; 220 tokens at V = 151,936, everything at V = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """The numbers that decide how many bytes a pass keeps."""

    parameters: int
    hidden: int
    layers: int
    queries: int
    """Width of the queries of all heads."""
    keys: int
    """Width of the keys of all heads."""
    inner: int
    """Width inside the MLP."""
    normed: bool
    """Queries and keys have norms."""
    rules: int = 0
    """Layers of gated delta rules."""
    rule: int = 0
    """Numbers that a computed token keeps in one of these besides."""
    recomputed: bool = False
    """Layers are computed again in the backward pass (`model.gradient_checkpointing`)."""

    def left(self, computed: int, attended: int) -> int:
        """Bytes that this many computed tokens and attended places keep for the backward pass."""
        heads = 2 * (self.queries + self.keys)
        layer = (6 * self.hidden + self.queries + 4 * self.inner + self.normed * heads) * computed + heads * attended
        if self.recomputed:
            return FP32 * (self.layers * self.hidden * computed + layer + self.rule * computed)
        return FP32 * (self.layers * layer + self.rules * self.rule * computed)

    def fits(self, computed: int, attended: int) -> bool:
        """Whether a pass of several rows may have this many on a CPU."""
        return attended <= CPU_TOKENS and self.left(computed, attended) <= self._most

    def largest(self, tokens: int, row: int) -> int:
        """Bytes that the largest pass on a CPU keeps if `tokens` are allowed and the longest row has `row`."""
        several = min(tokens, CPU_TOKENS)
        return max(min(self.left(several, several), self._most), self.left(row, row))

    @property
    def _most(self) -> int:
        return max(CPU_BYTES, FP32 * self.parameters)


def of_rules(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """(layers of gated delta rules, numbers that a token keeps in one for the backward pass, numbers of a sequence's
    state in one); zeros where config.json names none. transformers' rule keeps of each head some ten matrices between
    the 64 tokens of a chunk, and some 17 copies of keys and of values."""
    names = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")
    heads, key_heads, key, value = (config.get(f"linear_{name}") or 0 for name in names)
    layers = list(config.get("layer_types") or ()).count("linear_attention")
    return layers, heads * (10 * 64 + 17 * (key + value)) + 8 * key_heads * key, heads * key * value
