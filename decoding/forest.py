"""The forest of one prompt: which node extends which, and which slots each node may attend to.

Slots ``0 .. num_trunk - 1`` hold the trunk, the tokens that all live beams share. Slot ``num_trunk + i`` belongs to
node ``i``. Parents always stand before their children, so pruning keeps the order and the shared nodes come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .host import read, upload


@dataclass(frozen=True)
class Pruning:
    """How a forest was compacted.

    Attributes:
        kept: old indices of the surviving nodes, in order; node ``kept[i]`` became ``i - joined``.
        joined: how many of them (the first ones) joined the trunk.
        old_trunk: trunk length before.
    """

    kept: list[int]
    joined: int
    old_trunk: int


class Forest:
    """Nodes of one prompt above its trunk, on one device.

    Args:
        trunk_T: int64 (T,), the tokens of the trunk (may be empty).
        device: where the tensors live.
        capacity: nodes to make room for at first; it grows when needed.
    """

    def __init__(self, trunk_T: torch.Tensor, device: torch.device, capacity: int = 64) -> None:
        self.device = device
        self.trunk = trunk_T.to(device)
        self.size = 0
        self.tokens = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.parents = torch.full((capacity,), -1, dtype=torch.int64, device=device)  # -1: the end of the trunk
        self.positions = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.visible = torch.zeros(capacity, capacity, dtype=torch.bool, device=device)  # [node, ancestor or self]

    @property
    def num_trunk(self) -> int:
        """Tokens in the trunk."""
        return int(self.trunk.shape[0])

    @property
    def num_slots(self) -> int:
        """KV slots in use: the trunk and every node."""
        return self.num_trunk + self.size

    def add_root(self, token: torch.Tensor) -> torch.Tensor:
        """Add the first node, which extends the trunk itself. ``token`` is int64 (1,); returns its index, (1,)."""
        return self._append(torch.full_like(token, -1), token, torch.full_like(token, self.num_trunk), ancestors=None)

    def add(self, parents_N: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
        """Add N nodes.

        Args:
            parents_N: int64 (N,), node indices of the parents.
            tokens_N: int64 (N,), their tokens.

        Returns:
            int64 (N,), the new nodes' indices, consecutive.
        """
        return self._append(parents_N, tokens_N, self.positions[parents_N] + 1, ancestors=parents_N)

    def _append(
        self, parents: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, ancestors: torch.Tensor | None
    ) -> torch.Tensor:
        count, start = int(tokens.shape[0]), self.size
        self._reserve(start + count)
        end = start + count
        self.tokens[start:end] = tokens
        self.parents[start:end] = parents
        self.positions[start:end] = positions
        if ancestors is not None:
            self.visible[start:end] = self.visible[ancestors]
        nodes = torch.arange(start, end, device=self.device)
        self.visible[nodes, nodes] = True
        self.size = end
        return nodes

    def _reserve(self, size: int) -> None:
        capacity = self.tokens.shape[0]
        if size <= capacity:
            return
        grown = max(size, 2 * capacity)
        for name in ("tokens", "parents", "positions"):
            old = getattr(self, name)
            new = old.new_full((grown,), -1)
            new[:capacity] = old
            setattr(self, name, new)
        visible = self.visible.new_zeros(grown, grown)
        visible[:capacity, :capacity] = self.visible
        self.visible = visible

    def find_children(self, parents_K: torch.Tensor, tokens_K: torch.Tensor) -> torch.Tensor:
        """Nodes that hold the given continuations.

        Args:
            parents_K: int64 (K,), parent nodes.
            tokens_K: int64 (K,), tokens.

        Returns:
            int64 (K,), the (first) child node of each, or -1 where the forest has none.
        """
        if self.size == 0:
            return torch.full_like(parents_K, -1)
        match = (self.parents[: self.size] == parents_K.unsqueeze(1)) & (
            self.tokens[: self.size] == tokens_K.unsqueeze(1)
        )
        found, node = match.max(dim=1)
        return torch.where(found, node, -1)

    def slot_inputs(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a model needs to compute the slots ``start .. end - 1``.

        Returns:
            Tokens (T,) int64, positions (T,) int64, and bool (T, num_slots): the slots each one attends to. A trunk
            slot sees the trunk up to itself; a node sees the trunk, its ancestors and itself.
        """
        trunk = self.num_trunk
        first, last = max(start - trunk, 0), max(end - trunk, 0)
        mask = torch.ones(end - start, self.num_slots, dtype=torch.bool, device=self.device)
        mask[end - start - (last - first) :, trunk:] = self.visible[first:last, : self.size]
        if start >= trunk:
            return self.tokens[first:last], self.positions[first:last], mask
        in_trunk = torch.arange(start, min(end, trunk), device=self.device)
        slots = torch.arange(self.num_slots, device=self.device)
        mask[: in_trunk.shape[0]] = slots <= in_trunk.unsqueeze(1)
        tokens = torch.cat([self.trunk[in_trunk], self.tokens[first:last]])
        return tokens, torch.cat([in_trunk, self.positions[first:last]]), mask

    def slot_parents(self, start: int, end: int) -> torch.Tensor:
        """Slot of the token before each of the slots ``start .. end - 1``; -1 for the first token. int64 (T,)."""
        trunk = self.num_trunk
        in_trunk = torch.arange(start, min(end, max(start, trunk)), device=self.device) - 1
        parents = self.parents[max(start - trunk, 0) : max(end - trunk, 0)]
        return torch.cat([in_trunk, torch.where(parents >= 0, parents + trunk, trunk - 1)])

    def prune(self, live_L: torch.Tensor, known: tuple[Sequence[int], Sequence[int]] | None = None) -> Pruning:
        """Drop every node that no live beam descends from, and move what all of them share into the trunk.

        The live nodes themselves stay nodes (their KV is not computed yet).

        Args:
            live_L: int64 (L,), nodes of the live beams, at least one.
            known: the parents of all nodes and the nodes of the live beams, on the host; None reads them.

        Returns:
            What moved where; caches with the same slot layout follow it. Old node ``kept[joined + i]`` is node ``i``
            now.
        """
        if known is None:
            parents_of_all, live_nodes = read([self.parents[: self.size], live_L])
            known = [int(node) for node in parents_of_all], [int(node) for node in live_nodes]
        kept, joined = _survivors(*known)
        pruning = Pruning(kept=kept, joined=joined, old_trunk=self.num_trunk)
        kept_tensor = upload(kept, self.device)
        if joined:
            self.trunk = torch.cat([self.trunk, self.tokens[kept_tensor[:joined]]])
        stay = kept_tensor[joined:]
        count = int(stay.shape[0])
        new_index = torch.full((self.size,), -1, dtype=torch.int64, device=self.device)
        new_index[stay] = torch.arange(count, device=self.device)
        parents = self.parents[stay]
        self.tokens[:count] = self.tokens[stay]
        self.positions[:count] = self.positions[stay]
        self.parents[:count] = torch.where(parents >= 0, new_index[parents], -1)
        block = self.visible[stay][:, stay]
        self.visible[: self.size, : self.size] = False
        self.visible[:count, :count] = block
        self.size = count
        return pruning


def _survivors(parents: Sequence[int], live: Sequence[int]) -> tuple[list[int], int]:
    """The live nodes and their ancestors, in order, and how many of the first ones all live beams share."""
    counts: dict[int, int] = {}
    for leaf in live:
        node = leaf
        while node >= 0:
            counts[node] = counts.get(node, 0) + 1
            node = parents[node]
    kept = sorted(counts)
    alive = set(live)
    return kept, sum(counts[node] == len(live) and node not in alive for node in kept)
