"""Traces as batches for training: shuffled, streamed where they are large, shared between processes and workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from beamwise.decoding.errors import ConfigError, InputError

from .rows import Rows, Split, TraceSource


class TraceBatches(IterableDataset[Rows]):
    """Batches of one split: every row once per epoch over all processes, as many batches on each of them.

    An epoch is one order of all rows, a function of seed and epoch, cut into equal groups of at most
    ``batch_size * world_size`` rows. A group is one step: each process takes its share of it, so that several
    processes take the same steps as one with the same rows per step. Groups differ by one row at most, shares too;
    so nothing is padded, repeated or dropped. Workers take groups in turn. Every reader reads all shards and decodes
    its rows of them: that costs reading, and makes the order independent of the number of readers.

    Args:
        source: the rows.
        split: which of them.
        batch_size: most rows per batch and process (two with batches of one where rows would be left over).
        shuffle_rows: rows shuffled together (training); None keeps the order (evaluation).
        epoch: tells the epoch when an iteration starts; each has its own order.
        rank: number of this process.
        world_size: number of processes.

    Attributes:
        start: groups that the next iteration leaves out (those before a checkpoint).
        held: most rows that this reader has held at once.

    Raises:
        InputError: fewer rows than processes.
    """

    def __init__(
        self,
        source: TraceSource,
        split: Split,
        batch_size: int,
        shuffle_rows: int | None,
        epoch: Callable[[], int],
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.source, self.split, self.shuffle_rows = source, split, shuffle_rows
        self.epoch, self.rank, self.world_size = epoch, rank, world_size
        self.start = self.held = 0
        rows = source.counts[split]
        if rows < world_size:
            raise InputError(f"The {split} split has {rows} layers for {world_size} processes: use fewer processes")
        self._groups = min(-(-rows // (batch_size * world_size)), rows // world_size)

    def __len__(self) -> int:
        return self._groups

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned: they need the epoch, not the trainer."""
        return {**self.__dict__, "epoch": partial(int, self.epoch())}

    def __iter__(self) -> Iterator[Rows]:
        worker = get_worker_info()
        step, offset = (1, 0) if worker is None else (worker.num_workers, worker.id)
        for number, (rows, index) in enumerate(self._cut()):
            if number >= self.start and (number - self.start) % step == offset:
                yield rows.pick(torch.tensor_split(index, self.world_size)[self.rank])

    def _end(self, group: int) -> int:
        """Rows up to the end of a group."""
        return (group + 1) * self.source.counts[self.split] // self._groups

    def _cut(self) -> Iterator[tuple[Rows, torch.Tensor]]:
        """All groups in order: rows held at the moment, and the group's places in them."""
        generator = torch.Generator().manual_seed(1_000_003 * self.source.seed + self.epoch())
        shuffling = self.shuffle_rows is not None
        shards = torch.randperm(len(self.source.shards), generator=generator).tolist() if shuffling else None
        parts: list[Rows] = []
        group = waiting = seen = 0
        for chunk in self.source.chunks(self.split, shards):
            parts.append(chunk)
            waiting, seen = waiting + len(chunk), seen + len(chunk)
            if waiting < (self.shuffle_rows or 0) and seen < self.source.counts[self.split]:
                continue
            rows = parts[0] if len(parts) == 1 else Rows.cat(parts)
            order = torch.randperm(len(rows), generator=generator) if shuffling else torch.arange(len(rows))
            self.held, used = max(self.held, len(rows)), 0
            while group < self._groups and self._end(group) <= seen:
                size = self._end(group) - (seen - waiting) - used
                yield rows, order[used : used + size]
                used, group = used + size, group + 1
            parts, waiting = [rows.pick(order[used:])], waiting - used


