"""What a trace folder holds: its rows, its columns and its manifest (docs/traces.md)."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from .errors import FormatError
from .features import FEATURE_NAMES, schema_hash
from .safe_files import check_types, read_json

FORMAT = "beamwise-traces"
VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class LayerRow:
    """One drafted layer. W is ``num_beams``.

    Attributes:
        block: index of the block in its prompt.
        layer: index of the layer in its block.
        position: tokens generated so far at the block's start.
        num_beams: beams asked for (W).
        width: beams to keep that the policy asked for.
        draft_width: candidates that the policy asked for (m).
        drafted: candidates that were drafted; fewer than asked for only where the draft had no more.
        reached: verification walked up to this layer; where it did not, there is no outcome.
        covered: every selected beam was among the candidates.
        features: float32 (F,), the whole vector, as the policy saw it.
        candidates_needed: for each width 1..W the smallest number of candidates, in the draft's order, that covers the
            target's selection; 0 where the drafted ones do not. Empty where the layer was not reached.
        accept_prob: for each width 1..W the paper's probability that as many are accepted; None where p and q were not
            compared.
        draft_s: seconds of the draft's forward at this layer.
    """

    block: int
    layer: int
    position: int
    num_beams: int
    width: int
    draft_width: int
    drafted: int
    reached: bool
    covered: bool
    features: torch.Tensor
    candidates_needed: Sequence[int]
    accept_prob: Sequence[float] | None = None
    draft_s: float = 0.0


@dataclass(frozen=True)
class BlockRow:
    """One block.

    Attributes:
        block: index of the block in its prompt.
        position: tokens generated so far at its start.
        num_beams: beams asked for (W).
        gamma: layers drafted.
        layers: layers advanced, the recovered or bonus layer included.
        draft_forwards: forwards of the draft.
        nodes: candidates drafted in all layers.
        target_tokens: tokens in the target's forward.
        slots: KV slots in use after the block.
        finished: finished hypotheses after the block.
        draft_s: seconds of the draft.
        target_s: seconds of the target's forward.
        other_s: seconds of everything else.
    """

    block: int
    position: int
    num_beams: int
    gamma: int
    layers: int
    draft_forwards: int
    nodes: int
    target_tokens: int
    slots: int
    finished: int
    draft_s: float = 0.0
    target_s: float = 0.0
    other_s: float = 0.0


_KEYS = [("run", pa.string()), ("prompt", pa.string())]
LAYER_SCHEMA = pa.schema(
    [
        *_KEYS,
        *((name, pa.int32()) for name in ("block", "layer", "position")),
        *((name, pa.int16()) for name in ("num_beams", "width", "draft_width", "drafted")),
        ("reached", pa.bool_()),
        ("covered", pa.bool_()),
        ("features", pa.list_(pa.float32(), len(FEATURE_NAMES))),
        ("candidates_needed", pa.list_(pa.int16())),
        ("accept_prob", pa.list_(pa.float32())),
        ("draft_s", pa.float32()),
    ]
)
"""Columns of ``layers/*.parquet``."""
BLOCK_SCHEMA = pa.schema(
    [
        *_KEYS,
        *((item.name, pa.int32()) for item in fields(BlockRow) if not item.name.endswith("_s")),
        *((item.name, pa.float32()) for item in fields(BlockRow) if item.name.endswith("_s")),
    ]
)
"""Columns of ``blocks/*.parquet``."""


@dataclass
class Shard:
    """A committed pair of files.

    Attributes:
        name: file name in both folders.
        layer_rows: rows of its layers file.
        block_rows: rows of its blocks file.
        layer_sha256: of its layers file.
        block_sha256: of its blocks file.
        prompts: the prompts it holds, each of them whole.
    """

    name: str
    layer_rows: int
    block_rows: int
    layer_sha256: str
    block_sha256: str
    prompts: list[str]


@dataclass
class Manifest:
    """What ``manifest.json`` says.

    Attributes:
        run: name of the run; a key of every row.
        config: settings of the run, as JSON values; a resumed run must have the same.
        feature_names: the feature schema, in order.
        schema: its hash.
        shards: committed shards.
        format: always ``"beamwise-traces"``.
        version: of this format.
    """

    run: str
    config: dict[str, Any]
    feature_names: list[str] = field(default_factory=lambda: list(FEATURE_NAMES))
    schema: str = field(default_factory=schema_hash)
    shards: list[Shard] = field(default_factory=list)
    format: str = FORMAT
    version: int = VERSION


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """The manifest of a trace folder.

    Raises:
        FormatError: there is none, it is damaged, or its traces are of another version or feature schema.
    """
    path = Path(folder) / MANIFEST
    try:
        raw = read_json(folder, MANIFEST)
    except FileNotFoundError as error:
        raise FormatError(f"'{folder}' holds no traces ({MANIFEST} is missing): make some with beamwise collect") from (
            error
        )
    except (OSError, ValueError) as error:
        raise FormatError(f"'{path}' cannot be read: {error}. Collect the traces again") from error
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise FormatError(f"'{path}' is not a manifest of Beamwise traces (no format '{FORMAT}')")
    if raw.get("version") != VERSION:
        raise FormatError(
            f"'{folder}' holds traces of format version {raw.get('version')}, this Beamwise reads version {VERSION}: "
            "use the Beamwise that wrote them, or collect again"
        )
    if raw.get("schema") != schema_hash():
        raise FormatError(
            f"'{folder}' holds traces of feature schema {raw.get('schema')}, this Beamwise computes {schema_hash()}: "
            "use the Beamwise that wrote them, or collect again"
        )
    try:
        shards = [_read_shard_entry(shard) for shard in raw["shards"]]
        check_types(Manifest, {**raw, "shards": shards})
        if len({shard.name for shard in shards}) != len(shards):
            raise TypeError("two shards of the same name")
        return Manifest(**{**raw, "shards": shards})
    except (TypeError, KeyError) as error:
        raise FormatError(f"'{path}' has wrong fields ({error}). Collect the traces again") from error


def _read_shard_entry(raw: Any) -> Shard:
    if not isinstance(raw, dict):
        raise TypeError("a shard that is no object")
    check_types(Shard, raw)
    shard = Shard(**raw)
    if not re.fullmatch(r"[0-9]{6,12}\.parquet", shard.name):  # no way out of the folder
        raise TypeError(f"a shard's name is {shard.name[:40]!r}, not six digits and .parquet")
    if min(shard.layer_rows, shard.block_rows) < 0:
        raise TypeError(f"shard {shard.name} has a negative number of rows")
    return shard
