"""Products with the weights of a model: right, the same bits in any batch, and of the newest weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from rocstar.engines.torch_forward import Product, packs

SHAPES = ((640, 640), (640, 1920), (768, 256), (61, 96))  # out, in


def layer(out: int, width: int, dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    torch.manual_seed(out)
    return nn.Linear(width, out, bias=bias).to(dtype).requires_grad_(False)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_a_row_has_the_same_bits_whatever_stands_beside_it(out: int, width: int, dtype: torch.dtype) -> None:
    product, tokens = Product(layer(out, width, dtype)), torch.randn(320, width).to(dtype)
    together = product(tokens)
    for count in (4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 128, 200, 256, 319):
        for begin in {0, 320 - count, (320 - count) // 2}:
            assert torch.equal(product(tokens[begin : begin + count]), together[begin : begin + count]), count


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_several_layers_are_one_product(dtype: torch.dtype, gap: float) -> None:
    parts = [layer(out, 128, dtype) for out in (64, 32, 32)]
    tokens = torch.randn(9, 128).to(dtype)
    expected = torch.cat([nn.functional.linear(tokens.double(), p.weight.double(), p.bias.double()) for p in parts], 1)
    assert (Product(*parts)(tokens).double() - expected).abs().max() < gap


def test_new_weights_are_used_once_they_are_taken_over() -> None:
    first, second = layer(64, 128, torch.float32, bias=False), layer(32, 128, torch.float32, bias=False)
    product, tokens = Product(first, second), torch.randn(4, 128)
    if not first.weight.is_meta:
        second.weight.copy_(torch.ones_like(second.weight))
    product.renew([layer(64, 128, torch.float32, bias=False).weight, torch.ones(32, 128)])
    assert torch.allclose(product(tokens)[:, 64:], tokens.sum(1, keepdim=True).expand(-1, 32), atol=1e-4)


def test_the_numbers_are_held_once() -> None:
    one, double = layer(64, 128, torch.float32), layer(64, 128, torch.float64)
    for each in (one, double):
        packed = packs(each.weight)
        Product(each)
        assert each.weight.is_meta == packed and each.weight.shape == (64, 128)
    assert not double.weight.is_meta
