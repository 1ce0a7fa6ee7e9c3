"""Traffic between host and device. On a GPU each read waits for all work before it: reads are few, and made here."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def read(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """The values of several tensors on one device, flattened, in one transfer.

    Args:
        tensors: float32, float64, bool, or integers below 2**53: float64 holds them all exactly.
    """
    sizes = [tensor.numel() for tensor in tensors]
    values = torch.cat([tensor.reshape(-1).to(torch.float64) for tensor in tensors]).tolist()
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [values[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def upload(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 (N,) on the device; the host does not wait for it."""
    numbers = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers.to(device)


def reads_are_free(device: torch.device) -> bool:
    """Whether the host waits for every operation anyway, so that it may as well look at the result."""
    return device.type == "cpu"
