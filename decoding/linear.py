"""Linear layers on the CPU with weights packed once.

A matrix product of few rows is bound by reading the weights, and the stock kernels also rearrange them, at every call.
oneDNN can keep them in the order that its kernels read: measured on SmolLM2's layers, bfloat16 products of 1 to 16 rows
take 0.55 to 0.72 of the time, to the same bits; float32 ones 0.15 to 0.8, 16 rows at most half as much again as one.
The copies cost the weights' memory once more, so they can be left out (`pack_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch

_ROWS = 16
"""Rows of a product that the order is chosen for; others use it too."""

_SAMPLES = 16
"""Rows and columns of the sample by which changed weights are noticed."""


@dataclass(frozen=True)
class _Packed:
    """A layer's packed weights, and what tells whether the layer still has them.

    Attributes:
        weight: in oneDNN's order.
        address: of the layer's own weights.
        version: counts changes in place, except those made through ``.data``.
        sample: every so many rows and columns, which shows most of those.
    """

    weight: torch.Tensor
    address: int
    version: int
    sample: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> _Packed:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        return cls(packed, weight.data_ptr(), _version(weight), _sample(weight).clone())

    def is_of(self, weight: torch.Tensor) -> bool:
        same = self.address == weight.data_ptr() and self.version == _version(weight)
        return same and self.sample.dtype == weight.dtype and torch.equal(self.sample, _sample(weight))


_PACKED: WeakKeyDictionary[torch.nn.Linear, _Packed] = WeakKeyDictionary()
"""One copy for all decoders of a model; it goes with the layer."""


class PackedLinears:
    """The linear layers of a model whose products can use packed weights.

    Weights that change are packed again by `refresh`. It compares where they lie, their version counter and a sample of
    their values: an edit through ``.data`` that spares the sample (single entries, not a merge of all) goes unseen.

    Args:
        model: its plain `torch.nn.Linear` layers on the CPU in float32, and in bfloat16 where the processor has it.
            Others, and layers whose forward is somebody else's already, are left alone.
        pack: False leaves all alone.
    """

    def __init__(self, model: torch.nn.Module, pack: bool = True) -> None:
        self.modules: list[torch.nn.Linear] = (
            [module for module in model.modules() if _packable(module)] if pack else []
        )
        self._forwards: list[tuple[dict[str, Any], Callable[..., torch.Tensor]]] = []
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Pack again what was changed in the meantime: moved, replaced, or trained."""
        self.modules = [module for module in self.modules if _packable(module)]
        for module in self.modules:
            packed = _PACKED.get(module)
            if packed is None or not packed.is_of(module.weight):
                _PACKED[module] = _Packed.of(module.weight)
        self._forwards = [(vars(m), partial(_forward, _PACKED[m].weight, m.bias)) for m in self.modules]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the block the layers use their packed weights. The model is left as it was."""
        for attributes, forward in self._forwards:  # hundreds of layers: past torch's own, slower __setattr__
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, _ in self._forwards:
                del attributes["forward"]


def _forward(packed: torch.Tensor, bias: torch.Tensor | None, input: torch.Tensor) -> torch.Tensor:
    """``Linear.forward``: (..., in) -> (..., out)."""
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")
    return product


def _packable(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    if type(module) is not torch.nn.Linear or "forward" in vars(module) or module.weight.device.type != "cpu":
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if module.weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return module.weight.dtype == torch.float32


def _version(weight: torch.Tensor) -> int:
    return -1 if weight.is_inference() else weight._version


def _sample(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = (max(1, size // _SAMPLES) for size in weight.shape)
    return weight.detach()[::rows, ::columns]
