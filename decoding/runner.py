"""Static shapes for the pool's forwards, and what runs them: padded buckets, CUDA graphs, or compiled code.

A CUDA graph replays the same kernels on the same memory. So a forward's token count, its rows and the KV slots it
attends to are padded to buckets, its inputs lie in buffers that stay where they are, and its keys and values are
written in place at slot indices that are themselves an input. Padded queries write to a scratch slot, the last one of
the bucket, which no row has reached yet, and attend to it alone, so that they are finite and disturb nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from .config import RunnerName
from .errors import ConfigError

TOKEN_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Tokens of a row in one forward; above, multiples of the last."""

SLOT_BUCKET = 256
"""KV slots attended to are padded to multiples of this."""

MOST_TOKENS = 256
"""Tokens of a row up to which shapes are static; longer forwards (prompts) are bound by arithmetic and run eagerly."""

_UNGRAPHABLE_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies depend on the positions: they are chosen on the host."""


def token_bucket(count: int) -> int:
    """The smallest bucket of at least ``count`` tokens."""
    return next((size for size in TOKEN_BUCKETS if size >= count), -(-count // TOKEN_BUCKETS[-1]) * TOKEN_BUCKETS[-1])


def slot_bucket(count: int) -> int:
    """The smallest multiple of `SLOT_BUCKET` of at least ``count`` slots."""
    return -(-count // SLOT_BUCKET) * SLOT_BUCKET


def row_bucket(count: int, rows: int) -> int:
    """The smallest power of two of at least ``count`` rows, at most the pool's ``rows``."""
    return min(1 << (count - 1).bit_length(), rows)


@dataclass(frozen=True)
class Shape:
    """Shape of one forward: the key of its graph.

    Attributes:
        rows: batch rows (B), the first of the pool.
        tokens: queries per row (T).
        slots: KV slots attended to (S).
        trunk: the first of these that every query sees, so that they need no mask (see `attention`).
    """

    rows: int
    tokens: int
    slots: int
    trunk: int = 0


@dataclass(frozen=True)
class Inputs:
    """Buffers of one shape, written before each forward.

    Attributes:
        shape: of the forward.
        tokens_BT: int64 (B, T), token ids.
        positions_BT: int64 (B, T).
        visible_BTS: bool (B, T, S - trunk), what each query attends to besides the trunk.
        slots_BT: int64 (B, T), where each query's keys and values go.
        rows_B1: int64 (B, 1), 0 to B - 1.
        embeds_BTH: input embeddings (B, T, hidden) instead of the token ids, or None.
    """

    shape: Shape
    tokens_BT: torch.Tensor
    positions_BT: torch.Tensor
    visible_BTS: torch.Tensor
    slots_BT: torch.Tensor
    rows_B1: torch.Tensor
    embeds_BTH: torch.Tensor | None

    @classmethod
    def make(cls, shape: Shape, device: torch.device, hidden: int | None, dtype: torch.dtype) -> Inputs:
        """New buffers; with embeddings of ``hidden`` numbers, or None without."""
        size = (shape.rows, shape.tokens)
        return cls(
            shape,
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(*size, shape.slots - shape.trunk, dtype=torch.bool, device=device),
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.arange(shape.rows, device=device).unsqueeze(1),
            None if hidden is None else torch.zeros(*size, hidden, dtype=dtype, device=device),
        )

    def clear(self) -> None:
        """All queries are padding: token 0 at position 0, written to the scratch slot and seeing it alone."""
        self.tokens_BT.zero_()
        self.positions_BT.zero_()
        self.visible_BTS.fill_(False)
        self.visible_BTS[:, :, -1] = True
        self.slots_BT.fill_(self.shape.slots - 1)

    def set_row(
        self, row: int, start: int, tokens_N: torch.Tensor, positions_N: torch.Tensor, visible_NS: torch.Tensor
    ) -> None:
        """The first N queries of a row are real: they fill the slots from ``start`` on."""
        count, trunk = tokens_N.shape[0], self.shape.trunk
        visible_NS = visible_NS[:, trunk : self.shape.slots]
        self.tokens_BT[row, :count] = tokens_N
        self.positions_BT[row, :count] = positions_N
        self.visible_BTS[row, :count] = False
        self.visible_BTS[row, :count, : visible_NS.shape[1]] = visible_NS
        self.slots_BT[row, :count] = torch.arange(start, start + count, device=tokens_N.device)


