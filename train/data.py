"""Traces as batches for training: shuffled, streamed where they are large, shared between processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

import lightning as L
import torch
from torch.utils.data import DataLoader, IterableDataset

from beamwise.decoding.errors import ConfigError

from .rows import Rows, Split, TraceSource


class TraceBatches(IterableDataset[Rows]):
    """Batches of one split, the same number on every process of a distributed run.

    Every process reads everything and takes its share of the batches, so that none can run out before the others.

    Args:
        source: the rows.
        split: which of them.
        batch_size: rows per batch and process.
        shuffle_rows: rows shuffled together (training); None keeps the order (evaluation).
        epoch: tells the epoch when an iteration starts; each has its own order.
        rank: number of this process.
        world_size: number of processes.
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
        self.source, self.split, self.batch_size, self.shuffle_rows = source, split, batch_size, shuffle_rows
        self.epoch, self.rank, self.world_size = epoch, rank, world_size

    def __len__(self) -> int:
        rows, group = self.source.counts[self.split], self.batch_size * self.world_size
        if self.shuffle_rows is not None:
            return max(1, rows // group)
        return sum(1 for _ in range(self.rank * self.batch_size, rows, group))

    def __iter__(self) -> Iterator[Rows]:
        batches = self._batches()
        if self.shuffle_rows is None:
            yield from (batch for index, batch in enumerate(batches) if index % self.world_size == self.rank)
            return
        for _, *group in zip(range(len(self)), *[batches] * self.world_size, strict=False):
            yield group[self.rank]

    def _batches(self) -> Iterator[Rows]:
        """All batches of all processes; the last one may be small."""
        held: list[Rows] = []
        generator = torch.Generator().manual_seed(1_000_003 * self.source.seed + self.epoch())
        shuffling = self.shuffle_rows is not None
        order = torch.randperm(len(self.source.shards), generator=generator).tolist() if shuffling else None
        for chunk in self.source.chunks(self.split, order):
            held.append(chunk)
            if sum(len(part) for part in held) >= (self.shuffle_rows or 0):
                yield from self._cut(held, generator, last=False)
        yield from self._cut(held, generator, last=True)

    def _cut(self, held: list[Rows], generator: torch.Generator, last: bool) -> Iterator[Rows]:
        """Whole batches out of the held rows; what is left stays held, or is the last batch."""
        if not held:
            return
        rows = Rows.cat(held)
        if self.shuffle_rows is not None:
            rows = rows.pick(torch.randperm(len(rows), generator=generator))
        end = len(rows) if last else len(rows) - len(rows) % self.batch_size
        for start in range(0, end, self.batch_size):
            yield rows.pick(slice(start, min(start + self.batch_size, end)))
        held[:] = [rows.pick(slice(end, None))]


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
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if batch_size < 1 or shuffle_rows < batch_size:
            raise ConfigError(f"batch_size is {batch_size} and shuffle_rows {shuffle_rows}: 1 <= batch <= shuffle")
        self.folders = [traces] if isinstance(traces, str) else list(traces)
        self.batch_size, self.seed = batch_size, seed
        self.fractions = (val_fraction, test_fraction)
        self.cache_rows, self.shuffle_rows = cache_rows, shuffle_rows
        self._source: TraceSource | None = None

    @property
    def source(self) -> TraceSource:
        """The rows; opened on first use."""
        if self._source is None:
            self._source = TraceSource(self.folders, self.fractions, self.seed, self.cache_rows)
        return self._source

    def train_dataloader(self) -> DataLoader[Rows]:
        return self._loader("train", self.shuffle_rows)

    def val_dataloader(self) -> DataLoader[Rows]:
        return self._loader("val", None)

    def test_dataloader(self) -> DataLoader[Rows]:
        return self._loader("test", None)

    def _loader(self, split: Split, shuffle_rows: int | None) -> DataLoader[Rows]:
        trainer = self.trainer
        rank, world = (trainer.global_rank, trainer.world_size) if trainer is not None else (0, 1)
        epoch = (lambda: trainer.current_epoch) if trainer is not None else (lambda: 0)
        batches = TraceBatches(self.source, split, self.batch_size, shuffle_rows, epoch, rank, world)
        return DataLoader(batches, batch_size=None)

    def transfer_batch_to_device(self, batch: Rows, device: torch.device, dataloader_idx: int) -> Rows:
        return Rows(*(getattr(batch, item.name).to(device) for item in fields(batch)))
