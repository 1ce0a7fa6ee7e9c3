"""A hazard network for one layer at a time, on the host.

Where the host waits for every operation anyway, the time of so small a network is that of the calls: numpy's take a
third of torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from .predictor import HazardNet

_ZERO = np.float32(0.0)


class HostNet:
    """What `HazardNet.success_probs` computes, with the weights that the network has now.

    Args:
        net: the network.
        clip: standardised features are cut off here.
    """

    def __init__(self, net: HazardNet, clip: float) -> None:
        self._mean, self._factor = _array(net.mean), 1.0 / _array(net.std)
        self._clip = np.float32(clip)
        first, second, last = (layer for layer in net.layers if isinstance(layer, torch.nn.Linear))
        half = np.float32(0.5)  # x * sigmoid(x) is h + h * tanh(h) of half of x
        self._hidden = [(half * _array(layer.weight), half * _array(layer.bias)) for layer in (first, second)]
        self._last = _array(last.weight), _array(last.bias)
        self._steps, self._scale, self._shift = _array(net.steps), _array(net.scale), _array(net.shift)
        self._bins = net.bins

    def success_probs(self, features_F: np.ndarray, num_beams: int) -> np.ndarray:
        """P(candidates needed at width w <= edge j), float32 (num_beams, J), for features float32 (F,)."""
        x = np.minimum(np.maximum((features_F - self._mean) * self._factor, -self._clip), self._clip)
        for weight, bias in self._hidden:
            half = weight @ x + bias
            x = half + half * np.tanh(half)
        weight, bias = self._last
        out = weight @ x + bias
        logits = out[None, : self._bins]
        if num_beams > 1:
            further = out[self._bins : self._bins + num_beams - 1, None] + self._steps[: num_beams - 1]
            logits = np.concatenate([logits, logits - np.logaddexp(_ZERO, further).cumsum(0)])
        hazards = np.logaddexp(_ZERO, logits * self._scale + self._shift)
        probs: np.ndarray = -np.expm1(-hazards.cumsum(1))
        return probs


def _array(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().float().numpy().copy()
    return array
