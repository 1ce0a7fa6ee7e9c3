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


class HostNet:
    """What `HazardNet.success_probs` computes, with the weights that the network has now.

    Args:
        net: the network.
        clip: standardised features are cut off here.
    """

    def __init__(self, net: HazardNet, clip: float) -> None:
        self._mean, self._scale_in = _array(net.mean), 1.0 / _array(net.std)
        self._clip = np.float32(clip)
        self._layers = [
            (_array(layer.weight), _array(layer.bias)) for layer in net.layers if isinstance(layer, torch.nn.Linear)
        ]
        self._steps, self._scale, self._shift = _array(net.steps), _array(net.scale), _array(net.shift)
        self._bins = net.bins

    def success_probs(self, features_F: np.ndarray) -> np.ndarray:
        """P(candidates needed at width w <= edge j), float32 (W, J), for features float32 (F,)."""
        hidden = np.minimum(np.maximum((features_F - self._mean) * self._scale_in, -self._clip), self._clip)
        for weight, bias in self._layers[:-1]:
            hidden = _silu(weight @ hidden + bias)
        weight, bias = self._layers[-1]
        out = weight @ hidden + bias
        logits = np.empty((self._steps.shape[0] + 1, self._bins), dtype=np.float32)
        logits[0] = 0.0
        np.cumsum(_softplus(out[self._bins :, None] + self._steps), axis=0, out=logits[1:])
        np.subtract(out[: self._bins], logits, out=logits)
        probs: np.ndarray = -np.expm1(-np.cumsum(_softplus(logits * self._scale + self._shift), axis=1))
        return probs


def _array(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().cpu().float().numpy().copy()
    return array


def _silu(x: np.ndarray) -> np.ndarray:
    product: np.ndarray = np.float32(0.5) * x * (np.float32(1.0) + np.tanh(np.float32(0.5) * x))  # x * sigmoid(x)
    return product


def _softplus(x: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.logaddexp(np.float32(0.0), x)
    return result