Body = Callable[[Inputs], torch.Tensor]
"""The model's forward: last hidden states (B, T, hidden). It reads the buffers alone, and nothing on the host."""

Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
"""Makes of a function over fixed memory one that repeats its kernels; the result is overwritten by each repetition."""


class Runner:
    """Runs forwards in static shapes: plainly, or from the second of a shape on by what ``capture`` made of it.

    The first forward of a shape is plain, so that lazy initialisation is over before anything is captured, and shapes
    that occur once (the ends of prompts) are never captured.

    Args:
        body: the forward.
        device: of the buffers.
        capture: None runs plainly.
        hidden: size of input embeddings, None where the model takes token ids.
        dtype: of the embeddings.
    """

    def __init__(
        self,
        body: Body,
        device: torch.device,
        capture: Capture | None = None,
        hidden: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._body = body
        self._device = device
        self._capture = capture
        self._hidden = hidden
        self._dtype = dtype
        self._inputs: dict[Shape, Inputs] = {}
        self._seen: set[Shape] = set()
        self._captured: dict[Shape, Callable[[], torch.Tensor]] = {}

    def inputs(self, shape: Shape) -> Inputs:
        """The buffers of a shape, all padding."""
        if shape not in self._inputs:
            self._inputs[shape] = Inputs.make(shape, self._device, self._hidden, self._dtype)
        inputs = self._inputs[shape]
        inputs.clear()
        return inputs

    def run(self, inputs: Inputs) -> torch.Tensor:
        """Last hidden states (B, T, hidden); valid until the next forward of the same shape."""
        shape = inputs.shape
        if self._capture is None or shape not in self._seen:
            self._seen.add(shape)
            return self._body(inputs)
        if shape not in self._captured:
            self._captured[shape] = self._capture(lambda: self._body(inputs))
        return self._captured[shape]()

    @property
    def captured(self) -> list[Shape]:
        """Shapes captured so far."""
        return list(self._captured)


class CudaGraphs:
    """Captures CUDA graphs that share one memory pool (they never run at the same time)."""

    def __init__(self) -> None:
        self._memory: Any = None  # torch's handle, made on first use

    def __call__(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See `Capture`. Runs once on a side stream first: writing the same keys and values again changes nothing."""
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = run()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


def resolve_runner(name: RunnerName, model: PreTrainedModel) -> Literal["eager", "buckets", "graphs", "compile"]:
    """What ``"auto"`` means for a model: graphs on CUDA where they can be captured, else eager.

    Args:
        name: as `DecodeConfig.runner` has it.
        model: the model to run.

    Raises:
        ConfigError: graphs were asked for, and cannot be had.
    """
    reason = _why_no_graphs(model)
    if name == "auto":
        return "graphs" if reason is None else "eager"
    if name == "graphs" and reason is not None:
        raise ConfigError(f"runner='graphs': {reason}; use runner='auto', which takes graphs where they can be had")
    return name


def _why_no_graphs(model: PreTrainedModel) -> str | None:
    if model.device.type != "cuda":
        return f"CUDA graphs need the model on a CUDA device, and it is on {model.device.type}"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"the model is spread over {len(devices)} devices"
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)]
    dynamic = [kind for kind in kinds if kind in _UNGRAPHABLE_ROPE]
    return f"the model's rotary embedding ('{dynamic[0]}') changes with the positions" if dynamic else None
