"""Drafters: whatever proposes the nodes of the forest. None of them can change the output, only the speed.

A drafter gives, for each node of the frontier, scores over (some of) the next tokens. The engine runs the beam step on
them, with the same noise as the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from transformers import PreTrainedModel

from .causal import CausalModel
from .compat import check_model
from .config import RunnerName
from .errors import ConfigError, ModelError
from .forest import Forest, Pruning
from .kv_pool import KVPool, renew_pool


@dataclass(frozen=True)
class Proposal:
    """A drafter's view of the next token at P frontier nodes.

    Attributes:
        logits_PV: float32 (P, Vd), unnormalised log-probabilities; -inf where nothing is proposed.
        token_ids_V: int64 (Vd,), the target's token id of each column, or None where they are the same.
    """

    logits_PV: torch.Tensor
    token_ids_V: torch.Tensor | None


class Drafter(Protocol):
    """Proposes continuations of frontier nodes, for several prompts at once.

    Attributes:
        needs_target_states: it reads the target's hidden states, so it cannot draft before the target's first forward.
    """

    needs_target_states: bool

    def start(self, rows: int, capacity: int, runner: RunnerName = "eager") -> None:
        """Prepare for ``rows`` prompts of about ``capacity`` tokens each. Called once per batch of prompts.

        ``runner`` says how a model's forwards are run, see `DecodeConfig`.
        """
        ...

    def clear(self, row: int) -> None:
        """Forget a row: another prompt takes it."""
        ...

    def propose(
        self, rows: Sequence[int], forests: Sequence[Forest], sequences: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        """Scores of the next tokens at each row's frontier.

        Args:
            rows: row numbers, distinct.
            forests: their forests; the frontier is the last P nodes of each.
            sequences: int64 (P, T) per row, the tokens of each frontier beam so far, prompt included.

        Returns:
            One proposal per row, of P rows each.
        """
        ...

    def prune(self, row: int, pruning: Pruning) -> None:
        """The row's forest was compacted."""
        ...

    def observe(self, row: int, start: int, hidden_TH: torch.Tensor) -> None:
        """The target computed the slots from ``start`` on: its last hidden states, (T, hidden)."""
        ...

    @property
    def forwards(self) -> int:
        """Model forwards run so far."""
        ...


