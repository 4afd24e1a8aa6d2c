"""Products with the weights of a model. On a CPU they run over a second copy of the weights, in the order in which
oneDNN reads them.

A plain product brings the weights into such an order anew each time, which a step with few tokens pays dearly for: 64
tokens run 1.2 to 1.5 times as fast over the copy, 8 tokens twice as fast. A row of a product has the same bits whatever
stands in the other rows, from two rows up (tests/engines/test_torch_linear.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

USUAL_ROWS = 64  # tokens of a step that oneDNN chooses the order for; measured to make no difference


class Product:
    """tokens [T, in] -> [T, out]: several linear layers of the same input as one.

    Their weights become views of one matrix, so that whoever writes new weights into the layers writes here; `renew`
    takes them over."""

    def __init__(self, *parts: nn.Linear) -> None:
        biases = [part.bias for part in parts]
        self._weight = _one_of([part.weight for part in parts])
        self._bias = None if biases[0] is None else _one_of(biases)
        self._packed: torch.Tensor | None = None
        self.renew()

    def renew(self) -> None:
        """The weights have changed."""
        if packs(self._weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight.detach(), USUAL_ROWS)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return F.linear(tokens, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(tokens, self._packed, self._bias, "none", [], "")
        return product


def packs(weight: torch.Tensor) -> bool:
    """Whether a copy of this matrix is kept for products."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def copied_bytes(model: Any) -> int:
    """Of the copies of a model's weights, if products run over all of them."""
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.ndim == 2 and packs(parameter))


def _one_of(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parameters) == 1:
        return parameters[0]
    whole = torch.cat([parameter.detach() for parameter in parameters])
    begin = 0
    for parameter in parameters:
        parameter.data = whole[begin : begin + len(parameter)]
        begin += len(parameter)
    return whole
