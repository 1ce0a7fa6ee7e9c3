"""The largest of many numbers."""

from __future__ import annotations

import torch

_CHUNK = 128
"""Numbers that are first reduced to their maximum."""

_FEW = 16
"""The detour pays where at most one chunk in so many is wanted, and there are at least the square of it."""


def topk_rows(values_RN: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch.topk`` along the rows; on the CPU, where torch goes number by number, long rows take a half to a fifth.

    The ``count`` largest of a row lie in the ``count`` chunks with the largest maxima, and maxima are vectorised. Which
    of several equal numbers come out is left open, as it is in torch.

    Args:
        values_RN: (R, N); a NaN counts as the largest.
        count: at most N.

    Returns:
        Values (R, count), decreasing, and their columns, int64 (R, count).
    """
    rows, columns = values_RN.shape
    chunks = columns // _CHUNK
    if values_RN.device.type != "cpu" or chunks < _FEW * max(count, _FEW):
        return torch.topk(values_RN, count, dim=1)
    body = values_RN[:, : chunks * _CHUNK].view(rows, chunks, _CHUNK)
    best = body.amax(dim=2).topk(count, dim=1).indices
    index = (best.unsqueeze(2) * _CHUNK + torch.arange(_CHUNK)).view(rows, -1)
    if columns > chunks * _CHUNK:
        index = torch.cat([index, torch.arange(chunks * _CHUNK, columns).expand(rows, -1)], dim=1)
    values, places = values_RN.gather(1, index).topk(count, dim=1)
    return values, index.gather(1, places)