class ModelDrafter:
    """Drafts with a small causal language model that shares the target's vocabulary.

    Args:
        model: any Hugging Face causal LM. Where it has an attribute ``draft_token_ids`` (int64 (Vd,), the target's
            token id of each of its outputs) its vocabulary may be a subset of the target's.
        target: the target model, to check the vocabularies against each other.

    Raises:
        ModelError: the vocabularies differ.
    """

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel) -> None:
        self.model = CausalModel(model)
        check_model(self.model)
        token_ids = getattr(model, "draft_token_ids", None)
        self._token_ids = None if token_ids is None else cast(torch.Tensor, token_ids).to(model.device)
        wanted = int(target.config.get_text_config().vocab_size)
        if self._token_ids is None and self.model.vocab_size != wanted:
            raise ModelError(
                f"The draft model has {self.model.vocab_size} tokens and the target {wanted}: speculation needs one "
                "vocabulary (choose a draft of the same family, or distil one with `beamwise distil`)"
            )
        self._pool: KVPool | None = None
        self._forwards = 0

    needs_target_states = False

    def observe(self, row: int, start: int, hidden_TH: torch.Tensor) -> None:
        """Nothing to learn from the target's states."""

    def start(self, rows: int, capacity: int, runner: RunnerName = "eager") -> None:
        """See `Drafter.start`."""
        self._pool = renew_pool(self._pool, self.model, rows, capacity, runner=runner)

    def clear(self, row: int) -> None:
        """See `Drafter.clear`."""
        self.pool.clear(row)

    @property
    def pool(self) -> KVPool:
        """KV of the drafts."""
        if self._pool is None:
            raise RuntimeError("ModelDrafter.start was not called")
        return self._pool

    def propose(
        self, rows: Sequence[int], forests: Sequence[Forest], sequences: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        """See `Drafter.propose`."""
        self._forwards += 1
        logits = self.pool.forward(rows, forests, [int(sequence.shape[0]) for sequence in sequences])
        return [Proposal(row_logits.float(), self._token_ids) for row_logits in logits]

    def prune(self, row: int, pruning: Pruning) -> None:
        """See `Drafter.prune`."""
        self.pool.prune(row, pruning)

    @property
    def forwards(self) -> int:
        """See `Drafter.forwards`."""
        return self._forwards


class LookupDrafter:
    """Drafts by looking up the last tokens of a beam in its own prompt and output: no model, nearly no cost.

    Every earlier occurrence of the longest matching suffix votes for the token that followed it (prompt lookup
    decoding, as in transformers' ``prompt_lookup_num_tokens``).

    Args:
        max_ngram: longest suffix to look up.
        min_ngram: shortest one that counts as a match.

    Raises:
        ConfigError: a length out of range.
    """

    forwards = 0
    needs_target_states = False

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(f"LookupDrafter needs 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def start(self, rows: int, capacity: int, runner: RunnerName = "eager") -> None:
        """Nothing to prepare."""

    def clear(self, row: int) -> None:
        """Nothing to forget."""

    def prune(self, row: int, pruning: Pruning) -> None:
        """Nothing to follow."""

    def observe(self, row: int, start: int, hidden_TH: torch.Tensor) -> None:
        """Nothing to learn from the target's states."""

    def propose(
        self, rows: Sequence[int], forests: Sequence[Forest], sequences: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        """See `Drafter.propose`."""
        return [self._lookup(sequence) for sequence in sequences]

    def _lookup(self, sequences_PT: torch.Tensor) -> Proposal:
        rows, votes = self._votes(sequences_PT)
        token_ids, columns = torch.unique(votes, return_inverse=True)
        counts = sequences_PT.new_zeros(sequences_PT.shape[0], token_ids.shape[0], dtype=torch.float32)
        counts.index_put_((rows, columns), counts.new_ones(()), accumulate=True)
        return Proposal(counts.log(), token_ids)

    def _votes(self, sequences_PT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that followed the earlier occurrences of each beam's longest suffix that occurs earlier at all.

        Returns:
            int64 (N,) beams and int64 (N,) tokens, one pair for each occurrence.
        """
        length = sequences_PT.shape[1]
        # at each token but the first: whether the n before it are the last n
        matched = torch.ones_like(sequences_PT[:, 1:], dtype=torch.bool)
        longest = torch.zeros_like(matched)
        for size in range(1, min(self.max_ngram, length - 1) + 1):
            matched[:, : size - 1] = False
            matched[:, size - 1 :] &= sequences_PT[:, : length - size] == sequences_PT[:, length - size, None]
            if size >= self.min_ngram:
                longest = torch.where(matched.any(dim=1, keepdim=True), matched, longest)
        rows, places = longest.nonzero(as_tuple=True)
        return rows, sequences_PT[rows, places + 1]


class UnionDrafter:
    """Mixes a model's proposals with a lookup's: log(weight * lookup + (1 - weight) * model), token by token.

    Args:
        model: the model drafter.
        lookup: the lookup drafter.
        weight: share of the lookup where it found a match, between 0 and 1.

    Raises:
        ConfigError: the weight is out of range.
    """

    def __init__(self, model: ModelDrafter, lookup: LookupDrafter, weight: float = 0.3) -> None:
        if not 0.0 < weight < 1.0:
            raise ConfigError(f"weight is {weight}: the lookup's share must lie strictly between 0 and 1")
        self.model = model
        self.lookup = lookup
        self.weight = weight
        self.needs_target_states = model.needs_target_states

    def observe(self, row: int, start: int, hidden_TH: torch.Tensor) -> None:
        """See `Drafter.observe`."""
        self.model.observe(row, start, hidden_TH)

    def start(self, rows: int, capacity: int, runner: RunnerName = "eager") -> None:
        """See `Drafter.start`."""
        self.model.start(rows, capacity, runner)

    def clear(self, row: int) -> None:
        """See `Drafter.clear`."""
        self.model.clear(row)

    def prune(self, row: int, pruning: Pruning) -> None:
        """See `Drafter.prune`."""
        self.model.prune(row, pruning)

    @property
    def forwards(self) -> int:
        """See `Drafter.forwards`."""
        return self.model.forwards

    def propose(
        self, rows: Sequence[int], forests: Sequence[Forest], sequences: Sequence[torch.Tensor]
    ) -> list[Proposal]:
        """See `Drafter.propose`."""
        models = self.model.propose(rows, forests, sequences)
        lookups = self.lookup.propose(rows, forests, sequences)
        return [self._mix(model, lookup) for model, lookup in zip(models, lookups, strict=True)]

    def _mix(self, model: Proposal, lookup: Proposal) -> Proposal:
        assert lookup.token_ids_V is not None
        if lookup.token_ids_V.shape[0] == 0:
            return model
        log_q = torch.log_softmax(model.logits_PV, dim=1)
        matched = (lookup.logits_PV > float("-inf")).any(dim=1, keepdim=True)
        log_votes = torch.where(matched, torch.log_softmax(lookup.logits_PV, dim=1), float("-inf"))
        share = torch.where(matched, self.weight, 0.0)
        mixed = log_q + (1.0 - share).log()
        if model.token_ids_V is None:
            columns, token_ids = lookup.token_ids_V, None
        else:  # the draft's vocabulary may lack the tokens that were looked up: they become columns of their own
            here = model.token_ids_V.unsqueeze(0) == lookup.token_ids_V.unsqueeze(1)
            found, columns = here.max(dim=1)
            extra = lookup.token_ids_V[~found]
            columns = torch.where(found, columns, mixed.shape[1] - 1 + (~found).cumsum(0))
            token_ids = torch.cat([model.token_ids_V, extra])
            padding = mixed.new_full((mixed.shape[0], extra.shape[0]), float("-inf"))
            mixed = torch.cat([mixed, padding], dim=1)
        mixed[:, columns] = torch.logaddexp(mixed[:, columns], log_votes + share.log())
        return Proposal(mixed, token_ids)
