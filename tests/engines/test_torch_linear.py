"""Products with the weights of a model have the same bits in any batch. Whether they are right, and of the newest
weights: test_torch_forward.py."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import ref

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional as F

from rocstar.engines.torch_compact import Product, packs
from rocstar.engines.torch_forward import InBlocks

SHAPES = ((640, 640), (640, 1920), (768, 256), (61, 96), (512, 96), (96, 256))  # out, in


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
    for count in (4, 7, 8, 15, 16, 17, 33, 64, 65, 100, 128, 256, 319):
        for begin in {0, 320 - count, (320 - count) // 2}:
            assert torch.equal(product(tokens[begin : begin + count]), together[begin : begin + count]), count


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_so_have_products_of_a_models_own_code_in_blocks(out: int, width: int) -> None:
    one, tokens = layer(out, width, torch.bfloat16), torch.randn(1, 320, width)
    with InBlocks(), torch.autocast("cpu", torch.bfloat16):
        together = one(tokens)
        for count in (1, 7, 16, 33, 64, 100, 319):
            assert torch.equal(one(tokens[:, -count:]), together[:, -count:]), count
        transposed = tokens.bfloat16().mT.contiguous().mT  # as convolutions leave them
        assert torch.equal(one(transposed), together)


def test_so_have_products_of_experts_in_blocks() -> None:
    torch.manual_seed(0)
    weights, tokens = torch.randn(3, 640, 1920).bfloat16(), torch.randn(200, 1920).bfloat16()
    transposed = weights.transpose(1, 2)
    with InBlocks():
        found = F.grouped_mm(tokens, transposed, offs=torch.tensor([40, 40, 200], dtype=torch.int32))
        few = torch.cat((tokens[:17], tokens[40:60]))
        again = F.grouped_mm(few, transposed, offs=torch.tensor([17, 17, 37], dtype=torch.int32))
    assert torch.equal(again, torch.cat((found[:17], found[40:60])))
    plain = torch.cat((tokens[:40] @ transposed[0], tokens[40:] @ transposed[2]))
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize(
    ("out", "width", "dtype", "packed"),
    [(512, 512, torch.float32, True), (512, 512, torch.float64, False), (512, 96, torch.float32, False)],
)
def test_large_matrices_are_packed_and_held_once(out: int, width: int, dtype: torch.dtype, packed: bool) -> None:
    """Packed, 384 rows of a small one took seven times as long as plain, each time that they were as many for the
    first time."""
    one = layer(out, width, dtype)
    assert packs(one.weight) == packed
    Product(one)
    assert one.weight.is_meta == packed and one.weight.shape == (out, width)


def test_packed_matrices_are_renewed_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    product, new = Product(layer(512, 512, torch.float32)), torch.zeros(512, 512)
    old, held = ref(product.weight), []
    monkeypatch.setattr(
        torch.ops.mkldnn, "_reorder_linear_weight", lambda given, rows: held.append((given.data_ptr(), old()))
    )
    product.renew([new])
    assert held == [(new.data_ptr(), None)]
