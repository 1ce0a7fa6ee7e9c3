"""Packed linear layers: the same numbers, the model as it was afterwards, and never somebody's old weights."""

from __future__ import annotations

import gc

import pytest
import torch

from beamwise import SpeculativeBeams
from beamwise.decoding import linear
from beamwise.decoding.linear import PackedLinears
from tests.conftest import make_tiny_llama

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
IDS = torch.tensor([[3, 4, 5]])


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(12,), (1, 12), (2, 12), (1, 7, 12), (2, 3, 12), (1, 80, 12)])
def test_the_product_is_the_same(shape: tuple[int, ...], bias: bool) -> None:
    module = torch.nn.Linear(12, 20, bias=bias)
    rows = torch.randn(shape)
    expected = module(rows)
    packed = PackedLinears(module)
    assert packed.modules == [module]
    with torch.no_grad(), packed.in_use():
        ours = module(rows)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)


@needs_onednn
def test_only_inside_the_block() -> None:
    model = make_tiny_llama(0, dtype=torch.float32)
    before = model(IDS).logits
    packed = PackedLinears(model)
    assert len(packed.modules) == 2 * 7 + 1
    with torch.no_grad(), packed.in_use():
        assert PackedLinears(model).modules == []  # no layer twice
        torch.testing.assert_close(model(IDS).logits, before, atol=1e-4, rtol=1e-4)
    assert not any("forward" in vars(module) for module in packed.modules)
    assert torch.equal(model(IDS).logits, before)


def test_what_cannot_be_packed_is_left_alone() -> None:
    assert PackedLinears(make_tiny_llama(0, dtype=torch.float64)).modules == []
    assert PackedLinears(make_tiny_llama(0, dtype=torch.float32), pack=False).modules == []


@needs_onednn
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this processor has no bfloat16")
def test_bfloat16_to_the_bit() -> None:
    module = torch.nn.Linear(96, 160).to(torch.bfloat16)
    packed = PackedLinears(module)
    for count in (1, 3, 16, 70):
        rows = torch.randn(count, 96, dtype=torch.bfloat16)
        with torch.no_grad():
            expected = module(rows)
            with packed.in_use():
                assert torch.equal(module(rows), expected)


@needs_onednn
def test_changed_weights_are_noticed() -> None:
    """In place, through ``.data``, replaced, moved to another dtype: after `refresh` the product is the layer's own."""
    module, rows = torch.nn.Linear(40, 50), torch.randn(3, 40)
    packed = PackedLinears(module)

    def check() -> None:
        packed.refresh()
        with torch.no_grad(), packed.in_use():
            torch.testing.assert_close(module(rows), rows @ module.weight.T + module.bias, atol=1e-5, rtol=1e-5)

    with torch.no_grad():
        module.weight[7, 5] += 1.0
    check()
    module.weight.data += 0.25  # as LoRA is merged
    check()
    module.weight = torch.nn.Parameter(torch.randn(50, 40))
    check()
    module.load_state_dict({name: torch.randn_like(value) for name, value in module.state_dict().items()})
    check()
    module.double()
    packed.refresh()
    assert packed.modules == []


@needs_onednn
def test_decoders_share_a_copy_and_it_goes_with_the_model() -> None:
    model = make_tiny_llama(0, dtype=torch.float32)
    gc.collect()
    before = len(linear._PACKED)
    first = PackedLinears(model)
    copies = {module: linear._PACKED[module] for module in first.modules}
    second = PackedLinears(model)
    assert len(linear._PACKED) == before + len(first.modules)
    assert all(linear._PACKED[module] is copy for module, copy in copies.items())
    del model, first, second, copies
    gc.collect()
    assert len(linear._PACKED) == before


@needs_onednn
@pytest.mark.parametrize("pack", [True, False])
def test_a_decoder_follows_its_models_weights(pack: bool) -> None:
    """Weights that change between two calls of one decoder: each text is that of the model as it is."""
    target, draft = (make_tiny_llama(seed, vocab_size=48, dtype=torch.float32) for seed in (1, 2))
    beams = SpeculativeBeams(draft, gamma=2, draft_width=6, pack_weights=pack)
    texts = []
    for change in (0.0, 0.05, 0.1):
        for model in (target, draft):
            for parameter in model.parameters():
                parameter.data += change * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
        settings = {"attention_mask": torch.ones_like(IDS), "num_beams": 3, "max_new_tokens": 20, "do_sample": False}
        expected = target.generate(IDS, **settings)
        ours = target.generate(IDS, **settings, custom_generate=beams)
        assert torch.equal(ours, expected)
        texts.append(ours.tolist())
    assert len({str(text) for text in texts}) == 3  # the changes were changes
    assert all((module in linear._PACKED) == pack for module in target.modules() if type(module) is torch.nn.Linear)