class ResumableLoader(DataLoader[Rows]):
    """A loader of `TraceBatches` that a checkpoint can leave in the middle of an epoch.

    Args:
        batches: the batches.
        num_workers: processes that read for it; 0 reads in this one.
    """

    def __init__(self, batches: TraceBatches, num_workers: int = 0) -> None:
        super().__init__(batches, batch_size=None, num_workers=num_workers)
        self.batches = batches
        self._given = self._next = 0

    def __iter__(self) -> Iterator[Rows]:  # type: ignore[override]
        """The batches of an epoch, or those that a checkpoint left of it."""
        self.batches.start = self._given = self._next
        self._next = 0
        for batch in super().__iter__():
            self._given += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """How far the epoch is, for Lightning's checkpoints."""
        return {"given": self._given, "batches": len(self.batches)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Leave out, in the next iteration, what a checkpoint has seen.

        Args:
            state: of `state_dict`.

        Raises:
            ConfigError: an epoch had another number of batches.
        """
        if state["batches"] != len(self.batches) and state["given"] % state["batches"]:
            raise ConfigError(
                f"The checkpoint is in the middle of an epoch of {state['batches']} batches, and this run's have "
                f"{len(self.batches)}: resume with the same traces and rows per step (batch_size * processes)"
            )
        self._next = state["given"] % state["batches"]


class TraceData(L.LightningDataModule):
    """Layer rows of traces for training, validation and test, split by prompt.

    Args:
        traces: trace folder, or several.
        batch_size: rows per step and process.
        val_fraction: share of the prompts for validation.
        test_fraction: share of the prompts for test.
        seed: of the split and of the order.
        cache_rows: larger traces are streamed from disk in every epoch.
        shuffle_rows: rows shuffled together when streaming.
        num_workers: processes that read, for each process that trains, when streaming.
    """

    def __init__(
        self,
        traces: str | list[str],
        batch_size: int = 128,
        val_fraction: float = 0.15,
        test_fraction: float = 0.2,
        seed: int = 0,
        cache_rows: int = 2_000_000,
        shuffle_rows: int = 262_144,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if batch_size < 1 or shuffle_rows < batch_size:
            raise ConfigError(f"batch_size is {batch_size} and shuffle_rows {shuffle_rows}: 1 <= batch <= shuffle")
        if num_workers < 0:
            raise ConfigError(f"num_workers is {num_workers}: at least 0")
        self.folders = [traces] if isinstance(traces, str) else list(traces)
        self.batch_size, self.seed, self.num_workers = batch_size, seed, num_workers
        self.fractions = (val_fraction, test_fraction)
        self.cache_rows, self.shuffle_rows = cache_rows, shuffle_rows
        self._source: TraceSource | None = None
        self._training: ResumableLoader | None = None
        self._resume: dict[str, int] = {}

    @property
    def source(self) -> TraceSource:
        """The rows; opened on first use."""
        if self._source is None:
            self._source = TraceSource(self.folders, self.fractions, self.seed, self.cache_rows)
        return self._source

    def train_dataloader(self) -> DataLoader[Rows]:
        self._training = self._loader("train", self.shuffle_rows)
        if self._resume:
            self._training.load_state_dict(self._resume)
        return self._training

    def state_dict(self) -> dict[str, int]:
        """How far the epoch is."""
        return {} if self._training is None else self._training.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where a checkpoint was (Lightning would tell the loader, but only after its first iteration began)."""
        self._resume = state

    def val_dataloader(self) -> DataLoader[Rows]:
        return self._loader("val", None)

    def test_dataloader(self) -> DataLoader[Rows]:
        return self._loader("test", None)

    def _loader(self, split: Split, shuffle_rows: int | None) -> ResumableLoader:
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        epoch = (lambda: trainer.current_epoch) if trainer is not None else (lambda: 0)
        batches = TraceBatches(self.source, split, self.batch_size, shuffle_rows, epoch, rank, world)
        return ResumableLoader(batches, 0 if self.source.caching else self.num_workers)  # workers would copy the cache

    def transfer_batch_to_device(self, batch: Rows, device: torch.device, dataloader_idx: int) -> Rows:
        return Rows(*(getattr(batch, item.name).to(device) for item in fields(batch)))
