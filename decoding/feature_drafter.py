"""A drafter that reads the target's hidden states (the idea of EAGLE, Li et al. 2024, arXiv 2401.15077).

The draft's input at a token is a fusion of the token's embedding with the target's last hidden state at the token
before. Where the target has not been, deeper in a forest, the draft's own last hidden state stands in; after
verification the target's states replace it, and the accepted tokens are computed again from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from transformers import PreTrainedModel

from .config import RunnerName
from .drafters import ModelDrafter, Proposal
from .forest import Forest, Pruning
from .host import upload
from .kv_pool import renew_pool


class FeatureDrafter(ModelDrafter):
    """Drafts with a model made by `draft_model.build_draft` of the kind ``"feature"``.

    Args:
        model: the draft; has the module ``fusion``: (2 * hidden) -> hidden.
        target: its target.

    Raises:
        ModelError: the vocabularies differ.
    """

    needs_target_states = True

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel) -> None:
        super().__init__(model, target)
        self._fusion = cast(torch.nn.Module, model.fusion)
        self._embedding = model.get_input_embeddings()
        self._states = torch.empty(0)  # (rows, slots, hidden): the target's where it has been, else the draft's
        self._known: list[int] = []  # per row: slots below hold the target's states
        self._block_start: list[int | None] = []  # per row: slots when the block's drafting began

    def start(self, rows: int, capacity: int, runner: RunnerName = "eager") -> None:
        """See `Drafter.start`."""
        self._pool = renew_pool(self._pool, self.model, rows, capacity, embed=self._embed, runner=runner)
        self._pool.sink = self._keep_own
        hidden = int(self.model.model.config.get_text_config().hidden_size)
        self._states = torch.zeros(rows, capacity, hidden, dtype=self.model.model.dtype, device=self.model.device)
        self._known = [0] * rows
        self._block_start = [None] * rows

    def clear(self, row: int) -> None:
        """See `Drafter.clear`."""
        super().clear(row)
        self._known[row] = 0
        self._block_start[row] = None

    def propose(
        self, rows: Sequence[int], forests: Sequence[Forest], sequences: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        """See `Drafter.propose`."""
        for row, forest in zip(rows, forests, strict=True):
            if self._block_start[row] is None:
                self._block_start[row] = forest.num_slots
        return super().propose(rows, forests, sequences)

    def observe(self, row: int, start: int, hidden_TH: torch.Tensor) -> None:
        """See `Drafter.observe`. Whatever was drafted from the draft's own states is to be computed again."""
        end = start + hidden_TH.shape[0]
        self._reserve(end)
        self._states[row, start:end] = hidden_TH
        self._known[row] = end
        drafted_from = self._block_start[row]
        if drafted_from is not None:
            self.pool.filled[row] = min(self.pool.filled[row], drafted_from)

    def prune(self, row: int, pruning: Pruning) -> None:
        """See `Drafter.prune`."""
        trunk, kept = pruning.old_trunk, pruning.kept
        known = [node for node in kept if trunk + node < self._known[row]]
        source = upload(known, self._states.device) + trunk
        self._states[row, trunk : trunk + len(known)] = self._states[row, source]
        self._known[row] = trunk + len(known)
        self._block_start[row] = None
        super().prune(row, pruning)

    def _embed(
        self, tokens: torch.Tensor, window: Sequence[tuple[int, int, int]], before: torch.Tensor
    ) -> torch.Tensor:
        rows = upload([row for row, _, _ in window], tokens.device).unsqueeze(1)
        states = self._states[rows, before.clamp(min=0)]
        states = states.masked_fill((before < 0).unsqueeze(-1), 0.0)  # nothing stands before the first token
        return cast(torch.Tensor, self._fusion(torch.cat([self._embedding(tokens), states], dim=-1)))

    def _keep_own(self, row: int, start: int, hidden_TH: torch.Tensor) -> None:
        """Keep the draft's states where the target has not been yet."""
        skip = min(max(self._known[row] - start, 0), hidden_TH.shape[0])
        self._reserve(start + hidden_TH.shape[0])
        self._states[row, start + skip : start + hidden_TH.shape[0]] = hidden_TH[skip:]

    def _reserve(self, slots: int) -> None:
        if slots > self._states.shape[1]:
            grown = self._states.new_zeros(self._states.shape[0], 2 * slots, self._states.shape[2])
            grown[:, : self._states.shape[1]] = self._states
            self._states = grown
