"""A CUDA graph's rules on the CPU: operations are recorded once, then repeated on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

HOST_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
}


class Tape(TorchDispatchMode):
    """Records every operation on tensors; refuses those that a captured graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in HOST_READS, f"{func} waits for the device inside a forward"
        output = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, output))
        return output

    def replay(self, result: torch.Tensor) -> torch.Tensor:
        """Repeat the operations; tensors that none of them made are read where they lie, as they are now."""
        made: dict[int, torch.Tensor] = {}

        def current(value: Any) -> Any:
            return made.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, output in self.operations:
            again = func(*tree_map(current, args), **tree_map(current, kwargs))
            for old, new in zip(tree_flatten(output)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, torch.Tensor):
                    made[id(old)] = new
        return made[id(result)]


def tape_capture(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A `beamwise.decoding.runner.Capture` for the CPU."""
    tape = Tape()
    with tape:
        result = run()
    assert tape.operations
    return lambda: tape.replay(result)
