"""Traces as training data: split by prompt, streamed where they are large."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import lightning as L
import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, IterableDataset

from beamwise.decoding.errors import ConfigError, InputError
from beamwise.decoding.features import FEATURE_NAMES
from beamwise.decoding.trace import read_layers
from beamwise.decoding.trace_schema import Shard, read_manifest

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
_COLUMNS = ("prompt", "num_beams", "draft_width", "drafted", "reached", "features", "candidates_needed")
_NO_LIMIT = np.iinfo(np.int16).max


@dataclass(frozen=True)
class Rows:
    """N layers that verification reached.

    Attributes:
        features: float32 (N, F).
        needed: int16 (N, W), candidates needed at each width; 0 beyond a row's beams and where not covered.
        num_beams: int16 (N,).
        limit: int16 (N,), candidates up to which the outcome was seen; beyond any count where the draft had no more.
    """

    features: torch.Tensor
    needed: torch.Tensor
    num_beams: torch.Tensor
    limit: torch.Tensor

    def __len__(self) -> int:
        return int(self.features.shape[0])

    def pick(self, index: torch.Tensor | slice) -> Rows:
        """The rows at an index, a mask or a slice."""
        return Rows(*(getattr(self, item.name)[index] for item in fields(self)))

    @staticmethod
    def cat(parts: Sequence[Rows]) -> Rows:
        """Several, one after another."""
        return Rows(*(torch.cat([getattr(part, item.name) for part in parts]) for item in fields(Rows)))


def split_of(prompt: str, fractions: Sequence[float], seed: int) -> Split:
    """The split that a prompt belongs to, by a hash of its id: the same in every run, whatever else is traced.

    Args:
        prompt: its id.
        fractions: of validation and test.
        seed: another seed, another split.
    """
    digest = hashlib.sha256(f"{seed}:{prompt}".encode()).digest()
    place = int.from_bytes(digest[:8], "big") / 2**64
    if place < fractions[0]:
        return "val"
    return "test" if place < fractions[0] + fractions[1] else "train"


class TraceSource:
    """Layer rows of one or more trace folders, by split.

    Args:
        folders: trace folders.
        fractions: shares of the prompts for validation and test.
        seed: of the split.
        cache_rows: rows kept in memory after the first reading; larger traces are read again in every epoch.

    Raises:
        ConfigError: fractions out of range.
        FormatError: damaged or foreign traces.
        InputError: no rows, or none in one of the splits.
    """

    def __init__(self, folders: Sequence[str], fractions: Sequence[float], seed: int, cache_rows: int) -> None:
        if len(fractions) != 2 or min(fractions) <= 0 or sum(fractions) >= 1:
            raise ConfigError(f"fractions are {list(fractions)}: give those of validation and test, below 1 together")
        self.fractions, self.seed = tuple(fractions), seed
        self.shards: list[tuple[str, Shard]] = [
            (folder, shard) for folder in folders for shard in read_manifest(folder).shards
        ]
        self.folders = list(folders)
        self._splits: dict[str, Split] = {}
        self.counts: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        self.beams: set[int] = set()
        self._scan()
        self._cache: dict[Split, Rows] = {}
        self._caching = sum(self.counts.values()) <= cache_rows

    @property
    def max_width(self) -> int:
        """Most beams in the traces (W of the rows)."""
        return max(self.beams)

    def chunks(self, split: Split, order: Sequence[int] | None = None) -> Iterator[Rows]:
        """All rows of a split, some at a time; ``order`` permutes the shards."""
        if not self._caching:
            yield from self._read(split, range(len(self.shards)) if order is None else order)
            return
        if split not in self._cache:
            self._cache[split] = Rows.cat(list(self._read(split, range(len(self.shards)))))
        yield self._cache[split]

    def load(self, split: Split, most: int | None = None) -> Rows:
        """The rows of a split in memory, the first ``most`` of them."""
        parts, count = [], 0
        for chunk in self.chunks(split):
            parts.append(chunk)
            count += len(chunk)
            if most is not None and count >= most:
                break
        return Rows.cat(parts).pick(slice(most))

    def statistics(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation of the training rows' features, float32 (F,) each."""
        total, squares = torch.zeros(2, len(FEATURE_NAMES), dtype=torch.float64)
        for chunk in self.chunks("train"):
            features = chunk.features.double()
            total += features.sum(0)
            squares += features.square().sum(0)
        mean = total / self.counts["train"]
        return mean.float(), (squares / self.counts["train"] - mean.square()).clamp_min(0.0).sqrt().float()

    def _split(self, prompt: str) -> Split:
        if prompt not in self._splits:
            self._splits[prompt] = split_of(prompt, self.fractions, self.seed)
        return self._splits[prompt]

    def _scan(self) -> None:
        for folder, shard in self.shards:
            for batch in read_layers(folder, columns=("prompt", "num_beams", "reached"), shards=[shard]):
                batch = batch.filter(batch["reached"])
                self.beams.update(batch["num_beams"].unique().to_pylist())
                for item in batch["prompt"].value_counts().to_pylist():
                    self.counts[self._split(item["values"])] += item["counts"]
        for split, count in self.counts.items():
            if count == 0:
                raise InputError(
                    f"{', '.join(self.folders)}: no layers for the {split} split (of {sum(self.counts.values())}): "
                    "collect traces of more prompts"
                )

    def _read(self, split: Split, order: Sequence[int]) -> Iterator[Rows]:
        for index in order:
            folder, shard = self.shards[index]
            for batch in read_layers(folder, columns=_COLUMNS, shards=[shard]):
                wanted = [reached and self._split(prompt) == split for prompt, reached in _pairs(batch)]
                yield _decode(batch.filter(pa.array(wanted, pa.bool_())), self.max_width)


def _pairs(batch: pa.RecordBatch) -> Iterator[tuple[str, bool]]:
    return zip(batch["prompt"].to_pylist(), batch["reached"].to_pylist(), strict=True)


def _decode(batch: pa.RecordBatch, max_width: int) -> Rows:
    """Record batch (reached rows only) to tensors, padding ``needed`` to ``max_width``."""
    count = batch.num_rows
    features = batch["features"].flatten().to_numpy(zero_copy_only=False).reshape(count, len(FEATURE_NAMES))
    lists = batch["candidates_needed"]
    needed = np.zeros((count, max_width), dtype=np.int16)
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    needed[np.arange(max_width) < lengths[:, None]] = lists.flatten().to_numpy(zero_copy_only=False)
    drafted, asked = (batch[name].to_numpy(zero_copy_only=False) for name in ("drafted", "draft_width"))
    limit = np.where(drafted < asked, _NO_LIMIT, drafted)
    columns = features, needed, batch["num_beams"].to_numpy(zero_copy_only=False), limit
    return Rows(*(torch.from_numpy(np.array(column)) for column in columns))


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
