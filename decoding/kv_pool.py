"""One KV pool for the whole forest: trunk once, then the nodes (design §4). With `pool_layer` the only file that
touches cache classes.

A pool row holds one prompt's forest. Its slots are laid out as `forest.Forest` numbers them: trunk, then nodes. Slots
are always computed in order, so the state of a row is one number, how many are filled. Storage is preallocated and
written in place; beams are never copied, and pruning gathers the surviving nodes to the front. With a runner, forwards
of few tokens go in static shapes (`runner`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import Cache

from .attention import GROUPED, split_threshold
from .causal import CausalModel
from .config import RunnerName
from .forest import Forest, Pruning
from .host import upload
from .pool_layer import PoolLayer
from .runner import (
    MOST_TOKENS,
    SLOT_BUCKET,
    CudaGraphs,
    Inputs,
    Runner,
    Shape,
    resolve_runner,
    row_bucket,
    slot_bucket,
    token_bucket,
)

EmbedHook = Callable[[torch.Tensor, Sequence[tuple[int, int, int]], torch.Tensor], torch.Tensor]

_CHUNK = 512
"""Most tokens of one row in one forward: bounds the mask and the activations of a long prompt."""

_APART = 64
"""Rows so many tokens behind another one (prompts that just entered) catch up first: it is not padded to them."""


class KVPool:
    """KV storage of several forests for one model.

    Args:
        model: the model whose keys and values are stored.
        rows: prompts held at once.
        capacity: slots a row to preallocate; doubled when a forest outgrows it.
        embed: makes the model's input embeddings (B, T, hidden) from token ids (B, T), the window [(row, first slot,
            count)] and the slots (B, T) of the tokens before; None feeds token ids.
        runner: how forwards are run, see `DecodeConfig`.

    Raises:
        ConfigError: the runner cannot be had for this model.
    """

    def __init__(
        self,
        model: CausalModel,
        rows: int,
        capacity: int,
        embed: EmbedHook | None = None,
        runner: RunnerName = "eager",
    ) -> None:
        self.model = model
        self.rows = rows
        self.runner_name = resolve_runner(runner, model.model)
        self.capacity = self._round(capacity)
        self.filled = [0] * rows
        self.window: list[tuple[int, int, int]] = []  # (row, first slot, count) of the forward in progress
        self.window_end = 0
        self.active_rows: slice | list[int] = slice(0, 0)
        self.embed = embed
        self.split_from = split_threshold(model.device) if model.implementation == GROUPED else None
        """Trunk slots from which on trunk and tree are attended to apart; None never does."""
        self.static: Inputs | None = None  # of the forward in progress, where its shape is static
        self.sink: Callable[[int, int, torch.Tensor], None] | None = None
        """Given (row, first slot, hidden states (T, hidden)) of everything that is computed."""
        self._cache = Cache(layers=[PoolLayer(self) for _ in range(model.num_layers)])
        self._takes_positions = "position_ids" in inspect.signature(model.model.forward).parameters
        self._runner = self._make_runner()

    def _make_runner(self) -> Runner | None:
        """A new runner: one whose graphs point to this storage."""
        if self.runner_name == "eager":
            return None
        capture = CudaGraphs() if self.runner_name == "graphs" else None
        hidden = None if self.embed is None else int(self.model.model.config.get_text_config().hidden_size)
        return Runner(self._static_forward, self.model.device, capture, hidden, self.model.model.dtype)

    def _round(self, slots: int) -> int:
        """Slots to allocate for so many: static shapes need whole buckets, and a scratch slot."""
        return slots if self.runner_name == "eager" else slot_bucket(slots + 1)

    def clear(self, row: int) -> None:
        """Forget a row, so that another prompt can take it."""
        self.filled[row] = 0

    def pending(self, row: int, forest: Forest) -> int:
        """Slots of the forest that are not computed yet."""
        return forest.num_slots - self.filled[row]

    def forward(self, rows: Sequence[int], forests: Sequence[Forest], wanted: Sequence[int]) -> list[torch.Tensor]:
        """Compute every pending slot of the given rows and return logits of the last ones.

        Args:
            rows: pool rows, distinct.
            forests: their forests.
            wanted: for each row, how many of its last nodes to return logits for (at least 1, all of them pending).

        Returns:
            For each row, logits (wanted, V) in the model's dtype.
        """
        need = self._round(max(*self.filled, *(forest.num_slots for forest in forests)))
        if need > self.capacity:
            self._grow(max(need, self._round(2 * self.capacity)))
        while True:  # long prompts go in chunks, apart from other rows; the last forward covers the wanted nodes
            pending = [self.pending(row, forest) for row, forest in zip(rows, forests, strict=True)]
            extra = [count - most for count, most in zip(pending, wanted, strict=True)]
            alike = min(pending) + _APART
            behind = [i for i, more in enumerate(extra) if more > _CHUNK or (more > 0 and pending[i] > alike)]
            if not behind:
                break
            counts = [min(extra[i], _CHUNK) for i in behind]
            self._advance([rows[i] for i in behind], [forests[i] for i in behind], counts)
        states = self._advance(rows, forests, pending)
        kept = [row_states[row_states.shape[0] - count :] for row_states, count in zip(states, wanted, strict=True)]
        logits = self.model.head(torch.cat(kept))
        return list(torch.split(logits, list(wanted)))

    def _advance(self, rows: Sequence[int], forests: Sequence[Forest], counts: Sequence[int]) -> list[torch.Tensor]:
        """One model forward over the next ``counts`` pending slots of each row: their hidden states (count, hidden)."""
        self.window = [(row, self.filled[row], count) for row, count in zip(rows, counts, strict=True)]
        self.window_end = max(start + count for _, start, count in self.window)
        common = min(min(start, forest.num_trunk) for forest, (_, start, _) in zip(forests, self.window, strict=True))
        trunk = common if self.split_from is not None and common >= self.split_from else 0
        allocated = cast(PoolLayer, self._cache.layers[0]).is_initialized
        if self._runner is not None and allocated and max(counts) <= MOST_TOKENS:
            hidden = self._runner.run(self._static_inputs(self._runner, forests, trunk))
            lines = list(rows)  # every row of the pool has its line
        else:
            hidden = self._plain_forward(forests, trunk)
            lines = list(range(len(rows)))
        states = []
        for line, (row, start, count) in zip(lines, self.window, strict=True):
            self.filled[row] = start + count
            states.append(hidden[line, :count])
            if self.sink is not None:
                self.sink(row, start, states[-1])
        return states

    def _static_inputs(self, runner: Runner, forests: Sequence[Forest], trunk: int) -> Inputs:
        """The window in the buffers of its shape."""
        shape = Shape(
            rows=row_bucket(1 + max(row for row, _, _ in self.window), self.rows),
            tokens=token_bucket(max(count for _, _, count in self.window)),
            slots=slot_bucket(1 + max(self.window_end, *self.filled)),  # the last one is scratch
            trunk=trunk // SLOT_BUCKET * SLOT_BUCKET,
        )
        inputs = runner.inputs(shape)
        before_BT = torch.full_like(inputs.tokens_BT, -1)
        for forest, (row, start, count) in zip(forests, self.window, strict=True):
            inputs.set_row(row, start, *forest.slot_inputs(start, start + count))
            if self.embed is not None:
                before_BT[row, :count] = forest.slot_parents(start, start + count)
        if self.embed is not None:
            assert inputs.embeds_BTH is not None
            lines = [(row, 0, 0) for row in range(shape.rows)]
            inputs.embeds_BTH.copy_(self.embed(inputs.tokens_BT, lines, before_BT))
        return inputs

    def _static_forward(self, inputs: Inputs) -> torch.Tensor:
        """The `runner.Body`: reads the buffers alone."""
        self.static = inputs
        try:
            return self._call(inputs.tokens_BT, inputs.positions_BT, inputs.visible_BTS, inputs.embeds_BTH)
        finally:
            self.static = None

    def _plain_forward(self, forests: Sequence[Forest], trunk: int) -> torch.Tensor:
        """The window as it is, padded to its longest row."""
        rows = [row for row, _, _ in self.window]
        contiguous = rows == list(range(rows[0], rows[0] + len(rows)))
        self.active_rows = slice(rows[0], rows[0] + len(rows)) if contiguous else rows
        tokens, positions, visible = self._batch(forests)
        embeds = None
        if self.embed is not None:
            before = [f.slot_parents(start, start + n) for f, (_, start, n) in zip(forests, self.window, strict=True)]
            padded = torch.nn.utils.rnn.pad_sequence(before, batch_first=True, padding_value=-1)
            embeds = self.embed(tokens, self.window, padded)
        return self._call(tokens, positions, visible[:, :, trunk:], embeds)

    def _call(
        self, tokens: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor, embeds: torch.Tensor | None
    ) -> torch.Tensor:
        inputs: dict[str, Any] = {"attention_mask": self.model.mask(visible.unsqueeze(1)), "cache": self._cache}
        if self._takes_positions:
            inputs["position_ids"] = positions
        inputs["input_ids" if embeds is None else "inputs_embeds"] = tokens if embeds is None else embeds
        compiled = self.static is not None and self.runner_name == "compile"
        return self.model.hidden(compiled, use_cache=True, **inputs)

    def _batch(self, forests: Sequence[Forest]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens (B, T), positions (B, T) and visibility (B, T, S) of the current window, padded to the longest row."""
        parts = [
            forest.slot_inputs(start, start + count)
            for forest, (_, start, count) in zip(forests, self.window, strict=True)
        ]
        if len(parts) == 1:
            tokens, positions, mask = parts[0]
            return tokens.unsqueeze(0), positions.unsqueeze(0), mask[:, : self.window_end].unsqueeze(0)
        longest = max(count for _, _, count in self.window)
        device = self.model.device
        tokens = torch.zeros(len(parts), longest, dtype=torch.int64, device=device)
        positions = torch.zeros_like(tokens)
        mask = torch.zeros(len(parts), longest, self.window_end, dtype=torch.bool, device=device)
        mask[:, :, 0] = True  # a padded query must attend somewhere, or its softmax is NaN
        for index, (row_tokens, row_positions, row_mask) in enumerate(parts):
            count, slots = row_tokens.shape[0], min(row_mask.shape[1], self.window_end)
            tokens[index, :count] = row_tokens
            positions[index, :count] = row_positions
            mask[index, :count, :slots] = row_mask[:, :slots]
        return tokens, positions, mask

    def prune(self, row: int, pruning: Pruning) -> None:
        """Follow `Forest.prune`: gather the surviving nodes' slots to the front of the tree, in place."""
        kept, trunk = pruning.kept, pruning.old_trunk
        if self.filled[row] <= trunk:
            return  # this pool lags behind the trunk: it holds no node yet
        computed = [node for node in kept if trunk + node < self.filled[row]]
        moved = next((index for index, node in enumerate(computed) if index != node), len(computed))
        if moved < len(computed):
            source = upload(computed[moved:], self.model.device) + trunk
            for layer in self._cache.layers:
                cast(PoolLayer, layer).move(row, trunk + moved, source)
        self.filled[row] = trunk + len(computed)

    def _grow(self, capacity: int) -> None:
        for layer in self._cache.layers:
            cast(PoolLayer, layer).grow(capacity)
        self.capacity = capacity
        self._runner = self._make_runner()

    @property
    def bytes(self) -> int:
        """Bytes of KV storage allocated."""
        total = 0
        for layer in self._cache.layers:
            for tensor in (cast(PoolLayer, layer).keys, cast(PoolLayer, layer).values):
                total += 0 if tensor is None else tensor.numel() * tensor.element_size()
        return total


def renew_pool(
    old: KVPool | None,
    model: CausalModel,
    rows: int,
    capacity: int,
    embed: EmbedHook | None = None,
    runner: RunnerName = "eager",
) -> KVPool:
    """An empty pool: ``old`` itself where its static shapes can serve again, so that nothing is captured twice.

    Args:
        old: of an earlier call, or None.
        model: see `KVPool` for this and the following ones.
        rows: at least.
        capacity: at least.
        embed: of both pools.
        runner: as asked for.
    """
    model.refresh()
    kind = resolve_runner(runner, model.model)
    fits = old is not None and old.model is model and old.rows >= rows and old.capacity >= capacity
    if old is None or not fits or kind == "eager" or old.runner_name != kind:
        return KVPool(model, rows, capacity, embed, runner)
    for row in range(old.rows):
        old.clear(row)
    return old
