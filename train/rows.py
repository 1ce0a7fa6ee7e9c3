"""Layer rows of traces in memory, by split; prompts are split by a hash of their ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

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

    Attributes:
        counts: reached layers by split.
        beams: numbers of beams that occur.
        max_draft_width: widest layer that occurs.
        max_gamma: deepest layer that occurs, counted from 1.
        caching: rows stay in memory after the first reading.

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
        numbers = all(isinstance(fraction, int | float) for fraction in fractions)
        if not numbers or len(fractions) != 2 or min(fractions) <= 0 or sum(fractions) >= 1:
            raise ConfigError(f"fractions are {list(fractions)}: give those of validation and test, below 1 together")
        self.fractions, self.seed = tuple(fractions), seed
        self.shards: list[tuple[str, Shard]] = [
            (folder, shard) for folder in folders for shard in read_manifest(folder).shards
        ]
        self.folders = list(folders)
        self._splits: dict[str, Split] = {}
        self.counts: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        self.beams: set[int] = set()
        self.max_draft_width = self.max_gamma = 0
        self._scan()
        self._cache: dict[Split, Rows] = {}
        self.caching = sum(self.counts.values()) <= cache_rows

    @property
    def max_width(self) -> int:
        """Most beams in the traces (W of the rows)."""
        return max(self.beams)

    def chunks(self, split: Split, order: Sequence[int] | None = None) -> Iterator[Rows]:
        """All rows of a split, some at a time; ``order`` permutes the shards."""
        if not self.caching:
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
            columns = ("prompt", "num_beams", "draft_width", "layer", "reached")
            for batch in read_layers(folder, columns=columns, shards=[shard]):
                batch = batch.filter(batch["reached"])
                self.beams.update(batch["num_beams"].unique().to_pylist())
                self.max_draft_width = max(self.max_draft_width, pc.max(batch["draft_width"]).as_py() or 0)
                self.max_gamma = max(self.max_gamma, 1 + (pc.max(batch["layer"]).as_py() or 0))
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
                prompts = [prompt for prompt in batch["prompt"].unique().to_pylist() if self._split(prompt) == split]
                wanted = pc.and_(batch["reached"], pc.is_in(batch["prompt"], pa.array(prompts, pa.string())))
                yield _decode(batch.filter(wanted), self.max_width)


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
