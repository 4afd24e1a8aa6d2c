"""Products with the weights of a model. On a CPU they run over the weights in the order in which oneDNN reads them, and
the model's own copy is given up.

A plain product brings the weights into such an order anew each time, which a step with few tokens pays dearly for: 64
tokens run 1.2 to 1.5 times as fast without that, 8 tokens twice as fast. A row of a product has the same bits whatever
stands in the other rows, from two rows up (tests/engines/test_torch_linear.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

USUAL_ROWS = 64  # tokens of a step that oneDNN chooses the order for; measured to make no difference


class Product:
    """tokens [T, in] -> [T, out]: several linear layers of the same input as one.

    Their weights and biases become views of one tensor, so that whoever writes new ones into the layers writes here.
    Weights that are reordered leave a layer without numbers; new ones come by `renew`."""

    def __init__(self, *parts: nn.Linear) -> None:
        self.parts = parts
        biases = [part.bias for part in parts]
        self._bias = None if biases[0] is None else _one_of(biases)
        self._weight = _one_of([part.weight for part in parts])
        self._packs = packs(self._weight)
        if self._packs:
            self.renew([self._weight])
            for part in parts:
                part.weight = nn.Parameter(part.weight.to("meta"), requires_grad=False)

    def renew(self, weights: Sequence[torch.Tensor]) -> None:
        """The layers have these new weights."""
        if self._packs:
            whole = torch.cat([weight.detach().to(self._weight.dtype) for weight in weights])
            self._weight = torch.ops.mkldnn._reorder_linear_weight(whole, USUAL_ROWS)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if not self._packs:
            return F.linear(tokens, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(tokens, self._weight, self._bias, "none", [], "")
        return product


def packs(weight: torch.Tensor) -> bool:
    """Whether products run over a reordered matrix."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def _one_of(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(parameters) == 1:
        return parameters[0]
    whole = torch.cat([parameter.detach() for parameter in parameters])
    begin = 0
    for parameter in parameters:
        parameter.data = whole[begin : begin + len(parameter)]
        begin += len(parameter)
    return whole
