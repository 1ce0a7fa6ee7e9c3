"""Keys and values of one transformer layer of a pool: storage that is allocated once and written in place."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from .kv_pool import KVPool


class PoolLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one transformer layer, (rows, heads, slots, head_dim), written at the pool's window."""

    is_sliding = False

    def __init__(self, pool: KVPool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # no circle: an old pool goes at once, and not when garbage is collected
        self._pool: KVPool = weakref.proxy(pool)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self._pool.rows, key_states.shape[1], self._pool.capacity)
        self.keys = key_states.new_zeros(*shape, key_states.shape[3])
        self.values = value_states.new_zeros(*shape, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new slots of every active row in place; returns views of the filled slots."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        static = self._pool.static
        if static is not None:  # by index tensors: nothing here depends on the host
            index_BT = (static.rows_B1, static.slots_BT)
            self.keys.transpose(1, 2).index_put_(index_BT, key_states.transpose(1, 2))
            self.values.transpose(1, 2).index_put_(index_BT, value_states.transpose(1, 2))
            rows, end = static.shape.rows, static.shape.slots
            return self.keys[:rows, :, :end], self.values[:rows, :, :end]
        for index, (row, start, count) in enumerate(self._pool.window):
            self.keys[row, :, start : start + count] = key_states[index, :, :count]
            self.values[row, :, start : start + count] = value_states[index, :, :count]
        active, end = self._pool.active_rows, self._pool.window_end
        return self.keys[active, :, :end], self.values[active, :, :end]

    def move(self, row: int, start: int, source: torch.Tensor) -> None:
        """Gather the slots ``source`` of a row to ``start`` onwards."""
        if self.keys is not None and self.values is not None:
            end = start + source.shape[0]
            self.keys[row, :, start:end] = self.keys[row].index_select(1, source)
            self.values[row, :, start:end] = self.values[row].index_select(1, source)

    def grow(self, capacity: int) -> None:
        """Enlarge the storage to ``capacity`` slots a row."""
        if self.keys is None or self.values is None:
            return
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_seq_length(self) -> int:
        static = self._pool.static
        return self._pool.window_end if static is None else static.shape.slots

    def get_max_length(self) -> int:
        return self._pool.capacity
